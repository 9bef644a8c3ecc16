"""The names of the tensors of one layer of a decoder."""

from __future__ import annotations

from typing import NamedTuple

from .delta_spec import DeltaTensors

# Of an expert: gate, up and down, and the module that it is a part of, and which part of that is the router.
EXPERT_NAMES = {
    "gpt_oss": (("gate_proj", "up_proj", "down_proj"), "mlp", "router"),  # as stacked_experts.py names them
    "mixtral": (("w1", "w3", "w2"), "block_sparse_moe", "gate"),
}
COMMON_EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), "mlp", "gate")


class ExpertTensors(NamedTuple):
    """The names of one expert's weights."""

    gate_up: tuple[str, str]
    down: str


class LayerTensors(NamedTuple):
    """The names of one layer's weights; a bias is named like its weight."""

    # Queries, keys and values; or one that has the rows of all three, in this order. Of a delta rule it is such a one,
    # and what gates its outputs.
    qkv: tuple[str, ...]
    output: str
    gate_up: tuple[str, ...]  # likewise; where there are experts, of the one that all tokens share
    down: str
    router: str
    shared_gate: str  # [1, hidden_size], of that one
    experts: tuple[ExpertTensors, ...]  # in place of the MLP; none where there is one
    attention_norm: str
    mlp_norm: str
    attended_norm: str  # of what attention adds to x
    gated_norm: str  # of what the MLP adds
    query_norm: str
    key_norm: str
    sinks: str  # [num_heads], and no weight
    delta: DeltaTensors


def bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
