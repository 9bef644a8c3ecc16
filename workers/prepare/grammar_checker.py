"""Checks whether a grammar compiles within a time and a memory limit: native code cannot be interrupted, so it runs in
a process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ...protocol.errors import InvalidRequest
from ...protocol.proc_stat import is_stopped
from ...protocol.starvation import OwnTime
from ..process import STOPPED_S
from .structured import Structured, refusal

logger = logging.getLogger(__name__)

MAX_KNOWN = 256  # cached verdicts
START_TIMEOUT_S = 60.0
ENDING_S = 0.1  # between the end of a process's output and its own
REMEMBER_S = 60.0  # how long an exceeded limit is remembered; other verdicts stay while there is room
_READ_BYTES = 1 << 16


class Verdict(NamedTuple):
    """The result for a form: a grammar, or why there is none."""

    grammar: str = ""
    error: str = ""
    until: float = math.inf  # time.monotonic(); after an exceeded limit it may be tried again

    @property
    def result(self) -> str | InvalidRequest:
        return refusal(self.error) if self.error else self.grammar


class GrammarChecker:
    """Compiles one grammar at a time; ``compile`` is for a single thread, ``known`` for any.

    Invariant: a compiler that did not answer in time is dead when ``compile`` returns.
    """

    def __init__(self, run_dir: Path, *, timeout_s: float, memory_bytes: int) -> None:
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._verdicts: dict[Structured, Verdict] = {}
        self._process: _Process | None = None

    def known(self, structured: Structured) -> Verdict | None:
        """The verdict on an earlier form, if it is still cached."""
        verdict = self._verdicts.get(structured)
        return verdict if verdict is not None and time.monotonic() < verdict.until else None

    def compile(self, structured: Structured) -> Verdict:
        """The grammar for execute to run, or why there is none: the form does not compile, or not within the limits, or
        this model supports no grammars.
        """
        verdict = self.known(structured) or self._compile(structured)
        if len(self._verdicts) >= MAX_KNOWN:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[structured] = verdict
        return verdict

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _compile(self, structured: Structured, *, num_tries: int = 2) -> Verdict:
        try:
            if self._process is not None and self._process.is_dead:
                self.close()  # it died while idle: no form is to blame
            if self._process is None:
                self._process = _Process(self._run_dir, self._memory_bytes)
                self._process.begin()
            self._process.ask([structured.kind, structured.source])
            return Verdict(*self._process.answer(self._timeout_s))
        except TimeoutError:
            error = f"takes longer than {self._timeout_s} s to compile"
        except (EOFError, BrokenPipeError):
            error = f"cannot be compiled in {self._memory_bytes >> 20} MiB"
        except _Unusable as unusable:
            error = str(unusable)
        except ValueError:  # a malformed answer, say from a library that prints: the next line may be the real one
            self.close()
            raise
        is_disturbed = self._process is not None and self._process.is_disturbed
        self.close()
        if is_disturbed and num_tries > 1:
            return self._compile(structured, num_tries=num_tries - 1)
        return Verdict(error=error, until=time.monotonic() + REMEMBER_S)


class _Unusable(Exception):
    """No grammar can be compiled for this model; the message is the reason."""


class _Process:
    """One ``grammar_process``."""

    def __init__(self, run_dir: Path, memory_bytes: int) -> None:
        command = [sys.executable, "-m", f"{__package__}.grammar_process", "--run-dir", str(run_dir)]
        command += ["--memory-bytes", str(memory_bytes), "--parent", str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)

    def begin(self) -> None:
        """Wait until it can be asked.

        Raises:
            _Unusable: it cannot.
        """
        try:
            _, unusable = self.answer(START_TIMEOUT_S)
        except (TimeoutError, EOFError, ValueError) as error:  # the last one: a library printed something
            raise _Unusable("cannot be compiled: the compiler does not start") from error
        if unusable:
            raise _Unusable(unusable)

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_disturbed(self) -> bool:
        """Whether something outside has killed or stopped it. One that exceeds its memory ends itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(ENDING_S) == -signal.SIGKILL
        return is_stopped(self._process.pid)

    def ask(self, question: list[str]) -> None:
        self._stdin.write(json.dumps(question).encode() + b"\n")
        self._stdin.flush()

    def answer(self, timeout_s: float) -> tuple[str, str]:
        """``(grammar, error)``, one of them empty.

        If this process is stopped meanwhile, as in a paused container, so is the compiler: the time begins anew. What
        the compiler waits for a processor does not count: on a busy machine, a form may take many times as long.

        Raises:
            TimeoutError: no answer in time.
            EOFError: the process died.
        """
        clock, received = OwnTime(self._process.pid), b""
        while not received.endswith(b"\n"):
            began, left_s = time.monotonic(), max(0.0, timeout_s - clock.elapsed_s)
            if not self._selector.select(left_s):
                if time.monotonic() >= began + left_s + STOPPED_S:
                    clock = OwnTime(self._process.pid)
                elif clock.elapsed_s >= timeout_s:
                    raise TimeoutError
                continue
            received += (chunk := os.read(self._stdout.fileno(), _READ_BYTES))
            if not chunk:
                raise EOFError
        grammar, error = json.loads(received)
        return grammar, error

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._selector.close()
        self._stdout.close()
        try:
            self._stdin.close()
        except BrokenPipeError:
            logger.debug("the compiler died with a question in its pipe")
