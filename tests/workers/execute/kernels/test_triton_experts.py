"""Experts on a GPU, compared with their definition: one token and one choice after the other."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import HAS_GPU

pytest.importorskip("triton")

from triptych.workers.execute.kernels.triton_experts import (
    choose_experts,
    expert_product,
    expert_tile,
    sort_pairs,
    sum_pairs,
)

DEVICE = "cuda" if HAS_GPU else "cpu"


def random_choices(num_tokens: int, num_experts: int, num_chosen: int) -> torch.Tensor:
    torch.manual_seed(num_tokens)
    return torch.rand(num_tokens, num_experts, device=DEVICE).argsort(dim=1)[:, :num_chosen].int()


@pytest.mark.parametrize("norms_weights", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(6, 3), (16, 8), (5, 1), (4, 4)])
def test_likeliest_experts_are_chosen(num_experts: int, num_chosen: int, norms_weights: bool) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(7, num_experts, device=DEVICE)
    experts, weights = choose_experts(logits, num_chosen, norms_weights=norms_weights)
    expected, chosen = logits.softmax(dim=1).topk(num_chosen)
    assert torch.equal(experts.long(), chosen)
    torch.testing.assert_close(weights, expected / expected.sum(dim=1, keepdim=True) if norms_weights else expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
def test_nan_token_chooses_existing_experts() -> None:
    logits = torch.randn(3, 6, device=DEVICE)
    logits[1] = torch.nan
    experts, weights = choose_experts(logits, 2, norms_weights=True)
    assert bool(((experts >= 0) & (experts < 6)).all())
    assert weights.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("num_tokens", [1, 9, 800])
def test_pairs_are_sorted_by_their_experts(num_tokens: int) -> None:
    experts = random_choices(num_tokens, 6, 3)
    order, ends = sort_pairs(experts, 6)
    expected = experts.flatten().sort(stable=True)
    assert torch.equal(order.long(), expected.indices)
    assert ends.tolist() == [int((experts <= e).sum()) for e in range(6)]


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 100])
def test_pair_has_the_product_of_its_expert(num_tokens: int, is_invariant: bool) -> None:
    experts = random_choices(num_tokens, 6, 3)
    x, matrices = torch.randn(num_tokens, 72, device=DEVICE), torch.randn(6, 80, 72, device=DEVICE)
    pairs, tile = sort_pairs(experts, 6), expert_tile(experts.numel(), 6, x.dtype, is_invariant=is_invariant)
    of_tokens = expert_product(x, matrices, pairs, tile)
    expected = torch.einsum("tc,tknc->tkn", x, matrices[experts.long()]).flatten(0, 1)
    torch.testing.assert_close(of_tokens, expected, rtol=1e-4, atol=1e-4)
    scales, back = torch.rand(num_tokens, 3, device=DEVICE), torch.randn(6, 72, 80, device=DEVICE)
    of_pairs = expert_product(of_tokens, back, pairs, tile, scales=scales)
    expected = torch.einsum("tkn,tkcn->tkc", expected.view(num_tokens, 3, 80), back[experts.long()]) * scales[..., None]
    torch.testing.assert_close(of_pairs, expected.flatten(0, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum_pairs(of_pairs, 3), expected.sum(dim=1), rtol=1e-4, atol=1e-4)


def test_expert_chosen_by_all_gets_all_tiles() -> None:
    """And those chosen by none get no tiles."""
    experts = torch.full((150, 1), 4, dtype=torch.int32, device=DEVICE)
    x, matrices = torch.randn(150, 16, device=DEVICE), torch.randn(6, 16, 16, device=DEVICE)
    tile = expert_tile(150, 6, x.dtype, is_invariant=False)
    product = expert_product(x, matrices, sort_pairs(experts, 6), tile)
    torch.testing.assert_close(product, x @ matrices[4].T, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("rows_by_themselves")
def test_rows_do_not_depend_on_the_batch() -> None:
    experts = random_choices(100, 6, 3)
    x, matrices = torch.randn(100, 72, device=DEVICE), torch.randn(6, 80, 72, device=DEVICE)

    def product(start: int, end: int) -> torch.Tensor:
        own = experts[start:end].contiguous()
        tile = expert_tile(own.numel(), 6, x.dtype, is_invariant=True)
        return expert_product(x[start:end], matrices, sort_pairs(own, 6), tile).view(end - start, 3, 80)

    whole = product(0, 100)
    assert all(torch.equal(product(a, b), whole[a:b]) for a, b in ((0, 1), (50, 53), (3, 99)))
