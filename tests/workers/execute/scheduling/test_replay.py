"""A replayed sequence is computed exactly as it was the first time, whatever else runs meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.workers.execute.factories import (
    VOCAB_SIZE,
    advance,
    chunks_of,
    make_engine,
    make_scheduler,
    make_sequence,
    make_sequences,
    recover,
    run,
    step_tokens,
    tokens_of,
)
from triptych.protocol.arrays import Int32, Int64
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.moves import Moves
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step import StepInputs

TWIST = 7  # error of a cell per token of the chunk in which it was computed


class RoundingRunner(HashRunner):
    """A hash model whose keys and values depend on the number of tokens of the sequence computed together."""

    def launch(self, inputs: StepInputs) -> None:
        lengths = np.diff(inputs.query_starts)
        self._twists.reshape(-1)[inputs.slot_mapping] = np.repeat(lengths, lengths) * TWIST
        super().launch(inputs)

    @property
    def _twists(self) -> Int64:
        if not hasattr(self, "_made"):
            self._made: Int64 = np.zeros_like(self._cells)
        return self._made

    def move(self, moves: Moves) -> None:
        super().move(moves)
        if not hasattr(self, "_host_twists"):
            self._host_twists: Int64 = np.zeros_like(self._host_cells)
        for page, host_page in moves.swap_out:
            self._host_twists[host_page] = self._twists[page]
        for source, target in moves.copies:
            self._twists[target] = self._twists[source]
        for page, host_page in moves.swap_in:
            self._twists[page] = self._host_twists[host_page]

    def _read(self, block_table: Int32, num_tokens: int) -> int:
        num_pages = -(-num_tokens // self._page_size)
        return super()._read(block_table, num_tokens) + int(
            self._twists[block_table[:num_pages]].reshape(-1)[:num_tokens].sum()
        )


def undisturbed(sequence: Sequence) -> list[int]:
    """The rounding model's tokens for a prompt cut at ``chunk_ends``, from the definition alone."""
    tokens: list[int] = sequence.tokens[: sequence.num_prompt_tokens].tolist()
    lengths = np.diff([0, *sequence.chunk_ends])
    twist = int((lengths * lengths).sum()) * TWIST
    for _ in range(sequence.max_tokens):
        total = len(tokens) + sum((i + 1) * token for i, token in enumerate(tokens)) + twist
        tokens.append(total % (VOCAB_SIZE - 1) + 1)
        twist += TWIST
    return tokens[sequence.num_prompt_tokens :]


def crash(sequences: list[Sequence], num_steps: int) -> list[Sequence]:
    """``sequences`` as recovered after that many steps of an engine that crashed."""
    engine = make_engine(*sequences, runner=RoundingRunner, replays=True, max_num_seqs=8)
    for _ in range(num_steps):
        engine.step()
    comeback = []
    for index, old in enumerate(sequences):
        new = make_sequence(index, num_tokens=old.num_prompt_tokens, max_tokens=old.max_tokens)
        for token_id in old.output_tokens.tolist():
            new.append(token_id)
        new.chunk_ends = list(old.chunk_ends) if old.num_output_tokens else []
        comeback.append(new)
    return comeback


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_changes_no_token(prefix_cache: bool) -> None:
    sequences = make_sequences(6, num_tokens=13, max_tokens=20)
    engine = make_engine(*sequences, runner=RoundingRunner, num_pages=20, replays=True, prefix_cache=prefix_cache)
    outputs = run(engine)
    assert engine.stats.num_preemptions > 0
    assert outputs == {s.key: undisturbed(s) for s in sequences}


def test_chunk_boundaries_of_a_prompt_are_remembered_while_it_is_swapped_out() -> None:
    sequences = make_sequences(3, num_tokens=12, max_tokens=12)
    options: dict[str, Any] = {
        "num_pages": 10,
        "host_pages": 40,
        "preemption": "swap",
        "prefill_chunk": 3,
        "max_num_seqs": 5,
    }
    engine = make_engine(*sequences, runner=RoundingRunner, replays=True, **options)
    outputs = run(engine)
    assert engine.stats.num_swaps > 0
    assert all(max(np.diff([0, *s.chunk_ends])) <= 3 for s in sequences)
    assert outputs == {s.key: undisturbed(s) for s in sequences}


def test_recomputed_prompt_is_not_cut_smaller_for_current_decodes() -> None:
    """There were none when it arrived, so its chunks had the maximum length."""
    sequences = make_sequences(5, num_tokens=11, max_tokens=12)
    options: dict[str, Any] = {"num_pages": 12, "mixed_prefill_tokens": 2, "max_prefill_skip": 1}
    engine = make_engine(*sequences, runner=RoundingRunner, replays=True, **options)
    outputs = run(engine)
    assert engine.stats.num_preemptions > 0
    assert outputs == {s.key: undisturbed(s) for s in sequences}


def test_recomputed_prompt_with_larger_chunks_than_decodes_leave_waits_a_number_of_steps() -> None:
    decoding = make_sequence(0, num_tokens=2, max_tokens=60)
    scheduler = make_scheduler(decoding, replays=True, mixed_prefill_tokens=2, max_prefill_skip=3)
    advance(scheduler)
    scheduler.add(recover(make_sequence(1, num_tokens=8), 1))
    assert [chunks_of(advance(scheduler)).get(1, 0) for _ in range(4)] == [0, 0, 0, 8]


def test_without_replay_the_same_model_gives_other_tokens() -> None:
    sequences = make_sequences(6, num_tokens=13, max_tokens=20)
    outputs = run(make_engine(*sequences, runner=RoundingRunner, num_pages=20))
    assert outputs != {s.key: undisturbed(s) for s in sequences}


@pytest.mark.parametrize("num_steps", [1, 3, 7, 15])
def test_recovery_changes_no_token(num_steps: int) -> None:
    sequences = crash([make_sequence(i, num_tokens=11 + i, max_tokens=20) for i in range(5)], num_steps)
    engine = make_engine(*sequences, runner=RoundingRunner, replays=True, num_pages=40, prefill_chunk=5)
    outputs = run(engine)
    assert outputs == {s.key: undisturbed(s) for s in sequences}


def test_replay_emits_nothing_and_is_batched_like_decodes() -> None:
    sequences = crash(make_sequences(4, num_tokens=5, max_tokens=20), 10)
    num_emitted = {s.key: s.num_output_tokens for s in sequences}
    engine = make_engine(*sequences, runner=RoundingRunner, replays=True)
    first: dict[Key, int] = {}
    for count in range(max(num_emitted.values()) + 3):
        step = engine.step()
        assert step is not None
        for key, index, _ in tokens_of(step.progress):
            assert index >= num_emitted[key]
            first.setdefault(key, count)
    assert set(first) == set(num_emitted)


def test_request_that_arrives_during_a_replay_does_not_wait_for_it() -> None:
    engine = make_engine(
        *crash(make_sequences(2, num_tokens=5, max_tokens=20), 15), runner=RoundingRunner, replays=True
    )
    engine.step()
    engine.add(make_sequence(9))
    assert {key for _ in range(3) for key in step_tokens(engine)} == {(9, 0)}
