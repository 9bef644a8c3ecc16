"""A chaos test and a soak test: `make chaos`, `make soak`."""
