"""A checkpoint's weights as a transformers model, and what the rest of the pipeline must know about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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

from ....protocol.errors import ConfigError
from .checkpoint import check_layer_types, check_weights, context_limit, read_config
from .facts import ModelFacts, Progress
from .group import ALONE, Group
from .text_part import RENAMINGS, text_config


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
    """The causal language model in a local checkpoint directory, in evaluation mode on ``device``.

    Of a ``group`` each rank loads its own shard, and all must call this.

    Raises:
        ConfigError: something is missing, damaged or not known.
    """
    whole = config = read_config(folder)
    if type(text := text_config(whole)) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = text  # eyes and ears would take memory for nothing
    check_layer_types(config)
    check_weights(folder)
    with _reporting(progress), _quiet() if config is not whole else nullcontext():
        model: Any = _read_weights(folder, config, dtype, group)
    return LoadedModel(model.to(device), _facts(model, tokenizer))


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers says nothing of tensors that it finds and does not need."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _read_weights(folder: Path, config: PretrainedConfig, dtype: str, group: Group) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=RENAMINGS if config.get_text_config() is config else None,
            **_of_group(group),
        )
    except Exception as error:  # foreign code of hundreds of families: whatever it raises, this model cannot be used
        raise ConfigError(f"cannot load {config.model_type!r} from {folder}: {error}", param="model") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers only warns, and leaves them random
        raise ConfigError(f"the weights in {folder} lack {len(missing)} tensors, {missing[0]!r} first", param="model")
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


def _of_group(group: Group) -> dict[str, DistributedConfig]:
    """What ``from_pretrained`` needs to load this rank's shard."""
    return {"distributed_config": DistributedConfig(tp_size=group.size)} if group.size > 1 else {}


def _facts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> ModelFacts:
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    return ModelFacts(
        model_type=model.config.model_type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=model.config.get_text_config().vocab_size,
        eos_token_ids=tuple(sorted(int(token_id) for token_id in eos_ids)),
        context_limit=context_limit(model.config),
    )


@contextmanager
def _reporting(progress: Progress) -> Iterator[None]:
    """Progress bars that transformers opens in this block call ``progress`` and draw nothing."""
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
