"""Standard streams that were closed by whoever started the program, or cannot say what they should."""

from __future__ import annotations

import codecs
import io
import os
import sys


def open_closed_streams() -> None:
    """Give each of the three its place again: otherwise the next file or socket would get the number, and Python has
    None for it. Input is empty, and what goes to the output fails, as it would have.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(_null(os.O_RDONLY, 0), "r")
    if sys.stdout is None:
        sys.stdout = os.fdopen(_null(os.O_RDONLY, 1), "w")  # cannot be written
    if sys.stderr is None:
        sys.stderr = os.fdopen(_null(os.O_WRONLY, 2), "w")


def replace_what_cannot_be_written() -> None:
    """A terminal that knows ASCII only gets question marks for what it does not know, and no traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def keep_what_cannot_be_read() -> None:
    """Bytes of the input that its encoding does not know come as half surrogate pairs, which whoever needs a text
    finds: whether reading raises would be up to the locale.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _null(flags: int, number: int) -> int:
    """/dev/null, as this descriptor where it is free."""
    null = os.open(os.devnull, flags)
    if null == number:
        os.set_inheritable(null, True)
    return null
