"""A checkpoint's weights in the layout of the kernels, read tensor by tensor from the mapped files."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from .....protocol.arrays import Float32
from ...kernels.matrix import COLUMNS, Placement, new_matrix
from ...kernels.memory import Arena, MakeArena, padded
from ...kernels.structures import (
    LANES,
    Activation,
    DeltaLayer,
    DeltaShape,
    Expert,
    Format,
    Layer,
    Model,
    Screen,
    StateSpaceLayer,
    StateSpaceShape,
    Xielu,
)
from ..checkpoint.mapped import Checkpoint
from ..facts import Progress
from ..spec.decoder import DecoderSpec
from ..spec.delta import DeltaSpec, DeltaTensors
from ..spec.latent import LatentSpec, LatentTensors
from ..spec.layer_tensors import XIELU_SHAPES, ExpertTensors, LayerTensors
from ..spec.state_space import StateSpaceSpec, StateSpaceTensors
from .latent import HeadMatrices, latent_shape, whole_matrix
from .packing import Packing, readable
from .sizes import has_screen

_DELTA_SIZES = ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "conv_size")
_SPACE_SIZES = (
    "num_heads", "head_dim", "num_groups", "state_size", "conv_size", "norm_size", "norms_first", "gate_multiplier",
    "dt_multiplier",
)  # fmt: skip


class PackedWeights(Packing):
    """All weights of a decoder. ``model`` lacks what the checkpoint does not contain: rotary tables and pages.

    The embedding is not packed but read from the mapped file, one row per token of a step.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        *,
        library: ctypes.CDLL,
        format_: Format,
        num_threads: int,
        progress: Progress,
        importance: Mapping[str, Float32] | None = None,
        calibration_steps: int = 0,
        make_arena: MakeArena = Arena,
    ) -> None:
        super().__init__(
            spec, checkpoint, library, format_, num_threads, progress, importance, calibration_steps, make_arena
        )
        self._heads: dict[str, HeadMatrices] = {}
        self._embedding = self._read_embedding()
        self.layers = (Layer * spec.num_layers)()
        self._experts = [(Expert * len(spec.layer(index).experts))() for index in range(spec.num_layers)]
        for index, layer in enumerate(self.layers):
            self._fill_layer(layer, spec.layer(index), index)
            self._fill_experts(layer, spec.layer(index), self._experts[index])
            layer.window = spec.windows[index] or 0
            if spec.activation == "xielu":
                layer.xielu = self._xielu(spec.layer(index).activation)
        self.model = self._make_model()

    def _read_embedding(self) -> torch.Tensor:
        """The embedding in a type that the kernels read: mapped, or else no larger than it is stored."""
        stored = self._checkpoint[self.spec.embedding]
        is_rounded = stored.dtype == torch.float16 and self.format is not Format.FLOAT32
        return readable(stored.bfloat16() if is_rounded else stored)

    def quantised(self) -> dict[str, Callable[[], torch.Tensor]]:
        """The dequantised values of quantised tensors by name, float32, in the shapes of the checkpoint.

        Includes those of the layers, and any others that the checkpoint stores in four bits only.
        """

        def unpacked(name: str, places: list[Placement]) -> torch.Tensor:
            values = torch.from_numpy(np.concatenate([self._packer.unpack(place) for place in places]))
            return self._turned(name, values)

        are_rounded = self.format.arithmetic is Format.INT8
        plain = {
            name: partial(unpacked, name, places)
            for name, places in self._quantised.items()
            if name != self.spec.head or self._checkpoint.has_four_bits(name)
        }
        return plain | {name: heads.weight for name, heads in self._heads.items() if are_rounded}

    def _make_model(self) -> Model:
        spec = self.spec
        head = self._matrix([spec.head], spec.hidden_size, spec.vocab_size, has_bias=spec.has_head_bias)
        self._place(head, [spec.head], [(spec.vocab_size, 0)])
        if not spec.is_tied:
            self._count()  # the embedding
        return Model(
            layers=ctypes.addressof(self.layers),
            head=head,
            screen=self._make_screen(),
            embedding=self._embedding.data_ptr(),
            positions=self._positions() if spec.num_positions else None,
            num_positions=spec.num_positions,
            embedding_norm=self._norm(spec.embedding_norm) if spec.modules.embedding_norm else None,
            slopes=self._slopes() if spec.family.has_slopes else None,
            final_norm=self._norm(spec.final_norm, divisor=spec.logits_scaling),  # equivalent to dividing the logits
            format=self.format.arithmetic,
            embedding_is_bf16=self._embedding.dtype == torch.bfloat16,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=max(spec.intermediate_size if spec.has_plain_mlps else 0, spec.shared_size),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            norm_eps=spec.norm_eps,
            has_layer_norms=spec.has_layer_norms,
            score_divisor=1 / spec.attention_multiplier,
            embedding_multiplier=self._embedding_multiplier(),
            attended_multiplier=spec.residual_multiplier * spec.multipliers.attended,
            space_multiplier=spec.residual_multiplier * spec.multipliers.space,
            gated_multiplier=spec.residual_multiplier * spec.multipliers.gated,
            score_cap=spec.score_cap or 0.0,
            logit_cap=spec.logit_cap or 0.0,
            qkv_limit=spec.qkv_limit or 0.0,
            query_growth=spec.query_growth,
            query_growth_span=spec.query_growth_span,
            activation=Activation[spec.activation.upper()],
            has_gates=spec.has_gates,
            is_parallel=spec.is_parallel,
            gate_slope=spec.gate_slope,
            gate_limit=spec.gate_limit,
            num_experts=spec.num_experts,
            experts_per_token=spec.experts_per_token,
            expert_size=spec.expert_size,
            num_expert_groups=spec.num_expert_groups,
            num_chosen_groups=spec.num_chosen_groups,
            num_group_tops=spec.num_group_tops,
            norms_expert_weights=spec.norms_expert_weights,
            has_sigmoid_routers=spec.has_sigmoid_routers,
            expert_multiplier=spec.expert_multiplier,
            gates_shared_expert=spec.gates_shared_expert,
            norms_whole_queries=spec.norms_whole_queries,
            rotary_dim=spec.rotary_dim,
            turns_neighbours=spec.turns_neighbours,
            norms_turned_heads=spec.norms_turned_heads,
            gates_outputs=spec.gates_outputs,
            num_taps=spec.num_taps,
            delta=DeltaShape(*(getattr(spec.delta, name) for name in _DELTA_SIZES if spec.delta)),
            space=StateSpaceShape(*(getattr(spec.space, name) for name in _SPACE_SIZES if spec.space)),
            latent=latent_shape(spec.latent),
        )

    def _make_screen(self) -> Screen:
        """The head again in eight bits if that makes greedy steps faster, otherwise nothing."""
        spec, format_ = self.spec, self._format_of(self.spec.head)
        if not has_screen(spec, format_):
            return Screen()
        matrix = new_matrix(self._arena, Format.INT8, spec.hidden_size, spec.vocab_size, has_bias=False)
        limits = self._arena.floats(padded(spec.vocab_size))  # instead of biases
        screen = Screen(matrix, limits.ctypes.data)
        if self._arena.is_filled:
            return screen
        limits[spec.vocab_size :] = np.inf  # no tokens
        stored = self._checkpoint[spec.head]
        weights = readable(stored.bfloat16() if format_ is Format.BFLOAT16 else stored)  # as the head has them
        place, is_bf16 = Placement(matrix, spec.vocab_size), weights.dtype == torch.bfloat16
        self._packer.pack_screen(weights.data_ptr(), place, limits, is_bf16=is_bf16)
        return screen

    def _xielu(self, module: str) -> Xielu:
        values = {name: self._checkpoint[f"{module}.{name}"].float() for name in XIELU_SHAPES}
        for _ in values:
            self._count()
        above, below = (torch.nn.functional.softplus(values[name]) for name in ("alpha_p", "alpha_n"))
        return Xielu(float(above), float(values["beta"] + below), float(values["beta"]))

    def _positions(self) -> int:
        """Store the table of learned positions, [positions][hidden_size], each padded, and return the address."""
        table = self._checkpoint[self.spec.positions].float()[self.spec.family.first_position :]
        width = padded(self.spec.hidden_size)
        return self._keep(torch.nn.functional.pad(table, (0, width - table.shape[1])).numpy())

    def _slopes(self) -> int:
        """Store by how much a score of each head falls with each position, and return the address.

        Source: ALiBi, Press et al. 2022, "Train short, test long", and its code for numbers that are no powers of two.
        """
        count = self.spec.num_heads
        whole = 1 << (count.bit_length() - 1)
        halves = 2.0 ** (-8 / whole * np.arange(1, whole + 1)), 2.0 ** (-4 / whole * np.arange(1, 2 * whole, 2))
        return self._store(np.concatenate(halves)[:count].astype(np.float32), count)

    def _embedding_multiplier(self) -> float:
        multiplier = self.spec.embedding_multiplier
        if self.format is Format.FLOAT32 or not self.spec.rounds_embedding_multiplier:
            return multiplier
        return float(torch.tensor(multiplier, dtype=torch.bfloat16))

    def _fill_layer(self, layer: Layer, names: LayerTensors, index: int) -> None:
        spec = self.spec
        if spec.attends[index]:
            has_biases = spec.has_qkv_bias, spec.has_output_bias
            self._fill_mixer(layer, names, spec.qkv_parts, spec.attended_size, has_biases)
            self._fill_attention(layer, names)
        if spec.is_recurrent[index]:
            self._fill_recurrent(layer, names)
        for mlp, size in spec.mlps(names):
            if mlp is names:  # the others are routed experts
                self._fill_mlp(layer, names, size)
        if spec.has_pre_norms:
            layer.attention_norm = self._norm(names.attention_norm)
            is_shared = names.mlp_norm == names.attention_norm
            layer.mlp_norm = layer.attention_norm if is_shared else self._norm(names.mlp_norm)
        if spec.has_post_norms:
            layer.attended_norm = self._norm(names.attended_norm)
            layer.gated_norm = self._norm(names.gated_norm)

    def _fill_recurrent(self, layer: Layer, names: LayerTensors) -> None:
        spec, delta = self.spec, self.spec.delta
        if spec.space is not None:
            self._fill_space(layer.space, names.space, spec.space)
        elif delta is not None:
            self._fill_mixer(layer, names, delta.inputs, delta.num_outputs, (False, False))
            self._fill_delta(layer.delta, names.delta, delta)
        else:
            parts = [(spec.hidden_size, part * padded(spec.hidden_size)) for part in range(3)]
            self._fill_mixer(layer, names, parts, spec.hidden_size, (False, False))
            layer.convolution.taps = self._taps(names.convolution, padded(spec.hidden_size))

    def _fill_mixer(
        self,
        layer: Layer,
        names: LayerTensors,
        parts: Sequence[tuple[int, int]],
        num_found: int,
        has_biases: tuple[bool, bool],
    ) -> None:
        """Fill the projections before and after attention or a delta rule, whose output has ``num_found`` channels."""
        spec = self.spec
        num_outputs = max(first + size for size, first in parts)
        layer.qkv = self._matrix(names.qkv, spec.hidden_size, num_outputs, has_bias=has_biases[0])
        self._place(layer.qkv, names.qkv, parts)
        layer.output = self._matrix([names.output], num_found, spec.hidden_size, has_bias=has_biases[1])
        self._place(layer.output, [names.output], [(spec.hidden_size, 0)])

    def _fill_attention(self, layer: Layer, names: LayerTensors) -> None:
        if self.spec.has_qk_norm:
            layer.query_norm = self._norm(names.query_norm, size=self.spec.head_dim)
            layer.key_norm = self._norm(names.key_norm, size=self.spec.head_dim)
        if self.spec.has_sinks:
            layer.sinks = self._vector(names.sinks)
        if self.spec.latent is not None:
            self._fill_latents(layer, names.latent, self.spec.latent)

    def _fill_latents(self, layer: Layer, names: LatentTensors, latent: LatentSpec) -> None:
        if latent.query_rank:
            num_queries = self.spec.num_heads * latent.head_dim
            layer.latent.query_up = self._matrix([names.query_up], latent.query_rank, num_queries, has_bias=False)
            self._place(layer.latent.query_up, [names.query_up], [(num_queries, 0)])
            layer.latent.query_norm = self._vector(names.query_norm)
        layer.latent.norm = self._vector(names.norm)
        heads = HeadMatrices(latent, self.spec.num_heads, self._arena, self._packer, self.format.arithmetic)
        heads.attach(layer.latent)
        if not self._arena.is_filled:
            # Not in four bits: transposed, they would lose the groups in which a checkpoint has them.
            heads.pack(readable(whole_matrix(self._checkpoint, names.up, self._packer)))
        self._heads[names.up] = heads
        self._count()

    def _fill_delta(self, layer: DeltaLayer, names: DeltaTensors, delta: DeltaSpec) -> None:
        behind = padded(delta.num_value_heads, LANES)
        layer.gates = new_matrix(self._arena, Format.FLOAT32, self.spec.hidden_size, 2 * behind, has_bias=False)
        self._place(layer.gates, names.gates, delta.gates(behind))
        layer.convolution = self._taps(names.convolution, delta.num_channels)
        layer.rates = self._keep(self._checkpoint[names.rates].float().exp().numpy())
        layer.rate_biases = self._vector(names.rate_biases)
        layer.norm = self._vector(names.norm)

    def _fill_space(self, layer: StateSpaceLayer, names: StateSpaceTensors, space: StateSpaceSpec) -> None:
        hidden, num_rows = self.spec.hidden_size, space.num_outputs + space.num_channels
        layer.projection = self._matrix([names.projection], hidden, num_rows, has_bias=space.has_bias)
        layer.dts = new_matrix(self._arena, Format.FLOAT32, hidden, space.num_heads, has_bias=space.has_bias)
        places = [Placement(layer.projection, *part) for part in space.inputs]
        self._place_each([names.projection], [*places, Placement(layer.dts, space.num_heads)])
        layer.output = self._matrix([names.output], space.num_outputs, hidden, has_bias=space.has_output_bias)
        self._place(layer.output, [names.output], [(hidden, 0)])
        # The convolution is linear, so the multipliers of its inputs can be those of its taps.
        factors = np.repeat(np.array(space.channel_multipliers, np.float32), space.channel_sizes)
        layer.convolution = self._taps(names.convolution, space.num_channels, factors)
        if space.has_convolution_bias:
            layer.convolution_biases = self._vector(names.convolution_biases)
        else:
            layer.convolution_biases = self._arena.floats(padded(space.num_channels)).ctypes.data  # zeros
        layer.rates = self._keep(self._checkpoint[names.rates].float().exp().numpy())
        layer.dt_biases = self._vector(names.dt_biases)
        layer.skips = self._vector(names.skips)
        if space.norm_size:
            layer.norm = self._vector(names.norm)

    def _fill_mlp(self, mlp: Layer | Expert, names: LayerTensors | ExpertTensors, size: int) -> None:
        hidden, has_bias = self.spec.hidden_size, self.spec.has_mlp_bias
        if self.spec.has_gates:
            mlp.gate_up = self._matrix(names.gate_up, hidden, 2 * padded(size), has_bias=has_bias)
            half = COLUMNS // 2  # of each block are gates
            self._place(mlp.gate_up, names.gate_up, [(size, 0), (size, half)], run=half)
        else:
            mlp.gate_up = self._matrix(names.gate_up, hidden, size, has_bias=has_bias)
            self._place(mlp.gate_up, names.gate_up, [(size, 0)])
        mlp.down = self._matrix([names.down], size, hidden, has_bias=has_bias)
        self._place(mlp.down, [names.down], [(hidden, 0)])

    def _fill_experts(self, layer: Layer, names: LayerTensors, experts: ctypes.Array[Expert]) -> None:
        spec = self.spec
        if not names.experts:
            return
        layer.router = new_matrix(
            self._arena, Format.FLOAT32, spec.hidden_size, spec.num_experts + 1, has_bias=spec.has_mlp_bias
        )
        self._place(layer.router, [names.router], [(spec.num_experts, 0)])
        if spec.has_router_biases:
            layer.router_biases = self._vector(names.router_biases)
        if spec.shared_size and spec.gates_shared_expert:
            self._place(layer.router, [names.shared_gate], [(1, spec.num_experts)])
        for expert, own_names in zip(experts, names.experts, strict=True):
            self._fill_mlp(expert, own_names, spec.expert_size)
        layer.experts = ctypes.addressof(experts)
