"""Description of a Llama-shaped decoder: sizes, layers, and the names and shapes of its tensors.

It says nothing about where or how the decoder runs, so all fast paths share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from . import delta_spec, layer_kinds
from .delta_spec import DeltaSpec, delta_tensors, describe_delta
from .layer_kinds import EXPERTS, SHARED
from .layer_kinds import Unsupported as Unsupported
from .layer_tensors import COMMON_EXPERT_NAMES, EXPERT_NAMES, ExpertTensors, LayerTensors, bias_of
from .ropes import head_dim, rope_parameters, rotary_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GEMMA = {"gemma", "gemma2", "gemma3_text"}
_OFFSET_NORMS = {*_GEMMA, *delta_spec.FAMILIES}  # norm weights are stored as offsets from 1
_FAMILIES = {
    "exaone4", "granite", "llama", "ministral", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", *EXPERTS, *_GEMMA, *delta_spec.FAMILIES,
}  # fmt: skip
# Families that ...
_MERGED = {"phi3"}  # store queries, keys and values as one tensor, and likewise gate and up
_SANDWICHED = {"gemma2", "gemma3_text"}  # norm both the inputs and the outputs of attention and MLP
_NORMED_AFTER = {"exaone4", "olmo2", "olmo3"}  # norm only the outputs
_WHOLE_QUERIES = {"olmo2", "olmo3", "olmoe"}  # norm queries and keys across all heads together
_GROWING = {"ministral3"}  # scale queries up with their position
_WITH_SINKS = {"gpt_oss"}  # have an attention sink in each head
_WITH_LIMITS = {"gpt_oss"}  # clamp gates and ups
_GATED = delta_spec.FAMILIES  # gate each output of attention
_TURN_IN_PART = delta_spec.FAMILIES  # rotate only the first channels of each head
# Families with a setting for these. In others transformers keeps it if a config has it, but does not use it.
_CAPPED_SCORES = {"gemma2"}
_CAPPED_LOGITS = {"gemma2", "gemma3_text"}
_MAY_NORM_WEIGHTS = {"olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"}  # the others always do
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # those whose frequencies do not depend on the sequence length
_NEVER_ZERO = (
    "attention_multiplier",
    "logits_scaling",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' names


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Layers of ``x += attention(norm(x)); x += down(activation(gate(norm(x))) * up(norm(x)))``.

    Positions are rotary, or a layer uses none. In some families the embedding and what is added to x are scaled; what
    is added to x is normed as well, or instead of the inputs; and scores or logits y become ``cap * tanh(y / cap)``.

    A layer may have experts in place of its MLP: each token uses those with the highest router softmax, and their
    outputs are weighted by it. There may also be a shared expert, with a size of its own, which every token uses and
    which is weighted by a sigmoid.

    A layer may have a gated delta rule in place of attention, see ``delta_spec.py``. Outputs of attention may be
    multiplied by the sigmoids of gates; each head's gate rows follow its query rows.

    Clamped SwiGLU is ``gate * sigmoid(gate_slope * gate) * (up + 1)``, with gate at most ``gate_limit`` and up between
    ``-gate_limit`` and ``gate_limit``. A sink is a per-head score that takes part in the softmax over keys but has no
    value.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of layers without experts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # the first channels of a head, which are rotated
    gates_outputs: bool  # of attention
    delta: DeltaSpec | None  # of layers with a delta rule
    has_delta_rule: tuple[bool, ...]  # of each layer: whether it has a delta rule instead of attention
    activation: str  # "silu" or "gelu_tanh", or "clamped_swiglu": see gate_limit
    gate_slope: float
    gate_limit: float
    norm_eps: float
    norm_offset: float  # added to the weights of all norms
    attention_multiplier: float  # of scores
    score_cap: float | None
    logit_cap: float | None
    query_growth: float  # a query at position p is scaled by ``1 + query_growth * log(1 + p // query_growth_span)``
    query_growth_span: int
    embedding_multiplier: float
    rounds_embedding_multiplier: bool  # to the dtype that the model computes in
    residual_multiplier: float  # of what is added to x
    logits_scaling: float  # what logits are divided by
    windows: tuple[int | None, ...]  # of each layer: keys a token attends to, itself included; None: all before it
    ropes: tuple[int | None, ...]  # of each layer: the number of the rope that rotates queries and keys; None: no rope
    has_experts: tuple[bool, ...]  # of each layer
    num_experts: int  # of a layer with experts
    experts_per_token: int
    expert_size: int  # intermediate size of an expert
    shared_size: int  # intermediate size of the shared expert; 0: there is none
    norms_expert_weights: bool  # the weights of a token's experts add up to 1
    is_merged: bool  # queries, keys and values are stored as one tensor, and likewise gate and up
    has_qk_norm: bool  # queries and keys are normed before they are rotated
    norms_whole_queries: bool  # across all heads together, not per head
    has_pre_norms: bool  # of the inputs of attention and MLP
    has_post_norms: bool  # of what is added to x
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool  # also of experts and their router
    has_sinks: bool
    is_tied: bool  # the head is the embedding

    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def head(self) -> str:
        return self.embedding if self.is_tied else "lm_head.weight"

    @property
    def num_attending(self) -> int:
        """Number of layers with attention."""
        return self.num_layers - sum(self.has_delta_rule)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Output sizes of the query, key and value projections of an attention layer; gates count as queries."""
        keys = self.num_kv_heads * self.head_dim
        return (1 + self.gates_outputs) * self.num_heads * self.head_dim, keys, keys

    def layer(self, index: int) -> LayerTensors:
        qkv, gate_up = (["qkv"], ["gate_up"]) if self.is_merged else (["q", "k", "v"], ["gate", "up"])
        if self.has_delta_rule[index]:
            mixer, output, qkv = "linear_attn", "out_proj", ["in_proj_qkv", "in_proj_z"]
            qkv = ["in_proj_qkvz"] if self._is_by_heads else qkv
        else:
            mixer, output, qkv = "self_attn", "o_proj", [f"{name}_proj" for name in qkv]
        mlp = "mlp.shared_expert" if self.has_experts[index] else "mlp"
        mlp_norm = "pre_feedforward_layernorm" if self.has_post_norms else "post_attention_layernorm"

        def named(module: str) -> str:
            return f"model.layers.{index}.{module}.weight"

        def expert(number: int) -> ExpertTensors:
            (gate, up, down), module, _ = self._expert_names
            weights = f"{module}.experts.{number}"
            return ExpertTensors((named(f"{weights}.{gate}"), named(f"{weights}.{up}")), named(f"{weights}.{down}"))

        return LayerTensors(
            qkv=tuple(named(f"{mixer}.{name}") for name in qkv),
            output=named(f"{mixer}.{output}"),
            gate_up=tuple(named(f"{mlp}.{name}_proj") for name in gate_up),
            down=named(f"{mlp}.down_proj"),
            shared_gate=named("mlp.shared_expert_gate"),
            router=named(".".join(self._expert_names[1:])),
            experts=tuple(map(expert, range(self.num_experts if self.has_experts[index] else 0))),
            attention_norm=named("input_layernorm"),
            mlp_norm=named(mlp_norm),
            attended_norm=named("post_attention_layernorm"),
            gated_norm=named("post_feedforward_layernorm"),
            query_norm=named("self_attn.q_norm"),
            key_norm=named("self_attn.k_norm"),
            sinks=f"model.layers.{index}.self_attn.sinks",
            delta=delta_tensors(f"model.layers.{index}.linear_attn", is_by_heads=self._is_by_heads),
        )

    @property
    def _is_by_heads(self) -> bool:
        return self.delta is not None and self.delta.is_by_heads

    @property
    def _expert_names(self) -> tuple[tuple[str, str, str], str, str]:
        return EXPERT_NAMES.get(self.model_type, COMMON_EXPERT_NAMES)

    def mlps(self, layer: LayerTensors) -> Iterator[tuple[LayerTensors | ExpertTensors, int]]:
        """Yield the MLP of a layer, or its experts, with their sizes; the shared expert comes last."""
        yield from ((expert, self.expert_size) for expert in layer.experts)
        if not layer.experts:
            yield layer, self.intermediate_size
        elif self.shared_size:
            yield layer, self.shared_size

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return exactly the tensors a checkpoint must have, with their shapes."""
        shapes: dict[str, tuple[int, ...]] = {
            self.embedding: (self.vocab_size, self.hidden_size),
            self.final_norm: (self.hidden_size,),
            self.head: (self.vocab_size, self.hidden_size),
        }
        for index in range(self.num_layers):
            shapes.update(self._layer_shapes(index, self.layer(index)))
        return shapes

    def matrices(self) -> list[str]:
        """List the names of all matrices of the layers, without routers and the gates of a delta rule, which are never
        quantised.
        """
        layers = map(self.layer, range(self.num_layers))
        return [
            name
            for layer in layers
            for name in (
                *layer.qkv, layer.output,
                *(name for mlp, _ in self.mlps(layer) for name in (*mlp.gate_up, mlp.down)),
            )
        ]  # fmt: skip

    def _layer_shapes(self, index: int, names: LayerTensors) -> Iterator[tuple[str, tuple[int, ...]]]:
        delta = self.delta if self.has_delta_rule[index] else None
        matrices = [*(self._mixer_shapes(names) if delta is None else self._delta_shapes(names, delta))]
        for name, shape, has_bias in (*matrices, *self._mlp_shapes(names)):
            yield name, shape
            if has_bias:
                yield bias_of(name), shape[:1]
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.has_pre_norms:
            yield names.attention_norm, (hidden,)
            yield names.mlp_norm, (hidden,)
        if self.has_post_norms:
            yield names.attended_norm, (hidden,)
            yield names.gated_norm, (hidden,)
        if delta is not None:
            yield from delta.shapes(names.delta, hidden)
            return
        if self.has_qk_norm:
            yield names.query_norm, (queries if self.norms_whole_queries else self.head_dim,)
            yield names.key_norm, (keys if self.norms_whole_queries else self.head_dim,)
        if self.has_sinks:
            yield names.sinks, (self.num_heads,)

    def _mixer_shapes(self, names: LayerTensors) -> Iterator[tuple[str, tuple[int, int], bool]]:
        """Yield the matrices of attention with their shapes, and whether they have a bias."""
        sizes = [sum(self.qkv_sizes)] if self.is_merged else self.qkv_sizes
        yield from (
            (name, (rows, self.hidden_size), self.has_qkv_bias) for name, rows in zip(names.qkv, sizes, strict=True)
        )
        yield names.output, (self.hidden_size, self.num_heads * self.head_dim), self.has_output_bias

    def _delta_shapes(self, names: LayerTensors, delta: DeltaSpec) -> Iterator[tuple[str, tuple[int, int], bool]]:
        sizes = [delta.num_channels, delta.num_outputs]
        sizes = [sum(sizes)] if delta.is_by_heads else sizes
        yield from ((name, (rows, self.hidden_size), False) for name, rows in zip(names.qkv, sizes, strict=True))
        yield names.output, (self.hidden_size, delta.num_outputs), False

    def _mlp_shapes(self, names: LayerTensors) -> Iterator[tuple[str, tuple[int, int], bool]]:
        hidden, has_bias = self.hidden_size, self.has_mlp_bias
        if names.experts:
            yield names.router, (self.num_experts, hidden), has_bias
        if names.experts and self.shared_size:
            yield names.shared_gate, (1, hidden), False
        merged = 1 + (self.is_merged and not names.experts)
        for mlp, size in self.mlps(names):
            yield from ((name, (merged * size, hidden), has_bias) for name in mlp.gate_up)
            yield mlp.down, (hidden, size), has_bias


def describe_decoder(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
    """Describe a checkpoint with this config and tensors of these shapes.

    Raises:
        Unsupported: it has a feature that ``DecoderSpec`` cannot express.
    """
    _check_family(config)
    has_delta_rule = layer_kinds.delta_layers(config)
    # The first attention layer, if there is one: all of them have the same tensors.
    layer = f"model.layers.{has_delta_rule.index(False) if False in has_delta_rule else 0}."
    size = head_dim(config)
    is_gemma = config.model_type in _GEMMA
    has_experts = layer_kinds.has_experts(config)
    scores = getattr(config, "query_pre_attn_scalar", size) ** -0.5
    query_growth, query_growth_span = _query_growth(config)
    spec = DecoderSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", 0),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=size,
        rotary_dim=rotary_dim(config),
        gates_outputs=config.model_type in _GATED,
        delta=describe_delta(config) if any(has_delta_rule) else None,
        has_delta_rule=has_delta_rule,
        activation="clamped_swiglu" if config.model_type in _WITH_LIMITS else _ACTIVATIONS[_activation(config)],
        gate_slope=getattr(config, "swiglu_alpha", 1.702),
        gate_limit=getattr(config, "swiglu_limit", 7.0),
        norm_eps=config.rms_norm_eps,
        norm_offset=float(config.model_type in _OFFSET_NORMS),
        attention_multiplier=float(getattr(config, "attention_multiplier", scores)),
        score_cap=config.attn_logit_softcapping if config.model_type in _CAPPED_SCORES else None,
        logit_cap=config.final_logit_softcapping if config.model_type in _CAPPED_LOGITS else None,
        query_growth=query_growth,
        query_growth_span=query_growth_span,
        embedding_multiplier=float(getattr(config, "embedding_multiplier", config.hidden_size**0.5 if is_gemma else 1)),
        rounds_embedding_multiplier=is_gemma,
        residual_multiplier=float(getattr(config, "residual_multiplier", 1.0)),
        logits_scaling=float(getattr(config, "logits_scaling", 1.0)),
        windows=layer_kinds.windows(config),
        ropes=layer_kinds.rope_numbers(config),
        has_experts=has_experts,
        num_experts=config.num_experts if any(has_experts) else 0,
        experts_per_token=config.num_experts_per_tok if any(has_experts) else 0,
        expert_size=_expert_size(config) if any(has_experts) else 0,
        shared_size=config.shared_expert_intermediate_size if config.model_type in SHARED and any(has_experts) else 0,
        norms_expert_weights=config.model_type not in _MAY_NORM_WEIGHTS or bool(config.norm_topk_prob),
        is_merged=config.model_type in _MERGED,
        has_qk_norm=f"{layer}self_attn.q_norm.weight" in shapes,
        norms_whole_queries=config.model_type in _WHOLE_QUERIES,
        has_pre_norms=config.model_type not in _NORMED_AFTER,
        has_post_norms=config.model_type in {*_SANDWICHED, *_NORMED_AFTER},
        has_qkv_bias=f"{layer}self_attn.q_proj.bias" in shapes,
        has_output_bias=f"{layer}self_attn.o_proj.bias" in shapes,
        has_mlp_bias=f"{layer}mlp.down_proj.bias" in shapes or f"{layer}mlp.router.bias" in shapes,
        has_sinks=config.model_type in _WITH_SINKS,
        is_tied=bool(config.tie_word_embeddings),
    )
    _check_tensors(spec, shapes)
    return spec


def _expert_size(config: PretrainedConfig) -> int:
    name = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    size: int = getattr(config, name)
    return size


def _query_growth(config: PretrainedConfig) -> tuple[float, int]:
    """Return the factor, and the span of positions over which queries are scaled alike.

    Source: Llama 4 blog post, Meta 2025, "inference time temperature".
    """
    if config.model_type not in _GROWING:
        return 0.0, 1
    return config.rope_parameters["llama_4_scaling_beta"], config.rope_parameters["original_max_position_embeddings"]


def _activation(config: PretrainedConfig) -> str:
    name: str = config.hidden_activation if config.model_type in _SANDWICHED else config.hidden_act
    return name


def _check_family(config: PretrainedConfig) -> None:
    if config.model_type not in _FAMILIES:
        raise Unsupported(f"{config.model_type} is none of {', '.join(sorted(_FAMILIES))}")
    if _activation(config) not in _ACTIVATIONS:
        raise Unsupported(f"its activation is {_activation(config)}")
    if config.model_type in delta_spec.FAMILIES and _activation(config) != "silu":
        raise Unsupported(f"its convolutions' activation is {_activation(config)}")
    if getattr(config, "use_bidirectional_attention", None):
        raise Unsupported("its attention is not causal")
    if getattr(config, "clip_qkv", None) is not None:
        raise Unsupported(f"its queries, keys and values are clipped at {config.clip_qkv}")
    for name in _NEVER_ZERO:
        if getattr(config, name, None) == 0:
            raise Unsupported(f"its {name} is 0")
    for rope in rope_parameters(config).values():
        if rope.get("rope_type") not in _ROPE_TYPES:
            raise Unsupported(f"its rotary positions are of type {rope.get('rope_type')}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and config.model_type not in _TURN_IN_PART:
            raise Unsupported("its rotary positions turn only some of its channels")


def _check_tensors(spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    expected = spec.tensors()
    # Old checkpoints store rotary frequencies, which are computed here, and some store a tied head twice.
    ignored = {name for name in shapes if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"}
    if spec.model_type in delta_spec.FAMILIES:
        ignored |= {name for name in shapes if name.startswith("mtp.")}  # multi-token prediction
    differing = sorted(
        (expected.keys() - shapes.keys())
        | (shapes.keys() - expected.keys() - ignored)
        | {name for name in expected.keys() & shapes.keys() if expected[name] != tuple(shapes[name])}
    )
    if differing:
        raise Unsupported(f"{len(differing)} of its tensors differ from its config, {differing[0]} first")
