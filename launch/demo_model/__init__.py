"""A causal language model of two megabytes that knows Python's built-ins by heart, and the code that trains it."""

from pathlib import Path

CHECKPOINT = Path(__file__).with_name("checkpoint")  # an ordinary transformers checkpoint
