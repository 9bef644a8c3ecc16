"""What a driver writes to its run directory before the workers start, and what it finds there from an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError
from ..protocol.keys import OWN_KEYS_FILE, KeyFolder, make_own_keys
from ..protocol.model_card import CARD_FILE, ModelCard, Offer
from ..protocol.private_file import write_private
from ..protocol.run_dir import CONFIG_FILE, read_config
from ..protocol.tokenizer_files import FACTS_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from .journal_keeper import JournalKeeper
from .run_dir import RunDir


@contextmanager
def writing(run_dir: RunDir) -> Iterator[None]:
    """
    Raises:
        ConfigError: in place of any OSError: the folder cannot be written.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.message + run_dir.what_helps(error.__cause__), param=error.param) from error
    except OSError as error:
        text = f"the run directory {run_dir.path} cannot be written: {error.strerror}; choose another --run-dir"
        raise ConfigError(text + run_dir.what_helps(error), param="run_dir") from error


def prepare_run_dir(folder: Path, config: PipelineConfig, keeper: JournalKeeper) -> None:
    """Write the config, after checking what ran here before.

    Raises:
        ConfigError: the journal holds unanswered requests of another model, with other page or batch sizes, or for
            another adapter; or an adapter or the chat template cannot be read.
    """
    template = _read_chat_template(config.service.chat_template)
    adapters = {module.name: module.digest() for module in config.model.adapters}
    # A request records its own adapter. Without requests, the number of pages is determined anew, with the adapters.
    changes = _changes(folder, config, with_adapters=not keeper.num_unanswered)
    if changes is None or changes:
        _forget_model(folder, keeper, changes)
    keeper.claim_for(config.model.model, adapters)
    if adapters:
        _forget_adapters(folder, adapters)
    Offer(tuple(adapters)).publish(folder)
    if template is None:
        (folder / TEMPLATE_FILE).unlink(missing_ok=True)
    else:
        write_private(folder / TEMPLATE_FILE, template)
    write_private(folder / CONFIG_FILE, config.to_json())


def _read_chat_template(path: str | None) -> str | None:
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"chat_template {path!r} cannot be read: {why}", param="chat_template") from error


def check_trace(path: str | None) -> None:
    """
    Raises:
        ConfigError: the file cannot be written, which execute would not mind.
    """
    if path is None or Path(path).is_fifo():  # whose reader would take the end of this check for that of the trace
        return
    try:
        open(path, "ab").close()
    except OSError as error:
        raise ConfigError(f"the trace {path!r} cannot be written: {error.strerror}", param="trace") from error


def prepare_keys(folder: Path, config: PipelineConfig) -> None:
    """Keys for clients that can read the run directory, if clients need keys.

    Raises:
        ConfigError: the server's keys are missing, or others can read them.
    """
    if config.service.curve_keys is None:
        (folder / OWN_KEYS_FILE).unlink(missing_ok=True)
    else:
        make_own_keys(folder, KeyFolder(config.service.curve_keys))


def _changes(folder: Path, config: PipelineConfig, *, with_adapters: bool) -> list[str] | None:
    """The settings that requests depend on, as far as they differ from those of the pipeline that ran here before, or
    why that is unknown; None if none ran here.
    """
    try:
        before = read_config(folder)
    except FileNotFoundError:
        return None
    except ConfigError as error:
        return [error.message]
    model = before.model if with_adapters else replace(before.model, lora_modules=config.model.lora_modules)
    sections = ((model, config.model), (before.cache, config.cache), (before.scheduler, config.scheduler))
    return [
        f"{field.name} was {_shown(was)} and is {_shown(value)}"
        for old, new in sections
        for field in fields(old)
        if (was := getattr(old, field.name)) != (value := getattr(new, field.name))
    ]


def _shown(value: object) -> str:
    return "not set" if value is None else f"{value!r:.80}"


def _forget_model(folder: Path, keeper: JournalKeeper, changes: list[str] | None) -> None:
    count = keeper.num_unanswered
    if count and (folder / CARD_FILE).exists():
        advice = "start with the former settings and version to have them answered"
        reasons = f": {', '.join(changes)}; {advice}" if changes else ""
        text = f"{keeper.path} holds {count} unanswered requests of another configuration{reasons}"
        raise ConfigError(text, param="run_dir")
    for name in (CARD_FILE, FACTS_FILE, TOKENIZER_FILE):
        (folder / name).unlink(missing_ok=True)


def _forget_adapters(folder: Path, adapters: Mapping[str, str]) -> None:
    """Drop changed adapters from the card: execute would report them as changed during a restart."""
    if (card := ModelCard.read(folder)) is not None:
        same = {name: digest for name, digest in card.adapters.items() if adapters.get(name) == digest}
        replace(card, adapters=same).publish(folder)
