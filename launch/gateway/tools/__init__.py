"""Tool calls in the text of a model, each family's way of writing them."""
