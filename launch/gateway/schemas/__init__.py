"""What clients may send, as pydantic models: they check requests and make the OpenAPI document."""
