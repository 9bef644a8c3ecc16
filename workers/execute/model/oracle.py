"""What a fast decoder is held against before it serves: transformers' modules with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..step import Int32
from .decoder_spec import DecoderSpec, Unsupported
from .exchange import exchanged
from .expert_modules import FollowedChoices, attach_experts
from .lora import Adapter
from .memory import available_bytes
from .torch_lora import merged

_MOST_ROUNDING = 0.5  # of transformers in 16 bits against float32; a wrong decoder is beyond 1


class Said(NamedTuple):
    """What a decoder makes of the tokens of some sequences."""

    logits: torch.Tensor  # float32 [tokens, V]
    choices: torch.Tensor  # of experts, int [tokens, layers, experts of a token]


class Oracle(NamedTuple):
    """transformers' modules with the weights of a decoder, in a type that is asked for."""

    config: PretrainedConfig
    spec: DecoderSpec
    tensors: Mapping[str, torch.Tensor]  # by the checkpoint's names; those of that type are used where they are
    made: Mapping[str, Callable[[], torch.Tensor]] = {}  # what takes the place of some, whenever it is used

    def check(
        self,
        said: Callable[[int], Said],
        sequences: list[Int32],
        adapters: Sequence[Adapter],
        *,
        dtype: torch.dtype,
        limit: float,
        may_round: bool = False,
        outliers: float = 0.0,
    ) -> float:
        """The greatest difference between logits, relative to the greatest logit. ``said(number)`` is what the decoder
        makes of the sequences with the adapter of this number, or without one: 0.

        transformers takes the experts that the decoder chose: which of two is taken that are nearly alike depends on
        how numbers are rounded. That they are nearly alike is a part of what is compared.

        Where much hangs on the last bit of 16, as behind sharp attention, transformers itself is far from what it says
        in float32. There a decoder that ``may_round`` has to be as near to that, if there is memory for such a copy.

        ``outliers`` is the share of tokens that may differ by more.

        Raises:
            Unsupported: the difference is above ``limit``; the text says by how much.
        """
        modules, greatest = _Modules(self, dtype, outliers), 0.0
        for number, adapter in enumerate((None, *adapters)):
            found = said(number)
            plain, difference = modules.differ(found, sequences, adapter)
            if difference > limit and may_round and self._has_room():
                exact, from_exact = _Modules(self, torch.float32, outliers).differ(found, sequences, adapter)
                if from_exact <= relative_difference(plain, exact, outliers) <= _MOST_ROUNDING:
                    greatest = max(greatest, from_exact)
                    continue
            if not difference <= limit:  # a not-a-number fails too
                name = "" if adapter is None else f"with the adapter {adapter.name!r} "
                text = f"{name}its logits differ from transformers' by {difference:.2g} of the greatest"
                raise Unsupported(f"{text}, the limit is {limit}")
            greatest = max(greatest, difference)
        return greatest

    def _has_room(self) -> bool:
        """For the same weights in float32, twice: so much is left to others."""
        device = self.tensors[self.spec.embedding].device
        return available_bytes(device) > 8 * sum(map(prod, self.spec.tensors().values()))


class _Modules:
    def __init__(self, oracle: Oracle, dtype: torch.dtype, outliers: float) -> None:
        self._spec = oracle.spec
        self._outliers = outliers
        self._model = mapped_model(oracle, dtype)

        def read(name: str) -> torch.Tensor:
            return (oracle.made[name]() if name in oracle.made else oracle.tensors[name]).to(dtype)

        attach_experts(self._model, oracle.spec, read)
        modules = {name.removesuffix(".weight") for name in self._model.state_dict()}
        self._weights = {
            module: lambda _, make=make: make()
            for name, make in oracle.made.items()
            if (module := name.removesuffix(".weight")) in modules
        }

    def differ(self, found: Said, sequences: list[Int32], adapter: Adapter | None) -> tuple[torch.Tensor, float]:
        """Logits [tokens, V], and the relative difference of what was found from these, or from these choices."""
        followed = FollowedChoices(found.choices, norms_weights=self._spec.norms_expert_weights)
        with ExitStack() as stack:
            stack.enter_context(exchanged(self._model, self._weights))
            stack.enter_context(followed.by(self._model, self._spec))
            if adapter is not None:
                stack.enter_context(merged(self._model, adapter))
            plain = _plain_logits(self._model, sequences).to(found.logits.device)
        return plain, max(relative_difference(found.logits, plain, self._outliers), followed.difference)


def relative_difference(logits: torch.Tensor, expected: torch.Tensor, outliers: float = 0.0) -> float:
    """The greatest one, in units of the greatest logit that was expected, but for that share of rows [tokens, V]."""
    rows = (logits - expected).abs().amax(dim=-1)
    greatest = rows.sort(descending=True).values[int(outliers * len(rows))]
    return float((greatest + 0 * rows.sum()) / expected.abs().max())  # no number where any row has one that is none


def mapped_model(oracle: Oracle, dtype: torch.dtype) -> PreTrainedModel:
    """The model with these tensors as its weights, where they are: there is no second copy of those of ``dtype``.

    In place of those that are made there is nothing.
    """
    config = oracle.config
    # The attention of torch has no cap, and no sinks: models with these do not support it.
    has_cap = getattr(config, "attn_logit_softcapping", None) is not None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    attention = "sdpa" if model_class._supports_sdpa and not has_cap else "eager"
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)  # type: ignore[no-untyped-call]
    known = model.state_dict()
    tensors = {
        name: oracle.tensors[name].to(dtype) for name in oracle.tensors.keys() & known.keys() - oracle.made.keys()
    }
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
def _plain_logits(model: PreTrainedModel, sequences: list[Int32]) -> torch.Tensor:
    """Logits [tokens, V] of each sequence by itself."""
    batches = [torch.from_numpy(ids)[None].to(model.device, torch.int64) for ids in sequences]
    rows = [model(ids, use_cache=False).logits[0] for ids in batches]
    return torch.cat(rows).float()
