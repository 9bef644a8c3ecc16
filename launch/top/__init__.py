"""``triptych top``: the three stages of a running pipeline and its requests, live in a terminal."""
