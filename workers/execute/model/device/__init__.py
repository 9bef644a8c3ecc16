"""Steps on a GPU: buffers, CUDA graphs, and the runner that launches them ahead."""
