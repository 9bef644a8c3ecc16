"""The masks of a step: a row that fails or takes too long does so alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.workers.execute.factories import make_sequence
from triptych.protocol.arrays import Int32
from triptych.protocol.reasoning import Tags
from triptych.workers.execute.grammar import masks
from triptych.workers.execute.grammar.masks import MAX_THREADS, ROWS_A_JOB, MaskMaker, TokenMasks, first_allowed
from triptych.workers.execute.grammar.matcher import Bits, GrammarError, GrammarMatcher, ReasoningLimit, ids_of
from triptych.workers.execute.scheduling.sequence import Sequence

NUM_ROWS = 2 * ROWS_A_JOB + 3


def bits(*token_ids: int) -> Bits:
    return np.packbits(np.isin(np.arange(104), token_ids), bitorder="little")


class FakeMatcher(GrammarMatcher):
    """Allows one token, or does what the test says."""

    def __init__(self, token_id: int, act: Callable[[], object] = lambda: None) -> None:
        self._token_id = token_id
        self._act = act

    def allowed_after(self, output_tokens: Int32) -> Bits:
        self._act()
        return bits(self._token_id)


def masks_of(matchers: dict[int, FakeMatcher], maker: MaskMaker | None = None) -> TokenMasks:
    pending = (maker or MaskMaker()).begin([with_matcher(matchers.get(row)) for row in range(NUM_ROWS)])
    assert pending is not None
    return pending.wait()


def with_matcher(matcher: FakeMatcher | None) -> Sequence:
    sequence = make_sequence(1)
    sequence.grammar = matcher
    return sequence


def test_matcher_with_nothing_left_to_limit_is_dropped() -> None:
    sequence = make_sequence()
    sequence.grammar = ReasoningLimit(Tags(start=1, end=2, is_open=True, budget=0), 64)
    maker = MaskMaker()
    pending = maker.begin([sequence])
    assert pending is not None
    assert ids_of(pending.wait().allowed[0]).tolist() == [2]
    sequence.tokens[sequence.num_tokens] = 2
    sequence.num_tokens += 1
    pending = maker.begin([sequence])
    assert pending is not None
    assert pending.wait() == ({}, {})
    assert maker.begin([sequence]) is None
    assert sequence.grammar is None


def test_rows_without_a_grammar_cost_nothing() -> None:
    assert MaskMaker().begin([make_sequence(1)]) is None


def test_each_row_gets_its_own_mask() -> None:
    masks = masks_of({row: FakeMatcher(row) for row in range(NUM_ROWS)})
    assert {row: ids_of(mask).tolist() for row, mask in masks.allowed.items()} == {r: [r] for r in range(NUM_ROWS)}


class Panic(BaseException):
    """Like a panic of Rust code in Python."""


@pytest.mark.parametrize("error", [GrammarError("too complex"), Panic("index out of bounds")])
def test_error_fails_only_its_row(error: BaseException) -> None:
    def fail() -> None:
        raise error

    masks = masks_of({3: FakeMatcher(3), 4: FakeMatcher(4, fail), 5: FakeMatcher(5)})
    assert set(masks.allowed) == {3, 5}
    assert masks.failed == {4: f"the grammar failed: {error}"}


def test_slow_row_fails_alone_and_does_not_delay_the_next_step() -> None:
    maker, never = MaskMaker(timeout_s=0.2), threading.Event()
    try:
        matchers = {row: FakeMatcher(row) for row in range(NUM_ROWS)}
        matchers[2] = matchers[ROWS_A_JOB] = FakeMatcher(0, never.wait)
        masks = masks_of(matchers, maker)
        assert set(masks.failed) == {2, ROWS_A_JOB}
        assert "takes longer than 0.2 s" in masks.failed[2]
        assert set(masks.allowed) == set(range(NUM_ROWS)) - set(masks.failed)
        del matchers[2], matchers[ROWS_A_JOB]
        assert masks_of(matchers, maker).failed == {}
    finally:
        never.set()


def test_time_of_earlier_rows_does_not_fail_a_row() -> None:
    """Eight rows are one job. Four of them take longer than the time allowed per row, and none does."""
    wait = threading.Event().wait
    matchers = {row: FakeMatcher(row, lambda: wait(0.25)) for row in range(4)}
    masks = masks_of(matchers, MaskMaker(timeout_s=0.8))
    assert masks.failed == {}
    assert set(masks.allowed) == set(range(4))


def test_pause_of_the_whole_machine_fails_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container, in the middle of a mask."""
    begun, go_on, clock, pauses = threading.Event(), threading.Event(), time.monotonic, list[float]()

    def compute() -> None:
        begun.set()
        go_on.wait(60)

    def pause(futures: Any, timeout_s: float) -> object:
        if pauses:
            go_on.set()
            return wait(futures, timeout_s)
        begun.wait(60)
        pauses.append(60.0)
        return None

    monkeypatch.setattr(masks, "wait", pause)
    monkeypatch.setattr(masks, "time", SimpleNamespace(monotonic=lambda: clock() + sum(pauses)))
    found = masks_of({1: FakeMatcher(1, compute)})
    assert (set(found.allowed), found.failed) == ({1}, {})


def test_masks_do_not_wait_for_threads_stuck_in_an_abandoned_step() -> None:
    maker, never = MaskMaker(timeout_s=0.2), threading.Event()
    try:
        for _ in range(MAX_THREADS):
            maker.begin([with_matcher(FakeMatcher(0, never.wait))])
        assert masks_of({1: FakeMatcher(1)}, maker).failed == {}
    finally:
        never.set()


@pytest.mark.parametrize(("token_id", "expected"), [(0, 2), (2, 2), (3, 5), (6, 2)])
def test_first_allowed_token_is_searched_from_a_given_token(token_id: int, expected: int) -> None:
    assert first_allowed(bits(2, 5), token_id) == expected
