"""Which worker epochs are this driver's own: in a run directory that is kept, epochs continue to count."""

from __future__ import annotations

import json
from pathlib import Path

from ..protocol.board import ROLES, Board
from ..protocol.private_file import write_private

FIRST_EPOCHS_FILE = "first_epochs.json"


def note_first_epochs(run_dir: Path, board: Board) -> None:
    """Record the epochs that the workers will start with; called before they are started."""
    write_private(run_dir / FIRST_EPOCHS_FILE, json.dumps({role: board.epoch(role) + 1 for role in ROLES}))


def first_epochs(run_dir: Path) -> dict[str, int]:
    """Each worker's first epoch under the driver that runs in ``run_dir``, or ran there last."""
    try:
        return dict(json.loads((run_dir / FIRST_EPOCHS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return dict.fromkeys(ROLES, 1)
