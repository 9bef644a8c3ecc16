"""Which numbers adapters get while others run, and what an execute does that cannot change them."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters import make_nominal_adapter
from triptych.protocol.config import PipelineConfig
from triptych.protocol.model_card import ModelCard
from triptych.protocol.private_file import write_private
from triptych.protocol.run_dir import ADAPT_FILE, CONFIG_FILE
from triptych.workers.execute import served_adapters
from triptych.workers.execute.hash_build import build_hash_runner
from triptych.workers.execute.served_adapters import ServedAdapters


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedAdapters:
    """Of an execute that has the adapters a, b and c, and loads at once."""
    monkeypatch.setattr(served_adapters, "start_thread", lambda thread: thread.run())
    config = PipelineConfig.from_options(model="hash-lm", num_pages=16)
    runner, card = build_hash_runner(config.model, config.cache, config.scheduler, run_dir=tmp_path)
    digests = {name: make_nominal_adapter(tmp_path / name).name for name in "abc"}
    return ServedAdapters(replace(card, adapters=digests), runner, tmp_path)


def tell(served: ServedAdapters, folder: Path, names: str, *, may_change: bool = True) -> None:
    """What a driver does, and execute between its steps, until it has answered."""
    modules = [f"{name}={make_nominal_adapter(folder / name)}" for name in names]
    config = PipelineConfig.from_options(model="hash-lm", lora_modules=modules)
    write_private(folder / CONFIG_FILE, config.to_json())
    write_private(folder / ADAPT_FILE, "")
    for _ in range(2):
        served.change_if_told(may_change=may_change)
    assert not (folder / ADAPT_FILE).exists()


def test_free_numbers_are_given_before_new_ones(served: ServedAdapters, tmp_path: Path) -> None:
    numbers = served.numbers
    for names, expected in (
        ("ac", {"a": 1, "c": 3}),
        ("cdef", {"c": 3, "d": 1, "e": 2, "f": 4}),
        ("", {}),
        ("fg", {"f": 1, "g": 2}),
    ):
        tell(served, tmp_path, names)
        assert numbers == expected
        card = ModelCard.read(tmp_path)
        assert card is not None
        assert list(card.adapters) == list(names)


@pytest.mark.parametrize("reason", ["a suspect runs", "the settings are damaged"])
def test_driver_is_answered_if_a_restart_has_to_do_it(
    served: ServedAdapters, tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "the settings are damaged":
        monkeypatch.setattr(served_adapters, "read_config", lambda folder: PipelineConfig.from_json("{"))
    tell(served, tmp_path, "d", may_change=reason != "a suspect runs")
    assert served.numbers == {"a": 1, "b": 2, "c": 3}


def test_run_directory_that_cannot_be_changed_does_not_keep_execute_from_starting(
    served: ServedAdapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    ServedAdapters(served._card, served._runner, tmp_path)
