from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.tiny import build_tiny_model, make_tiny_model
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.checkpoint.dense import open_checkpoint
from triptych.workers.execute.model.checkpoint.find import context_limit, find_checkpoint
from triptych.workers.execute.model.facts import no_progress, resolve_device, take_device
from triptych.workers.execute.model.modules.loader import LoadedModel, load_model
from triptych.workers.execute.model.tokenizer import load_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "llama")


def load(folder: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(folder, load_tokenizer(folder), dtype=dtype, device=CPU, progress=no_progress)


def edit_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_model_is_in_evaluation_mode_without_gradients(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_facts_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    facts = load(checkpoint).facts
    assert (facts.model_type, facts.vocab_size, facts.context_limit) == ("llama", 272, 512)
    assert facts.num_parameters == sum(p.numel() for p in build_tiny_model("llama").parameters())


def test_end_of_sequence_ids_come_from_tokenizer_and_generation_config(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(checkpoint).facts.eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(("asked", "given"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtype_is_the_checkpoint_s_or_the_configured_one(checkpoint: Path, asked: str, given: torch.dtype) -> None:
    assert load(checkpoint, dtype=asked).model.dtype == given


def test_progress_counts_tensors_up_to_the_last(checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(
        checkpoint,
        load_tokenizer(checkpoint),
        dtype="auto",
        device=CPU,
        progress=lambda done, total: calls.append((done, total)),
    )
    num_tensors = len(load_file(checkpoint / "model.safetensors"))
    assert calls == [(n + 1, num_tensors) for n in range(num_tensors)]


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        find_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="x cannot be read: File name too long"):
        find_checkpoint("x" * 300)


def test_missing_config_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", r"cannot use .*config\.json"), ('{"model_type": "llama99"}', "llama99"), ('{"model_type": "vit"}', "vit")],
    ids=["damaged", "unknown architecture", "not generative"],
)
def test_config_that_cannot_be_used_is_named(checkpoint: Path, text: str, why: str) -> None:
    tokenizer = load_tokenizer(checkpoint)
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=why):
        load_model(checkpoint, tokenizer, dtype="auto", device=CPU, progress=no_progress)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", r"\[\] is not a JSON object"),
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>', it must be a token id"),
        ('{"eos_token_id": [1, [2]]}', r"eos_token_id is \[1, \[2\]\]"),
    ],
)
def test_damaged_generation_config_is_named(checkpoint: Path, content: str, why: str) -> None:
    """It says which tokens end an answer: without it the model would go on."""
    (checkpoint / "generation_config.json").write_text(content)
    for opened in (load, open_checkpoint):
        with pytest.raises(ConfigError, match=rf"generation_config\.json is damaged: {why}"):
            opened(checkpoint)


@pytest.mark.parametrize("damaged", [lambda content: content[:-100], lambda _: b"\xff" * 1000], ids=["cut", "other"])
def test_damaged_weights_are_named(checkpoint: Path, damaged: Callable[[bytes], bytes]) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(damaged(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer", ""), ("model.safetensors", "\0" * 100)], ids=["none", "damaged"]
)
def test_missing_or_damaged_file_is_named_at_a_start(checkpoint: Path, tmp_path: Path, name: str, text: str) -> None:
    """Through the whole start, with each backend."""
    if text:
        (checkpoint / name).write_text(text)
    else:
        for file in checkpoint.glob("token*"):
            file.unlink()
    with pytest.raises(ConfigError, match=name):
        build_runner(
            ModelConfig(model=str(checkpoint), device="cpu"), CacheConfig(num_pages=16), SchedulerConfig(),
            model_dir=checkpoint, run_dir=tmp_path,
        )  # fmt: skip


def test_pickled_weights_are_not_used(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no model\.safetensors; pytorch_model\.bin cannot be used"):
        load(checkpoint)


def test_missing_shard_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-00001-of-00002\.safetensors is missing"):
        load(checkpoint)


def test_missing_tensor_is_an_error(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 tensors, 'model\.layers\.1\.mlp\.up_proj\.weight' first"):
        load(checkpoint)


def test_tensor_of_another_shape_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, intermediate_size=100)
    with pytest.raises(ConfigError, match="cannot load 'llama'"):
        load(checkpoint)


def test_missing_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch sees"):
        resolve_device("cuda:99")


@pytest.mark.parametrize(("name", "current"), [("cuda:1", 1), ("cuda", 0)])
def test_configured_device_becomes_the_current_one(name: str, current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [0]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: devices.append(device.index))
    assert take_device(name) == torch.device(name)
    assert devices[-1] == current


@pytest.mark.parametrize(("stated", "limit"), [(64, 256), (300, 300)])
def test_yarn_extends_the_context_even_if_the_config_states_the_original_length(stated: int, limit: int) -> None:
    """As it does after users followed the model card of Qwen2.5, which tells them to add these settings only."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    config = AutoConfig.for_model("qwen2", max_position_embeddings=stated, rope_parameters=rope)
    assert context_limit(config) == limit


def test_longrope_limits_the_context_to_the_original_length() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    model = build_tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert context_limit(model.config) == 64
