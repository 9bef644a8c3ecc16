"""The exact weights behind the samples, compared with transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triptych.workers.execute.sampling.draw import (
    Filters,
    cut_candidates,
    draw,
    in_order,
    invert,
    invert_whole,
    whole_weights,
)

V = 500


def make_filters(*, temperature: float = 1.0, top_k: int = V, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        torch.tensor([[temperature]]),
        torch.tensor([[top_k]]),
        torch.tensor([[top_p]], dtype=torch.float64),
        torch.tensor([[min_p]]),
    )


def by_transformers(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chain.append(MinPLogitsWarper(min_p))
    ids: Any = torch.zeros(1, 1, dtype=torch.int64)
    edited: torch.Tensor = chain(ids, logits.clone())
    return edited.double().softmax(-1)[0]


def probabilities(logits: torch.Tensor, filters: Filters, num_candidates: int) -> torch.Tensor:
    """The normalised weights of one row, [V]."""
    scores = (logits - logits.max()) / filters.temperature
    if filters.top_k.item() == V and filters.top_p.item() == 1:
        weights = whole_weights(scores, filters)[0].double()
    else:
        candidates = cut_candidates(scores, filters, num_candidates)
        assert candidates.complete.all()
        weights = torch.zeros(V, dtype=torch.float64).scatter_(0, candidates.token_ids[0], candidates.weights[0])
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.7])
@pytest.mark.parametrize("top_k", [1, 20, V])
@pytest.mark.parametrize("top_p", [0.0, 0.4, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.03])
def test_probabilities_equal_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(3)) * 2
    expected = by_transformers(logits, temperature, top_k, top_p, min_p)
    filters = make_filters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    observed = probabilities(logits, filters, num_candidates=V)
    assert ((observed == 0) == (expected == 0)).all()
    torch.testing.assert_close(observed, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_candidates", [40, 100, V])
def test_number_of_candidates_changes_nothing(num_candidates: int) -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(3)) * 5
    filters = make_filters(top_k=30, top_p=0.9)
    observed = probabilities(logits, filters, num_candidates)
    assert torch.equal(observed, probabilities(logits, filters, V))


def test_ties_at_the_edge_of_the_candidates_need_more_candidates() -> None:
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -1.0, -2.0]])
    candidates = cut_candidates(scores, make_filters(top_k=2), 3)
    assert not candidates.complete.any()


def test_ties_have_the_same_order_for_any_candidates() -> None:
    logits = torch.tensor([[2.0, 1.0] + [1.5] * 300 + [1.0] * 198])
    uniforms = torch.full((1, 1), 0.5, dtype=torch.float64)
    tokens = {int(draw(logits, make_filters(top_p=p), uniforms)[0]) for p in (0.99, 0.999)}
    assert tokens <= set(range(2, 302))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("filters", [make_filters(), make_filters(top_p=0.99)], ids=["whole", "cut"])
def test_ends_of_the_unit_interval_choose_tokens_with_weight(uniform: float, filters: Filters) -> None:
    logits = torch.zeros(1, V)
    logits[0, 0] = logits[0, -1] = -torch.inf
    token = int(draw(logits, filters, torch.full((1, 1), uniform, dtype=torch.float64))[0])
    assert 0 < token < V - 1


def test_long_row_is_bit_identical_alone_and_in_a_batch() -> None:
    logits = torch.randn(8, 60_000, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(8, 1, dtype=torch.float64)
    for filters in (make_filters(top_k=60_000), make_filters(top_k=60_000, top_p=0.7)):
        batch = Filters(*(x.expand(8, 1) for x in filters))
        alone = [int(draw(logits[i : i + 1], filters, uniforms[i : i + 1])[0]) for i in range(8)]
        assert draw(logits, batch, uniforms).tolist() == alone


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 5000])
@pytest.mark.parametrize("share", [1.0, 0.02], ids=["all", "few"])
def test_blocks_choose_the_token_of_a_single_cumulative_sum(vocab_size: int, share: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(400, vocab_size, generator=generator) * (torch.rand(vocab_size, generator=generator) < share)
    weights[:, 0] += 1e-3
    uniforms = torch.rand(400, 1, generator=generator, dtype=torch.float64)
    assert torch.equal(invert_whole(weights, uniforms), invert(weights, uniforms))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_ends_never_choose_a_block_or_a_place_without_weight(uniform: float) -> None:
    weights = torch.zeros(300, 1000)
    rows, places = torch.arange(300), torch.arange(300) * 3 + 50
    weights[rows, places] = torch.rand(300, generator=torch.Generator().manual_seed(0)) + 0.1
    uniforms = torch.full((300, 1), uniform, dtype=torch.float64)
    assert torch.equal(invert_whole(weights, uniforms), places)


@pytest.mark.parametrize("vocab_size", [5000, 128 * 100, 20_001])
@pytest.mark.parametrize("levels", [7, 10**9], ids=["ties", "no ties"])
def test_greatest_values_are_found_in_order(vocab_size: int, levels: int) -> None:
    scores = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(2))
    scores = (scores * levels / 4).round() / levels
    scores[1, 10:] = -torch.inf
    scores[2] = scores[2].sort().values  # the greatest all in the last blocks
    values, ids = in_order(scores, 20)
    expected = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :20])
    is_above = values > values[:, -1:]  # which of those that tie with the last are included is undefined
    assert torch.equal(ids[is_above], expected.indices[:, :20][is_above])
    assert torch.equal(scores.gather(1, ids), values)
