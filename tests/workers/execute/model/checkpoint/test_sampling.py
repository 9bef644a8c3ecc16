"""What a checkpoint recommends for sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.model.checkpoint.find import read_sampling


def recommending(folder: Path, settings: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.6, "top_k": 20}),
        ({"repetition_penalty": 1.05, "min_p": 0.1, "eos_token_id": 3}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"temperature": None, "max_new_tokens": 9}, {}),
    ],
    ids=["qwen3", "others", "nothing"],
)  # fmt: skip
def test_what_the_file_recommends_is_known(settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    assert read_sampling(recommending(tmp_path, settings)) == expected


def test_without_a_file_nothing_is_recommended(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == {}


@pytest.mark.parametrize("value", [-1, 1e9, "hot", True, [0.5]])
def test_recommendation_out_of_range_is_ignored_with_a_warning(
    value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_sampling(recommending(tmp_path, {"temperature": value, "top_k": 20})) == {}
    assert "temperature" in caplog.text
    assert str(tmp_path) in caplog.text


def test_damaged_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_sampling(recommending(tmp_path, [1]))


def test_card_carries_whole_numbers_as_such() -> None:
    """``top_k`` is one."""
    fields: dict[str, Any] = dict.fromkeys(
        ("num_parameters", "vocab_size", "max_model_len", "page_size", "num_pages", "max_num_seqs", "max_live"), 1
    )
    names: dict[str, Any] = dict.fromkeys(("model", "model_type", "backend", "dtype", "device"), "x")
    card = ModelCard(**fields, **names, eos_token_ids=(), load_s=0.0, sampling={"top_k": 20, "top_p": 0.5})
    found = ModelCard.from_json(json.dumps(card.to_wire())).sampling
    assert found == {"top_k": 20, "top_p": 0.5}
    assert isinstance(found["top_k"], int)
