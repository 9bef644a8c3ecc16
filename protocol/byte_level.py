"""The alphabet of byte-level tokenizers, in which a printable character stands for each byte."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 characters stand for themselves, those from U+0100 for the other bytes.

    Source: Radford et al. 2019, ``bytes_to_unicode`` of the GPT-2 code.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _alphabet()
