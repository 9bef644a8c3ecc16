"""Penalties of a sequence that grows: those of all its tokens, of which only the new ones are counted."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.execute.factories import make_beams, make_sequence
from tests.workers.execute.sampling.rows import make_row
from triptych.workers.execute.sampling.adjust import adjust_logits
from triptych.workers.execute.sampling.token_counts import count_tokens
from triptych.workers.execute.scheduling.sequence import Sequence

VOCAB_SIZE = 12
PARAMS = ({"repetition_penalty": 1.3}, {"presence_penalty": 0.7, "frequency_penalty": 0.4})


def adjusted(sequence: Sequence) -> torch.Tensor:
    logits = torch.linspace(-1, 1, VOCAB_SIZE)[None].clone()
    adjust_logits(logits, [sequence], [sequence.num_tokens], [])
    return logits


@pytest.mark.parametrize("params", [*PARAMS, PARAMS[0] | PARAMS[1]], ids=str)
def test_grown_sequence_is_adjusted_like_a_new_one(params: dict[str, Any]) -> None:
    rng = random.Random(0)
    prompt, output = [rng.randrange(VOCAB_SIZE) for _ in range(4)], [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    sequence = make_row(prompt, output, **params)
    for count in (0, 1, 2, 7, 8, 20, 3):  # of the output; several may come in one step, and a test may take some back
        sequence.num_tokens = len(prompt) + count
        assert torch.equal(adjusted(sequence), adjusted(make_row(prompt, output[:count], **params)))


def test_beam_that_goes_on_from_another_one_is_adjusted_for_its_new_tokens() -> None:
    first, second = make_beams(0, 2, num_tokens=3, repetition_penalty=1.3)
    for beam, token_id in ((first, 5), (second, 6)):
        beam.append(token_id)
        adjusted(beam)
    second.tokens[:4] = first.tokens[:4]
    assert torch.equal(adjusted(second), adjusted(first))


def test_token_that_occurs_often_has_one_entry() -> None:
    sent: list[np.ndarray[Any, Any]] = []

    def send(arrays: list[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        sent.extend(arrays)
        return [torch.from_numpy(array) for array in arrays]

    sequence = make_row([3, 4] * 500, [4, 5], repetition_penalty=1.3)
    adjust_logits(torch.zeros(1, VOCAB_SIZE), [sequence], [sequence.num_tokens], [], send=send)
    rows, token_ids, _ = sent
    assert len(rows) == 3
    assert sorted(token_ids.tolist()) == [3, 4, 5]


def test_only_new_tokens_are_counted() -> None:
    sequence = make_sequence(num_tokens=5, repetition_penalty=1.3)
    counts = count_tokens(sequence)
    sequence.append(int(sequence.tokens[0]))
    sequence.tokens[1:4] = 90  # would be seen if they were counted again
    assert count_tokens(sequence) is counts
    assert 90 not in counts.ids
    assert counts.in_output.tolist() == [float(token_id == sequence.tokens[0]) for token_id in counts.ids]
