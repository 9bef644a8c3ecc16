"""What is read from and written to a terminal, a pipe or a log."""
