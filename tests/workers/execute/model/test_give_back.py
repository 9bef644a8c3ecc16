"""Memory of read checkpoint files is given back to the system, and they can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triptych.workers.execute.model.checkpoint.mapped import Checkpoint
from triptych.workers.execute.model.give_back import trim_heap

SMAPS = Path("/proc/self/smaps")


def resident_kib(path: Path) -> int:
    """Of this process's mappings of a file."""
    total, is_of_file = 0, False
    for line in SMAPS.read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_of_file = line.endswith(str(path.resolve()))
        elif is_of_file and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(not SMAPS.exists(), reason="reads /proc")
def test_checkpoint_can_be_read_again_after_its_memory_was_given_back(tmp_path: Path) -> None:
    path, expected = tmp_path / "model.safetensors", torch.arange(1 << 20, dtype=torch.float32)
    save_file({"a": expected}, path)
    checkpoint = Checkpoint(tmp_path)
    tensor = checkpoint["a"]
    assert tensor.sum() == expected.sum()
    assert resident_kib(path) >= 4096
    checkpoint.forget()
    assert resident_kib(path) == 0
    assert torch.equal(tensor, expected)
    trim_heap()
