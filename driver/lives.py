"""Which lives of the workers are this driver's own: in a run directory that is kept their numbers go on."""

from __future__ import annotations

import json
from pathlib import Path

from ..protocol.board import ROLES, Board
from ..protocol.private_file import write_private

FIRST_LIVES_FILE = "first_lives.json"


def note_first_lives(run_dir: Path, board: Board) -> None:
    """Write down what the first lives will be numbered; before the workers are started."""
    write_private(run_dir / FIRST_LIVES_FILE, json.dumps({role: board.epoch(role) + 1 for role in ROLES}))


def first_lives(run_dir: Path) -> dict[str, int]:
    """The number of each worker's first life under the driver that runs in ``run_dir``, or ran there last."""
    try:
        return dict(json.loads((run_dir / FIRST_LIVES_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return dict.fromkeys(ROLES, 1)
