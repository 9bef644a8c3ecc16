"""The ``encrypted_content`` of reasoning: for clients that send back nothing else of it.

Nothing is stored here, so it has to hold the reasoning itself. It is not encrypted, as the reply shows the same text.
"""

from __future__ import annotations

import base64

_OURS = "triptych:"  # what other services have encrypted begins otherwise


def packed(text: str) -> str:
    """The reasoning as a string that is opaque to clients."""
    return _OURS + base64.b64encode(text.encode()).decode()


def unpacked(content: str | None) -> str:
    """The reasoning; empty if it is that of another service, which nobody else can read, or damaged."""
    if content is None or not content.startswith(_OURS):
        return ""
    try:
        return base64.b64decode(content[len(_OURS) :], validate=True).decode()
    except ValueError:
        return ""
