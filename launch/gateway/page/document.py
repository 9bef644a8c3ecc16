"""The page as a single document, built once, with style and script inlined: it loads nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import NamedTuple

SCRIPTS = ("format.js", "stream.js", "drawing.js", "panels.js", "requests.js", "main.js")  # one scope, in this order


class Document(NamedTuple):
    """The response."""

    body: bytes
    headers: dict[str, str]


@cache
def document() -> Document:
    """The page, with headers that restrict browsers to its own script, style and server."""
    style = _read("page.css")
    script = "\n".join(_read(name) for name in SCRIPTS)
    html = _read("index.html").replace("/* style */", style).replace("/* script */", script)
    policy = "; ".join((
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ))  # fmt: skip
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Document(html.encode(), headers)


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
