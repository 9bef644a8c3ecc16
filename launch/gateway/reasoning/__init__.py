"""The reasoning of an answer: where it begins and ends, and what becomes of it."""
