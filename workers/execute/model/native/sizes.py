"""How much memory the packed weights of a decoder take."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ...kernels.matrix import matrix_bytes
from ...kernels.memory import padded
from ...kernels.structures import LANES, Format
from ..spec.decoder import DecoderSpec
from ..spec.delta import DeltaSpec
from ..spec.latent import LatentSpec
from ..spec.layer_tensors import ExpertTensors, LayerTensors
from ..spec.state_space import StateSpaceSpec
from .latent import head_bytes

_PER_LAYER_BYTES = 1 << 12  # for alignment to cache lines
SCREENED_WEIGHTS = 1 << 22  # of a head, at least; what stays in a cache is not faster to read
_SCREENED_SHARE = 0.1  # of all weights that a token reads


def has_screen(spec: DecoderSpec, head: Format) -> bool:
    """Whether the greatest logit is found with a copy of the head in eight bits, see ``src/screen.h``.

    It takes a fourth or half of the head's memory, and saves as much of what a token reads. A cap of logits could make
    different ones equal, of which the first would not be found.
    """
    of_head = spec.hidden_size * spec.vocab_size
    of_token = sum(map(prod, spec.tensors().values())) - (0 if spec.is_tied else of_head)  # without the embedding
    is_plain = head in (Format.FLOAT32, Format.BFLOAT16) and not spec.has_head_bias and not spec.logit_cap
    return is_plain and of_head >= max(SCREENED_WEIGHTS, _SCREENED_SHARE * of_token)


def packed_bytes(spec: DecoderSpec, format_of: Callable[..., Format]) -> int:
    """The size of all packed weights. ``format_of`` maps the names of the weights of a matrix to its format."""
    hidden = spec.hidden_size
    normed = spec.num_heads * spec.head_dim if spec.norms_whole_queries else spec.head_dim
    vectors = 4 * (8 * padded(hidden) + 2 * padded(normed) + padded(spec.num_heads)) + _PER_LAYER_BYTES

    def mixer(names: LayerTensors, num_outputs: int, num_found: int) -> int:
        qkv = matrix_bytes(format_of(*names.qkv), hidden, num_outputs)
        return vectors + qkv + matrix_bytes(format_of(names.output), num_found, hidden)

    def delta_rule(names: LayerTensors, delta: DeltaSpec) -> int:
        gates = matrix_bytes(Format.FLOAT32, hidden, 2 * padded(delta.num_value_heads, LANES))
        own = sum(map(padded, (delta.conv_size * delta.num_channels, *[delta.num_value_heads] * 2, delta.value_dim)))
        return mixer(names, delta.num_channels + delta.num_outputs, delta.num_outputs) + gates + 4 * own

    def state_space(names: LayerTensors, space: StateSpaceSpec) -> int:
        projection, output = names.space.projection, names.space.output
        matrices = matrix_bytes(format_of(projection), hidden, space.num_outputs + space.num_channels)
        matrices += matrix_bytes(Format.FLOAT32, hidden, space.num_heads)
        matrices += matrix_bytes(format_of(output), space.num_outputs, hidden)
        vectors = ((1 + space.conv_size) * space.num_channels, *[space.num_heads] * 3, space.num_outputs)
        return matrices + 4 * sum(map(padded, vectors)) + _PER_LAYER_BYTES

    def latents(names: LayerTensors, latent: LatentSpec) -> int:
        num_queries = latent.query_rank and spec.num_heads * latent.head_dim
        up = matrix_bytes(format_of(names.latent.query_up), latent.query_rank, num_queries)
        own = up + 4 * (padded(latent.query_rank) + padded(latent.rank))
        return own + head_bytes(latent, format_of(names.latent.up).arithmetic, spec.num_heads)

    def mlp(names: LayerTensors | ExpertTensors, size: int) -> int:
        up = matrix_bytes(format_of(*names.gate_up), hidden, (1 + spec.has_gates) * padded(size))
        return up + matrix_bytes(format_of(names.down), size, hidden)

    def layer(index: int) -> int:
        names = spec.layer(index)
        before = mixer(names, sum(spec.qkv_sizes), spec.attended_size) if spec.attends[index] else vectors
        before += latents(names, spec.latent) if spec.attends[index] and spec.latent else 0
        if spec.is_recurrent[index] and spec.space is not None:
            before += state_space(names, spec.space)
        elif spec.is_recurrent[index] and spec.delta is not None:
            before += delta_rule(names, spec.delta)
        elif spec.is_recurrent[index]:
            before += mixer(names, 3 * padded(hidden), hidden) + 4 * spec.num_taps * padded(hidden)
        router = matrix_bytes(Format.FLOAT32, hidden, spec.num_experts + 1) + 4 * padded(spec.num_experts)
        router = router if names.experts else 0
        return before + router + sum(mlp(*each) for each in spec.mlps(names))

    head = matrix_bytes(format_of(spec.head), hidden, spec.vocab_size)
    if has_screen(spec, format_of(spec.head)):
        head += matrix_bytes(Format.INT8, hidden, spec.vocab_size)
    outside = 4 * ((4 + spec.num_positions) * padded(hidden) + padded(spec.num_heads)) + _PER_LAYER_BYTES
    return sum(map(layer, range(spec.num_layers))) + head + outside
