"""What a model is, however it is computed: its sizes, layers and tensors, and what its family does differently."""
