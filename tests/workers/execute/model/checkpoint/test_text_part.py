"""Vision models: their text part runs alone, and gives the whole model's answers to texts."""

from __future__ import annotations

import json
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from tests import tiny
from tests.adapters import make_adapter, merge
from tests.workers.execute.factories import make_scheduler, run
from tests.workers.execute.model.native.decoders import adapt, greedy_choices, make_request
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.checkpoint.text_part import text_names
from triptych.workers.execute.scheduling.sequence import Sequence

_PICTURES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VIT = {**_PICTURES, "image_size": 28, "patch_size": 14}
_QWEN_VIT = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the text model, and of the whole one
    "gemma3": (
        {
            "model_type": "gemma3_text",
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
        {"vision_config": _VIT, "mm_tokens_per_image": 4, "image_token_index": 271, "tie_word_embeddings": True},
    ),
    "mistral3": (
        {"model_type": "mistral"},
        {"vision_config": {**_VIT, "model_type": "pixtral"}, "image_token_index": 271, "tie_word_embeddings": False},
    ),
    "llava": (
        {"model_type": "llama"},
        {"vision_config": {**_VIT, "model_type": "clip_vision_model"}, "image_token_index": 271},
    ),
    "ministral3 in mistral3": (
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.7,
            },
        },
        {"vision_config": {**_VIT, "model_type": "pixtral"}, "image_token_index": 271, "tie_word_embeddings": False},
    ),
    "smolvlm": (
        {"model_type": "llama"},
        {"vision_config": {**_VIT, "model_type": "smolvlm_vision"}, "tie_word_embeddings": False},
    ),
    "idefics3": (
        {"model_type": "llama"},
        {"vision_config": {**_VIT, "model_type": "idefics3_vision"}, "tie_word_embeddings": False},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {"vision_config": {**_VIT, "image_size": [28, 28], "patch_size": [14, 14]}, "tie_word_embeddings": False},
    ),
    "qwen2_vl": (
        {"rope_parameters": _SECTIONS},
        {
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_5_vl": ({"rope_parameters": _SECTIONS}, {"vision_config": _QWEN_VIT, "tie_word_embeddings": True}),
    "qwen3_vl": (
        {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
        {"vision_config": {**_QWEN_VIT, "deepstack_visual_indexes": [0]}, "tie_word_embeddings": False},
    ),
}
_AUDIO = {"hidden_size": 32, "codebook_dim": 32, "num_lstm_layers": 1}
_WITHOUT_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # likewise, of models whose head lacks their ids
    "apertus1p5": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "output_vocab_size": 264},
        {
            "vision_config": {"codebook_size": 4, "base_channels": 32, "num_res_blocks": 1},
            "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 4, "num_filters": 2, **_AUDIO},
            "image_token_offset": 264,
            "audio_token_offset": 268,
        },
    ),
}
_OF_QWEN3_5 = {"vision_config": _QWEN_VIT, "tie_word_embeddings": False}
_CHANNELS = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
RECURRENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lfm2_vl": (
        {**tiny.RECURRENT["lfm2"], "model_type": "lfm2"},
        {
            "vision_config": {**_VIT, "model_type": "siglip2_vision_model", "num_patches": 16},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5": ({**tiny.RECURRENT["qwen3_5_text"], **_CHANNELS, "model_type": "qwen3_5_text"}, _OF_QWEN3_5),
    "qwen3_5_moe": (
        {
            **tiny.RECURRENT["qwen3_next"],
            **_CHANNELS,
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 32,
        },
        _OF_QWEN3_5,
    ),
}


def make_seeing(family: str, folder: Path) -> Any:
    """A random float32 checkpoint in ``folder``, and the model."""
    of_text, of_whole = (MODELS | RECURRENT | _WITHOUT_IMAGES)[family]
    config = AutoConfig.for_model(family.split()[-1], text_config={**tiny.LLAMA_LIKE, **of_text}, **of_whole)
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    tiny.make_tiny_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return model.eval()


def greedy_tokens(folder: Path, requests: list[Sequence], **options: Any) -> tuple[list[list[int]], ModelCard]:
    """The output tokens of each request with the checkpoint's runner, and its model card."""
    runner, card = build_runner(
        ModelConfig(model=str(folder), device="cpu", **options), CacheConfig(num_pages=64), SchedulerConfig(),
        model_dir=folder, run_dir=folder.parent,
    )  # fmt: skip
    options = {"num_pages": 64, "page_size": 16, "max_model_len": 512, "num_snapshots": card.num_snapshots}
    outputs = run(Engine(make_scheduler(*requests, **options), runner))
    return [outputs[request.key] for request in requests], card


def requests() -> list[Sequence]:
    return [make_request(index, length, 8) for index, length in enumerate((1, 20, 45))]


def expected(model: Any, outputs: list[list[int]]) -> list[list[int]]:
    """What transformers chooses after these tokens."""
    return [greedy_choices(model, *each) for each in zip(requests(), outputs, strict=True)]


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *product([*MODELS, *RECURRENT], ["native"]),
        *product(MODELS, ["transformers"]),
        *(pytest.param(family, "transformers", marks=tiny.needs_states) for family in RECURRENT),
    ],
)
def test_greedy_tokens_equal_those_of_the_whole_model(
    family: str, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    whole = make_seeing(family, tmp_path / "model")
    outputs, card = greedy_tokens(tmp_path / "model", requests(), backend=backend)
    assert outputs == expected(whole, outputs)
    assert card.backend.startswith(backend)
    assert card.num_parameters < sum(parameter.numel() for parameter in whole.parameters())
    assert "UNEXPECTED" not in caplog.text, "unused vision weights are not logged"


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_separate_head_is_used_even_if_the_config_does_not_mention_it(backend: str, tmp_path: Path) -> None:
    """Mistral 3 is tied by default, and its config.json does not say when it is not."""
    whole = make_seeing("mistral3", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("tie_word_embeddings") is False
    file.write_text(json.dumps(config))
    outputs, _ = greedy_tokens(tmp_path / "model", requests(), backend=backend)
    assert outputs == expected(whole, outputs)


@pytest.mark.skipif("apertus1p5" not in CONFIG_MAPPING, reason="transformers 5.24 has it")
def test_ids_of_images_have_no_logits_if_the_head_lacks_them(tmp_path: Path) -> None:
    whole = make_seeing("apertus1p5", tmp_path / "model")
    outputs, card = greedy_tokens(tmp_path / "model", requests())
    assert outputs == expected(whole, outputs)
    assert card.vocab_size == whole.lm_head.out_features == 264


def test_adapter_of_the_whole_model_works_on_its_text_part(tmp_path: Path) -> None:
    checkpoint, adapter = tmp_path / "model", tmp_path / "adapter"
    whole = make_seeing("qwen3_vl", checkpoint)
    make_adapter(adapter, checkpoint, targets=("gate_proj", "up_proj", "down_proj"))
    merged = AutoModelForImageTextToText.from_pretrained(merge(checkpoint, adapter, tmp_path / "merged"))
    outputs, _ = greedy_tokens(
        checkpoint, [adapt(request, 1) for request in requests()], lora_modules=(f"a={adapter}",)
    )
    assert outputs == expected(merged, outputs)
    assert outputs != expected(whole, outputs)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", ""])
def test_tensor_names_are_those_of_a_text_model(prefix: str) -> None:
    inner = "model." if prefix != "model.language_model." else ""
    stored = [f"{prefix}{inner}norm.weight", f"{prefix}{inner}layers.0.mlp.up_proj.weight"]
    others = ["visual.a.weight", "vision_tower.b.weight"]
    head = ["lm_head.weight"] if prefix != "language_model." else ["language_model.lm_head.weight"]
    names = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert text_names([*others, *stored, *head]) == dict(zip(names, [*stored, *head], strict=True))
