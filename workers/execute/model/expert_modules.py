"""Experts of transformers' modules whose weights stay where they are, and who follow the choices of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .decoder_spec import DecoderSpec

Read = Callable[[str], torch.Tensor]  # a weight by its name in the checkpoint


class ExpertStack:
    """Stands for a tensor [experts, outputs, inputs], of which an expert's part is read whenever it is asked for."""

    def __init__(self, read: Read, names: Sequence[Sequence[str]]) -> None:
        """``names`` are those of each expert's weights, one above the other."""
        self._read = read
        self._names = names

    def __getitem__(self, expert: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._read(name) for name in self._names[int(expert)]])


def attach_experts(model: PreTrainedModel, spec: DecoderSpec, read: Read) -> None:
    """Gives routers and experts of the model, which are on no device yet, the weights that ``read`` finds.

    transformers has all experts of a layer as one tensor, which would be a second copy of nearly the whole model. Its
    plain implementation goes through the experts that were chosen one after the other, so it gets each for that time.
    """
    layers: Any = model.model.layers
    if any(spec.has_experts):
        model.set_experts_implementation("eager")
    for index, layer in enumerate(layers):
        names = spec.layer(index)
        if names.experts:
            layer.mlp.gate.weight = nn.Parameter(read(names.router), requires_grad=False)
            experts = layer.mlp.experts
            del experts.gate_up_proj, experts.down_proj
            experts.gate_up_proj = ExpertStack(read, [expert.gate_up for expert in names.experts])
            experts.down_proj = ExpertStack(read, [(expert.down,) for expert in names.experts])


class FollowedChoices:
    """Which experts the tokens of a run chose, and how unlikely transformers' routers find them."""

    def __init__(self, choices: torch.Tensor, *, norms_weights: bool) -> None:
        """``choices`` [tokens, layers, experts of a token] of all tokens, in the order in which they will come."""
        self.choices = choices.long()
        self.norms_weights = norms_weights
        # Greatest, of the routers' logits of what was chosen from the greatest that there are, relative to those.
        self.difference = 0.0

    @contextmanager
    def by(self, model: PreTrainedModel, spec: DecoderSpec) -> Iterator[None]:
        """In this block the model takes these experts, each by the weight that its own routers give it."""
        layers: Any = model.model.layers
        routers = [(index, layer.mlp.gate) for index, layer in enumerate(layers) if spec.has_experts[index]]
        handles = [router.register_forward_hook(self._hook(index)) for index, router in routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int) -> Callable[[Any, Any, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
        num_seen = 0

        def follow(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            nonlocal num_seen
            logits, weights, experts = output
            chosen = self.choices[num_seen : num_seen + len(experts), layer].to(logits.device)
            num_seen += len(experts)
            greatest = logits.float().topk(chosen.shape[1]).values
            taken = logits.float().gather(1, chosen).sort(descending=True).values
            self.difference = max(self.difference, float((greatest - taken).abs().max() / logits.abs().max()))
            probabilities = logits.float().softmax(dim=-1).gather(1, chosen)
            if self.norms_weights:
                probabilities /= probabilities.sum(dim=-1, keepdim=True)
            return logits, probabilities.to(weights.dtype), chosen

        return follow
