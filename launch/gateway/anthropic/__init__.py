"""Routes in the format of Anthropic's API."""
