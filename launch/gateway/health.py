"""Whether the pipeline can answer, judged by the progress of its three stages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...protocol.board import DRAIN, FAILED, ROLES, RUN, Board
from ...protocol.config import PipelineConfig, SupervisorConfig
from ...protocol.journal.layout import has_failed_flush
from ...protocol.model_card import CARD_FILE
from ...protocol.run_dir import journal_path

MODES = {RUN: "run", DRAIN: "drain", FAILED: "failed"}


def is_loaded(board: Board, run_dir: Path, first: Mapping[str, int]) -> bool:
    """Whether the pipeline has been ready since its driver started, with the epochs ``first`` of its workers.

    The card shows that the model was loaded, by this driver or, in a run directory that is kept, by an earlier one.
    """
    if not (run_dir / CARD_FILE).exists():
        return False
    return all(board.ready(role) or board.epoch(role) > first[role] for role in ROLES)


def stages(board: Board, config: SupervisorConfig) -> dict[str, dict[str, Any]]:
    """Each stage's phase, epoch, and seconds since its last progress, with the limit beyond which it is stuck."""
    now_ns = time.monotonic_ns()
    result = {}
    for role in ROLES:
        page, epoch = board.worker(role), board.epoch(role)
        phase = page.phase(epoch)
        age_s = max(0.0, (now_ns - page.progress_ns) / 1e9)
        limit_s = max(config.hang_s, page.patience_ns / 1e9)
        done, total = page.done_of_total
        result[role] = {
            "phase": phase,
            "life": epoch,
            "progress_age_s": round(age_s, 3),
            "stuck_after_s": round(limit_s, 3),
            "healthy": phase == "ready" and age_s <= limit_s,
            **({"done": done, "total": total} if phase in ("loading", "warming") and total else {}),
        }
    return result


def degradations(board: Board, run_dir: Path, config: PipelineConfig) -> dict[str, bool]:
    """The ways in which a pipeline may be degraded while it still answers, and whether each applies."""
    has_failed = False
    with suppress(OSError):  # the driver has exited, and its folder was removed
        has_failed = has_failed_flush(journal_path(run_dir, config.service))
    return {
        "one_sequence_at_a_time": board.is_degraded,
        "journal_not_written": has_failed,
        "too_many_clients": bool(board.crowded),
        "run_directory_deleted": not board.is_in_place,
    }


def health(board: Board, run_dir: Path, config: PipelineConfig) -> dict[str, Any]:
    """``status`` is "ok" if every stage is ready and makes progress; otherwise it says what is wrong.

    It is "failed" once the driver has given up restarting a worker, whatever the others do, and "gone" if no worker can
    be started again because the run directory was deleted.
    """
    found = stages(board, config.supervisor)
    ill = [role for role, stage in found.items() if not stage["healthy"]]
    is_starting = any(found[role]["phase"] in ("starting", "loading", "warming") for role in ill)
    status = "ok" if not ill else "loading" if is_starting else "unhealthy"
    if ill and not board.is_in_place:
        status = "gone"
    if board.mode == FAILED:
        status = "failed"
    mode = MODES.get(board.mode, "stop")
    degraded = [what for what, is_so in degradations(board, run_dir, config).items() if is_so]
    return {"status": status, "mode": mode, "degraded": degraded, "unhealthy": ill, "stages": found}
