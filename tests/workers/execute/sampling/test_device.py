"""Sampling on the device gives the same tokens as sampling on the host."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import HAS_GPU
from tests.workers.execute.grammar.form import make_form
from tests.workers.execute.sampling.rows import make_row
from triptych.workers.execute.model.device.graphs import CudaGraphCapture
from triptych.workers.execute.sampling.adjust import adjust_logits
from triptych.workers.execute.sampling.device import columns, sample
from triptych.workers.execute.sampling.draw import in_order
from triptych.workers.execute.sampling.kinds import SamplingKind, kind_of
from triptych.workers.execute.sampling.sampler import Sampler
from triptych.workers.execute.scheduling.sequence import Sequence

DEVICE = "cuda" if HAS_GPU else "cpu"
VOCAB_SIZE = 1000
ROWS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}],
    "drawn": [{"temperature": 1.0}, {}, {"temperature": 0.3, "min_p": 0.1}, {"temperature": 30.0}],
    "cut": [
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 300, "top_p": 0.5, "min_p": 0.01},
        {"temperature": 3.0, "top_k": 300, "min_p": 0.3},
        {"temperature": 1.0},
        {},
        {"temperature": 5.0, "top_p": 0.0},
        {"temperature": 50.0, "top_p": 0.999},
    ],
}


def table_of(rows: list[Sequence], vocab_size: int) -> torch.Tensor:
    lengths = np.array([row.num_tokens for row in rows], np.int32)
    return torch.from_numpy(columns(rows, lengths, vocab_size=vocab_size)).to(DEVICE)


@pytest.mark.parametrize("kind", ["greedy", "drawn", "cut"])
def test_device_samples_the_same_tokens_as_the_host(kind: str) -> None:
    for seed in range(20):
        rows = [make_row([1, 2, 3], seed=7 * seed + i, **params) for i, params in enumerate(ROWS[kind])]
        torch.manual_seed(seed)
        logits = 4 * torch.randn(len(rows), VOCAB_SIZE).to(DEVICE)
        logits[:, 100:110] = logits[:, 90:91]  # ties
        assert kind_of(rows).name.lower() == kind
        table = table_of(rows, VOCAB_SIZE)
        chosen = sample(logits.clone(), table, kind_of(rows)).token_ids
        assert chosen.tolist() == Sampler(()).sample(logits, rows).token_ids.tolist()


def test_ties_of_a_fully_sorted_row_are_in_order_of_their_ids() -> None:
    torch.manual_seed(0)
    scores = torch.randint(-20, 0, (5, VOCAB_SIZE)).float().to(DEVICE)
    scores[1, ::3] = -torch.inf
    scores[2] = 0.0
    scores[3, ::2] = -0.0
    values, ids = in_order(scores, VOCAB_SIZE)
    expected = np.stack([np.lexsort((np.arange(VOCAB_SIZE), -row)) for row in scores.cpu().numpy()])
    assert ids.tolist() == expected.tolist()
    assert torch.equal(values, scores.gather(1, ids))


@pytest.mark.parametrize("num_logits", [1, 2 * VOCAB_SIZE, 7 * VOCAB_SIZE])
def test_rows_sorted_in_parts_give_the_same_tokens(num_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [make_row([1, 2, 3], seed=i, **params) for i, params in enumerate(ROWS["cut"])]
    logits = 4 * torch.randn(len(rows), VOCAB_SIZE).to(DEVICE)
    table = table_of(rows, VOCAB_SIZE)
    monkeypatch.setattr("triptych.workers.execute.sampling.device.has_compiled_kernels", lambda _device: False)
    expected = sample(logits, table, SamplingKind.CUT).token_ids
    monkeypatch.setattr("triptych.workers.execute.sampling.device._PART", num_logits)
    with Operators() as operators:
        assert torch.equal(sample(logits, table, SamplingKind.CUT).token_ids, expected)
    assert operators.counts["sort"] == -(-len(rows) // max(1, num_logits // VOCAB_SIZE))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["greedy", "drawn", "cut"])
def test_full_vocabulary_of_a_model_gives_the_same_tokens_in_a_graph_too(kind: str) -> None:
    """In the size that is served, where torch uses other kernels for sums and sorts."""
    vocab_size, num_rows = 151_936, 40
    rows = [make_row([1, 2, 3], seed=i, **params) for i, params in zip(range(num_rows), cycle(ROWS[kind]))]
    logits = 4 * torch.randn(num_rows, vocab_size, device=DEVICE)
    table = table_of(rows, vocab_size)
    expected = Sampler(()).sample(logits.clone(), rows).token_ids.tolist()
    found = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)

    def run() -> None:
        found.copy_(sample(logits, table, kind_of(rows)).token_ids)

    run()
    # A sum that was rounded in another way may end between other tokens: with a hundred thousand tokens of nearly the
    # same weight, a rounding of float32 is a hundredth of one.
    most = 0 if kind == "greedy" else num_rows // 10
    assert sum(a != b for a, b in zip(found.tolist(), expected, strict=True)) <= most
    launched = found.tolist()
    found.zero_()
    with torch.inference_mode():  # as in a runner: torch's generator refuses captures of both kinds in one process
        CudaGraphCapture()(run)()
    assert found.tolist() == launched


@pytest.mark.parametrize("mask_size", [VOCAB_SIZE - 40, VOCAB_SIZE + 24])
def test_masks_leave_only_the_allowed_logits(mask_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model knows more ids than the mask, or fewer; and in parts of three rows."""
    monkeypatch.setattr("triptych.workers.execute.sampling.adjust._PART", 3 * VOCAB_SIZE)
    rng, logits = np.random.default_rng(0), torch.randn(9, VOCAB_SIZE)
    is_allowed = np.zeros((9, VOCAB_SIZE + 24), bool)
    is_allowed[:, :mask_size] = rng.random((9, mask_size)) < 0.1
    rows = [0, 2, 3, 5, 7, 8]
    masks = {row: np.packbits(is_allowed[row, :mask_size], bitorder="little") for row in rows}
    masked = logits.to(DEVICE)
    adjust_logits(masked, [make_row([1])] * 9, [1] * 9, (), masks)
    expected = logits.clone()
    expected[rows] = logits[rows].where(torch.from_numpy(is_allowed[rows, :VOCAB_SIZE]), -torch.inf)
    assert torch.equal(masked.cpu(), expected)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def test_whole_row_is_sorted_once() -> None:
    scores = torch.randn(2, VOCAB_SIZE)
    with Operators() as operators:
        in_order(scores, VOCAB_SIZE)
    assert operators.counts == {"sort": 1}


def test_row_does_not_depend_on_the_sampling_of_its_batch() -> None:
    rows = [make_row([1, 2], seed=i, temperature=1.0) for i in range(50)]
    logits, table = torch.randn(50, VOCAB_SIZE).to(DEVICE), table_of(rows, VOCAB_SIZE)
    drawn, cut = (sample(logits, table, kind).token_ids for kind in (SamplingKind.DRAWN, SamplingKind.CUT))
    assert torch.equal(drawn, cut)


@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.DRAWN, SamplingKind.CUT])
def test_nan_row_is_reported_and_spoils_no_other(kind: SamplingKind) -> None:
    rows = [make_row([1, 2], seed=i, temperature=1.0, top_k=9) for i in range(3)]
    logits, table = torch.randn(3, VOCAB_SIZE).to(DEVICE), table_of(rows, VOCAB_SIZE)
    expected = sample(logits.clone(), table, kind).token_ids
    logits[1, 5] = torch.nan
    sampled = sample(logits, table, kind)
    assert sampled.greatest.isfinite().tolist() == [True, False, True]
    assert sampled.token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= int(sampled.token_ids[1]) < VOCAB_SIZE


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"min_tokens": 1},
        {"logit_bias": {1: 2.0}},
    ],
    ids=str,
)
def test_rows_whose_logits_are_changed_or_reported_are_told_apart(params: dict[str, Any]) -> None:
    assert kind_of([make_row([1]), make_row([1], **params)]) is SamplingKind.EDITED


def test_rows_with_a_grammar_are_told_apart() -> None:
    row = make_row([1])
    row.grammar = make_form(VOCAB_SIZE)
    assert kind_of([make_row([1]), row]) is SamplingKind.EDITED


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"top_k": 5}, SamplingKind.CUT),
        ({"top_p": 0.9}, SamplingKind.CUT),
        ({"min_p": 0.1}, SamplingKind.DRAWN),
        ({"top_k": 0}, SamplingKind.DRAWN),
        ({"top_k": -1, "top_p": 1.0}, SamplingKind.DRAWN),
    ],
    ids=str,
)
def test_only_top_k_and_top_p_need_an_order(params: dict[str, Any], kind: SamplingKind) -> None:
    assert kind_of([make_row([1], temperature=1.0, **params)]) is kind


def test_only_beams_need_the_host() -> None:
    assert kind_of([make_row([1]), make_row([1], num_beams=2)]) is SamplingKind.HOST
