"""The health of a pipeline: judged by progress, not by the existence of processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..protocol.board import DRAIN, ROLES, RUN
from ..protocol.errors import TriptychError, WorkerDied
from .deaths import CROWDED, last_words
from .parts import Parts
from .worker import WorkerHealth

MAX_REASON = 400  # characters


@dataclass(frozen=True, slots=True)
class Health:
    """``status`` is "ok", "degraded" (one sequence at a time, after repeated crashes; the journal could not be written
    to disk; the run directory was deleted; or a worker ends again and again because it may open no file for another
    client), "starting" (also: a worker is being replaced or makes no progress), "draining", or "failed" (the driver
    gave up).
    """

    status: str
    reason: str  # for humans, empty if all is well
    workers: dict[str, WorkerHealth]

    def to_wire(self) -> dict[str, Any]:
        """Return plain maps and values, for JSON and MessagePack."""
        return dataclasses.asdict(self)


def take_health(parts: Parts) -> Health:
    supervisor, board, keeper = parts.supervisor, parts.board, parts.keeper
    workers = {role: supervisor.health(role) for role in ROLES}
    status, reason = "ok", ""
    not_ok = [role for role, worker in workers.items() if not worker.ok]
    if supervisor.error is not None:
        status, reason = "failed", _why_failed(supervisor.error)
    elif board.mode == DRAIN:
        status, reason = "draining", "the pipeline is stopping"
    elif board.mode != RUN:
        status, reason = "failed", "the pipeline is stopped"
    elif not_ok:
        status = "starting"
        reason = ", ".join(_explain(role, workers[role]) for role in not_ok)
    elif board.is_degraded:
        status, reason = "degraded", "execute crashed often and runs one sequence at a time"
    elif keeper.has_failed:
        status, reason = "degraded", f"{keeper.path} could not be written: a power loss would lose its requests"
    elif problem := parts.sockets.problem:
        status, reason = "degraded", problem
    elif crowded := supervisor.crowded:
        status, reason = "degraded", f"{' and '.join(crowded)} {CROWDED}"
    return Health(status, reason, workers)


def _why_failed(error: TriptychError) -> str:
    """In one line, with what a worker wrote last, such as the error that ended it."""
    reason = error.message.partition(";")[0]
    written = last_words(error.stderr) if isinstance(error, WorkerDied) else ""
    return f"{reason}: {written}"[:MAX_REASON] if written else reason


def _explain(role: str, worker: WorkerHealth) -> str:
    text = f"{role} is {worker.phase}, {worker.since_progress_s:.1f} s"
    return f"{text}; it died before ({worker.last_death})" if worker.last_death else text
