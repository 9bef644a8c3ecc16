"""The compiled decoder on a CPU: weights packed for the kernels, and the runner that calls them."""
