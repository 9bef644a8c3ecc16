"""Description of a Llama-shaped decoder: sizes, layers, and the names and shapes of its tensors.

It says nothing about where or how the decoder runs, so all fast paths share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from ...kernels.memory import padded
from .delta import DeltaSpec, Part, delta_modules, delta_tensors
from .families import FAMILIES
from .family import Family, Modules
from .latent import LatentSpec, latent_modules, latent_tensors
from .layer_kinds import Unsupported as Unsupported
from .layer_tensors import XIELU_SHAPES, ExpertTensors, LayerTensors, bias_of
from .multipliers import Multipliers
from .state_space import StateSpaceSpec, state_space_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Layers of ``x += attention(norm(x)); x += down(activation(gate(norm(x))) * up(norm(x)))``.

    Norms are RMS norms or layer norms. Positions are rotary, or a layer uses none, or there is a table of vectors that
    are added to the embeddings. In some families the embedding and what is added to x are scaled; what is added to x is
    normed as well, or instead of the inputs; and scores or logits y become ``cap * tanh(y / cap)``.

    A layer may have experts in place of its MLP: each token uses those with the highest scores, which are the softmax
    of a router's logits or their sigmoids, and their outputs are weighted by these. There may also be a shared expert,
    with a size of its own, which every token uses.

    The heads of attention may share latents in place of keys and values, see ``spec/latent.py``.

    A layer may have a gated delta rule in place of attention, see ``spec/delta.py``, or a state space in place of it or
    beside it, see ``spec/state_space.py``, or a short convolution, whose outputs are ``gate * convolution(input_gate *
    input)``. Outputs of attention may be multiplied by the sigmoids of gates; each head's gate rows follow its query
    rows.

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
    head_dim: int  # of what pages hold as a key
    latent: LatentSpec | None  # of all attention layers, which then have one key per token
    num_positions: int  # with a learned vector; 0: positions are not learned
    rotary_dim: int  # the first channels of a head, which are rotated
    turns_neighbours: bool  # channel 2i is rotated with 2i + 1, not i with i + rotary_dim / 2
    gates_outputs: bool  # of attention
    delta: DeltaSpec | None  # of layers with a delta rule
    num_taps: int  # of short convolutions; 0: no layer has one
    space: StateSpaceSpec | None  # of layers with a state space
    is_recurrent: tuple[bool, ...]  # of each layer: whether it has a delta rule, a convolution or a state space
    attends: tuple[bool, ...]  # of each layer
    has_mlp: tuple[bool, ...]  # of each layer, or experts
    activation: str  # one of ``ACTIVATIONS`` in checks.py, or "clamped_swiglu": see gate_limit
    gate_slope: float  # also a factor of the gates of "silu"
    gate_limit: float
    has_gates: bool  # in MLPs; without, they are ``down(activation(up(norm(x))))``
    is_parallel: bool  # ``x += attention(norm(x)) + mlp(norm(x))``, often with the same norm
    norm_eps: float
    has_layer_norms: bool  # of inputs: means are subtracted first
    has_norm_weights: bool
    has_norm_biases: bool
    norm_offset: float  # added to the weights of all norms
    attention_multiplier: float  # of scores
    qkv_limit: float | None  # queries, keys and values are clipped to +-qkv_limit
    score_cap: float | None
    logit_cap: float | None
    query_growth: float  # a query at position p is scaled by ``1 + query_growth * log(1 + p // query_growth_span)``
    query_growth_span: int
    embedding_multiplier: float
    rounds_embedding_multiplier: bool  # to the dtype that the model computes in
    residual_multiplier: float  # of what is added to x
    multipliers: Multipliers  # more of them
    logits_scaling: float  # what logits are divided by
    windows: tuple[int | None, ...]  # of each layer: keys a token attends to, itself included; None: all before it
    ropes: tuple[int | None, ...]  # of each layer: the number of the rope that rotates queries and keys; None: no rope
    has_experts: tuple[bool, ...]  # of each layer
    num_experts: int  # of a layer with experts
    num_expert_groups: int  # of equal size; a token's experts are from some of them; 1: from all
    num_chosen_groups: int  # per token: those whose experts have the highest scores,
    num_group_tops: int  # 1 or 2 of them added up
    experts_per_token: int
    expert_size: int  # intermediate size of an expert
    shared_size: int  # intermediate size of the shared expert; 0: there is none
    gates_shared_expert: bool  # by a sigmoid; otherwise its weight is 1
    has_sigmoid_routers: bool  # the scores of experts are sigmoids, not a softmax
    has_router_biases: bool  # which are added to the scores for the choice of experts alone
    norms_expert_weights: bool  # the weights of a token's experts add up to 1
    expert_multiplier: float  # of the weights of a token's experts
    has_qk_norm: bool  # queries and keys are normed before they are rotated
    norms_whole_queries: bool  # across all heads together, not per head
    norms_turned_heads: bool  # they are normed after they are rotated instead
    has_pre_norms: bool  # of the inputs of attention and MLP
    has_post_norms: bool  # of what is added to x
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool  # also of experts and their router
    has_sinks: bool
    has_head_bias: bool
    is_tied: bool  # the head is the embedding

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def modules(self) -> Modules:
        return self.family.modules

    @property
    def embedding(self) -> str:
        return f"{self.modules.embedding}.weight"

    @property
    def embedding_norm(self) -> str:
        return f"{self.modules.embedding_norm}.weight"

    @property
    def positions(self) -> str:
        return f"{self.modules.positions}.weight"

    @property
    def final_norm(self) -> str:
        return f"{self.modules.final_norm}.weight"

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def head(self) -> str:
        return self.embedding if self.is_tied else "lm_head.weight"

    @property
    def has_plain_mlps(self) -> bool:
        """Whether some layer has an MLP and no experts."""
        return any(mlp and not experts for mlp, experts in zip(self.has_mlp, self.has_experts, strict=True))

    @property
    def num_attending(self) -> int:
        """Number of layers with attention."""
        return sum(self.attends)

    @property
    def state_sizes(self) -> tuple[int, int]:
        """Number of elements of a sequence's state in one recurrent layer: that of its heads, and past inputs."""
        if (heads := self.delta or self.space) is not None:
            return heads.state_sizes
        return 0, max(0, self.num_taps - 1) * padded(self.hidden_size)

    @property
    def value_dim(self) -> int:
        """Channels of what pages hold as a value."""
        return self.latent.rank if self.latent else self.head_dim

    @property
    def attended_size(self) -> int:
        """Channels of the values of all heads, which are projected to what attention adds to x."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """Output sizes of the query, key and value projections of an attention layer; gates count as queries."""
        if self.latent:
            return self.latent.input_sizes(self.num_heads)
        keys = self.num_kv_heads * self.head_dim
        return (1 + self.gates_outputs) * self.num_heads * self.head_dim, keys, keys

    @property
    def qkv_parts(self) -> list[Part]:
        """How the rows of these projections map to queries, keys and values side by side."""
        groups = self.num_kv_heads if self.family.are_heads_together else 1
        firsts = accumulate(self.qkv_sizes, initial=0)
        each = [(size // groups, first) for size, first in zip(self.qkv_sizes, firsts, strict=False)]
        return [Part(size, first + group * size) for group in range(groups) for size, first in each]

    def layer(self, index: int) -> LayerTensors:
        modules = self.modules
        qkv, output = self._mixer_modules(index)
        gate_up, down = modules.gate_up, modules.down
        *in_expert, last = modules.expert if self.has_gates else modules.expert[1:]
        if self.has_experts[index] and modules.shared:
            gate_up, down = tuple(f"{modules.shared}.{name}" for name in in_expert), f"{modules.shared}.{last}"
        if not self.has_mlp[index]:
            gate_up = ()

        def named(module: str) -> str:
            return f"{modules.layers}.{index}.{module}.weight"

        def expert(number: int) -> ExpertTensors:
            module = f"{modules.experts}.{number}"
            return ExpertTensors(tuple(named(f"{module}.{name}") for name in in_expert), named(f"{module}.{last}"))

        return LayerTensors(
            qkv=tuple(map(named, qkv)),
            output=named(output),
            gate_up=tuple(map(named, gate_up)),
            down=named(down),
            activation=f"{modules.layers}.{index}.{modules.activation}",
            shared_gate=named(modules.shared_gate),
            router=named(modules.router),
            router_biases=f"{modules.layers}.{index}.{modules.router_biases}",
            experts=tuple(map(expert, range(self.num_experts if self.has_experts[index] else 0))),
            attention_norm=named(modules.attention_norm),
            mlp_norm=named(modules.mlp_norm),
            attended_norm=named(modules.attended_norm),
            gated_norm=named(modules.gated_norm),
            query_norm=named(modules.query_norm),
            key_norm=named(modules.key_norm),
            sinks=f"{modules.layers}.{index}.self_attn.sinks",
            delta=delta_tensors(
                f"{modules.layers}.{index}.linear_attn", is_by_heads=self.delta is not None and self.delta.is_by_heads
            ),
            convolution=named(modules.convolution),
            space=state_space_tensors(f"{modules.layers}.{index}.{modules.state_space}"),
            latent=latent_tensors(f"{modules.layers}.{index}.self_attn"),
        )

    def _mixer_modules(self, index: int) -> tuple[tuple[str, ...], str]:
        """The projections to and from what mixes the tokens in a layer: attention, or a delta rule or a convolution. A
        state space has its own, also beside attention.
        """
        modules = self.modules
        if self.is_recurrent[index] and self.delta is not None:
            return delta_modules(is_by_heads=self.delta.is_by_heads)
        if self.is_recurrent[index] and self.space is None:
            return (modules.convolution_inputs,), modules.convolution_output
        if not self.attends[index]:
            return (), ""
        return latent_modules(self.latent) if self.latent is not None else modules.qkv, modules.output

    def mlps(self, layer: LayerTensors) -> Iterator[tuple[LayerTensors | ExpertTensors, int]]:
        """Yield the MLP of a layer, or its experts, with their sizes; the shared expert comes last."""
        yield from ((expert, self.expert_size) for expert in layer.experts)
        if layer.gate_up and not layer.experts:
            yield layer, self.intermediate_size
        elif layer.experts and self.shared_size:
            yield layer, self.shared_size

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return exactly the tensors a checkpoint must have, with their shapes."""
        shapes: dict[str, tuple[int, ...]] = {
            self.embedding: (self.vocab_size, self.hidden_size),
            self.head: (self.vocab_size, self.hidden_size),
            **dict(self._norm_shapes(self.final_norm)),
        }
        if self.modules.embedding_norm:
            shapes.update(self._norm_shapes(self.embedding_norm))
        if self.num_positions:
            shapes[self.positions] = (self.family.first_position + self.num_positions, self.hidden_size)
        if self.has_head_bias:
            shapes[bias_of(self.head)] = (self.vocab_size,)
        for index in range(self.num_layers):
            shapes.update(self._layer_shapes(index, self.layer(index)))
        return shapes

    def matrices(self) -> list[str]:
        """List the names of all matrices of the layers, without routers and the gates of a delta rule, which are never
        quantised.
        """
        return [
            name
            for index in range(self.num_layers)
            for names in [self.layer(index)]
            for name in (
                *(name for name, _, _ in self._mixer_shapes(index, names)),
                *self._latent_matrices(names),
                *(name for mlp, _ in self.mlps(names) for name in (*mlp.gate_up, mlp.down)),
            )
        ]

    def _latent_matrices(self, names: LayerTensors) -> list[str]:
        if self.latent is None:
            return []
        return [*([names.latent.query_up] if self.latent.query_rank else []), names.latent.up]

    def _layer_shapes(self, index: int, names: LayerTensors) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape, has_bias in (*self._mixer_shapes(index, names), *self._mlp_shapes(names)):
            yield name, shape[::-1] if self.family.is_transposed else shape
            if has_bias:
                yield bias_of(name), shape[:1]
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.has_pre_norms:
            for norm in (names.attention_norm, names.mlp_norm):
                yield from self._norm_shapes(norm)
        if self.has_post_norms:
            yield names.attended_norm, (hidden,)
            yield names.gated_norm, (hidden,)
        if self.is_recurrent[index] and self.space is not None:
            yield from self.space.shapes(names.space)
        elif self.is_recurrent[index] and self.delta is not None:
            yield from self.delta.shapes(names.delta, hidden)
        elif self.is_recurrent[index]:
            yield names.convolution, (hidden, 1, self.num_taps)
        if not self.attends[index]:
            return
        if self.latent is not None:
            yield from self.latent.shapes(names.latent, self.num_heads)
        if self.has_qk_norm and self.has_norm_weights:
            yield names.query_norm, (queries if self.norms_whole_queries else self.head_dim,)
            yield names.key_norm, (keys if self.norms_whole_queries else self.head_dim,)
        if self.has_sinks:
            yield names.sinks, (self.num_heads,)

    def _norm_shapes(self, name: str) -> Iterator[tuple[str, tuple[int]]]:
        if self.has_norm_weights:
            yield name, (self.hidden_size,)
        if self.has_norm_biases:
            yield bias_of(name), (self.hidden_size,)

    def _mixer_shapes(self, index: int, names: LayerTensors) -> Iterator[tuple[str, tuple[int, int], bool]]:
        """Yield the matrices of attention and of what replaces it, with their shapes, and whether they have a bias."""
        if self.attends[index]:
            yield from self._attention_shapes(names)
        if self.is_recurrent[index] and self.space is not None:
            yield from self.space.matrices(names.space, self.hidden_size)
        elif self.is_recurrent[index] and self.delta is not None:
            yield from self._delta_shapes(names, self.delta)
        elif self.is_recurrent[index]:
            yield from self._convolution_shapes(names)

    def _attention_shapes(self, names: LayerTensors) -> Iterator[tuple[str, tuple[int, int], bool]]:
        sizes = [sum(self.qkv_sizes)] if len(names.qkv) == 1 else self.qkv_sizes
        yield from (
            (name, (rows, self.hidden_size), self.has_qkv_bias) for name, rows in zip(names.qkv, sizes, strict=True)
        )
        yield names.output, (self.hidden_size, self.attended_size), self.has_output_bias

    def _convolution_shapes(self, names: LayerTensors) -> Iterator[tuple[str, tuple[int, int], bool]]:
        yield names.qkv[0], (3 * self.hidden_size, self.hidden_size), False
        yield names.output, (self.hidden_size, self.hidden_size), False

    def _delta_shapes(self, names: LayerTensors, delta: DeltaSpec) -> Iterator[tuple[str, tuple[int, int], bool]]:
        sizes = [delta.num_channels, delta.num_outputs]
        sizes = [sum(sizes)] if delta.is_by_heads else sizes
        yield from ((name, (rows, self.hidden_size), False) for name, rows in zip(names.qkv, sizes, strict=True))
        yield names.output, (self.hidden_size, delta.num_outputs), False

    def _mlp_shapes(self, names: LayerTensors) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        hidden, has_bias = self.hidden_size, self.has_mlp_bias
        if names.experts:
            yield names.router, (self.num_experts, hidden), has_bias
        if names.experts and self.has_router_biases:
            axes = self.family.router_biases_axes
            yield names.router_biases, (*axes, self.num_experts), False
        if names.experts and self.shared_size and self.gates_shared_expert:
            yield names.shared_gate, (1, hidden), False
        for mlp, size in self.mlps(names):
            yield from (
                (name, ((1 + self.has_gates) * size // len(mlp.gate_up), hidden), has_bias) for name in mlp.gate_up
            )
            yield mlp.down, (hidden, size), has_bias
        if self.activation == "xielu":
            yield from ((f"{names.activation}.{name}", shape, False) for name, shape in XIELU_SHAPES.items())
