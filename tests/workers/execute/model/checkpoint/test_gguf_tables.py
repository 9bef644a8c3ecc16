"""Models of the architectures that a table of ours reads: their weights and configs are those that were converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.workers.execute.model.checkpoint.gguf_tables import CASES, build, write
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.checkpoint.gguf import table_settings
from triptych.workers.execute.model.checkpoint.gguf.architectures import FAMILIES
from triptych.workers.execute.model.checkpoint.gguf.file import GgufFile, open_gguf
from triptych.workers.execute.model.checkpoint.gguf.numbers import numbers_of
from triptych.workers.execute.model.checkpoint.gguf.settings import read_settings
from triptych.workers.execute.model.checkpoint.gguf.tensors import GgufTensors
from triptych.workers.execute.model.facts import no_progress

# Names, numbers of no consequence, what other attributes say, and what the family does not use.
MAY_DIFFER = {
    "architectures", "_name_or_path", "initializer_range", "embedding_initializer_range", "pad_token_id",
    "bos_token_id", "eos_token_id", "dtype", "transformers_version", "num_nextn_predict_layers", "n_inner",
    "rotary_dim", "first_k_dense_replace",
}  # fmt: skip
NOT_USED = {
    "bloom": {"intermediate_size", "max_position_embeddings", "num_key_value_heads"},
    "falcon": {"intermediate_size", "num_key_value_heads"},
    "gpt2": {"intermediate_size", "num_key_value_heads"},
    "gpt_neox": {"num_key_value_heads"},
}
HEAD_DIM_NOT_USED = {"bloom", "falcon", "glm4_moe", "glm4_moe_lite", "gpt2", "phi", "stablelm", "granitemoehybrid"}


def config_of(file: GgufFile) -> Any:
    return read_settings(file, file.path.parent, file.path.name)


def near(made: Any, known: Any) -> bool:
    """Equal but for the rounding of a float32."""
    if isinstance(known, dict):
        return all(near(made.get(key), value) for key, value in known.items())
    return bool(made == (pytest.approx(known, rel=1e-6) if isinstance(known, float) else known))


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_one_that_was_converted(name: str, tmp_path: Path) -> None:
    model = build(CASES[name])
    write(tmp_path / "x.gguf", CASES[name], model)
    file = open_gguf([tmp_path / "x.gguf"])
    config = config_of(file)
    made, known = config.to_dict(), model.config.to_dict()
    skipped = MAY_DIFFER | NOT_USED.get(name, set()) | ({"head_dim"} if name in HEAD_DIM_NOT_USED else set())
    assert [
        (key, made.get(key), known[key]) for key in known.keys() - skipped if not near(made.get(key), known[key])
    ] == []
    stored = dict(model.state_dict())
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    expected = revert_weight_conversion(model, stored)
    weights = {
        name: weight
        for group in GgufTensors(file, config).read(torch.float32, no_progress)
        for name, weight in group.items()
    }
    assert weights.keys() == expected.keys()
    assert [n for n in expected if not np.allclose(weights[n], expected[n], rtol=1e-6, atol=1e-6)] == []


def test_family_that_only_newer_transformers_know_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x.gguf", CASES["olmo2"], build(CASES["olmo2"]))
    monkeypatch.setattr(table_settings, "CONFIG_MAPPING", {})
    with pytest.raises(ConfigError, match=r"x\.gguf: transformers \S+ does not know 'olmo2', newer ones do"):
        config_of(open_gguf([tmp_path / "x.gguf"]))


def test_one_number_may_count_for_all_layers_but_no_other_count(tmp_path: Path) -> None:
    case = CASES["apertus"]
    write(tmp_path / "x.gguf", case, model := build(case))
    file = open_gguf([tmp_path / "x.gguf"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GgufFile, "value", lambda _, key: "apertus" if key == "general.architecture" else 0.5)
        assert set(numbers_of(file, model).values()) == {0.5}
        assert len(numbers_of(file, model)) == 4 * 3
        patch.setattr(GgufFile, "value", lambda _, key: "apertus" if key == "general.architecture" else [0.5] * 2)
        with pytest.raises(ConfigError, match=r"states xielu.alpha_p for 2 layers and has 3"):
            numbers_of(file, model)


@pytest.mark.parametrize("name", [name for name in CASES if FAMILIES[name].turns_in_part])
def test_heads_turn_as_a_whole_if_the_file_states_no_part_of_them(name: str, tmp_path: Path) -> None:
    nowhere: dict[str, Any] = {"rope.dimension_count": None}
    write(tmp_path / "x.gguf", CASES[name], build(CASES[name]), **nowhere)
    assert config_of(open_gguf([tmp_path / "x.gguf"])).rope_parameters["partial_rotary_factor"] == 1


def test_experts_in_mxfp4_stay_in_mxfp4(tmp_path: Path) -> None:
    case, random = CASES["gpt_oss"], np.random.default_rng(0)
    blocks = {}

    def in_blocks(name: str, array: Any) -> Any:
        if not name.endswith("_exps.weight"):
            return array
        made = random.integers(0, 256, (*array.shape[:-1], array.shape[-1] // 32, 17), dtype=np.uint8)
        made[..., 0] = random.integers(118, 126, made.shape[:-1])
        blocks[name] = made.reshape(*array.shape[:-1], -1)
        return blocks[name]

    write(tmp_path / "x.gguf", case, build(case), tensors=in_blocks)
    file = open_gguf([tmp_path / "x.gguf"])
    config = config_of(file)
    read = list(GgufTensors(file, config).read(torch.bfloat16, no_progress))
    made = {name: weight for group in read for name, weight in group.items()}
    prefix = "model.layers.1.mlp.experts."
    values = convert_moe_packed_tensors(made[f"{prefix}gate_up_proj_blocks"], made[f"{prefix}gate_up_proj_scales"])
    for part, number in (("gate", 0), ("up", 1)):
        expected = dequantize(blocks[f"blk.1.ffn_{part}_exps.weight"], GGMLQuantizationType.MXFP4)
        assert np.array_equal(values[..., number::2].float().swapaxes(1, 2), expected)
    values = convert_moe_packed_tensors(made[f"{prefix}down_proj_blocks"], made[f"{prefix}down_proj_scales"])
    expected = dequantize(blocks["blk.1.ffn_down_exps.weight"], GGMLQuantizationType.MXFP4)
    assert np.array_equal(values.float().swapaxes(1, 2), expected)
    assert made["model.layers.1.mlp.experts.down_proj_bias"].dtype == torch.bfloat16


def test_older_files_of_deepseek_have_one_matrix_for_keys_and_values(tmp_path: Path) -> None:
    case, model = CASES["deepseek_v2"], build(CASES["deepseek_v2"])
    config: Any = model.config
    whole = model.state_dict()["model.layers.1.self_attn.kv_b_proj.weight"]
    older = {
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim, "attention.head_count_kv": 4,
        "attention.key_length_mla": None, "attention.value_length_mla": None,
        "expert_group_count": None, "expert_group_used_count": None,
    }  # fmt: skip
    write(tmp_path / "x.gguf", case, model, merges_latents=True, **older)
    file = open_gguf([tmp_path / "x.gguf"])
    made = config_of(file)
    assert (made.qk_nope_head_dim, made.v_head_dim) == (config.qk_nope_head_dim, config.v_head_dim)
    assert (made.n_group, made.topk_method) == (1, "greedy")
    read = list(GgufTensors(file, made).read(torch.float32, no_progress))
    weights = {name: weight for group in read for name, weight in group.items()}
    assert torch.equal(weights["model.layers.1.self_attn.kv_b_proj.weight"], whole)
