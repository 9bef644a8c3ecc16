"""Loading a checkpoint as a transformers model, and collecting what the rest of the pipeline must know about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from .....protocol.errors import ConfigError
from ..checkpoint.find import (
    check_layer_types,
    check_weights,
    context_limit,
    num_outputs,
    read_config,
    read_end_tokens,
)
from ..checkpoint.fp8_weights import Fp8Checkpoint, is_of_quantised
from ..checkpoint.stored_weights import kind_of, open_for_modules, read_settings
from ..checkpoint.text_part import RENAMINGS, text_config
from ..embeddings import may_lack_head
from ..facts import ModelFacts, Progress, end_tokens
from ..parallel.group import ALONE, Group
from .hidden_states import head_names, hidden_size


class LoadedModel(NamedTuple):
    model: PreTrainedModel
    facts: ModelFacts


def load_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: str,
    device: torch.device,
    progress: Progress,
    group: Group = ALONE,
) -> LoadedModel:
    """Load the causal language model in a local checkpoint directory to ``device``, in evaluation mode.

    In a ``group`` each rank loads its own shard, and all ranks must call this.

    Raises:
        ConfigError: something is missing, damaged or unknown.
    """
    whole = config = read_config(folder)
    check_layer_types(whole)
    ends = read_end_tokens(folder)
    check_weights(folder)
    tensors = open_for_modules(folder)
    is_read_plainly = tensors is not None or read_settings(folder) is None  # else only the whole config says how
    if is_read_plainly and type(text := text_config(whole)) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = text  # vision and audio towers would only waste memory
    with _reporting(progress), _quiet() if config is not whole else nullcontext():
        model, has_head = _read_weights(folder, config, dtype, group, tensors)
    on_device: Any = model.to(device)
    if ends is None:  # as transformers finds them in the config
        ends = model.generation_config.eos_token_id if model.generation_config else None
    return LoadedModel(on_device, _facts(model, end_tokens(tokenizer, ends), has_head=has_head))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings about tensors in the checkpoint that the model does not use."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _read_weights(
    folder: Path, config: PretrainedConfig, dtype: str, group: Group, tensors: Fp8Checkpoint | None
) -> tuple[PreTrainedModel, bool]:
    """Load the weights in ``folder``, or those in ``tensors`` instead if given; also says whether a head is there."""
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "use_safetensors": True,
        "local_files_only": True,
        "output_loading_info": True,
        "key_mapping": RENAMINGS if config.get_text_config() is config else None,
        **_of_group(group),
    }
    try:
        if tensors is None:
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)
        else:
            loaded = _from_tensors(folder, tensors, options)
    except Exception as error:  # third-party code for hundreds of families: whatever it raises, the model is unusable
        text = f"cannot load {config.model_type!r} from {folder}{_quantised(folder)}: {error}"
        raise ConfigError(text, param="model") from error
    model, report = loaded
    heads = head_names(model) if may_lack_head(folder) else set()
    missing = sorted(set(report["missing_keys"]) - heads)
    if missing:  # transformers only warns, and initialises them randomly
        raise ConfigError(f"the weights in {folder} lack {len(missing)} tensors, {missing[0]!r} first", param="model")
    if scales := sorted(name for name in report["unexpected_keys"] if is_of_quantised(name)):
        raise ConfigError(
            f"{len(scales)} tensors of quantised weights were not used, {scales[0]!r} first", param="model"
        )
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready, not heads & set(report["missing_keys"])


def _quantised(folder: Path) -> str:
    settings = read_settings(folder)
    return "" if settings is None else f", whose weights are quantised by {kind_of(settings)}"


def _from_tensors(folder: Path, tensors: Fp8Checkpoint, options: dict[str, Any]) -> tuple[PreTrainedModel, Any]:
    """Do what ``from_pretrained`` does, except that the weights are ``tensors``.

    If it saw that ``folder`` is quantised, it would read the weights in its own way, so that is hidden from it.
    """
    config = options["config"]
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    if options["dtype"] == "auto" and config.dtype is None:
        options = {**options, "dtype": torch.float32}
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = model_class.from_pretrained(
        None, state_dict={name: _Unread(tensors, name) for name in tensors}, **options
    )
    return model, report


@dataclass(frozen=True, slots=True)
class _Unread:
    """A lazily read tensor, with the interface of a safetensors slice that transformers expects."""

    tensors: Fp8Checkpoint
    name: str

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.tensors[self.name][place]

    def get_shape(self) -> list[int]:
        return list(self.tensors.shape(self.name))


def _of_group(group: Group) -> dict[str, DistributedConfig]:
    """Return the options that ``from_pretrained`` needs to load this rank's shard."""
    return {"distributed_config": DistributedConfig(tp_size=group.size)} if group.size > 1 else {}


def _facts(model: PreTrainedModel, eos_token_ids: tuple[int, ...], *, has_head: bool) -> ModelFacts:
    return ModelFacts(
        model_type=model.config.model_type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=num_outputs(model.config),
        eos_token_ids=eos_token_ids,
        context_limit=context_limit(model.config),
        hidden_size=hidden_size(model),
        has_head=has_head,
    )


@contextmanager
def _reporting(progress: Progress) -> Iterator[None]:
    """Make progress bars that transformers opens in this block call ``progress`` instead of drawing."""
    previous = transformers_logging.set_tqdm_hook(lambda _factory, args, kwargs: _Bar(progress, *args, **kwargs))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _ignore(*_: Any, **__: Any) -> None: ...


class _Bar:
    """The part of tqdm that transformers uses while it loads weights."""

    def __init__(self, progress: Progress, items: Iterable[Any] = (), *, total: int | None = None, **_: Any) -> None:
        self._progress = progress
        self._items = list(items)
        self._total = len(self._items) if total is None else total
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., None]:
        return _ignore  # close, set_description, ...

    def update(self, count: int = 1) -> None:
        self._done += count
        self._progress(self._done, self._total)
