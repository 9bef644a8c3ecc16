"""Errors as a person at a terminal should see them."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from ..protocol.errors import ConfigError, InvalidRequest, TriptychError, WorkerDied

# The end of a worker's traceback, if it failed by an error of ours: the message says it all.
_OWN_ERROR = re.compile(r"\A(?:.*\n)?[\w.]*\.protocol\.errors\.\w+: (?P<message>.+)", re.DOTALL)
# What a write says where the place is at fault: a full disk, a quota, a limit, a broken disk, a closed stream.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@contextmanager
def failures_told() -> Iterator[None]:
    """End the program with one line for an error in the block: with 2 for a wrong setting, else with 1."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # not at the exit of Python, which has no words and no exit code of ours for it
    except TriptychError as error:
        _end(explain(error), 2 if isinstance(error, (ConfigError, InvalidRequest)) else 1)
    except BrokenPipeError:  # whoever read has enough
        _give_up_output()
        sys.exit(128 + 13)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _give_up_output()
        _end(f"cannot write {error.filename or 'the output'}: {os.strerror(error.errno)}", 1)


def explain(error: TriptychError) -> str:
    """What went wrong, without the traceback of a worker where its last words do."""
    if isinstance(error, WorkerDied) and (match := _OWN_ERROR.search(error.stderr)):
        return f"{error.role}: {match['message'].strip()}"
    return error.message


def _end(message: str, code: int) -> NoReturn:
    typer.secho(f"error: {message}", fg="red", err=True)
    sys.exit(code)


def _give_up_output() -> None:
    """Send what is left of standard output nowhere, or Python tries it again when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
