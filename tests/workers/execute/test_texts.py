"""Every schedule gives the same text, for any chunks, pages, pool, rows and budget."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.execute.factories import expected_output, make_engine, make_sequence, make_sequences, run
from triptych.workers.execute.scheduling.sequence import Sequence

LENGTHS = (1, 3, 8, 17, 40, 65)


def mixed() -> list[Sequence]:
    """Prompts of all lengths, greedy and sampled in turn."""
    return [
        make_sequence(index, num_tokens=num_tokens, max_tokens=20, temperature=float(index % 2))
        for index, num_tokens in enumerate(LENGTHS)
    ]


def assert_exact(sequences: list[Sequence], **options: Any) -> None:
    expected = {sequence.key: expected_output(sequence) for sequence in sequences}
    assert run(make_engine(*sequences, **options)) == expected


@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("max_num_seqs", [4, 5, 8])
def test_texts_do_not_depend_on_chunks_pages_and_rows(prefill_chunk: int, page_size: int, max_num_seqs: int) -> None:
    assert_exact(
        mixed(),
        num_pages=1024 // page_size,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        max_num_seqs=max_num_seqs,
    )


@pytest.mark.parametrize("num_tokens", [88, 96, 128, 200], ids=lambda n: f"pool{n}")
@pytest.mark.parametrize("page_size", [1, 2, 8])
@pytest.mark.parametrize("margin", [0.0, 0.2, 1.0])
def test_texts_do_not_depend_on_the_pool(num_tokens: int, page_size: int, margin: float) -> None:
    assert_exact(mixed(), page_size=page_size, num_pages=num_tokens // page_size, safety_margin=margin)


@pytest.mark.parametrize("budget", [1, 2, 3, 9, 300])
@pytest.mark.parametrize("page_size", [2, 64])
def test_texts_do_not_depend_on_the_token_budget(budget: int, page_size: int) -> None:
    assert_exact(
        mixed(), max_num_batched_tokens=budget, prefill_chunk=32, page_size=page_size, num_pages=512 // page_size
    )


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_pool_for_one_sequence_serves_many_by_preemption(page_size: int) -> None:
    sequences = make_sequences(6, num_tokens=6, max_tokens=18)
    expected = {sequence.key: expected_output(sequence) for sequence in sequences}
    engine = make_engine(*sequences, page_size=page_size, num_pages=24 // page_size)
    assert run(engine) == expected
    assert engine.stats.num_preemptions > 0


def test_sequence_preempted_twice_is_unchanged() -> None:
    sequences = make_sequences(4, num_tokens=4, max_tokens=40)
    expected = {sequence.key: expected_output(sequence) for sequence in sequences}
    assert run(make_engine(*sequences, page_size=1, num_pages=44)) == expected
    assert max(sequence.num_preemptions for sequence in sequences) > 1


def test_long_context_is_read_completely() -> None:
    sequence = make_sequence(num_tokens=4000, max_tokens=30)
    assert_exact([sequence], prefill_chunk=512, page_size=16, num_pages=256)
