"""Explains why a text is not UTF-8."""

from __future__ import annotations

import codecs


def why_not_utf8(text: bytes) -> str:
    """The offending byte and its position, or the encoding of the whole text; for a lone surrogate, that."""
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16, not UTF-8; iconv -f UTF-16 -t UTF-8 converts it"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte 0x{text[error.start]:02x} after {error.start} others"
    return "not UTF-8: a lone surrogate"
