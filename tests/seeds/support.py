"""Shared by the tests of this folder: sequences with a given prompt, traces of steps, and ends of many streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.pipeline.checks import busy_figures
from tests.waiting import eventually
from tests.workers.execute.factories import make_sequence
from triptych import Driver
from triptych.driver.stream import Completion, Stream
from triptych.protocol.board import Board
from triptych.protocol.errors import TriptychError
from triptych.protocol.journal.layout import Journal
from triptych.protocol.run_dir import board_path, journal_path
from triptych.workers.execute.engine import Engine, StepOutputs
from triptych.workers.execute.scheduling.sequence import Sequence as TokenSequence


def sequence_of(prompt: Sequence[int], index: int = 0, **options: Any) -> TokenSequence:
    """``make_sequence`` with this prompt."""
    sequence = make_sequence(index, num_tokens=len(prompt), **options)
    sequence.tokens[: len(prompt)] = prompt
    return sequence


def trace(engine: Engine, *, max_steps: int = 10_000, each: Callable[[StepOutputs], object] = id) -> list[StepOutputs]:
    """Run every step until nothing is left to do; after each one, check the invariants and call ``each``."""
    steps: list[StepOutputs] = []
    while engine.has_work:
        step = engine.step()
        assert step is not None, "sequences are live, but nothing was planned"
        assert len(steps) < max_steps, f"{len(engine.scheduler.live)} sequences live after {max_steps} steps"
        engine.check()
        each(step)
        steps.append(step)
    return steps


def text_of(token_ids: Iterable[int]) -> str:
    """The text of these ids in the hash LM's byte tokenizer: token ``1 + b`` is byte ``b``, others are special."""
    return bytes(i - 1 for i in token_ids if 1 <= i <= 256).decode("utf-8", "replace")


def end_all(streams: Iterable[Stream]) -> list[Completion | TriptychError]:
    """Abort all of them and wait for their ends."""
    streams = list(streams)
    for stream in streams:
        stream.abort()
    return [outcome(stream) for stream in streams]


def outcome(stream: Stream, timeout: float = 30.0) -> Completion | TriptychError:
    """The answer, or the error that it would raise."""
    try:
        return stream.result(timeout)
    except TriptychError as error:
        return error


def board_stats(driver: Driver) -> dict[str, Any]:
    """The statistics of all workers, read from the board."""
    board = Board(board_path(driver.run_dir))
    stats = board.stats()
    board.close()
    return stats


_COUNTING = ("prepare", "execute")  # summarize's rate decays for two seconds


def holds_nothing(driver: Driver) -> bool:
    """Whether no request has a record in the journal, and the last statistics show every page free and no work."""
    journal = Journal.open(journal_path(driver.run_dir, driver.config.service))
    in_use = bool((journal.states() != 0).any())
    journal.close()
    execute = driver.stats()["execute"]
    return (
        not in_use
        and not busy_figures(driver)
        and bool(execute["pages_free"] + execute["pages_cached"] == execute["pages"])
    )


def clean_up(driver: Driver) -> None:
    """Abort what a failed test left behind, so that the next one finds an empty pipeline."""
    for request_id in list(driver.client.session._exchange.requests):
        driver.abort(request_id)
    eventually(lambda: holds_nothing(driver), timeout=40)


def settle(driver: Driver) -> dict[str, Any]:
    """The statistics once nothing is held and they no longer change: workers publish them up to 250 ms late."""
    seen: list[tuple[float, dict[str, Any]]] = []
    clock = Clock()

    def is_steady() -> bool:
        stats = driver.stats()
        if not holds_nothing(driver) or (seen and any(seen[0][1][role] != stats[role] for role in _COUNTING)):
            seen.clear()
        seen.append((clock.s, stats))
        return clock.s - seen[0][0] > 0.4

    eventually(is_steady, interval=0.05)
    return seen[-1][1]


def cpu_seconds(pid: int | None) -> float:
    """Processor time of a process so far."""
    nanoseconds = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
    return int(nanoseconds) / 1e9


class Clock:
    """Seconds since its creation."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def s(self) -> float:
        return time.monotonic() - self._start
