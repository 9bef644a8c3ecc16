"""One script a question; each runs without arguments and prints one JSON line."""
