"""Checkpoints whose tensors have shapes or kinds that no tool writes: each ends with an error that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.workers.execute.model.native.decoders import change_config, make_checkpoint
from tests.workers.execute.model.native.families import FAMILIES
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.checkpoint.dense import open_checkpoint
from triptych.workers.execute.model.checkpoint.find import context_limit, read_config, weight_files
from triptych.workers.execute.model.checkpoint.stored_weights import family_of, open_for_modules, open_tensors
from triptych.workers.execute.model.embeddings import may_lack_head
from triptych.workers.execute.model.spec.decoder import Unsupported

EXPERTS = "model.layers.0.mlp.experts"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
SCHEME = {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
NOTHING_AT_FIRST = {**FAMILIES["minicpm3"]["rope_parameters"], "original_max_position_embeddings": -2}
TWO_SCHEMES = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": SCHEME, "b": SCHEME},
}  # fmt: skip


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(1 << 40, 0, 4), (2, 0, 4), (0, 4, 4)])
def test_stack_of_nothing_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """However many experts it has: a name for each of them would not fit into memory."""
    write(tmp_path, {f"{EXPERTS}.gate_up_proj": torch.empty(shape)}, model_type="gpt_oss")
    with pytest.raises(ConfigError, match=r"gate_up_proj in .*, which should have 3 axes, none of them empty"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("kind", ["bias", "blocks"])
def test_stack_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    name, shape = f"{EXPERTS}.gate_up_proj_{kind}", {"bias": (2, 4), "blocks": (2, 4, 1, 16)}[kind]
    tensors = {name: torch.ones(shape, dtype=torch.uint8), f"{EXPERTS}.gate_up_proj_scales": ints(2, 4, 1).byte()}
    write(tmp_path, tensors, model_type="qwen3_5_moe_text")
    with pytest.raises(Unsupported, match=f"it has the tensor {name}"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("more", [{}, {"dynamic": {"-:.*": {}}}], ids=["alike", "with exceptions"])
@pytest.mark.parametrize(("num_words", "num_outputs"), [(0, 8), (8, 0)])
def test_four_bits_of_nothing_are_refused(
    num_words: int, num_outputs: int, more: dict[str, Any], tmp_path: Path
) -> None:
    parts = {"qweight": ints(num_words, num_outputs), "qzeros": ints(1, num_outputs // 8 or 1)}
    tensors = {f"a.{name}": part for name, part in {**parts, "scales": torch.ones(1, num_outputs)}.items()}
    write(tmp_path, tensors, model_type="llama", quantization_config={**GPTQ, **more})
    with pytest.raises(ConfigError, match=r"has a\.qweight, but no matrix a\."):
        open_tensors(tmp_path)


@pytest.mark.parametrize("shape", [[8, 0], [8], [[8, 8]]], ids=str)
def test_shape_that_is_none_is_refused(shape: list[Any], tmp_path: Path) -> None:
    tensors = {"a.weight_packed": ints(8, 8), "a.weight_scale": torch.ones(8, 2), "a.weight_shape": torch.tensor(shape)}
    write(tmp_path, tensors, model_type="llama", quantization_config=TWO_SCHEMES)
    with pytest.raises(Unsupported, match="it does not have their shapes"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (2, 0, 8)])
def test_fp8_of_nothing_is_refused(method: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(*shape), "a.weight_scale": torch.ones(shape[0], 1)}
    write(tmp_path, tensors, model_type="llama", quantization_config={"quant_method": method})
    for opened in (open_tensors, open_for_modules):
        with pytest.raises(ConfigError, match=r"a\.weight_scale in .* have none"):
            opened(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"weight_map": [1]}', "", '{"weight_map": {"a": 1}}'])
def test_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        weight_files(tmp_path)


@pytest.mark.parametrize("named", [["llama"], 3, None, {}])
def test_family_is_a_name_or_none(named: Any, tmp_path: Path) -> None:
    """Adapters are read before the config."""
    assert family_of(write(tmp_path, {}, model_type=named)) is None


@pytest.mark.parametrize("named", ["LlamaModel", 3.5, [None], [["LlamaModel"]], {"LlamaModel": 1}, [3]])
def test_base_model_is_told_by_a_list_of_names(named: Any, tmp_path: Path) -> None:
    assert not may_lack_head(write(tmp_path, {}, architectures=named))
    assert may_lack_head(write(tmp_path, {}, architectures=["LlamaModel"]))


@pytest.mark.parametrize(("family", "change"), [
    ("gemma3_text", {"query_pre_attn_scalar": -1}),  # its root is complex
    ("falcon_h1", {"ssm_multipliers": [1.0]}),
])  # fmt: skip
def test_wrong_value_in_a_config_is_left_to_other_backends(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    change_config(make_checkpoint(family, tmp_path), **change)
    with pytest.raises(Unsupported, match="its config has a wrong value"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "num_hidden_layers"), ("qwen3", "num_hidden_layers"), ("gpt2", "n_layer")]
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_more_layers_than_any_model_has_are_refused(family: str, name: str, is_inside: bool, tmp_path: Path) -> None:
    """Before there is a list with an item for each of them."""
    config = {"model_type": family, name: 1 << 40}
    write(tmp_path, {}, **({"model_type": "llava", "text_config": config} if is_inside else config))
    with pytest.raises(ConfigError, match=f"{name} in .* is 1099511627776, the limit is 10000"):
        read_config(tmp_path)


@pytest.mark.parametrize("stated", [{"max_position_embeddings": -1}, {"rope_parameters": NOTHING_AT_FIRST}], ids=str)
def test_limit_that_leaves_no_token_is_refused(stated: dict[str, Any], tmp_path: Path) -> None:
    change_config(make_checkpoint("minicpm3", tmp_path), **stated)
    config = read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"the config limits sequences to -\d+ tokens"):
        context_limit(config)


@pytest.mark.parametrize("setting", [{"pad_token_id": "x"}, {"compile_config": ""}, {"temperature": [1]}], ids=str)
def test_settings_that_matter_to_nobody_may_be_wrong(setting: dict[str, Any], tmp_path: Path) -> None:
    (make_checkpoint("llama", tmp_path) / "generation_config.json").write_text(
        json.dumps({**setting, "eos_token_id": 7})
    )
    assert open_checkpoint(tmp_path).eos_token_ids == [7]
