"""The guard of the compiled decoder: it serves only if its logits are those of transformers' plain forward pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..kernels.structures import Format
from ..step import StepInputs
from .decoder_spec import DecoderSpec, Unsupported
from .exchange import exchanged
from .expert_modules import FollowedChoices, attach_experts
from .lora import Adapter
from .memory import available_bytes
from .native_decoder import NativeDecoder
from .native_lora import PackedAdapters
from .native_weights import PackedWeights
from .ropes import find_ropes
from .torch_lora import merged

Int32 = npt.NDArray[np.int32]

PAGE_SIZE = 16
_CHUNKS = ((20, 1), (3, 31), (33, 2))  # tokens of each sequence in the first step and in the second
_PAGES = np.array([[8, 2, 5], [1, 9, 3], [6, 4, 7]], dtype=np.int32)  # out of order, and none shared
NUM_PAGES = _PAGES.size
NUM_POSITIONS = max(map(sum, _CHUNKS))
# Greatest difference allowed, relative to the greatest logit.
_TOLERANCES = {Format.FLOAT32: 1e-4, Format.BFLOAT16: 1e-1, Format.INT8: 0.5, Format.INT4: 0.5}
_MOST_ROUNDING = 0.5  # of transformers in bfloat16 against float32; a wrong kernel is beyond 1


def check_native(
    library: ctypes.CDLL,
    weights: PackedWeights,
    config: PretrainedConfig,
    checkpoint: Mapping[str, torch.Tensor],
    *,
    num_threads: int,
    packed: PackedAdapters | None = None,
    adapters: Sequence[Adapter] = (),
    eight_bit_pages: bool = False,
) -> float:
    """Run three short sequences in two ragged steps, without an adapter and with each; the greatest difference,
    relative to the greatest logit. Quantised weights count as what they stand for, keys and values in eight bits do
    not. ``packed`` are the ``adapters`` as the kernels have them.

    transformers takes the experts that the kernels chose: which of two is taken that are nearly alike depends on how
    numbers are rounded. That they are nearly alike is a part of what is compared.

    Where much hangs on the last bit of bfloat16, as behind sharp attention, transformers itself is far from what it
    says in float32. There the kernels have to be as near to that, if there is memory for such a copy of the model.

    Raises:
        Unsupported: the logits differ; the text says by how much.
    """
    sequences = random_sequences(weights.spec.vocab_size)
    oracle = _Oracle(config, checkpoint, weights, torch.float32 if weights.format is Format.FLOAT32 else torch.bfloat16)
    decoder = NativeDecoder(
        library,
        weights,
        [rope.tables(NUM_POSITIONS) for rope in find_ropes(config)],
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_threads=num_threads,
        adapters=packed,
        eight_bit_pages=eight_bit_pages,
    )
    greatest, limit = 0.0, _TOLERANCES[Format.INT8 if eight_bit_pages else weights.format]
    for number, adapter in enumerate((None, *adapters)):
        found, choices = _native_logits(decoder, weights.spec, sequences, number)
        plain, unlikelihood = oracle.logits(sequences, adapter, choices)
        difference = max(relative_difference(found, plain), unlikelihood)
        if difference > limit and weights.format is Format.BFLOAT16 and _has_room(checkpoint):
            exact, unlikelihood = _Oracle(config, checkpoint, weights, torch.float32).logits(
                sequences, adapter, choices
            )
            from_exact = max(relative_difference(found, exact), unlikelihood)
            if from_exact <= relative_difference(plain, exact) <= _MOST_ROUNDING:
                greatest = max(greatest, from_exact)
                continue
        if not difference <= limit:  # a not-a-number fails too
            name = "" if adapter is None else f"with the adapter {adapter.name!r} "
            text = f"{name}its logits differ from transformers' by {difference:.2g} of the greatest"
            raise Unsupported(f"{text}, the limit is {limit}")
        greatest = max(greatest, difference)
    return greatest


class _Oracle:
    """transformers' modules with the weights that the kernels have."""

    def __init__(
        self,
        config: PretrainedConfig,
        checkpoint: Mapping[str, torch.Tensor],
        weights: PackedWeights,
        dtype: torch.dtype,
    ) -> None:
        self._spec = weights.spec
        self._model = mapped_model(config, checkpoint, dtype)
        quantised = weights.quantised()

        def read(name: str) -> torch.Tensor:
            return (quantised[name]() if name in quantised else checkpoint[name]).to(dtype)

        attach_experts(self._model, weights.spec, read)
        modules = {name.removesuffix(".weight") for name in self._model.state_dict()}
        self._weights = {
            module: lambda _, unpack=unpack: unpack()
            for name, unpack in quantised.items()
            if (module := name.removesuffix(".weight")) in modules
        }

    def logits(
        self, sequences: list[Int32], adapter: Adapter | None, choices: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """Logits [tokens, V] by experts that others chose, and how unlikely its routers find these."""
        followed = FollowedChoices(choices, norms_weights=self._spec.norms_expert_weights)
        with ExitStack() as stack:
            stack.enter_context(exchanged(self._model, self._weights))
            stack.enter_context(followed.by(self._model, self._spec))
            if adapter is not None:
                stack.enter_context(merged(self._model, adapter))
            return plain_logits(self._model, sequences), followed.difference


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest one, in units of the greatest logit that was expected."""
    return float((logits - expected).abs().max() / expected.abs().max())


def _has_room(checkpoint: Mapping[str, torch.Tensor]) -> bool:
    """For the same weights in float32, twice: so much is left to others."""
    return available_bytes(torch.device("cpu")) > 8 * sum(tensor.numel() for tensor in checkpoint.values())


def mapped_model(
    config: PretrainedConfig, checkpoint: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """The model with these tensors as its weights, where they are: there is no second copy of those of ``dtype``."""
    attention = "sdpa" if getattr(config, "attn_logit_softcapping", None) is None else "eager"  # the former has no cap
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)  # type: ignore[no-untyped-call]
    known = model.state_dict()
    tensors = {name: checkpoint[name].to(dtype) for name in checkpoint if name in known}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    device = next(iter(tensors.values())).device
    # Frequencies and the factor of an embedding are no weights, and still meta.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    embedding = model.get_input_embeddings()
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=device)
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, sequences: list[Int32]) -> torch.Tensor:
    """Logits [tokens, V] of each sequence by itself."""
    batches = [torch.from_numpy(ids)[None].to(model.device, torch.int64) for ids in sequences]
    rows = [model(ids, use_cache=False).logits[0] for ids in batches]
    return torch.cat(rows).float()


def _native_logits(
    decoder: NativeDecoder, spec: DecoderSpec, sequences: list[Int32], adapter: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logits out of two ragged steps, and choices of experts [tokens, layers, experts of a token]."""
    adapters = np.full(len(sequences), adapter, np.int32) if adapter else None

    def run(inputs: StepInputs) -> torch.Tensor:
        choices = np.zeros((len(inputs.token_ids), spec.num_layers, spec.experts_per_token), np.int32)
        outputs = decoder.run(replace(inputs, adapters=adapters), choices=choices)
        # Beside the logits, so that they take the same way into the order of the tokens.
        return torch.from_numpy(np.concatenate([outputs.logits, choices.reshape(len(choices), -1)], axis=1))

    both = paged_logits(run, sequences)
    shape = (len(both), spec.num_layers, spec.experts_per_token)
    return both[:, : spec.vocab_size].float(), both[:, spec.vocab_size :].reshape(shape)


def paged_logits(run: Callable[[StepInputs], torch.Tensor], sequences: list[Int32]) -> torch.Tensor:
    """Logits [tokens, V] out of two ragged steps, which ``run`` computes on ``NUM_PAGES`` pages of ``PAGE_SIZE``."""
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in range(2):
        starts = [sum(chunks[:step]) for chunks in _CHUNKS]
        inputs = _step(sequences, starts, [chunks[step] for chunks in _CHUNKS])
        logits = run(inputs)
        for s, (start, end) in enumerate(pairwise(inputs.query_starts.tolist())):
            pieces[s].append(logits[start:end])
    return torch.cat([torch.cat(piece) for piece in pieces])


def _step(sequences: list[Int32], starts: list[int], lengths: list[int]) -> StepInputs:
    positions = [np.arange(a, a + n, dtype=np.int32) for a, n in zip(starts, lengths, strict=True)]
    slots = [_PAGES[s, p // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + p % PAGE_SIZE for s, p in enumerate(positions)]
    return StepInputs(
        token_ids=np.concatenate([ids[p] for ids, p in zip(sequences, positions, strict=True)]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array([p[-1] + 1 for p in positions], dtype=np.int32),
        block_tables=_PAGES,
        num_decodes=int(lengths[0] == 1),
        sample_rows=np.arange(sum(lengths), dtype=np.int32),
        sampled=(),
    )


def random_sequences(vocab_size: int) -> list[Int32]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, sum(chunks), dtype=np.int32) for chunks in _CHUNKS]
