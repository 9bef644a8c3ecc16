"""Standard streams that were closed before the program started, or whose encoding is limited."""

from __future__ import annotations

import codecs
import io
import os
import sys


def open_closed_streams() -> None:
    """Reopen closed standard streams: otherwise the next file or socket would get their descriptors, and Python has
    None for them. Input is then empty, and writing to the output fails, as it would have.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(_null(os.O_RDONLY, 0), "r")
    if sys.stdout is None:
        sys.stdout = os.fdopen(_null(os.O_RDONLY, 1), "w")  # cannot be written
    if sys.stderr is None:
        sys.stderr = os.fdopen(_null(os.O_WRONLY, 2), "w")


def replace_what_cannot_be_written() -> None:
    """Replace unencodable characters by question marks, as on an ASCII-only terminal, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def keep_what_cannot_be_read() -> None:
    """Represent undecodable input bytes as lone surrogates, to be found by whoever needs valid text: otherwise the
    locale would decide whether reading raises.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _null(flags: int, number: int) -> int:
    """/dev/null, opened as descriptor ``number`` if that is free."""
    null = os.open(os.devnull, flags)
    if null == number:
        os.set_inheritable(null, True)
    return null
