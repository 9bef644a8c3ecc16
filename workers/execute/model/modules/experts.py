"""Experts in transformers modules that read their weights in place, and that can follow given routing choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..spec.decoder import DecoderSpec
from ..spec.layer_tensors import ExpertTensors, LayerTensors, bias_of

Read = Callable[[str], torch.Tensor]  # a weight by its name in the checkpoint
Join = Callable[[list[torch.Tensor]], torch.Tensor]


class ExpertStack:
    """Stands in for a tensor [experts, ...]: an expert's part is read whenever it is indexed."""

    def __init__(self, read: Read, names: Sequence[Sequence[str]], join: Join) -> None:
        """``names`` are the names of each expert's tensors, which ``join`` combines into one."""
        self._read = read
        self._names = names
        self._join = join

    def __getitem__(self, expert: torch.Tensor) -> torch.Tensor:
        return self._join([self._read(name) for name in self._names[int(expert)]])


def attach_experts(model: PreTrainedModel, spec: DecoderSpec, read: Read) -> None:
    """Give the model's routers and experts, which are on no device yet, the weights that ``read`` returns.

    transformers keeps all experts of a layer in one tensor, which would be a second copy of nearly the whole model. Its
    eager implementation visits the chosen experts one by one, so each expert's weights are read only while it is used.
    """
    if any(spec.has_experts):
        model.set_experts_implementation("eager")
    for index, layer in _with_experts(model, spec):
        names = spec.layer(index)
        _attach_router(_router_of(layer), names, read)
        if spec.has_router_biases:
            holder, name = _biases_of(layer)
            delattr(holder, name)  # it is a parameter in some families, and a buffer in others
            holder.register_buffer(name, read(names.router_biases))
        _attach_experts(_block_of(layer).experts, names.experts, read)


def _with_experts(model: PreTrainedModel, spec: DecoderSpec) -> list[tuple[int, Any]]:
    """The layers with experts, and their indices."""
    layers: Any = model.get_submodule(spec.modules.layers)
    return [(index, layer) for index, layer in enumerate(layers) if spec.has_experts[index]]


def _attach_router(router: Any, names: LayerTensors, read: Read) -> None:
    router.weight = nn.Parameter(read(names.router), requires_grad=False)
    if hasattr(router, "bias"):
        router.bias = nn.Parameter(read(bias_of(names.router)), requires_grad=False)


def _attach_experts(experts: Any, names: Sequence[ExpertTensors], read: Read) -> None:
    stacks: dict[str, list[tuple[str, ...]]] = {
        "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj": [expert.gate_up for expert in names],
        "down_proj": [(expert.down,) for expert in names],
    }
    # Experts with biases, those of gpt-oss, interleave gates and ups, and store matrices as [inputs, outputs].
    has_biases = hasattr(experts, "gate_up_proj_bias")
    join: Join = _in_turns if has_biases else torch.cat
    for stack, tensors in stacks.items():
        _replace(experts, stack, ExpertStack(read, tensors, _transposed if has_biases else join))
        if has_biases:
            biases = [[bias_of(name) for name in of_one] for of_one in tensors]
            _replace(experts, f"{stack}_bias", ExpertStack(read, biases, join))


def _replace(experts: Any, name: str, stack: ExpertStack) -> None:
    delattr(experts, name)  # it is a parameter, and only another parameter could be assigned to it
    setattr(experts, name, stack)


def _transposed(parts: list[torch.Tensor]) -> torch.Tensor:
    return _in_turns(parts).T


def _in_turns(parts: list[torch.Tensor]) -> torch.Tensor:
    """Interleave rows: the first of each part, then the second of each, and so on."""
    return torch.stack(parts, dim=1).flatten(0, 1)


def _block_of(layer: Any) -> Any:
    names = ("mlp", "feed_forward", "block_sparse_moe", "mixer")
    return next(getattr(layer, name) for name in names if hasattr(layer, name))


def _router_of(layer: Any) -> Any:
    block = _block_of(layer)
    return block.router if hasattr(block, "router") else block.gate


def _biases_of(layer: Any) -> tuple[Any, str]:
    """The module that holds the biases of a layer's router, and their name in it."""
    block, router = _block_of(layer), _router_of(layer)
    for name in ("expert_bias", "e_score_correction_bias"):
        if hasattr(block, name):
            return block, name
    return getattr(router, "moe_statics", router), "e_score_correction_bias"


class FollowedChoices:
    """The experts that the tokens of a run chose, and how far transformers' routers disagree with the choices."""

    def __init__(self, choices: torch.Tensor, others: torch.Tensor | None = None) -> None:
        """``choices`` [tokens, layers, experts per token] of all tokens, in the order in which the model sees them.

        ``others`` are choices that are not followed, only compared: those of the model's own routers in another type,
        which are in ``own`` there.
        """
        self.choices, self.others = choices.long(), others
        self.own = self.choices.clone()
        self.difference_of_others = 0.0  # how far they are from the routers' top ranks
        # The greater of two differences. Between the top ranks of a router and its ranks of the chosen experts,
        # relative to its greatest absolute rank; ranks are logits, or scores with biases. And between its own weights
        # of experts and those that follow from the description, relative to the greatest weight.
        self.difference = 0.0

    @contextmanager
    def by(self, model: PreTrainedModel, spec: DecoderSpec) -> Iterator[None]:
        """Make the model use these experts in this block, each with the weight that the model's own routers give it."""
        handles = [
            _router_of(layer).register_forward_hook(self._hook(index, layer, spec))
            for index, layer in _with_experts(model, spec)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(
        self, index: int, layer: Any, spec: DecoderSpec
    ) -> Callable[[Any, Any, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
        num_seen, router = 0, _router_of(layer)
        multiplier = getattr(router, "routed_scaling_factor", 1.0)
        biases = getattr(*_biases_of(layer)).float().squeeze() if spec.has_router_biases else None

        def follow(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            nonlocal num_seen
            logits, weights, experts = output
            rows = slice(num_seen, num_seen + len(experts))
            num_seen += len(experts)
            chosen = self.choices[rows, index].to(logits.device)
            self.own[rows, index] = experts.to(self.own)
            scores = logits.float().sigmoid() if spec.has_sigmoid_routers else logits.float().softmax(dim=-1)
            ranks = scores if spec.num_expert_groups > 1 else logits.float()
            if biases is not None:
                ranks = scores + biases
            of_own, of_chosen = scores.gather(1, experts), scores.gather(1, chosen)
            if _are_normed(weights / multiplier, of_own):
                of_own /= of_own.sum(dim=-1, keepdim=True)
                of_chosen /= of_chosen.sum(dim=-1, keepdim=True)
            # The router's own choices show whether it ranks and weights experts as the description says.
            differences = (
                *(_gaps(ranks, taken, spec).max() / ranks.abs().max() for taken in (chosen, experts)),
                (weights / multiplier - of_own).abs().max() / of_own.max(),
            )
            self.difference = max(self.difference, *map(float, differences))
            if self.others is not None:
                gaps = _gaps(ranks, self.others[rows, index].to(logits.device), spec)
                self.difference_of_others = max(self.difference_of_others, float(gaps.max() / ranks.abs().max()))
            return logits, (of_chosen * multiplier).to(weights.dtype), chosen

        return follow


def _gaps(ranks: torch.Tensor, chosen: torch.Tensor, spec: DecoderSpec) -> torch.Tensor:
    """How far the chosen experts [tokens, ...] are from those with the highest ranks [tokens, experts], [tokens]."""
    taken = ranks.gather(1, chosen).sort(descending=True).values
    if spec.num_expert_groups == 1:
        return (ranks.topk(chosen.shape[1]).values - taken).abs().amax(dim=-1)
    in_groups, num_chosen = ranks.view(len(ranks), spec.num_expert_groups, -1), spec.num_chosen_groups
    tops = in_groups.topk(spec.num_group_tops).values.sum(dim=-1)
    ordered, groups = tops.sort(descending=True)
    allowed = torch.zeros_like(tops, dtype=torch.bool).scatter(1, groups[:, :num_chosen], True)
    highest = in_groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1).topk(chosen.shape[1]).values
    gaps = (highest - taken).abs().amax(dim=-1)
    # Which of two almost equal groups is chosen depends on rounding too, and so do all experts then.
    chosen_groups, last = chosen // in_groups.shape[2], ordered[:, num_chosen - 1]
    if num_chosen < spec.num_expert_groups:
        gaps = gaps.minimum(last - ordered[:, num_chosen])
    has_others = ~allowed.gather(1, chosen_groups).all(dim=1)
    return torch.where(has_others, last - tops.gather(1, chosen_groups).amin(dim=1), gaps)


def _are_normed(weights: torch.Tensor, scores: torch.Tensor) -> bool:
    """Whether a router's weights [tokens, ...] add up to 1 rather than to the scores of its experts."""
    sums = weights.float().sum(dim=-1)
    return bool((sums - 1).abs().sum() <= (sums - scores.sum(dim=-1)).abs().sum())
