"""The HTTP gateway: OpenAI's API in front of a pipeline, in processes of its own that are clients like any other."""
