"""Errors as a person at a terminal should see them."""

from __future__ import annotations

import re

from ..protocol.errors import TriptychError, WorkerDied

# The last line of a worker's traceback, if it failed by an error of ours: the message says it all.
_OWN_ERROR = re.compile(r"^[\w.]*\.protocol\.errors\.\w+: (?P<message>.+)", re.MULTILINE | re.DOTALL)


def explain(error: TriptychError) -> str:
    """What went wrong, without the traceback of a worker where its last words do."""
    if isinstance(error, WorkerDied) and (match := _OWN_ERROR.search(error.stderr)):
        return f"{error.role}: {match['message'].strip()}"
    return error.message
