"""Experts on a GPU, compared with their definition: one token and one choice after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import HAS_GPU

pytest.importorskip("triton")

from triptych.workers.execute.kernels.triton_experts import (
    choose_experts,
    expert_product,
    expert_tile,
    sort_pairs,
    sum_pairs,
)
from triptych.workers.execute.kernels.triton_one_row import add_chosen, fits_one_row, one_row_linear

# What Triton's interpreter computes with numpy where a GPU says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

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


@pytest.mark.parametrize("num_chosen", [1, 3, 4])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_experts_of_one_token_yield_what_each_would_alone(num_chosen: int, activation: str, has_norm: bool) -> None:
    """With sizes that are no multiples of a tile's."""
    torch.manual_seed(0)
    x, norm = torch.randn(1, 40, device=DEVICE), torch.rand(40, device=DEVICE)
    gate_up, down = torch.randn(6, 2 * 13, 40, device=DEVICE), torch.randn(6, 40, 13, device=DEVICE)
    chosen = choose_experts(torch.randn(1, 6, device=DEVICE), num_chosen, norms_weights=False)
    added, row = torch.zeros(1, 40, device=DEVICE).double(), x.double()
    if has_norm:
        row = F.rms_norm(row, (40,), norm.double(), 0.1)
    for expert, weight in zip(chosen.experts[0].tolist(), chosen.weights[0].tolist(), strict=True):
        gate, up = F.linear(row, gate_up[expert].double()).chunk(2, dim=1)
        activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        added += weight * F.linear(activated * up, down[expert].double())
    residual = torch.randn(1, 40, device=DEVICE)
    expected = residual.double() + 0.25 * added
    gated = one_row_linear(
        x, gate_up, experts=chosen.experts, norm=norm if has_norm else None, eps=0.1, activation=activation
    )
    add_chosen(gated, down, chosen, residual=residual, multiplier=0.25)
    torch.testing.assert_close(residual.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_chosen", "num_channels"), [(8, 768), (2, 14336)])
def test_experts_of_one_token_in_the_served_type(num_chosen: int, num_channels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2048, device=DEVICE).bfloat16()
    gate_up, down = (
        (torch.randn(8, *shape, device=DEVICE) * shape[1] ** -0.5).bfloat16()
        for shape in ((2 * num_channels, 2048), (2048, num_channels))
    )
    chosen = choose_experts(torch.randn(1, 8, device=DEVICE), num_chosen, norms_weights=True)
    gated = one_row_linear(x, gate_up, experts=chosen.experts, activation="silu")
    gates, ups = torch.einsum("eic,c->ei", gate_up.double(), x[0].double())[chosen.experts[0].long()].chunk(2, dim=1)
    torch.testing.assert_close(gated.double(), F.silu(gates) * ups, rtol=1e-2, atol=1e-3)
    residual = torch.zeros(1, 2048, device=DEVICE)
    add_chosen(gated, down, chosen, residual=residual)
    each = torch.einsum("kci,ki->kc", down.double()[chosen.experts[0].long()], gated.double())
    expected = (chosen.weights.double()[0, :, None] * each).sum(dim=0, keepdim=True)
    torch.testing.assert_close(residual.double(), expected, rtol=1e-3, atol=1e-3)


def test_program_of_one_row_holds_the_experts_of_the_largest_models() -> None:
    assert fits_one_row(8, 768)  # Qwen3-30B-A3B
    assert fits_one_row(2, 16384)  # Mixtral 8x22B
    assert not fits_one_row(4, 16384)
