from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.workers.execute.sampling.rows import make_row
from triptych.workers.execute.sampling import draw, sampler
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepResult

V = 300
EOS = 2
PROMPT, OUTPUT = [5, 6, 7, 5], [8, 6, 8]


def make_logits(num_rows: int = 1, *, vocab_size: int = V, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, *rows: Sequence) -> StepResult:
    return Sampler((EOS,)).sample(logits.clone(), rows)


NUM_DRAWS = 12_000  # shows a probability that is a tenth off from 0.2 on, and at once a filter that cuts elsewhere


def frequencies(logits: torch.Tensor, count: int = NUM_DRAWS, **params: Any) -> torch.Tensor:
    """The share of each token over ``count`` seeds: [V]."""
    rows = [make_row(PROMPT, OUTPUT, seed=seed, **params) for seed in range(count)]
    tokens = sample(logits.expand(count, -1), *rows).token_ids
    return torch.from_numpy(np.bincount(tokens, minlength=logits.shape[-1]) / count)


def by_transformers(logits: torch.Tensor, *, min_tokens: int = 0, **params: Any) -> torch.Tensor:
    """The probabilities [V] after transformers' own processors, in the order of its ``generate``."""
    makers: dict[str, Any] = {
        "logit_bias": lambda bias: SequenceBiasLogitsProcessor([[[key], value] for key, value in bias.items()]),
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    chain: list[LogitsProcessor] = [make(params[name]) for name, make in makers.items() if name in params]
    if min_tokens:
        chain.insert(0, MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [EOS]))
    ids: Any = torch.tensor([PROMPT + OUTPUT])
    edited: torch.Tensor = LogitsProcessorList(chain)(ids, logits.clone())
    return edited.softmax(-1)[0]


COMBINATIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.7, "logit_bias": {6: 4.0, 8: 5.0, 9: 3.0}},
    {"temperature": 0.8, "repetition_penalty": 0.7, "top_p": 0.9, "min_tokens": 5},
]


@pytest.mark.parametrize("params", COMBINATIONS, ids=str)
def test_token_frequencies_equal_transformers(params: dict[str, Any]) -> None:
    logits = make_logits()
    expected = by_transformers(logits, **params)
    observed = frequencies(logits, **params)
    assert observed[expected == 0].sum() == 0  # filtered tokens are never sampled
    deviation = (observed - expected).abs() / (expected * (1 - expected) / NUM_DRAWS).sqrt().clamp_min(1e-4)
    assert deviation.max() < 5


@pytest.mark.parametrize("params", [*COMBINATIONS, {}, {"repetition_penalty": 1.5}], ids=str)
def test_row_is_the_same_alone_and_in_a_batch(params: dict[str, Any]) -> None:
    logits = make_logits(12)
    others = [make_row(seed=9, **mate) for mate in [*COMBINATIONS, {}, {"top_k": 3, "temperature": 2.0}]]
    alone = [sample(logits[i : i + 1], make_row(seed=i, **params)).token_ids[0] for i in range(3)]
    rows = [make_row(seed=i, **params) for i in range(3)]
    together = sample(
        logits[[0, 3, 1, 4, 5, 2, *range(3, 11)]], rows[0], others[0], rows[1], *others[1:3], rows[2], *others[3:]
    )
    assert together.token_ids[[0, 2, 5]].tolist() == alone


def test_each_row_obeys_its_own_parameters() -> None:
    logits = make_logits().expand(4, -1)
    rows = [make_row(), make_row(temperature=1.0, top_k=1), make_row(logit_bias={3: 100.0}), make_row(temperature=1.0)]
    tokens = sample(logits, *rows).token_ids
    best = int(logits[0].argmax())
    assert tokens[:3].tolist() == [best, best, 3]


def test_same_seed_and_position_give_the_same_token() -> None:
    logits = make_logits()
    tokens = {sample(logits, make_row(seed=4, temperature=1.0)).token_ids[0] for _ in range(5)}
    assert len(tokens) == 1


def test_next_position_samples_anew() -> None:
    logits = make_logits()
    tokens = {sample(logits, make_row([1] * n, seed=4, temperature=5.0)).token_ids[0] for n in range(1, 30)}
    assert len(tokens) > 10


@pytest.mark.parametrize("top_k", [None, 0, -1, V, 10 * V], ids=str)
def test_top_k_may_be_off_or_beyond_the_vocabulary(top_k: int | None) -> None:
    logits = make_logits()
    assert frequencies(logits, 2000, temperature=3.0, top_k=top_k).count_nonzero() > 100


def test_top_p_of_zero_keeps_one_token() -> None:
    logits = make_logits()
    assert frequencies(logits, 500, temperature=3.0, top_p=0.0).argmax() == logits.argmax()


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert (frequencies(logits, 2000, temperature=1.0, top_p=0.6) > 0).tolist() == [True, True, False]


def test_top_k_keeps_all_tied_tokens() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    assert (frequencies(logits, 2000, temperature=1.0, top_k=2) > 0).tolist() == [True, True, True, True, False]


def test_wide_vocabulary_with_a_flat_top_p_is_exact() -> None:
    """The first candidates do not contain the nucleus, so more are taken."""
    logits = make_logits(vocab_size=5000) / 10
    expected = by_transformers(logits, temperature=1.0, top_p=0.9)
    observed = frequencies(logits, 4000, temperature=1.0, top_p=0.9)
    assert observed[expected == 0].sum() == 0
    assert observed.count_nonzero() > 1000


def test_tiny_temperature_is_greedy() -> None:
    logits = make_logits()
    assert sample(logits, make_row(temperature=1e-40)).token_ids[0] == logits.argmax()


def test_equal_logits_give_the_lowest_id() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), make_row()).token_ids[0] == 1


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 8], logits[0, 5] = 2.0, 1.0  # 8 came twice, 5 in the prompt only
    assert sample(logits, make_row(PROMPT, OUTPUT)).token_ids[0] == 8
    assert sample(logits, make_row(PROMPT, OUTPUT, presence_penalty=0.9)).token_ids[0] == 8
    assert sample(logits, make_row(PROMPT, OUTPUT, presence_penalty=1.1)).token_ids[0] == 5
    assert sample(logits, make_row(PROMPT, OUTPUT, frequency_penalty=0.6)).token_ids[0] == 5


def test_repetition_penalty_counts_the_prompt() -> None:
    logits = torch.tensor([[0.0] * 5 + [1.0, 0.9]])
    assert sample(logits, make_row([5], repetition_penalty=1.2)).token_ids[0] == 6


def test_bias_adds_to_the_logit_and_ignores_ids_beyond_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert sample(logits, make_row(logit_bias={0: 1.5, 1: 1.5, 2: -5.0, 9999: 100.0})).token_ids[0] == 1


def test_min_tokens_prevents_eos_and_stop_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0]])
    early = make_row(output=[0], min_tokens=2, stop_ids=frozenset({EOS, 3}))
    late = make_row(output=[0, 0], min_tokens=2, stop_ids=frozenset({EOS, 3}))
    assert sample(logits.expand(2, -1), early, late).token_ids.tolist() == [1, EOS]


def test_bias_cannot_restore_tokens_that_min_tokens_prevents() -> None:
    row = make_row(min_tokens=2, logit_bias={EOS: 100.0})
    assert sample(torch.tensor([[0.0, 1.0, 9.0]]), row).token_ids[0] == 1


def test_prevented_token_is_never_sampled() -> None:
    logits = torch.full((1, 4), -50.0)
    logits[0, EOS] = 50.0
    assert frequencies(logits, 3000, temperature=1.0, min_tokens=9)[EOS] == 0


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = make_logits(2)
    asked = make_row(PROMPT, OUTPUT, logprobs=4, temperature=2.0, top_k=3, repetition_penalty=2.0, logit_bias={9: 5.0})
    result = sample(logits, make_row(), asked)
    raw = logits[1].log_softmax(-1)
    best = raw.topk(4)
    assert set(result.logprobs) == {1}
    assert result.logprobs[1].chosen == pytest.approx(float(raw[result.token_ids[1]]), abs=1e-6)
    assert result.logprobs[1].token_ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(result.logprobs[1].logprobs, best.values.numpy(), atol=1e-6)


def test_logprobs_of_zero_alternatives_give_the_chosen_only() -> None:
    result = sample(make_logits(), make_row(logprobs=0))
    assert result.logprobs[0].chosen < 0
    assert len(result.logprobs[0].token_ids) == 0


def test_rows_with_equal_numbers_of_logprobs_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computation waits for the device. Each row gets what it gets alone."""
    rows = [make_row(seed=i, temperature=1.0, logprobs=count) for i, count in enumerate((2, 5, None, 2))]
    logits, topk, num_asked = make_logits(4), torch.Tensor.topk, 0
    alone = [sample(logits[i : i + 1], row).logprobs.get(0) for i, row in enumerate(rows)]

    def counted(*arguments: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return topk(*arguments)

    monkeypatch.setattr(torch.Tensor, "topk", counted)
    together = sample(logits, *rows).logprobs
    assert num_asked == 2
    assert list(together) == [0, 1, 3]
    for row, found in together.items():
        expected = alone[row]
        assert expected is not None
        assert found.chosen == expected.chosen
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.logprobs.tolist() == expected.logprobs.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = make_logits(3)
    logits[1, 7] = bad
    rows = [make_row(), make_row(temperature=1.0, top_p=0.5, logprobs=2), make_row(temperature=1.0, seed=3)]
    result = sample(logits, *rows)
    assert "not finite" in result.failed[1]
    assert list(result.failed) == [1]
    assert result.token_ids[2] == sample(logits[2:], rows[2]).token_ids[0]


def test_row_with_no_token_left_fails() -> None:
    result = sample(torch.zeros(1, 3), make_row(min_tokens=1, stop_ids=frozenset({0, 1, 2})))
    assert "no token can be chosen" in result.failed[0]


def test_logit_of_minus_infinity_is_valid_and_never_sampled() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    assert frequencies(logits, 1000, temperature=1.0)[1] == 0


def test_no_rows_give_an_empty_result() -> None:
    assert sample(torch.empty(0, V)).token_ids.shape == (0,)


def test_sampling_waits_for_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads = []

    def count(*given: Any) -> torch.Tensor:
        num_threads.append(torch.get_num_threads())
        return draw.draw(*given)

    monkeypatch.setattr(sampler, "draw", count)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        sample(make_logits(), make_row(PROMPT, OUTPUT, temperature=1.0))
        assert (num_threads, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)
