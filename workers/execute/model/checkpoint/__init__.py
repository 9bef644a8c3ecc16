"""What lies on disk: finding a checkpoint, and reading its config and its weights whatever their format."""
