"""Reading a record while prepare changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from triptych.protocol.journal.layout import DISPATCHED, Journal
from triptych.protocol.journal.requests import AcceptTimes, RequestWriter, read_request
from triptych.protocol.record import RequestRecord


class ArenaThatRings:
    """The arena of a journal; each read first lets another process act."""

    def __init__(self, arena: Any, act: Any) -> None:
        self._arena, self._act = arena, act

    def __getitem__(self, key: Any) -> Any:
        self._act()
        return self._arena[key]


def test_record_dispatched_during_the_read_is_found(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal", num_records=2, arena_bytes=1 << 16)
    writer = RequestWriter(journal)
    record = RequestRecord(
        request_id="a", digest=1, prompt=np.arange(3, dtype=np.int32).tobytes(), num_truncated_tokens=0,
        token_capacity=4, seed=0, lease_s=1.0, sampling={},
    )  # fmt: skip
    slot, generation = writer.accept(record, AcceptTimes(1, 2, 3, 4))
    arena = journal.arena
    journal.arena = ArenaThatRings(arena, lambda: writer.dispatch(slot, generation, 5))  # type: ignore[assignment]
    view = read_request(journal, slot)
    journal.arena = arena
    assert view is not None
    assert view.record == record
    again = read_request(journal, slot)
    assert again is not None
    assert again.state == DISPATCHED
