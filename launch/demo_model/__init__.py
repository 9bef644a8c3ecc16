"""A causal language model of two megabytes that knows Python's built-ins by heart, and the code that trains it."""
