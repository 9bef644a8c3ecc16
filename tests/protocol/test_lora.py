"""Adapters, given as names and folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.adapters import make_nominal_adapter
from triptych.protocol.config import ModelConfig, PipelineConfig
from triptych.protocol.errors import ConfigError
from triptych.protocol.lora import MAX_ADAPTERS, WEIGHTS_FILE, LoraModule, parse_modules
from triptych.protocol.record import RequestRecord


def test_name_and_folder_are_split_at_the_first_equals_sign() -> None:
    [module] = parse_modules(["team/a-1.0=/x=y"])
    assert module == ("team/a-1.0", Path("/x=y"))


@pytest.mark.parametrize("text", ["", "a", "a=", "=a", "a b=c", "a\n=c", "a" * 129 + "=c", "é=c", "a,b=c"])
def test_malformed_adapter_option_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the form is NAME=PATH"):
        ModelConfig(lora_modules=(text,))


def test_duplicate_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora_modules has the name 'a' more than once"):
        ModelConfig(lora_modules=("a=x", "b=x", "a=y"))


def test_number_of_adapters_is_limited() -> None:
    texts = tuple(f"a{number}=x" for number in range(MAX_ADAPTERS + 1))
    assert len(parse_modules(texts[1:])) == MAX_ADAPTERS
    with pytest.raises(ConfigError, match=f"lora_modules has {MAX_ADAPTERS + 1} adapters, the limit is {MAX_ADAPTERS}"):
        parse_modules(texts)


def test_list_decoded_from_json_is_accepted() -> None:
    config = PipelineConfig.from_options(lora_modules=["a=x"])
    assert PipelineConfig.from_json(config.to_json()) == config


def test_digest_depends_on_content_and_not_on_the_path(tmp_path: Path) -> None:
    folders = [
        make_nominal_adapter(tmp_path / name, content) for name, content in (("a", b"x"), ("b", b"x"), ("c", b"y"))
    ]
    digests = [module.digest() for module in parse_modules(f"{folder.name}={folder}" for folder in folders)]
    assert digests[0] == digests[1] != digests[2]


def test_named_pipe_in_an_adapter_folder_does_not_block(tmp_path: Path) -> None:
    folder = make_nominal_adapter(tmp_path / "a")
    (folder / WEIGHTS_FILE).unlink()
    os.mkfifo(folder / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=r"'a' cannot be read: .*adapter_model\.safetensors is not a file"):
        LoraModule("a", folder).digest()


def test_no_two_pairs_of_adapter_and_salt_share_prefixes() -> None:
    salts = ["", "a", "\0", "a\0", "\0a", "a\0b", "b"]
    pairs = [(lora, salt) for lora in ("", "a", "b") for salt in salts]
    assert len({make_record(lora, salt).prefix_salt for lora, salt in pairs}) == len(pairs)
    assert make_record("", "tenant").prefix_salt == "tenant"


def make_record(lora: str, cache_salt: str) -> RequestRecord:
    return RequestRecord(
        request_id="r", digest=0, prompt=b"", num_truncated_tokens=0, token_capacity=1, seed=0, lease_s=1.0,
        sampling={}, lora=lora, cache_salt=cache_salt,
    )  # fmt: skip
