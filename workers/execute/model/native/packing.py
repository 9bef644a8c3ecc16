"""Tensors of a checkpoint become packed matrices and vectors of floats, each counted once it is done."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, repeat

import numpy as np
import numpy.typing as npt
import torch

from .....protocol.arrays import Float32
from ...kernels.matrix import COLUMNS, FourBits, Mxfp4, Packer, Placement, new_matrix
from ...kernels.memory import MakeArena, padded
from ...kernels.structures import Format, Matrix
from ..checkpoint.mapped import Checkpoint
from ..facts import Progress
from ..spec.decoder import DecoderSpec
from ..spec.layer_tensors import bias_of
from .sizes import packed_bytes

logger = logging.getLogger(__name__)


class Packing:
    """Memory for all weights of a decoder, and what fills it. Each tensor of the spec is counted once."""

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        library: ctypes.CDLL,
        format_: Format,
        num_threads: int,
        progress: Progress,
        importance: Mapping[str, Float32] | None,
        calibration_steps: int,
        make_arena: MakeArena,
    ) -> None:
        """``importance``: how much the inputs of matrices in four bits matter, by the name of their first weight, see
        ``Packer.pack``. ``calibration_steps``: how many steps will observe inputs before the weights are packed again;
        0: they are final. Where the memory of ``make_arena`` is filled, nothing is packed: these are the weights.
        """
        self.spec = spec
        self.format = format_
        self._checkpoint = checkpoint
        if checkpoint.quantised_format is not None:
            self._weight_format = checkpoint.quantised_format
            self._has_four_bits = dict(self._formats_of_experts())
        else:
            self._weight_format = self._suitable(format_)
        self._arena = make_arena(packed_bytes(spec, self._format_of))
        self._packer = Packer(library, num_threads)
        self._quantised: dict[str, list[Placement]] = {}
        self._importance = importance or {}
        # Sums of the squares of inputs, by the same names, if they are observed and weights were rounded to four bits.
        self.squares: dict[str, Float32] = {}
        self._observes = calibration_steps > 0 and self._weight_format is Format.INT4
        self._num_done, self._progress = 0, progress
        self.num_parts = len(spec.tensors())  # of the progress: packed tensors, and what follows if inputs are observed
        if self._observes:
            self.num_parts += calibration_steps + self.num_parts

    def _matrix(self, names: Sequence[str], num_inputs: int, num_outputs: int, *, has_bias: bool) -> Matrix:
        """Allocate the matrix for the weights of these names."""
        matrix = new_matrix(self._arena, self._format_of(*names), num_inputs, num_outputs, has_bias=has_bias)
        if self._observes and matrix.format == Format.INT4:
            self.squares[names[0]] = np.zeros(num_inputs, np.float32)
            matrix.squares = self.squares[names[0]].ctypes.data
        return matrix

    def _format_of(self, *names: str) -> Format:
        """The format of a matrix with the weights of these names."""
        if self._checkpoint.quantised_format is None:
            is_quantised = names != (self.spec.head,)
        else:
            has_four_bits = self._checkpoint.has_four_bits
            is_quantised = all(self._has_four_bits.get(name, has_four_bits(name)) for name in names)
        return self._weight_format if is_quantised else self.format.arithmetic

    def _suitable(self, format_: Format) -> Format:
        """The format in which plain weights are kept if this one is wanted."""
        if not self._has_groups_of_32():
            return format_
        if format_ is Format.INT4:
            return Format.FINE_INT4
        logger.info("the weights were rounded to four bits before: --quantization int4 keeps them in 5 bits each")
        return format_

    def _has_groups_of_32(self) -> bool:
        """Whether the weights were rounded to four bits in groups of 32 before, as in most GGUF files.

        In other groups of 32, or in groups of 64, hardly ever do only 16 different values occur.
        """
        layer = self.spec.layer(self.spec.num_layers // 2)
        names = [*layer.qkv, *layer.gate_up, layer.output, layer.down]
        # Each is read once: it may be computed at every read.
        tensors = [self._turned(name, self._checkpoint[name]) for name in names if name in self._checkpoint]

        def share(size: int) -> float:
            """Of the groups that have at most 16 values."""
            counts = [num_values(tensor, size) for tensor in tensors]
            return float(np.mean(np.concatenate(counts) <= 16)) if counts else 0.0

        return share(32) > 0.5 > share(64)

    def _formats_of_experts(self) -> Iterator[tuple[str, bool]]:
        """Yield the names of the weights of experts, and whether they are kept in four bits.

        All experts of a layer read the same rows, which have one form. The shared expert reads these, or rows for eight
        bits.
        """
        has_four_bits = self._checkpoint.has_four_bits
        for index in range(self.spec.num_layers):
            names = self.spec.layer(index)
            ups = [name for expert in names.experts for name in expert.gate_up]
            downs = [expert.down for expert in names.experts]
            for group in (ups, downs):
                yield from zip(group, repeat(all(map(has_four_bits, group))))
            if ups:
                yield from zip(names.gate_up, repeat(all(map(has_four_bits, [*ups, *names.gate_up]))))

    def _place(
        self, matrix: Matrix, names: Sequence[str], parts: Sequence[tuple[int, int]], *, run: int = COLUMNS
    ) -> None:
        """Pack tensors into columns of the matrix, and their biases if it has one.

        ``parts`` are pairs (number of rows, first column). Each part is a tensor, or all of them form one.
        """
        self._place_each(names, [Placement(matrix, *part, run) for part in parts])

    def _place_each(self, names: Sequence[str], places: Sequence[Placement]) -> None:
        """Pack tensors into these places, or the rows of one tensor one after another."""
        if Format(places[0].matrix.format).arithmetic is Format.INT8:
            of_each = [list(places)] if len(names) == 1 else [[place] for place in places]
            self._quantised |= dict(zip(names, of_each, strict=True))
        if self._arena.is_filled:
            self._count(len(names) * (2 if places[0].matrix.bias else 1))
        else:
            self._pack_each(names, places)

    def _pack_each(self, names: Sequence[str], places: Sequence[Placement]) -> None:
        sizes = [place.num_outputs for place in places]
        for source, place in zip(self._read_weights(names, sizes), places, strict=True):
            if isinstance(source, FourBits) and place.matrix.format != self._weight_format:
                weights = source.floats(self._weight_format)
                self._packer.pack(weights.ctypes.data, place, is_bf16=False)
            elif isinstance(source, FourBits):
                self._packer.pack_int4(source, place)
            elif isinstance(source, Mxfp4):
                self._packer.pack_mxfp4(source, place)
            else:
                usable = readable(source)
                is_bf16, importance = usable.dtype == torch.bfloat16, self._importance.get(names[0])
                self._packer.pack(usable.data_ptr(), place, is_bf16=is_bf16, importance=importance)
        if places[0].matrix.bias:
            for source, place in zip(self._read([bias_of(name) for name in names], sizes), places, strict=True):
                bias = (ctypes.c_float * (COLUMNS * place.matrix.num_blocks)).from_address(place.matrix.bias)
                whole, rest = np.divmod(np.arange(len(source)), place.run)
                np.frombuffer(bias, np.float32)[place.first + whole * COLUMNS + rest] = source.float().numpy()

    def _read_weights(self, names: Sequence[str], sizes: Sequence[int]) -> Iterator[torch.Tensor | FourBits | Mxfp4]:
        """Like ``_read``, but yields weights in four bits if stored so."""
        are_merged = len(names) < len(sizes)
        for name in names:
            if not self._checkpoint.has_four_bits(name):
                yield from self._read([name], sizes if are_merged else sizes[:1])
                continue
            stored = self._checkpoint.four_bits(name)
            cuts = list(accumulate(sizes))[:-1] if are_merged else []
            yield from map(type(stored), *(np.split(part, cuts) for part in stored))
            self._count()

    def _read(self, names: Sequence[str], sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield tensors with ``sizes`` rows, or one tensor split into these. Each tensor is counted once processed."""
        for name in names:
            tensor = self._turned(name, self._checkpoint[name])
            yield from [tensor] if len(names) == len(sizes) else torch.split(tensor, list(sizes))
            self._count()

    def _turned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A matrix as [outputs, inputs] if it is given as stored, and the other way round."""
        is_turned = self.spec.family.is_transposed and tensor.dim() == 2 and name != self.spec.head
        return tensor.T if is_turned else tensor

    def _norm(self, name: str, *, size: int | None = None, divisor: float = 1.0) -> int:
        """Store the weights of a norm, and its biases behind them if the model has layer norms; return the address.

        ``size`` is that of the norm, which needs as many weights even if the model has none; of hidden states if None.
        """
        if self.spec.has_norm_weights:
            address = self._vector(name, offset=self.spec.norm_offset, divisor=divisor)
        else:
            size = size or self.spec.hidden_size
            address = self._store(1 / divisor, size)
        if self.spec.has_norm_biases:
            self._vector(bias_of(name), divisor=divisor)
        elif self.spec.has_layer_norms:
            self._arena.floats(padded(self.spec.hidden_size))  # zeros
        return address

    def _vector(self, name: str, *, offset: float = 0.0, divisor: float = 1.0) -> int:
        """Store ``(x + offset) / divisor`` of a tensor x as a padded vector of floats and return the address."""
        values: npt.NDArray[np.float32] = self._checkpoint[name].float().numpy()
        return self._keep((values + np.float32(offset)) / np.float32(divisor))

    def _taps(self, name: str, width: int, factors: npt.NDArray[np.float32] | float = 1.0) -> int:
        """Store the taps of a convolution times ``factors`` [channels], [taps][width], and return the address."""
        taps = factors * self._checkpoint[name].float()[:, 0].T.numpy()
        return self._keep(np.pad(taps, ((0, 0), (0, width - taps.shape[1]))))

    def _keep(self, values: npt.NDArray[np.float32]) -> int:
        """Store values computed from a tensor as contiguous padded floats and return the address."""
        address = self._store(values.ravel(), values.size)
        self._count()
        return address

    def _store(self, values: npt.NDArray[np.float32] | float, count: int) -> int:
        vector = self._arena.floats(padded(count))
        if not self._arena.is_filled:
            vector[:count] = values
        return vector.ctypes.data

    def _count(self, num_tensors: int = 1) -> None:
        self._num_done += num_tensors
        self._progress(self._num_done, self.num_parts)


def num_values(weights: torch.Tensor, size: int) -> npt.NDArray[np.int64]:
    """How many different values each group of inputs has, in a few outputs; all of them if groups do not fit."""
    rows = weights[:4].float().numpy()
    if rows.ndim != 2 or rows.shape[1] % size:
        return np.full(1, size)
    groups = np.sort(rows.reshape(-1, size))
    changes: npt.NDArray[np.int64] = np.count_nonzero(np.diff(groups), axis=1)
    return changes + 1


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if the kernels can read its type and layout, otherwise a copy that they can read."""
    return (tensor if tensor.dtype in (torch.bfloat16, torch.float32) else tensor.float()).contiguous()
