"""Triptych compared with other engines: README.md."""
