"""A path that is no model is refused, and the error names the model that was probably meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.checkpoint.find import find_checkpoint


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("README.md", ""),
        ("b.gguf", "; name what is in it, such as {}/b.gguf"),
        ("own/config.json", "; name what is in it, such as {}/own"),
        ("snapshots/1a2b/config.json", "; name what is in it, such as {}/snapshots/1a2b"),
    ],
)
def test_error_about_a_folder_names_the_model_in_it(tmp_path: Path, file: str, hint: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    (tmp_path / "z.gguf.part").touch()
    words = f"{tmp_path} is not a model: it has no config.json{hint.format(tmp_path)}"
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
        find_checkpoint(str(tmp_path))


def test_error_about_an_address_says_how_models_of_the_hub_are_named() -> None:
    with pytest.raises(ConfigError, match="directory https://hub/a/b does not exist; an id on the hub has the form"):
        find_checkpoint("https://hub/a/b")


def test_error_about_a_folder_that_cannot_be_looked_at_says_why() -> None:
    with pytest.raises(ConfigError, match=r"model x+ cannot be read: File name too long"):
        find_checkpoint("x" * 300)
