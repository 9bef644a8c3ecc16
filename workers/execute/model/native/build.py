"""Builds a compiled decoder from weights and a description of their model, which native/proven.py determines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from ...kernels.compile import NoCompiler
from ...kernels.library import Kernels, load_library
from ...kernels.memory import Arena, MakeArena
from ...kernels.structures import LANES, Format
from ...weights_file import WeightsFile
from ..checkpoint.find import check_weights
from ..checkpoint.mapped import Checkpoint
from ..checkpoint.stored_weights import open_tensors
from ..facts import Progress
from ..guard.proof import Proof
from ..lora import Adapter
from ..pool import EIGHT_BIT_PAGES, LayerShape
from ..spec.decoder import DecoderSpec, Unsupported
from ..spec.delta import DeltaSpec
from ..spec.ropes import Rope
from ..spec.state_space import StateSpaceSpec
from ..threads import num_threads
from .calibration import NUM_STEPS, calibrate
from .calibration_store import CalibrationStore
from .decoder import NativeDecoder
from .latent import check_latents
from .lora import PackedAdapter, PackedAdapters
from .states import state_bytes
from .weights import PackedWeights

logger = logging.getLogger(__name__)

_TILE_TOKENS = 16  # tokens in a tile of a page, see kernels/src/pages.h
_MOST_TAPS = 8  # per convolution, see kernels/src/causal_convolution.h
FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
QUANTISED = {"int8": Format.INT8, "int4": Format.INT4}


@dataclass(frozen=True, slots=True)
class NativeModel:
    """Weights that passed the self-test. ``make_decoder(num_pages, max_model_len, num_state_rows, make_arena)`` adds
    pages and states, and ``pack_adapter`` prepares another adapter, or raises a ConfigError if that does not fit.
    """

    proof: Proof
    dtype: torch.dtype
    backend: str
    shapes: list[LayerShape]
    make_decoder: Callable[[int, int, int, MakeArena], NativeDecoder]
    pack_adapter: Callable[[Adapter], PackedAdapter]
    state_bytes: Callable[[int], int]  # number of sequences -> bytes of their states; 0: no layer has state
    why: str  # for the log: what runs where, and how much its logits differ from those of transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSetting:
    """How the kernels should run."""

    quantization: str  # "none" or a key of QUANTISED
    kernels: str = "auto"  # or a level of kernels/compile.py
    spare_cache: Path | None = None  # see kernels/compile.py
    page_size: int  # tokens
    has_eight_bit_pages: bool = False
    threads: int | None  # None: as many as pay off
    overlaps: bool = False  # whether steps run while no caller waits for them
    adapters: Sequence[Adapter] = ()
    progress: Progress  # counts packed tensors
    weights_file: WeightsFile | None = None  # where packed weights outlive this process

    @property
    def is_quantised(self) -> bool:
        return self.quantization in QUANTISED

    def num_threads(self, spec: DecoderSpec) -> int:
        return num_threads(self.threads, sum(map(prod, spec.tensors().values())))

    def pack(
        self, folder: Path, checkpoint: Checkpoint, spec: DecoderSpec, ropes: Sequence[Rope], dtype: torch.dtype
    ) -> tuple[Kernels, PackedWeights]:
        """Load the kernels, and pack the weights in their layout. ``checkpoint`` is that in ``folder``.

        Raises:
            Unsupported: the kernels do not support this model, or cannot be built here; the message says why.
            ConfigError: this machine cannot run the kernels that are wanted.
        """
        self._check(spec)
        try:
            library = load_library(self.kernels, spare_cache=self.spare_cache)
        except NoCompiler as error:
            raise Unsupported(str(error)) from error
        packed = partial(
            PackedWeights,
            spec,
            checkpoint,
            library=library,
            format_=self._format(checkpoint, spec, dtype),
            num_threads=self.num_threads(spec),
            make_arena=self.weights_file.arena if self.weights_file else Arena,
        )
        is_packed = self.weights_file is not None and self.weights_file.find(library.level)
        if is_packed or self.quantization != "int4" or checkpoint.quantised_format is not None:
            return library, packed(progress=self.progress)
        store = CalibrationStore(folder, library.level, self.spare_cache)
        return library, self._pack_by_importance(library, packed, store, ropes)

    def _check(self, spec: DecoderSpec) -> None:
        """
        Raises:
            Unsupported: the kernels do not support this model.
        """
        if self.page_size % _TILE_TOKENS:
            raise Unsupported(f"a page has {self.page_size} tokens, which is not a multiple of {_TILE_TOKENS}")
        if spec.head_dim % _TILE_TOKENS:
            raise Unsupported(f"its heads have {spec.head_dim} channels, which is not a multiple of {_TILE_TOKENS}")
        if spec.delta is not None:
            _check_delta(spec.delta)
        if spec.space is not None:
            _check_state_space(spec.space)
        if spec.latent is not None:
            check_latents(spec.latent, rotary_dim=spec.rotary_dim)
            if self.adapters:
                raise Unsupported("its heads share latents, for which the kernels have no adapters")

    def _pack_by_importance(
        self, library: Kernels, packed: Callable[..., PackedWeights], store: CalibrationStore, ropes: Sequence[Rope]
    ) -> PackedWeights:
        """Pack weights, which are rounded to four bits by the importance of their inputs. The first start measures the
        importance, with weights that were rounded without it.
        """
        if (found := store.find()) is not None:
            return packed(progress=self.progress, importance=found)
        start = time.monotonic()
        weights = packed(progress=self.progress, calibration_steps=NUM_STEPS)
        if not weights.squares:  # they were in four bits before
            return weights
        num_tensors, num_parts = len(weights.spec.tensors()), weights.num_parts

        def after(num_before: int) -> Progress:
            return lambda done, _: self.progress(num_before + done, num_parts)

        threads = self.num_threads(weights.spec)
        found = calibrate(library, weights, ropes, num_threads=threads, progress=after(num_tensors))
        del weights  # before there are others: both may not fit
        store.keep(found)
        logger.info("found out which weights matter most in four bits, once, in %.1f s", time.monotonic() - start)
        return packed(progress=after(num_tensors + NUM_STEPS), importance=found)

    def _format(self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype) -> Format:
        if (stored := checkpoint.quantised_format) is None:
            return QUANTISED.get(self.quantization) or FORMATS[dtype]
        stored = Format.INT4 if stored is Format.FINE_INT4 else stored  # each matrix has its own groups
        if self.quantization not in ("none", stored.name.lower()):
            raise Unsupported(f"its weights have four bits already, and quantization is {self.quantization}")
        if stored is Format.INT4:
            for names in map(spec.layer, range(spec.num_layers)):
                if any(map(checkpoint.has_four_bits, (names.router, *names.delta.gates))):
                    raise Unsupported("its routers have 4 bits; only the layers' matrices and the head can have 4 bits")
            if checkpoint.has_four_bits(spec.embedding):
                raise Unsupported("its embedding has 4 bits; only the layers' matrices and the head can have 4 bits")
        return stored

    def pack_adapters(self, weights: PackedWeights) -> PackedAdapters:
        """
        Raises:
            ConfigError: an adapter does not fit the model.
        """
        return PackedAdapters([PackedAdapter(weights.spec, adapter, weights.format) for adapter in self.adapters])

    def model(self, library: Kernels, weights: PackedWeights, adapters: PackedAdapters, proof: Proof) -> NativeModel:
        """Assemble the model described by ``proof``, whose weights have passed the self-test."""
        if self.weights_file is not None:
            self.weights_file.complete()
        spec, format_, threads = weights.spec, weights.format, self.num_threads(weights.spec)

        def make_decoder(
            num_pages: int, max_model_len: int, num_state_rows: int, make_arena: MakeArena
        ) -> NativeDecoder:
            return NativeDecoder(
                library, weights, [rope.tables(max_model_len) for rope in proof.ropes],
                num_pages=num_pages, page_size=self.page_size, num_threads=threads,
                num_state_rows=num_state_rows,
                # A failed step runs again from the states before it: no later step may have overwritten them.
                overlaps=self.overlaps and not any(spec.is_recurrent),
                adapters=adapters, eight_bit_pages=self.has_eight_bit_pages, make_arena=make_arena,
            )  # fmt: skip

        has_eight_bits = self.has_eight_bit_pages
        key_bytes, value_bytes = format_.cache_bytes(spec.head_dim, spec.value_dim, has_eight_bits=has_eight_bits)
        name = format_.name.lower() + EIGHT_BIT_PAGES * has_eight_bits
        return NativeModel(
            proof=proof,
            dtype=getattr(torch, proof.dtype),
            backend=f"native {name} on {library.level}",
            shapes=[LayerShape(spec.num_kv_heads, key_bytes, value_bytes, torch.uint8)] * spec.num_attending,
            make_decoder=make_decoder,
            pack_adapter=partial(PackedAdapter, spec, format_=format_),
            state_bytes=lambda num_rows: state_bytes(spec, num_rows=num_rows),
            why=f"{name} on {library.level}, {threads} threads; "
            f"its logits differ from transformers' by {proof.difference:.1g} of the greatest",
        )


def _check_delta(delta: DeltaSpec) -> None:
    _check_channels("delta rules", keys=delta.key_dim, values=delta.value_dim)
    if delta.num_value_heads % delta.num_key_heads:
        raise Unsupported(f"its delta rules have {delta.num_value_heads} heads, and keys for {delta.num_key_heads}")
    _check_taps(delta.conv_size)


def _check_state_space(space: StateSpaceSpec) -> None:
    _check_channels("state spaces", heads=space.head_dim, states=space.state_size, norms=space.norm_size)
    if space.num_heads % space.num_groups:
        raise Unsupported(f"its state spaces have {space.num_heads} heads in {space.num_groups} groups")
    _check_taps(space.conv_size)


def _check_channels(layers: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % LANES:
            raise Unsupported(f"{name} of its {layers} have {size} channels, which is not a multiple of {LANES}")


def _check_taps(count: int) -> None:
    if not 1 <= count <= _MOST_TAPS:
        raise Unsupported(f"its convolutions see {count} tokens, the limits are 1 and {_MOST_TAPS}")


def load_proven(folder: Path, proof: Proof, setting: NativeSetting) -> NativeModel:
    """Load a local checkpoint directory whose decoder was proven by an earlier start.

    Raises:
        Unsupported: the kernels can no longer be built.
        ConfigError: the weights are damaged, or an adapter does not fit them.
    """
    check_weights(folder)
    checkpoint = open_tensors(folder)
    library, weights = setting.pack(folder, checkpoint, proof.spec, proof.ropes, getattr(torch, proof.dtype))
    checkpoint.forget()
    return setting.model(library, weights, setting.pack_adapters(weights), proof)
