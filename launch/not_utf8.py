"""What to say of text that is no UTF-8."""

from __future__ import annotations

import codecs


def why_not_utf8(text: bytes) -> str:
    """The byte and where it stands, or what the whole is instead; for text that UTF-8 cannot hold, that."""
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16 and not UTF-8, which iconv -f UTF-16 -t UTF-8 makes of it"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte 0x{text[error.start]:02x} after {error.start} others"
    return "not UTF-8: half a surrogate pair"
