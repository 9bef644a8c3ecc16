"""A program without standard streams writes nothing into the files of a pipeline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triptych.protocol.lifeline import child_environment

CODE = """
import os, sys
from pathlib import Path
from triptych.driver.lasting_memory import LastingMemory
from triptych.protocol.board import Board
from triptych.protocol.journal.layout import Journal
from triptych.protocol.lock import LockFile

os.closerange(0, 3)
folder = Path(sys.argv[1])
opened = {}
sys.exit(sum(os.path.lexists(f"/proc/self/fd/{{file}}") for file in range(3)))
"""
OPENERS = {
    "new journal": 'Journal.create(folder / "journal", num_records=4, arena_bytes=4096)',
    "journal": 'Journal.open(Journal.create(folder / "journal", num_records=4, arena_bytes=4096).path)',
    "board": 'Board(folder / "board")',
    "lock": 'LockFile(folder / "lock", os.O_CREAT)',
    "lasting memory": 'LastingMemory(folder / "kv")',
}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS.keys())
def test_no_file_of_a_pipeline_has_the_descriptor_of_a_closed_stream(opener: str, tmp_path: Path) -> None:
    """What a library prints before it aborts was written over the header of the journal, which then was none."""
    command = [sys.executable, "-c", CODE.format(opener), str(tmp_path)]
    assert subprocess.run(command, env=child_environment(), check=False).returncode == 0
