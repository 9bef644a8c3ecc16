"""A causal language model of two megabytes that knows Python's built-ins by heart."""
