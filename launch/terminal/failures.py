"""Shows errors to a person at a terminal."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from ...protocol.errors import ConfigError, InvalidRequest, TriptychError, WorkerDied
from .logs import flush_log

# The end of a worker's traceback, if it failed with an error of ours: the message says it all.
_OWN_ERROR = re.compile(r"\A(?:.*\n)?[\w.]*\.protocol\.errors\.\w+: (?P<message>.+)", re.DOTALL)
# Errors of a write caused by its target: a full disk, a quota, a limit, a broken disk, a closed stream.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@contextmanager
def reporting_failures() -> Iterator[None]:
    """End the program with one line for an error in the block: exit code 2 for an invalid setting, otherwise 1."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # Python's own flush at exit would neither explain an error nor use our exit code
    except TriptychError as error:
        _end(explain(error), 2 if isinstance(error, (ConfigError, InvalidRequest)) else 1)
    except BrokenPipeError:  # the reader closed the pipe
        _give_up_output()
        sys.exit(128 + 13)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _give_up_output()
        _end(f"cannot write {error.filename or 'the output'}: {os.strerror(error.errno)}", 1)


def explain(error: TriptychError) -> str:
    """What went wrong; without a worker's traceback if the last line of its log says enough."""
    if isinstance(error, WorkerDied) and (match := _OWN_ERROR.search(error.stderr)):
        return f"{error.role}: {match['message'].strip()}"
    return error.message


def _end(message: str, code: int) -> NoReturn:
    flush_log()  # which comes first
    typer.secho(f"error: {message}", fg="red", err=True)
    sys.exit(code)


def _give_up_output() -> None:
    """Discard the rest of standard output: otherwise Python tries to write it again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
