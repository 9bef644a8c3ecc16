"""``triptych run-batch``: the requests of a file, in the form of OpenAI's Batch API."""
