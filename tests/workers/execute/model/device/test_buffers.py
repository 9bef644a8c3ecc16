"""What is sent to a device arrives as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triptych.workers.execute.model.device.buffers import HostStage


@pytest.mark.parametrize("num_bytes", [1, 8, 30])
def test_numbers_of_all_types_are_sent_in_one_copy(num_bytes: int) -> None:
    arrays = [np.array([3, -1]), np.array([0.1, -np.inf], np.float32), np.arange(num_bytes, dtype=np.uint8)[None]]
    sent = HostStage(torch.device("cpu"), torch.int32).send(arrays)
    assert [(column.dtype, column.tolist()) for column in sent] == [
        (torch.int64, [3, -1]),
        (torch.float32, arrays[1].tolist()),
        (torch.uint8, list(range(num_bytes))),
    ]


def test_bytes_are_not_widened_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of 32 rows are half a megabyte."""
    sizes: list[int] = []
    copy = HostStage.copy

    def noted(stage: HostStage, arrays: list[np.ndarray]) -> torch.Tensor:
        sizes.append(sum(array.size for array in arrays))
        return copy(stage, arrays)

    monkeypatch.setattr(HostStage, "copy", noted)
    HostStage(torch.device("cpu"), torch.int32).send([np.zeros((4, 100), np.uint8)])
    assert sizes == [100]
