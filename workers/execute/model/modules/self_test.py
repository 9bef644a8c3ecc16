"""The guard at load time: refuses a model family whose paged forward pass differs from its plain one.

The flags of a transformers family do not tell whether it works on paged attention: some switch their attention only in
part or not at all, some keep a state per sequence, some have a mask that never reaches the attention function. So it is
tried, with random tokens, on a few separate pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .....protocol.arrays import Int32
from .....protocol.errors import ConfigError
from ...attention.forward_context import PagedLayers, attending, use_paged_attention
from ...attention.interface import AttentionForm, PagedAttention
from ..checkpoint.find import NO_MIXING
from ..guard.probe import NUM_PAGES, NUM_STATE_ROWS, Chunks, paged_rows, random_sequences
from ..guard.tolerances import ROUNDED, TOLERANCES, relative_difference
from ..lora import Adapter
from ..memory import available_bytes
from ..pool import LayerShape, allocate_pool
from ..states import SequenceStates, StateLayout
from .forward import PagedForward, RaggedForward
from .lora import TorchAdapters, merged
from .recurrent import StateProbe, cut_batches, remembering

_PAGE_SIZE = 4  # small, so that short sequences have several pages
_CHUNKS: Chunks = ((6, 1), (3, 8), (9, 2))
# Share of tokens that may differ by more in half precision, where rounding alone can route a token to another expert.
_OUTLIERS = 0.11


class LayerMemory(NamedTuple):
    """What the layers of a model store about previous tokens."""

    pages: dict[int, LayerShape]  # by layer number
    states: StateLayout  # of recurrent layers


@torch.inference_mode()
def switch_to_pages(
    model: PreTrainedModel,
    kernel: PagedAttention,
    *,
    max_model_len: int,
    adapters: TorchAdapters | None = None,
    has_eight_bit_pages: bool = False,
) -> LayerMemory:
    """Route the model's attention through pages and its recurrent layers through states, check that the results are
    the same, with each adapter too, and return what its layers store.

    Where 16-bit rounding has a large effect, such as on which expert a token is routed to, transformers differs as much
    between its own attention implementations. Then the check is repeated in float32, if there is memory for such a
    copy.

    Raises:
        ConfigError: this family cannot run on paged attention; the message says what was measured.
    """
    if not model._can_set_attn_implementation():
        raise ConfigError(f"{_family(model)} does not let its attention be replaced", param="model")
    recurrent = cut_batches(model)
    if _has_unaligned_experts(model):
        model.set_experts_implementation("eager")  # one after the other
    # Two, since either may be inaccurate: some versions of sdpa omit a soft cap, and eager rounds more in bfloat16.
    plain = (model.config._attn_implementation, "eager")
    attempt = partial(_try, model, kernel, recurrent, max_model_len, adapters, plain, has_eight_bit_pages)
    memory, why_not = attempt()
    if why_not and model.dtype != torch.float32 and _has_room_for_float32(model):
        with _in_float32(model):
            _, why_not = attempt()
    if why_not:
        raise ConfigError(why_not, param="model")
    return memory


def _has_unaligned_experts(model: PreTrainedModel) -> bool:
    """Whether rows of a layer's stacked experts are no multiples of 16 bytes, which torch's product of all experts at
    once refuses.
    """
    stacks = (weight for name, weight in model.named_parameters() if ".experts." in name and weight.dim() == 3)
    return any(size * stack.element_size() % 16 for stack in stacks for size in stack.shape[1:])


def _try(
    model: PreTrainedModel,
    kernel: PagedAttention,
    recurrent: Sequence[nn.Module],
    max_model_len: int,
    adapters: TorchAdapters | None,
    implementations: tuple[str, ...],  # of plain attention
    has_eight_bit_pages: bool,
) -> tuple[LayerMemory, str]:
    """Return what the layers store, and how the logits differ, if they do; raise other reasons to refuse the model."""
    forward = RaggedForward(model)
    sequences = random_sequences(model.config.get_text_config().vocab_size, _CHUNKS)
    cases: list[Adapter | None] = [None, *(adapters.adapters if adapters else ())]
    with _refusing(model):
        plain = [[_plain_logits(forward, sequences, name, case) for name in implementations] for case in cases]
        use_paged_attention(model)
        probe, state_probe = _probe(forward, recurrent, has_eight_bit_pages=has_eight_bit_pages)
        _check_windows(model, probe.windows, max_model_len)
        caches = allocate_pool(probe.shapes, NUM_PAGES, page_size=_PAGE_SIZE, device=forward.device)
        states = SequenceStates(state_probe.layout, NUM_STATE_ROWS, forward.device) if recurrent else None
        paged = PagedForward(model, PagedLayers(kernel, caches), adapters=adapters, states=states)
        found = [_paged_logits(paged, sequences, number) for number in range(len(cases))]
    limit = ROUNDED if has_eight_bit_pages else TOLERANCES[model.dtype]
    reasons = [
        _why_different(model, expected, said, "" if case is None else f" with the adapter {case.name!r}", limit)
        for case, expected, said in zip(cases, plain, found, strict=True)
    ]
    return LayerMemory(probe.shapes, state_probe.layout), next(filter(None, reasons), "")


def _has_room_for_float32(model: PreTrainedModel) -> bool:
    """Whether there is memory for an extra float32 copy plus a quarter for computing. False on ranks: none sees all."""
    weights: list[torch.Tensor] = list(model.parameters())
    if any(isinstance(weight, DTensor) for weight in weights):
        return False
    return available_bytes(model.device) > 5 * sum(weight.numel() for weight in weights)


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Within this block, the model has float32 copies of its tensors."""

    def tensors() -> dict[str, torch.Tensor]:  # by name, as a weight exchanged meanwhile is another object
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    kept = {name: tensor.data for name, tensor in tensors().items() if tensor.dtype == model.dtype}
    try:
        for name, tensor in tensors().items():
            if name in kept:
                tensor.data = kept[name].float()
        yield
    finally:
        for name, tensor in tensors().items():
            if name in kept:
                tensor.data = kept[name]


class _Probe:
    """A ``LayerAttention`` that computes nothing but records what each layer requests."""

    def __init__(self, *, has_eight_bit_pages: bool) -> None:
        self._has_eight_bit_pages = has_eight_bit_pages
        self.num_calls = 0
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        self.num_calls += 1
        dtype = torch.int8 if self._has_eight_bit_pages else key.dtype
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], dtype)
        self.windows[layer] = form.sliding_window
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _probe(
    forward: RaggedForward, recurrent: Sequence[nn.Module], *, has_eight_bit_pages: bool
) -> tuple[_Probe, StateProbe]:
    """Record what the layers request in one step. Each must request pages, a state or both, and each only once."""
    probe, state_probe = _Probe(has_eight_bit_pages=has_eight_bit_pages), StateProbe()
    two = torch.arange(2, device=forward.device)
    with attending(probe), remembering(state_probe):
        forward(two, two, two)
    config = forward.model.config.get_text_config()
    num_layers, types = config.num_hidden_layers, getattr(config, "layer_types", None) or ()
    asking = {*probe.shapes, *(int(module.layer_idx) for module in recurrent)}  # type: ignore[arg-type]
    idle = {layer for layer, layer_type in enumerate(types) if layer_type in NO_MIXING}
    all_ask = asking | idle == set(range(num_layers))
    if not (all_ask and probe.num_calls == len(probe.shapes) and sorted(state_probe.calls) == [*range(len(recurrent))]):
        raise ConfigError(
            f"{_family(forward.model)} calls the attention function {probe.num_calls} times in a step "
            f"and has {num_layers} layers, {len(recurrent)} recurrent: the others do not use it",
            param="model",
        )
    return probe, state_probe


def _check_windows(model: PreTrainedModel, windows: dict[int, int | None], max_model_len: int) -> None:
    """Refuse a window that exists only in the (unused) mask: it would matter in longer sequences than the test's."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if not window or window >= max_model_len or getattr(text, "use_sliding_window", True) is False:
        return
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * len(windows)
    for layer, layer_type in enumerate(types):
        if layer_type == "sliding_attention" and windows.get(layer) is None:
            raise ConfigError(
                f"{_family(model)} has a sliding window of {window} tokens that layer {layer} does not pass on; "
                f"it can run with max_model_len up to {window}",
                param="max_model_len",
            )


def _plain_logits(
    forward: RaggedForward, sequences: list[Int32], implementation: str, adapter: Adapter | None
) -> torch.Tensor:
    """Logits [tokens, V] by one of transformers' attention implementations, with each sequence computed separately."""
    forward.model.set_attn_implementation(implementation)
    logits = []
    with nullcontext() if adapter is None else merged(forward.model, adapter):
        for sequence in sequences:
            token_ids = torch.from_numpy(sequence).to(forward.device)
            positions = torch.arange(len(sequence), device=forward.device)
            logits.append(forward(token_ids, positions, positions))
    return torch.cat(logits)


def _paged_logits(forward: PagedForward, sequences: list[Int32], adapter: int) -> torch.Tensor:
    """Compute the same logits in two ragged steps, the second of which mixes decode and prefill."""
    adapters = np.full(len(sequences), adapter, np.int32)
    return paged_rows(
        lambda inputs: forward(replace(inputs, adapters=adapters)), sequences, _CHUNKS, page_size=_PAGE_SIZE
    )


def _why_different(
    model: PreTrainedModel, plain: list[torch.Tensor], paged: torch.Tensor, case: str, limit: float
) -> str:
    """How the paged logits [tokens, V] differ; empty if they match one of the plain ones up to ``limit``, see
    ``relative_difference``.
    """
    outliers = 0.0 if model.dtype == torch.float32 else _OUTLIERS
    difference = min(relative_difference(paged, logits, outliers) for logits in plain)
    if difference <= limit:
        return ""
    return (  # NaN is refused too
        f"{_family(model)}{case} is computed wrongly on paged attention: its logits differ by {difference:.2g} "
        f"of the greatest from the plain forward pass, the limit is {limit:.2g}"
    )


@contextmanager
def _refusing(model: PreTrainedModel) -> Iterator[None]:
    """Turn any exception of a family's forward pass on a ragged batch into a refusal."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{_family(model)} cannot run a ragged batch: {type(error).__name__}: {error}", param="model"
        ) from error


def _family(model: PreTrainedModel) -> str:
    return f"model family {model.config.model_type!r}"
