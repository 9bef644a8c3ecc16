from __future__ import annotations

import pytest

from tests.workers.execute.factories import make_sequence
from triptych.workers.execute.scheduling.sequence import Sequence

STOP = 50


def with_output(*token_ids: int, **options: int) -> Sequence:
    sequence = make_sequence(num_tokens=3, stop_ids=frozenset({STOP}), **options)
    for token_id in token_ids:
        sequence.append(token_id)
    return sequence


@pytest.mark.parametrize(
    ("sequence", "reason"),
    [
        (with_output(1), None),
        (with_output(1, STOP), "stop"),
        (with_output(STOP, 1), None),
        (with_output(1, STOP, max_tokens=2), "stop"),
        (with_output(1, 2, max_tokens=2), "length"),
        (with_output(STOP, min_tokens=2), None),
        (with_output(1, STOP, min_tokens=2), "stop"),
        (with_output(1, 2, 3, 4, 5), "length"),
    ],
    ids=["goes on", "stop", "not the last", "both", "max_tokens", "below min_tokens", "at min_tokens", "context"],
)
def test_sequence_ends_by_its_last_token_or_its_length(sequence: Sequence, reason: str | None) -> None:
    assert sequence.end_reason(max_model_len=8) == reason


def test_final_token_ends_a_sequence_before_min_tokens_too() -> None:
    sequence = with_output(1, min_tokens=5)
    sequence.final_ids = frozenset({9})
    assert sequence.end_reason(max_model_len=8) is None
    sequence.append(9)
    assert sequence.end_reason(max_model_len=8) == "stop"


def test_prompt_that_ends_with_a_stop_token_continues() -> None:
    sequence = make_sequence(num_tokens=3)
    sequence.stop_ids = frozenset({int(sequence.tokens[2])})
    assert sequence.end_reason(max_model_len=8) is None


def test_output_tokens_are_those_after_the_prompt() -> None:
    assert with_output(8, 9).output_tokens.tolist() == [8, 9]
