"""One script per question; each runs without arguments and prints one JSON line."""
