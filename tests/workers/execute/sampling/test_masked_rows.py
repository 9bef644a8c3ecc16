"""Grammars in the sampler: a masked row is sampled as if the forbidden tokens did not exist; others are unaffected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.execute.grammar.only import Only
from tests.workers.execute.sampling.rows import make_row
from tests.workers.execute.sampling.test_device import Operators
from triptych.workers.execute.grammar.masks import MaskMaker
from triptych.workers.execute.grammar.matcher import GrammarMatcher
from triptych.workers.execute.sampling.adjust import adjust_logits
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepResult

V, EOS = 3000, 2


def row(matcher: GrammarMatcher | None, **options: Any) -> Sequence:
    sequence = make_row([5, 6], [7, 7], **options)
    sequence.grammar = matcher
    return sequence


def sample(logits: torch.Tensor, *rows: Sequence) -> StepResult:
    return Sampler((EOS,)).sample(logits.clone(), rows, MaskMaker().begin(rows))


def make_logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {7: 5.0, 2999: 100.0}},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_masked_row_is_sampled_like_logits_without_the_forbidden_tokens(params: dict[str, Any]) -> None:
    allowed = (7, 100, 1234, 2998)
    without = torch.full((1, V), -torch.inf)
    logits = make_logits()
    without[:, allowed] = logits[:, allowed]
    seen = set()
    for seed in range(30):
        token = sample(logits, row(Only(*allowed), seed=seed, **params)).token_ids
        assert token == sample(without, row(None, seed=seed, **params)).token_ids
        seen.add(int(token[0]))
    assert seen <= set(allowed)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_masked_neighbour_changes_nothing(params: dict[str, Any]) -> None:
    logits = make_logits(3)
    alone = sample(logits[1:2], row(None, **params)).token_ids
    mixed = sample(logits, row(Only(3)), row(None, **params), row(Only(), temperature=1.0))
    assert mixed.token_ids[1] == alone[0]
    assert mixed.token_ids[0] == 3
    assert mixed.failed == {2: "the grammar failed: nothing fits"}


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = make_logits()
    result = sample(logits, row(Only(9), logprobs=2))
    reference = logits[0].log_softmax(-1)
    assert result.logprobs[0].chosen == pytest.approx(float(reference[9]), abs=1e-5)
    assert result.logprobs[0].token_ids.tolist() == reference.topk(2).indices.tolist()


def test_min_tokens_prevents_the_end_while_the_grammar_allows_another_token() -> None:
    logits = make_logits()
    logits[0, EOS] = 100.0
    assert sample(logits, row(Only(EOS, 9))).token_ids == [EOS]
    assert sample(logits, row(Only(EOS, 9), min_tokens=5)).token_ids == [9]


@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({EOS, 9})])
def test_min_tokens_gives_way_if_the_grammar_only_allows_the_end(stop_ids: frozenset[int]) -> None:
    left = max(stop_ids, default=EOS)
    result = sample(make_logits(), row(Only(left), min_tokens=5, stop_ids=stop_ids))
    assert (result.token_ids.tolist(), result.failed) == ([left], {})


def test_ids_beyond_the_mask_are_forbidden() -> None:
    logits = make_logits()
    logits[0, 2500] = 100.0
    assert sample(logits, row(Only(4, 5, vocab_size=2000))).token_ids[0] in (4, 5)


def test_row_without_a_finite_logit_left_fails_alone() -> None:
    logits = make_logits(2)
    logits[0, 4] = -torch.inf
    result = sample(logits, row(Only(4)), row(None))
    assert set(result.failed) == {0}


def test_many_rows_are_masked_in_as_few_launches_as_one() -> None:
    """A launch takes the host longer than a GPU needs to mask a row."""
    counts = []
    for num_rows in (1, 1, 50):  # the first also makes a table
        bits = {row: Only(7, 9).allowed_after(np.empty(0, np.int32)) for row in range(num_rows)}
        rows = [make_row([5, 6])] * num_rows
        with Operators() as operators:
            adjust_logits(torch.empty(60, V, device="meta"), rows, [2] * num_rows, (), bits)
        del operators.counts["view"]  # launches nothing
        counts.append(operators.counts)
    assert counts[1] == counts[2]
    assert counts[1]["minimum"] == 1
