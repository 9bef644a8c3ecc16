"""Recognises clients that speak another protocol than HTTP/1.1: the server would only call their requests invalid."""

from __future__ import annotations

_TLS = "TLS, and this port has none: use http://, or start the server with --ssl-certfile"
_PROXY = "the PROXY protocol, which this port does not know: switch it off in the proxy in front"
_HTTP2 = "HTTP/2 from its first byte, and this port HTTP/1.1: set that version in the client, or in the proxy in front"
_BEGINNINGS = {
    b"\x16\x03": _TLS,  # a handshake of any version from SSL 3 on
    b"PROXY ": _PROXY,
    b"\r\n\r\n\0\r\nQUIT\n": _PROXY,  # its second version
    b"PRI * HTTP/2.0": _HTTP2,
}


def foreign_protocol(beginning: bytes) -> str | None:
    """What a connection that begins like this speaks, and what helps; None if it may be HTTP/1.1."""
    return next((spoken for first, spoken in _BEGINNINGS.items() if beginning.startswith(first)), None)
