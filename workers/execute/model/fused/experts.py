"""The mixture-of-experts MLP of a fused decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels.triton_experts import Choices, choose_experts, expert_product, expert_tile, sort_pairs, sum_pairs
from ...kernels.triton_one_row import add_chosen, one_row_linear
from ...kernels.triton_rows import gate_mul
from ..spec.decoder import DecoderSpec

if TYPE_CHECKING:
    from .weights import Projection


class FusedExperts(NamedTuple):
    """Axes: T tokens, E experts, C channels of the hidden state, I channels inside an expert."""

    spec: DecoderSpec
    router: Projection  # to logits [T, E]
    gate_up: torch.Tensor  # [E, 2 I, C]
    down: torch.Tensor  # [E, C, I]
    is_invariant: bool

    def __call__(self, x: torch.Tensor, choices: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Map x [T, C] to [T, C]. Appends the chosen experts, int32 [T, experts per token], to ``choices``."""
        spec, chosen = self.spec, self._choose(self.router(x), choices)
        pairs = sort_pairs(chosen.experts, spec.num_experts)
        tile = expert_tile(len(pairs.order), spec.num_experts, x.dtype, is_invariant=self.is_invariant)
        gated = gate_mul(expert_product(x, self.gate_up, pairs, tile), spec.activation)
        return sum_pairs(expert_product(gated, self.down, pairs, tile, scales=chosen.weights), spec.experts_per_token)

    def add_one_row(
        self,
        x: torch.Tensor,
        choices: list[torch.Tensor] | None,
        *,
        norm: torch.Tensor | None,
        eps: float,
        multiplier: float,
    ) -> None:
        """Add to x [1, C] ``multiplier`` times what a call yields for its RMS norm with the weights ``norm`` [C]."""
        chosen = self._choose(self.router.one_row(x, norm=norm, eps=eps, dtype=torch.float32), choices)
        gated = one_row_linear(
            x, self.gate_up, experts=chosen.experts, norm=norm, eps=eps, activation=self.spec.activation
        )
        add_chosen(gated, self.down, chosen, residual=x, multiplier=multiplier)

    def _choose(self, logits: torch.Tensor, choices: list[torch.Tensor] | None) -> Choices:
        spec = self.spec
        chosen = choose_experts(logits, spec.experts_per_token, norms_weights=spec.norms_expert_weights)
        if choices is not None:
            choices.append(chosen.experts)
        return chosen
