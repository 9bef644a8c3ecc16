"""The structures of ``src/abi.h``, field by field; ``library.load_library`` checks that their sizes agree."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

LANES = 16  # numbers in a vector, kLanes in src/simd.h
GROUP_INPUTS = 64  # that share a scale and a least value in int4, or two scales in mxfp4
MOST_SCALE_CHANNELS = 128  # of an eight-bit key that share a scale, a bfloat16; a value has one scale
_WEIGHT_STEPS = GROUP_INPUTS // 8  # of a group, before its parameters


class Activation(IntEnum):
    """Of the gates, or of the ups if there are none; the names are those of ``DecoderSpec``."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SWIGLU = 2
    SQUARED_RELU = 3
    RELU = 4
    GELU = 5
    XIELU = 6


class Format(IntEnum):
    """How weights are stored, which also decides the arithmetic."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    MXFP4 = 4
    FINE_INT4 = 5  # in groups of 32

    @property
    def arithmetic(self) -> Format:
        """The format of activations, and of weights that are not quantised further: the head and adapters."""
        return Format.INT8 if self.has_groups else self

    @property
    def has_groups(self) -> bool:
        """Whether weights are in four bits, in groups with their own parameters."""
        return self >= Format.INT4

    @property
    def group_inputs(self) -> int:
        """How many weights of an output share their parameters, where there are groups."""
        return GROUP_INPUTS if self is Format.INT4 else GROUP_INPUTS // 2

    def steps(self, num_inputs: int) -> int:
        """The number of 32-bit words in a column of that many weights, see ``src/pack.h`` and ``src/int4.h``."""
        if self.has_groups:
            return -(-num_inputs // GROUP_INPUTS) * (_WEIGHT_STEPS + (2 if self is Format.FINE_INT4 else 1))
        return -(-num_inputs // (1, 2, 4)[self])

    def cache_bytes(self, key_dim: int, value_dim: int, *, has_eight_bits: bool) -> tuple[int, int]:
        """Bytes of a cached key and value of one head; for the scales in eight bits, see ``src/eight_bits.h``."""
        if has_eight_bits:
            scale_channels = min(key_dim & -key_dim, MOST_SCALE_CHANNELS)
            return key_dim + key_dim // scale_channels * 2, value_dim + 2
        size = 4 if self is Format.FLOAT32 else 2
        return key_dim * size, value_dim * size


class Matrix(ctypes.Structure):
    _fields_ = [
        ("blocks", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("squares", c_void_p),
        ("num_inputs", c_int32),
        ("num_blocks", c_int32),
        ("format", c_int32),
        ("unused", c_int32),
    ]


class Screen(ctypes.Structure):
    _fields_ = [
        ("matrix", Matrix),
        ("limits", c_void_p),
    ]


class Expert(ctypes.Structure):
    _fields_ = [
        ("gate_up", Matrix),
        ("down", Matrix),
    ]


class DeltaLayer(ctypes.Structure):
    _fields_ = [
        ("gates", Matrix),
        ("convolution", c_void_p),
        ("rates", c_void_p),
        ("rate_biases", c_void_p),
        ("norm", c_void_p),
        ("states", c_void_p),
        ("inputs", c_void_p),
    ]


class ShortConvolution(ctypes.Structure):
    _fields_ = [
        ("taps", c_void_p),
        ("inputs", c_void_p),
    ]


class Xielu(ctypes.Structure):
    _fields_ = [
        ("squared", c_float),
        ("exponential", c_float),
        ("linear", c_float),
    ]


class StateSpaceLayer(ctypes.Structure):
    _fields_ = [
        ("projection", Matrix),
        ("dts", Matrix),
        ("output", Matrix),
        ("convolution", c_void_p),
        ("convolution_biases", c_void_p),
        ("rates", c_void_p),
        ("dt_biases", c_void_p),
        ("skips", c_void_p),
        ("norm", c_void_p),
        ("states", c_void_p),
        ("inputs", c_void_p),
    ]


class LatentLayer(ctypes.Structure):
    _fields_ = [
        ("query_up", Matrix),
        ("key_ups", c_void_p),
        ("value_ups", c_void_p),
        ("query_norm", c_void_p),
        ("norm", c_void_p),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("router", Matrix),
        ("router_biases", c_void_p),
        ("experts", c_void_p),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attended_norm", c_void_p),
        ("gated_norm", c_void_p),
        ("delta", DeltaLayer),
        ("convolution", ShortConvolution),
        ("space", StateSpaceLayer),
        ("latent", LatentLayer),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("sinks", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int32),
        ("xielu", Xielu),
    ]


class Update(ctypes.Structure):
    _fields_ = [
        ("down", Matrix),
        ("up", c_void_p),
        ("rank", c_int32),
        ("num_vectors", c_int32),
    ]


class DeltaShape(ctypes.Structure):
    _fields_ = [
        ("num_key_heads", c_int32),
        ("num_value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("conv_size", c_int32),
        ("unused", c_int32),
    ]


class StateSpaceShape(ctypes.Structure):
    _fields_ = [
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("num_groups", c_int32),
        ("state_size", c_int32),
        ("conv_size", c_int32),
        ("norm_size", c_int32),
        ("norms_first", c_int32),
        ("gate_multiplier", c_float),
        ("dt_multiplier", c_float),
        ("unused", c_int32),
    ]


class LatentShape(ctypes.Structure):
    _fields_ = [
        ("rank", c_int32),
        ("query_rank", c_int32),
        ("plain_dim", c_int32),
        ("head_value_dim", c_int32),
        ("norm_eps", c_float),
        ("unused", c_int32),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("head", Matrix),
        ("screen", Screen),
        ("embedding", c_void_p),
        ("positions", c_void_p),
        ("embedding_norm", c_void_p),
        ("slopes", c_void_p),
        ("final_norm", c_void_p),
        ("updates", c_void_p),
        ("format", c_int32),
        ("embedding_is_bf16", c_int32),
        ("num_positions", c_int32),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_dim", c_int32),
        ("page_size", c_int32),
        ("norm_eps", c_float),
        ("has_layer_norms", c_int32),
        ("score_divisor", c_float),
        ("embedding_multiplier", c_float),
        ("attended_multiplier", c_float),
        ("space_multiplier", c_float),
        ("gated_multiplier", c_float),
        ("score_cap", c_float),
        ("logit_cap", c_float),
        ("qkv_limit", c_float),
        ("query_growth", c_float),
        ("query_growth_span", c_int32),
        ("activation", c_int32),
        ("has_gates", c_int32),
        ("is_parallel", c_int32),
        ("gate_slope", c_float),
        ("gate_limit", c_float),
        ("max_rank", c_int32),
        ("adapted_products", c_int32),
        ("eight_bit_pages", c_int32),
        ("num_experts", c_int32),
        ("experts_per_token", c_int32),
        ("expert_size", c_int32),
        ("num_expert_groups", c_int32),
        ("num_chosen_groups", c_int32),
        ("num_group_tops", c_int32),
        ("norms_expert_weights", c_int32),
        ("has_sigmoid_routers", c_int32),
        ("expert_multiplier", c_float),
        ("gates_shared_expert", c_int32),
        ("norms_whole_queries", c_int32),
        ("rotary_dim", c_int32),
        ("turns_neighbours", c_int32),
        ("norms_turned_heads", c_int32),
        ("gates_outputs", c_int32),
        ("num_taps", c_int32),
        ("delta", DeltaShape),
        ("space", StateSpaceShape),
        ("latent", LatentShape),
    ]


class Sharing(ctypes.Structure):
    _fields_ = [
        ("worth_a_thread", c_int64),
        ("worth_a_team", c_int64),
        ("too_long", c_int64),
        ("num_threads", c_int32),
        ("num_own", c_int32),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("wanted_rows", c_void_p),
        ("carried", c_void_p),
        ("last_tokens", c_void_p),
        ("adapters", c_void_p),
        ("segment_starts", c_void_p),
        ("segment_ends", c_void_p),
        ("state_reads", c_void_p),
        ("state_writes", c_void_p),
        ("choices", c_void_p),
        ("logits", c_void_p),
        ("tokens", c_void_p),
        ("greatest", c_void_p),
        ("hidden", c_void_p),
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_rows", c_int32),
        ("table_width", c_int32),
        ("vocab_size", c_int32),
        ("num_hidden", c_int32),
        ("only_greatest", c_int32),
    ]
