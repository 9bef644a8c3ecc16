"""Tokens drawn by kernels are those of the definition, which sorts the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import pytest
import torch

from tests.conftest import HAS_GPU
from triptych.workers.execute.sampling.device import _drawn
from triptych.workers.execute.sampling.kinds import SamplingKind

select = pytest.importorskip("triptych.workers.execute.kernels.triton_select")

# What Triton's interpreter computes with numpy where a GPU says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

DEVICE = "cuda" if HAS_GPU else "cpu"
V = 300
EVERY = [  # temperature, top-k, top-p, min-p, and the random number
    (1.0, 5, 1.0, 0.0, 0.7),
    (2.0, V, 0.9, 0.0, 0.99),
    (1.0, 40, 0.5, 0.01, 0.3),
    (0.7, V, 0.0, 0.0, 1 - 2.0**-53),
    (50.0, V, 0.999, 0.0, 0.999),
    (3.0, 1, 0.95, 0.0, 0.0),
    (1.0, V, 1.0, 0.2, 0.8),
    (0.0, 3, 0.5, 0.0, 0.8),
]


def make_logits(form: str, num_rows: int, vocab_size: int = V) -> torch.Tensor:
    torch.manual_seed(num_rows)
    logits = 4 * torch.randn(num_rows, vocab_size)
    if form == "ties":
        logits = (logits / 4).round()
    elif form == "equal":
        logits[:] = -2.5
    elif form == "masked":
        logits = logits.where(torch.rand(num_rows, vocab_size) < 0.05, -torch.inf)
        logits[:, 9] = 1.0
    return logits.to(DEVICE)


def both(logits: torch.Tensor, rows: Rows[tuple[float, ...]], *, has_cuts: bool = True) -> tuple[list[int], list[int]]:
    """The tokens of the kernels and of the definition."""
    table = torch.tensor(rows, dtype=torch.float64, device=DEVICE).T.contiguous()
    greatest, tokens = logits.max(dim=-1)
    expected = _drawn(logits, greatest, tokens, table, SamplingKind.CUT if has_cuts else SamplingKind.DRAWN)
    select.draw_rows(logits, greatest, tokens, table, has_cuts=has_cuts)
    return tokens.tolist(), expected.tolist()


@pytest.mark.parametrize("part", [EVERY[0:2], EVERY[2:4], EVERY[4:6], EVERY[6:8]], ids=lambda part: str(part[0][:4]))
def test_every_combination_of_filters_draws_the_token_of_the_definition(part: Rows[tuple[float, ...]]) -> None:
    found, expected = both(make_logits("random", 2), part)
    assert found == expected


@pytest.mark.parametrize("form", ["ties", "equal", "masked"])
def test_ties_and_masks_draw_the_token_of_the_definition(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if most of the row is in a bracket, and so in no list."""
    monkeypatch.setattr(select, "_NUM_PASSES", 1)
    found, expected = both(make_logits(form, 3), EVERY[:3])
    assert found == expected


def test_rows_without_cuts_are_drawn_in_the_order_of_their_ids() -> None:
    rows = [(0.8, V, 1.0, 0.0, 0.4), (1.0, V, 1.0, 0.1, 0.9), (0.0, V, 1.0, 0.0, 0.5)]
    found, expected = both(make_logits("random", 3), rows, has_cuts=False)
    assert found == expected


@pytest.mark.parametrize("row", [EVERY[2], (1.0, 3001, 1.0, 0.0, 0.6)], ids=["cut", "whole"])
def test_splits_and_passes_change_nothing(row: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits("random", 1, 3001)
    monkeypatch.setattr(select, "_NUM_PASSES", 2)
    monkeypatch.setattr(select, "split_count", lambda *_: 3)
    split, expected = both(logits, [row])
    monkeypatch.setattr(select, "_NUM_PASSES", 1)
    monkeypatch.setattr(select, "split_count", lambda *_: 1)
    assert split == both(logits, [row])[0] == expected


def test_row_with_a_nan_gets_some_token() -> None:
    """The next step reads it before the host can refuse it."""
    logits = make_logits("random", 1)
    logits[0, 7] = torch.nan
    assert 0 <= both(logits, EVERY[2:3])[0][0] < V


def test_filters_of_another_step_are_harmless_where_nothing_is_cut() -> None:
    """As when a graph without cuts is captured after a step with some."""
    assert 0 <= both(make_logits("random", 1), EVERY[:1], has_cuts=False)[0][0] < V


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 64), (32, 8), (256, 1), (1000, 1)])
def test_all_processors_have_work(num_rows: int, expected: int) -> None:
    assert select.split_count(num_rows, 151_936, 132) == expected
