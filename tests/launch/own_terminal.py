"""A verb in its own terminal, as a person would use it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.waiting import eventually

COMMAND = [sys.executable, "-c", "from triptych.launch.cli import main; main()"]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z]|\r")


class Terminal:
    """The output of the process so far, and a keyboard."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master, self.process = master, process
        self._seen = bytearray()

    @property
    def raw(self) -> str:
        with suppress(OSError):  # there is nothing new, or the other end is closed
            while piece := os.read(self._master, 1 << 16):
                self._seen += piece
        return self._seen.decode(errors="replace")

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self.raw)

    def see(self, words: str, *, times: int = 1) -> None:
        """Wait until the words were written that many times."""
        try:
            eventually(lambda: self.text.count(words) >= times, timeout=60)
        except AssertionError:
            raise AssertionError(f"{words!r} is not {times} times in:\n{self.text}") from None

    def see_prompt(self, prompt: str = "> ") -> None:
        """Wait until the prompt is the last output: the terminal processes earlier input itself, Ctrl-D included."""
        try:
            eventually(lambda: self.text.endswith(prompt), timeout=60)
        except AssertionError:
            raise AssertionError(f"{prompt!r} is not at the end of:\n{self.text}") from None

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        """The exit code."""
        eventually(lambda: (self.text, self.process.poll())[1] is not None, timeout=60)
        return int(self.process.returncode)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """A verb started in a terminal; killed at the end if it still runs."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30", **environment},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
    ) as process:
        os.close(slave)
        try:
            yield Terminal(master, process)
        finally:
            process.kill()
            os.close(master)
