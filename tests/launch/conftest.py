"""The command line, called in this process, and one pipeline that all of its tests share."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest
import typer

from triptych import Driver
from triptych.launch.cli import main
from triptych.launch.signals import ENDING


class Outcome(NamedTuple):
    """The result of a call."""

    code: int
    out: str
    err: str


Triptych: TypeAlias = Callable[..., Outcome]

_get_command = cache(typer.main.get_command)  # it makes the flags of all verbs, which takes more than most calls


@pytest.fixture(scope="package")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The run directory of a running pipeline with the hash model."""
    folder = tmp_path_factory.mktemp("p")
    folder.chmod(0o700)
    driver = Driver("hash-lm", run_dir=folder, max_queue=1024)
    driver.start()
    yield str(folder)
    driver.stop()


@pytest.fixture
def triptych(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Triptych]:
    """``triptych("generate", "hi", stdin=b"...")``, called as from a shell."""

    monkeypatch.setattr(typer.main, "get_command", _get_command)

    def call(*arguments: str | Path, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        return Outcome(int(exit_.value.code or 0), *capfd.readouterr())

    handlers = {number: signal.getsignal(number) for number in ENDING}
    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
