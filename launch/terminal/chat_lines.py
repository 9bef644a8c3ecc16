"""Input of chat messages, typed or piped: one line or several, with editing and a history on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PROMPT, MORE = "> ", ". "
BLOCK = '"""'  # begins and ends a message of several lines
MAX_HISTORY = 1000


def read_message() -> str | None:
    """The next message; None at the end of the input. A line that ends in a backslash continues on the next one.

    Ctrl-C discards the message, as in a shell, but does not end the program.
    """
    while True:
        try:
            line = _read_line(PROMPT)
            if line is None:
                return None
            if line.strip().startswith(BLOCK):
                return _read_block(line.strip().removeprefix(BLOCK))
            return _read_continued(line)
        except KeyboardInterrupt:
            print()


def _read_block(first: str) -> str:
    lines, line = [], first
    while not line.rstrip().endswith(BLOCK):
        lines.append(line)
        following = _read_line(MORE)
        if following is None:
            return "\n".join(lines).strip("\n")
        line = following
    return "\n".join([*lines, line.rstrip().removesuffix(BLOCK)]).strip("\n")


def _read_continued(line: str) -> str:
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = _read_line(MORE) or ""
    return "\n".join([*lines, line])


def _read_line(prompt: str) -> str | None:
    """A line without its newline; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


@contextmanager
def line_editing(commands: Sequence[str]) -> Iterator[None]:
    """Line editing, completion of commands, and the history of earlier conversations, inside this block."""
    try:
        import readline  # gives input() its editing
    except ImportError:  # a Python that was built without it
        yield
        return
    path = history_path()
    if path is not None:
        with suppress(OSError):
            readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    readline.set_completer_delims("")  # complete whole lines, as only a whole line can be a command
    readline.set_completer(lambda text, index: _completion(text, index, commands))
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        if path is not None:
            with suppress(OSError):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(mode=0o600)  # before anything is written: the history is private
                readline.write_history_file(path)


def history_path() -> Path | None:
    """The history file, in the XDG state directory; None for a user without a home, as in a container with an unknown
    user id.
    """
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return Path(home) / "triptych" / "chat_history"


def _completion(text: str, index: int, commands: Sequence[str]) -> str | None:
    fitting = [command for command in commands if text and command.startswith(text)]
    return fitting[index] if index < len(fitting) else None
