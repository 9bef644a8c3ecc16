"""Routes in the formats of OpenAI's API."""
