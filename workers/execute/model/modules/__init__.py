"""Transformers' own modules, with their attention switched to pages."""
