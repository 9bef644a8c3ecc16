from __future__ import annotations

import errno
import io
import itertools
import json
import os
from typing import Any

import pytest

from tests.workers.execute.factories import VOCAB_SIZE, make_scheduler, make_sequence, make_sequences, run
from triptych.workers.execute import trace as trace_module
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.audit import measure_memory
from triptych.workers.execute.scheduling.history import StepHistory
from triptych.workers.execute.trace import StepTrace


def timed_engine(**options: Any) -> Engine:
    """An engine whose clock advances by a millisecond each time it is read."""
    return traced_engine(io.StringIO(), **options)


def traced_engine(file: io.StringIO, **options: Any) -> Engine:
    scheduler = make_scheduler(**options)
    runner = HashRunner(VOCAB_SIZE, num_pages=64, page_size=4)
    clock = itertools.count(0, 1_000_000).__next__
    engine = Engine(scheduler, runner, clock=clock, trace=StepTrace(file, scheduler, secret=b"s"))
    for sequence in make_sequences(2, num_tokens=6, max_tokens=4):
        engine.add(sequence)
    return engine


def trace(**options: Any) -> list[dict[str, Any]]:
    file = io.StringIO()
    run(traced_engine(file, **options))
    lines = [json.loads(line) for line in file.getvalue().splitlines() if line]
    return [line for line in lines if "step" in line]


class FullDisk(io.StringIO):
    """A file with the trace of an earlier process, to which nothing more can be written."""

    def tell(self) -> int:
        return 7

    def write(self, _: str, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_ends_the_trace_and_not_the_next_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_module, "open", lambda *_, **__: FullDisk(), raising=False)
    file = trace_module.open_trace("trace.jsonl")
    assert isinstance(file, FullDisk)
    run(traced_engine(file))
    assert caplog.messages == ["the trace ends here: No space left on device"]


def test_every_step_is_one_line() -> None:
    lines = trace()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["ms"] == 1.0 for line in lines)


def test_line_contains_the_sequences_and_omits_what_did_not_happen() -> None:
    first, second, *_ = trace()
    assert first["prefills"] == [[0, 0, 6], [1, 0, 6]]
    assert first["starts"] == [[0, 0], [1, 0]]
    assert second["decodes"] == [0, 1]
    assert not {"prefills", "starts", "preempted", "swap_out", "failed"} & set(second)


def test_last_line_contains_the_end_of_each_sequence() -> None:
    assert trace()[-1]["finished"] == {"0": "length", "1": "length"}


def test_history_contains_only_the_last_steps() -> None:
    engine = timed_engine()
    engine.history = StepHistory(max_steps=3)
    run(engine)
    assert [record.step for record in engine.history.last(1000)] == [2, 3, 4]
    assert len(engine.history) == 3


def test_history_contains_the_tokens_and_the_time_of_a_step() -> None:
    engine = timed_engine()
    engine.step()
    (record,) = engine.history.last(1000)
    assert (record.num_prefill_tokens, record.num_decodes, record.elapsed_ns) == (12, 0, 1_000_000)


def test_summary_covers_all_steps_in_the_history() -> None:
    engine = timed_engine()
    assert engine.history.summary() == (0, 0, 0)
    run(engine)
    assert engine.history.summary() == (4.5, 1.0, 1.0)


def test_unused_memory_is_reserved_or_fragmented() -> None:
    engine = Engine(
        make_scheduler(make_sequence(0, num_tokens=5, max_tokens=2), make_sequence(1, num_tokens=7, max_tokens=30)),
        HashRunner(VOCAB_SIZE, num_pages=64, page_size=4),
    )
    engine.step()
    assert measure_memory(engine.scheduler) == (3, 1)
