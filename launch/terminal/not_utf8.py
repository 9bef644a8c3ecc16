"""Explains why a file or a text is not UTF-8."""

from __future__ import annotations

import codecs

_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def is_utf16(content: bytes) -> bool:
    """Whether a file with this content, or one that begins with it, is UTF-16. Within a file, the same bytes are an
    error.
    """
    return content.startswith(_MARKS)


def why_file_not_utf8(content: bytes) -> str:
    """The encoding of the whole file, or what ``why_not_utf8`` says about its text."""
    if is_utf16(content):
        return "UTF-16, not UTF-8; iconv -f UTF-16 -t UTF-8 converts it"
    return why_not_utf8(content)


def why_not_utf8(text: bytes) -> str:
    """The offending byte and its position; for a lone surrogate, that."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte 0x{text[error.start]:02x} after {error.start} others"
    return "not UTF-8: a lone surrogate"
