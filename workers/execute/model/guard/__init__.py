"""What the self-tests at load time share, and a cache of their outcomes."""
