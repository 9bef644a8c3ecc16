"""``triptych bench``: a load that arrives on its own schedule, and what its clients saw of the answers."""
