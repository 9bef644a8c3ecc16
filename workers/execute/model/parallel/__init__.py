"""Tensor parallelism: several processes that compute one model together."""
