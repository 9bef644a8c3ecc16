"""Reading an adapter's folder, and the errors for what is refused in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters import write_adapter
from triptych.protocol.errors import ConfigError
from triptych.protocol.lora import LoraModule
from triptych.workers.execute.model.lora import Adapter, load_adapters

Tensors = dict[str, torch.Tensor]
QUERY, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


def tensors_of(*modules: str, rank: int = 4) -> Tensors:
    shapes = {"A": (rank, 6), "B": (8, rank)}
    return {
        f"base_model.model.{m}.lora_{side}.weight": torch.ones(shape) for m in modules for side, shape in shapes.items()
    }


def load(folder: Path, tensors: Tensors, **config: Any) -> Adapter:
    write_adapter(folder, tensors, **{"r": 4, "lora_alpha": 8, **config})
    [adapter] = load_adapters([LoraModule("mine", folder)])
    return adapter


@pytest.mark.parametrize(
    ("config", "query", "up"),
    [
        ({}, 2.0, 2.0),
        ({"use_rslora": True}, 4.0, 4.0),
        ({"alpha_pattern": {"q_proj": 1}}, 0.25, 2.0),
        ({"alpha_pattern": {r"layers\.[1-9]\.mlp\.up_proj": 1, "up_proj": 4}}, 2.0, 0.25),
        ({"alpha_pattern": {"proj": 1}}, 2.0, 2.0),  # a pattern matches the last parts of a name
        ({"rank_pattern": {"q_proj": 4}, "r": 4, "use_rslora": True, "alpha_pattern": {"up_proj": 16}}, 4.0, 8.0),
    ],
)
def test_scales_equal_those_of_peft(config: dict[str, Any], query: float, up: float, tmp_path: Path) -> None:
    adapter = load(tmp_path, tensors_of(QUERY, UP), **config)
    assert {name: float(update.b[0, 0]) for name, update in adapter.updates.items()} == {QUERY: query, UP: up}


def test_published_names_of_a_family_are_those_of_its_modules(tmp_path: Path) -> None:
    """Nemotron-H is published with its own code, in which adapters are trained."""
    load(tmp_path, tensors_of("backbone.layers.0.mixer.in_proj"))
    for family, name in (("nemotron_h", "model.layers"), ("mamba2", "backbone.layers"), (None, "backbone.layers")):
        [adapter] = load_adapters([LoraModule("mine", tmp_path)], family)
        assert [*adapter.updates] == [f"{name}.0.mixer.in_proj"]


def test_ranks_may_differ_by_module(tmp_path: Path) -> None:
    tensors = tensors_of(QUERY) | tensors_of(UP, rank=2)
    adapter = load(tmp_path, tensors, rank_pattern={"up_proj": 2}, lora_alpha=4)
    assert {name: (len(a), float(b[0, 0])) for name, (a, b) in adapter.updates.items()} == {
        QUERY: (4, 1.0),
        UP: (2, 2.0),
    }


def test_adapter_name_inside_tensor_names_is_accepted(tmp_path: Path) -> None:
    tensors = {name.replace(".weight", ".default.weight"): each for name, each in tensors_of(QUERY).items()}
    assert list(load(tmp_path, tensors).updates) == [QUERY]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "its peft_type is 'IA3', the one that can be served is 'LORA'"),
        ({"use_dora": True}, "its use_dora is True, which cannot be served"),
        ({"bias": "all"}, "its bias is 'all', the one that can be served is 'none'"),
        ({"modules_to_save": ["lm_head"]}, "its modules_to_save is .'lm_head'., which cannot be served"),
        ({"init_lora_weights": "pissa"}, "its init_lora_weights is 'pissa'"),
        ({"an_idea_of_tomorrow": {"on": 1}}, "its an_idea_of_tomorrow is"),
        ({"r": 5}, "the rank is 5"),
        ({"r": None}, "adapter_config.json is damaged"),
        ({"rank_pattern": {"(": 1}}, "adapter_config.json is damaged"),
        pytest.param(
            {"rank_pattern": {"(?i)q_proj": 1}},
            "adapter_config.json is damaged",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="re takes flags inside a pattern until 3.11"),
        ),
        ({"rank_pattern": [1]}, "adapter_config.json is damaged"),
        ({"rank_pattern": {"q_proj": float("inf")}}, "adapter_config.json is damaged"),
        ({"r": 4.5}, "adapter_config.json is damaged"),
        ({"lora_alpha": 10**400}, "adapter_config.json is damaged"),
        ({"use_rslora": "false"}, "'false' is neither true nor false"),
    ],
)
def test_settings_beyond_a_low_rank_update_are_refused(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the adapter 'mine' cannot be served: .*{why}"):
        load(tmp_path, tensors_of(QUERY), **config)


HARMLESS = {
    "use_dora": False, "modules_to_save": None, "lora_dropout": 0.1, "target_modules": ["q_proj"],
    "init_lora_weights": True, "layers_to_transform": [0], "peft_version": "1", "megatron_core": "megatron.core",
    "base_model_name_or_path": "x",
}  # fmt: skip


def test_training_settings_are_ignored(tmp_path: Path) -> None:
    assert list(load(tmp_path, tensors_of(QUERY), **HARMLESS).updates) == [QUERY]


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_non_finite_weights_are_refused(number: float, side: str, tmp_path: Path) -> None:
    """On a GPU they would be multiplied by zeros of other rows, which gives NaN."""
    tensors = tensors_of(QUERY)
    tensors[f"base_model.model.{QUERY}.lora_{side}.weight"][1, 1] = number
    with pytest.raises(
        ConfigError, match=f"the adapter 'mine' cannot be served: its weights of {QUERY} are not finite"
    ):
        load(tmp_path, tensors)


def test_rank_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the rank of {QUERY} is 513, the limits are 1 and 512"):
        load(tmp_path, tensors_of(QUERY, rank=513), r=513)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop(f"base_model.model.{QUERY}.lora_B.weight"), f"it has only lora_A of {QUERY}"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(1)}),
            "embedding_A is neither",
        ),
        (
            lambda t: t.update({f"base_model.model.{QUERY}.lora_magnitude_vector": torch.ones(1)}),
            "magnitude_vector is neither",
        ),
        (lambda t: t.clear(), "has no tensors"),
        (lambda t: t.update({f"base_model.model.{QUERY}.lora_B.weight": torch.ones(4)}), "are .4, 6. and .4."),
        (
            lambda t: t.update({f"base_model.model.{QUERY}.lora_A.default.weight": torch.zeros(4, 6)}),
            f"it has lora_A of {QUERY} twice",
        ),
        *[
            (
                lambda t, dtype=dtype: t.update(
                    {f"base_model.model.{QUERY}.lora_A.weight": torch.ones(4, 6).to(dtype)}
                ),
                f"its weights of {QUERY} have dtype {dtype}",
            )
            for dtype in (torch.float8_e4m3fn, torch.complex64, torch.int8)
        ],
    ],
)
def test_tensors_that_do_not_form_pairs_are_refused(change: Callable[[Tensors], Any], why: str, tmp_path: Path) -> None:
    tensors = tensors_of(QUERY)
    change(tensors)
    with pytest.raises(ConfigError, match=why):
        load(tmp_path, tensors)


@pytest.mark.parametrize(("name", "content"), [("adapter_config.json", b"{"), ("adapter_model.safetensors", b"xx")])
def test_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    write_adapter(tmp_path, tensors_of(QUERY), r=4, lora_alpha=8)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        load_adapters([LoraModule("mine", tmp_path)])


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000], ids=["no map", "too deeply nested"])
def test_config_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    write_adapter(tmp_path, tensors_of(QUERY), r=4)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"adapter_config\.json is damaged"):
        load_adapters([LoraModule("mine", tmp_path)])


@pytest.mark.parametrize("value", ["16", True, None, [8]])
@pytest.mark.parametrize("field", ["r", "lora_alpha", "rank_pattern", "alpha_pattern"])
def test_invalid_number_is_named(field: str, value: object, tmp_path: Path) -> None:
    kind = "a rank" if field.startswith("r") else "an alpha"
    with pytest.raises(ConfigError, match=re.escape(f"{value!r} is not {kind}")):
        load(tmp_path, tensors_of(QUERY), **{field: {"q_proj": value} if "pattern" in field else value})


def test_config_beyond_the_size_limit_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has 10\d{5} bytes, the limit is 1048576"):
        load(tmp_path, tensors_of(QUERY), revision="x" * (1 << 20))
