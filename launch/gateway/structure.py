"""Answers that must have a form: what the pipeline is asked for ``response_format`` and a forced tool."""

from __future__ import annotations

from typing import Any

from .errors import unsupported
from .schemas.structure import ResponseFormat


def structured_options(response_format: ResponseFormat | None) -> dict[str, Any]:
    """The options of a request whose answer must keep to a form; none for plain text.

    Raises:
        ApiError: the form cannot be kept.
    """
    if response_format is None or response_format.type == "text":
        return {}
    raise unsupported("response_format", f"response_format is {response_format.type!r}, only 'text' can be done")
