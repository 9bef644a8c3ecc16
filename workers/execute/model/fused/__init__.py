"""The fused decoder on a GPU: merged weights, and one kernel for whatever lies between two matrix products."""
