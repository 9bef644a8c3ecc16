"""What a driver says of a run directory in which a pipeline with other settings ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from triptych.driver.journal_keeper import JournalKeeper
from triptych.driver.preparing import prepare_run_dir
from triptych.protocol.config import PipelineConfig
from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import CARD_FILE
from triptych.protocol.run_dir import CONFIG_FILE


def test_settings_that_keep_a_pipeline_from_continuing_are_named(tmp_path: Path) -> None:
    config = PipelineConfig()
    (tmp_path / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
    (tmp_path / CARD_FILE).touch()
    keeper = cast(JournalKeeper, SimpleNamespace(num_unanswered=2, path=tmp_path / "journal"))
    changed = replace(config, cache=replace(config.cache, page_size=64))
    with pytest.raises(ConfigError, match=r"2 unanswered .*: page_size was not set and is 64; start with the former"):
        prepare_run_dir(tmp_path, changed, keeper)


def test_requests_of_another_version_are_said_to_be_of_one(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"cache": {"novelty": 1}}', encoding="utf-8")
    (tmp_path / CARD_FILE).touch()
    keeper = cast(JournalKeeper, SimpleNamespace(num_unanswered=2, path=tmp_path / "journal"))
    with pytest.raises(ConfigError, match=r"2 unanswered .*config.json was written by another version .*'?novelty"):
        prepare_run_dir(tmp_path, PipelineConfig(), keeper)


@pytest.mark.parametrize("field", ["chat_template", "lora_modules"])
def test_start_refused_for_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path, field: str) -> None:
    (tmp_path / CARD_FILE).touch()
    keeper = cast(JournalKeeper, SimpleNamespace(num_unanswered=0))
    missing = str(tmp_path / "nowhere")
    config = PipelineConfig.from_options(**{field: missing if field == "chat_template" else (f"a={missing}",)})
    (tmp_path / CONFIG_FILE).write_text(PipelineConfig.from_options(dtype="float32").to_json(), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        prepare_run_dir(tmp_path, config, keeper)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CARD_FILE, CONFIG_FILE])
