"""The names of the tensors of one layer of a decoder."""

from __future__ import annotations

from typing import NamedTuple

from .delta import DeltaTensors
from .latent import LatentTensors
from .state_space import StateSpaceTensors

# Of the parameters of this activation, by their names in its module.
XIELU_SHAPES: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


class ExpertTensors(NamedTuple):
    """The names of one expert's weights."""

    gate_up: tuple[str, ...]  # without gates: only up
    down: str


class LayerTensors(NamedTuple):
    """The names of one layer's weights; a bias is named like its weight."""

    # Queries, keys and values, or one tensor with the rows of all three, in this order. For a delta rule: one tensor
    # with the rows of all three, and the output gates, as a second tensor or merged into the first. For a short
    # convolution: one tensor with the rows of input gates, output gates and inputs. With latents: queries or their
    # latents, and the latents of keys and values, with the keys' rotated channels. Empty if a layer has none of these.
    qkv: tuple[str, ...]
    output: str
    gate_up: tuple[str, ...]  # gate and up, or one tensor with the rows of both; of the shared expert in MoE layers
    down: str  # of the shared expert in MoE layers
    activation: str  # the module
    router: str
    router_biases: str  # [num_experts] or [1, num_experts], not named ``.bias``
    shared_gate: str  # [1, hidden_size], of the shared expert
    experts: tuple[ExpertTensors, ...]  # in place of the MLP; empty in layers with an MLP
    attention_norm: str
    mlp_norm: str
    attended_norm: str  # of what attention adds to x
    gated_norm: str  # of what the MLP adds
    query_norm: str
    key_norm: str
    sinks: str  # [num_heads], not named ``.weight``
    delta: DeltaTensors
    convolution: str  # of a short convolution: [hidden_size, 1, taps]
    space: StateSpaceTensors
    latent: LatentTensors


def bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
