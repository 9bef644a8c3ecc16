"""The reference for checking a fast decoder before it serves: transformers' modules with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .....protocol.arrays import Int32
from .....protocol.errors import ConfigError
from ..lora import Adapter
from ..memory import available_bytes, is_out_of_memory
from ..modules.exchange import exchanged
from ..modules.experts import FollowedChoices, attach_experts
from ..modules.lora import merged
from ..spec.decoder import DecoderSpec, Unsupported
from .tolerances import relative_difference


class _Rounding(NamedTuple):
    """What is accepted where transformers itself is inexact."""

    exact: torch.dtype  # what it is compared with
    most: float  # relative difference of transformers from that; wrong decoders exceed it
    factor: float  # by which a decoder may exceed transformers' difference

    def accepts(self, exact: _Found, own: float, limit: float) -> bool:
        """Whether the decoder, as compared in ``exact``, is about as close to the exact result as transformers, whose
        own difference is ``own``.

        Choices of experts may be somewhat worse than those of transformers' own routers: the worst of all tokens
        decides, and chance which of both has it.
        """
        may_choose = max(limit, _CHANCE * exact.of_others)
        is_close = exact.of_logits <= self.factor * own and exact.of_choices <= may_choose
        return is_close and max(own, exact.of_others) <= self.most


_CHANCE = 1.5
# In 16 bits, decoders keep more in float32 than transformers does. In float32, both round as often, in another order.
_ROUNDING_16 = _Rounding(torch.float32, 0.5, 1.0)
_ROUNDING = {
    torch.bfloat16: _ROUNDING_16,
    torch.float16: _ROUNDING_16,
    torch.float32: _Rounding(torch.float64, 1e-3, 4.0),
}

_NOT_COMPUTED = "transformers cannot compute it"


class DecoderOutputs(NamedTuple):
    """The outputs of a decoder for the tokens of some sequences."""

    logits: torch.Tensor  # float32 [tokens, V]
    choices: torch.Tensor  # chosen experts, int [tokens, layers, experts per token]

    def first(self, count: int) -> DecoderOutputs:
        """Those of the first ``count`` tokens."""
        return DecoderOutputs(self.logits[:count], self.choices[:count])


class _Found(NamedTuple):
    """How a decoder differs from transformers in one type."""

    plain: torch.Tensor  # transformers' logits [tokens, V]
    of_logits: float  # the greatest difference, relative to the greatest logit
    of_choices: float  # of experts, as are the following; see ``FollowedChoices``
    own_choices: torch.Tensor
    of_others: float

    @property
    def difference(self) -> float:
        return max(self.of_logits, self.of_choices)


class Oracle(NamedTuple):
    """transformers' modules with the weights of a decoder, in a requested dtype."""

    config: PretrainedConfig
    spec: DecoderSpec
    tensors: Mapping[str, torch.Tensor]  # by the checkpoint's names; not copied if of the requested dtype
    made: Mapping[str, Callable[[], torch.Tensor]] = {}  # computed substitutes for some of these, anew at each use

    def check(
        self,
        outputs_of: Callable[[int], DecoderOutputs],
        sequences: list[Int32],
        adapters: Sequence[Adapter],
        *,
        dtype: torch.dtype,
        limit: float,
        may_round: bool = False,
        is_finer: bool = False,
        outliers: float = 0.0,
    ) -> float:
        """Return the greatest difference between logits, relative to the greatest logit. ``outputs_of(number)`` are the
        decoder's outputs for the sequences with the adapter of this number, or without one if 0.

        transformers uses the experts that the decoder chose, since the choice between two nearly equal experts depends
        on rounding. That they are nearly equal is part of the check.

        Where rounding has a large effect, such as after sharp attention, transformers itself differs much from its own
        result in twice as many bits. Then a decoder that ``may_round`` passes if it is about as close to that one,
        provided that there is memory for such a copy. One that ``is_finer`` than transformers must always be as close
        to it for most tokens, see ``_check_usual``.

        ``outliers`` is the share of tokens that may differ by more.

        Raises:
            Unsupported: the difference exceeds ``limit``, and the message says by how much; or transformers fails.
        """
        modules, frugal, rounding = _Modules(self, dtype, outliers), None, _ROUNDING[dtype]
        greatest, count = 0.0, len(sequences[0])
        for number, adapter in enumerate((None, *adapters)):
            found, exact = outputs_of(number), None
            here = modules.differ(found, sequences, adapter)
            plain, difference = here.plain, here.difference
            is_accepted = difference <= limit  # NaN is not
            if not is_accepted and may_round and self._has_room(rounding.exact):
                others = here.own_choices
                exact = _Modules(self, rounding.exact, outliers).differ(found, sequences, adapter, others)
                if rounding.accepts(exact, relative_difference(plain, exact.plain, outliers), limit):
                    difference, is_accepted = exact.difference, True
            if not is_accepted:
                name = "" if adapter is None else f"with the adapter {adapter.name!r} "
                text = f"{name}its logits differ from transformers' by {difference:.2g} of the greatest"
                raise Unsupported(f"{text}, the limit is {limit}")
            if is_finer and self._has_room(rounding.exact):
                if exact is None:
                    frugal = frugal or _Modules(self._frugal(), rounding.exact, outliers)
                    exact = frugal.differ(found.first(count), sequences[:1], adapter)
                _check_usual(found.logits[:count], plain[:count], exact.plain[:count])
            greatest = max(greatest, difference)
        return greatest

    def _frugal(self) -> Oracle:
        """The same oracle, but its modules convert each matrix anew at each use instead of holding a converted copy."""
        read = {name: partial(self.tensors.__getitem__, name) for name in self.spec.matrices()}
        return self._replace(made={**read, **self.made})

    def _has_room(self, dtype: torch.dtype) -> bool:
        """Whether twice the size of the weights in this type is free: half of that is left to other processes."""
        device = self.tensors[self.spec.embedding].device
        return available_bytes(device) > 2 * dtype.itemsize * sum(map(prod, self.spec.tensors().values()))


class _Modules:
    def __init__(self, oracle: Oracle, dtype: torch.dtype, outliers: float) -> None:
        self._spec = oracle.spec
        self._outliers = outliers
        with refusing(_NOT_COMPUTED):
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

    def differ(
        self,
        found: DecoderOutputs,
        sequences: list[Int32],
        adapter: Adapter | None,
        others: torch.Tensor | None = None,
    ) -> _Found:
        """How ``found`` differs from the logits of transformers; ``others`` are other choices of experts."""
        followed = FollowedChoices(found.choices, others)
        with ExitStack() as stack:
            stack.enter_context(exchanged(self._model, self._weights))
            stack.enter_context(followed.by(self._model, self._spec))
            if adapter is not None:
                stack.enter_context(merged(self._model, adapter))
            stack.enter_context(refusing(_NOT_COMPUTED))
            plain = _plain_logits(self._model, sequences).to(found.logits.device)
        of_logits = relative_difference(found.logits, plain, self._outliers)
        return _Found(plain, of_logits, followed.difference, followed.own, followed.difference_of_others)


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Turn whatever is raised within into a refusal of the model, such as what transformers raises for a config with
    contradictions, which it only finds when it computes. Errors of the device itself pass through: after one, nothing
    else can run there either. So does a lack of its memory, which says nothing about the model: beside a process that
    is just being ended, a restart would go on with another backend.

    Raises:
        Unsupported: the message begins with ``reason``.
    """
    try:
        yield
    except (Unsupported, ConfigError, torch.AcceleratorError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Unsupported(f"{reason}: {type(error).__name__}: {error}") from error


def _check_usual(found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare logits that were found, and those of transformers, with ``exact`` ones, [tokens, V], by the median of
    tokens. A factor that is wrong by a few percent changes all logits, but none by as much as rounding changes some in
    other models.

    Raises:
        Unsupported: the logits that were found differ by more than those of transformers.
    """
    usual, limit = (_usual_difference(logits, exact) for logits in (found, plain))
    if usual > limit:
        dtype = str(exact.dtype).removeprefix("torch.")
        text = f"its logits usually differ by {usual:.2g} from transformers' in {dtype}"
        raise Unsupported(f"{text}, the limit is the {limit:.2g} by which transformers' own differ")


def _usual_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The median difference of rows [tokens, V], relative to the median size of the expected ones."""
    return float((logits - expected).norm(dim=-1).median() / expected.norm(dim=-1).median())


def mapped_model(oracle: Oracle, dtype: torch.dtype) -> PreTrainedModel:
    """The model with these tensors as its weights, in place: those of type ``dtype`` are not copied.

    Weights in ``oracle.made`` are left out.
    """
    config = oracle.config
    # torch's attention has neither a soft cap nor sinks, so models that have one of these do not support it.
    has_cap = getattr(config, "attn_logit_softcapping", None) is not None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    attention = "sdpa" if model_class._supports_sdpa and not has_cap else "eager"
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    known = model.state_dict()
    tensors = {
        name: oracle.tensors[name].to(dtype) for name in oracle.tensors.keys() & known.keys() - oracle.made.keys()
    }
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    device = next(iter(tensors.values())).device
    # Rotary frequencies, multipliers and the embedding scale are not weights, so they are still on the meta device.
    for name in ("rotary_emb", "pos_emb"):
        if (positions := getattr(model.base_model, name, None)) is not None:
            setattr(model.base_model, name, type(positions)(config).to(device))
    for layer in getattr(model.base_model, "layers", ()):
        if hasattr(getattr(layer, "mamba", None), "mup_vector"):
            layer.mamba.mup_vector = _state_space_multipliers(config).to(device)
    for module in model.modules():  # nor are the positions and masks that some families compute in each layer
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)) and not list(module.parameters(False)):
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
    embedding = model.get_input_embeddings()
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=device)
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


def _state_space_multipliers(config: PretrainedConfig) -> torch.Tensor:
    from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector  # here: few models need it

    vector: torch.Tensor = compute_mup_vector(config)
    return vector


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, sequences: list[Int32]) -> torch.Tensor:
    """Logits [tokens, V], with each sequence computed separately."""
    batches = [torch.from_numpy(ids)[None].to(model.device, torch.int64) for ids in sequences]
    rows = [model(ids, use_cache=False).logits[0] for ids in batches]
    logits = torch.cat(rows)
    return logits if logits.dtype == torch.float64 else logits.float()
