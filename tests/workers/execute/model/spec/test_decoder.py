"""Which checkpoints the fast path supports, and how it refuses the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.tiny import FAMILIES
from tests.workers.execute.model.native.decoders import changed_tensors, make_checkpoint
from triptych.workers.execute.model.checkpoint.dense import open_checkpoint
from triptych.workers.execute.model.checkpoint.mapped import Checkpoint
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors
from triptych.workers.execute.model.spec.decoder import Unsupported
from triptych.workers.execute.model.spec.describe import describe_decoder
from triptych.workers.execute.model.spec.ropes import find_ropes

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
STATE_SPACES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
BESIDE = {**STATE_SPACES, "mamba_d_ssm": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0}  # beyond the model's context


def make_config(family: str, **overrides: Any) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(family, **{**FAMILIES["llama"], **overrides})
    return config


def shapes_of(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3", "gemma", "gemma2", "gemma3_text"),
        *("arcee", "cohere", "helium", "nemotron"),
    ],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_all_tensors_of_dense_families_are_described(family: str, is_tied: bool) -> None:
    config = make_config(family, tie_word_embeddings=is_tied)
    shapes = shapes_of(config)
    spec = describe_decoder(config, shapes)
    assert spec.tensors() == shapes
    assert spec.has_qk_norm == (family in ("qwen3", "gemma3_text"))
    assert spec.has_qkv_bias == (family == "qwen2")
    assert spec.has_post_norms == (family in ("gemma2", "gemma3_text"))


def test_windows_follow_the_layer_types() -> None:
    config = make_config("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert describe_decoder(config, shapes_of(config)).windows == (None, 8, 8)


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_window_without_layer_types_applies_to_all_layers(family: str) -> None:
    config = make_config(family, sliding_window=8)
    assert describe_decoder(config, shapes_of(config)).windows == (8, 8, 8)


@pytest.mark.parametrize(("layers", "ropes"), [([0, 1, 0, 1], (None, 0, None)), (None, (0, None, 0))])
def test_config_selects_layers_with_rotary_positions(layers: list[int] | None, ropes: tuple[int | None, ...]) -> None:
    config = make_config("smollm3", no_rope_layers=layers, no_rope_layer_interval=2)
    assert describe_decoder(config, shapes_of(config)).ropes == ropes


@pytest.mark.parametrize("flat", [None, {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}])
def test_layers_of_two_types_have_their_own_rope(flat: dict[str, Any] | None) -> None:
    """If the config states settings for all layers instead, transformers adds those of the types and uses these."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = make_config("gemma3_text", layer_types=types, sliding_window=8, rope_parameters=flat)
    spec = describe_decoder(config, shapes_of(config))
    assert (spec.ropes, spec.windows) == ((1, 0, 1), (8, None, 8))
    assert [float(rope.frequencies[1]) for rope in find_ropes(config)] == pytest.approx([1e6**-0.125, 1e4**-0.125])
    del config.rope_parameters["full_attention"]
    with pytest.raises(Unsupported, match="no rotary positions for layers of type full_attention"):
        describe_decoder(config, {})


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_all_tensors_of_experts_are_described(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    config, shapes = AutoConfig.from_pretrained(checkpoint), Checkpoint(checkpoint).shapes()
    spec = describe_decoder(config, shapes)
    assert spec.tensors() == shapes
    assert set(spec.matrices()) == {
        name for name in shapes if name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight"))
    }
    assert spec.has_experts == ((True, False, True) if family == "qwen3_moe" else (True,) * 3)
    assert spec.norms_expert_weights == (family == "mixtral")


@pytest.mark.parametrize(("step", "without", "layers"), [(2, [], (1,)), (1, [0], (1, 2)), (2, [1], ()), (4, [], ())])
def test_config_selects_layers_with_experts(
    step: int, without: list[int], layers: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("qwen3_moe", tmp_path, decoder_sparse_step=step, mlp_only_layers=without)
    spec = describe_decoder(AutoConfig.from_pretrained(checkpoint), Checkpoint(checkpoint).shapes())
    assert tuple(layer for layer, has_experts in enumerate(spec.has_experts) if has_experts) == layers
    assert spec.num_experts == (6 if layers else 0)


@pytest.mark.parametrize(("family", "is_normed"), [("mixtral", True), ("gpt_oss", True), ("olmoe", False)])
def test_only_some_families_have_a_setting_for_the_weights_of_experts(
    family: str, is_normed: bool, tmp_path: Path
) -> None:
    """The config classes of the others keep the setting too if a config has it, but transformers does not use it."""
    checkpoint = make_checkpoint(family, tmp_path, norm_topk_prob=False)
    spec = describe_decoder(AutoConfig.from_pretrained(checkpoint), open_tensors(checkpoint).shapes())
    assert spec.norms_expert_weights == is_normed


@pytest.mark.parametrize(
    ("family", "caps"), [("gemma2", (50.0, 30.0)), ("gemma3_text", (None, 30.0)), ("llama", (None, None))]
)
def test_caps_are_those_that_transformers_applies(family: str, caps: tuple[float | None, float | None]) -> None:
    """In 16 bits, a cap of this size is within the tolerance of the self-test."""
    config = make_config(family, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    spec = describe_decoder(config, shapes_of(config))
    assert (spec.score_cap, spec.logit_cap) == caps


def test_experts_in_one_tensor_are_refused() -> None:
    config = make_config("mixtral", num_local_experts=4)
    with pytest.raises(Unsupported, match="of its tensors differ from its config"):
        describe_decoder(config, shapes_of(config))


TURNING_MORE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}
GROWING_ALWAYS = {
    "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "overrides", "why"),
    [
        ("diffllama", {}, "diffllama models are not supported"),
        ("opt", {"do_layer_norm_before": False}, "its do_layer_norm_before is False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "its scale_attn_by_inverse_layer_idx is True"),
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 3}, "a token has 3 of 2 experts"),
        ("llama", {"hidden_act": "tanh"}, "tanh"),
        ("lfm2", {"layer_types": ["conv"] * 3, "conv_bias": True}, "its conv_bias is True"),
        ("bamba", {**STATE_SPACES, "time_step_limit": (0.1, 1.0)}, r"time steps are limited to \(0.1, 1.0\)"),
        ("falcon_h1", {**BESIDE, "mamba_proj_bias": True, "ssm_in_multiplier": 2.0}, "spaces have multipliers"),
        ("falcon_h1", {**BESIDE, "attention_bias": True, "attention_in_multiplier": 2.0}, "attention has multipliers"),
        ("falcon_h1", {**BESIDE, "key_multiplier": 0.0}, "key_multiplier is 0"),
        ("glm4_moe", {"n_routed_experts": 5, "num_experts_per_tok": 2, "n_group": 2}, "5 experts are in 2 groups"),
        ("gemma3_text", {"hidden_activation": "tanh"}, "tanh"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention is not causal"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0"),
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ("smollm3", {"no_rope_layers": [1], "layer_types": ["full_attention"] * 3}, "says of 1 of 3 layers"),
        ("granite", {"attention_multiplier": 0.0}, "attention_multiplier is 0"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}, "only some of its"),
        ("qwen3", {"num_attention_heads": 5}, "5 heads share 2 heads of keys"),
        ("phi3", {"num_key_value_heads": 0}, "4 heads share 0 heads of keys"),
        ("glm4", {"rope_parameters": TURNING_MORE}, "positions turn 24 of the 16 channels"),
        ("gptj", {"rotary_dim": 7}, "positions turn 7 of the 16 channels"),
        ("ministral3", {"rope_parameters": GROWING_ALWAYS}, "queries grow every 0 positions"),
    ],
    ids=[
        *(
            "family",
            "norms behind",
            "scores by layer",
            "too few experts",
            "activation",
            "biases",
            "time steps",
            "biases of state spaces",
            "biases of attention",
            "multiplier of keys",
            "groups",
            "activation of gemma",
            "both ways",
            "cap",
            "positions",
            "layers",
            "multiplier",
        ),
        *("partial positions", "heads", "no heads of keys", "more channels than there are", "half a pair of channels"),
        "span",
    ],
)
def test_unsupported_feature_is_named(family: str, overrides: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        describe_decoder(make_config(family, **overrides), {})


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("glm4_moe", tmp_path)
    config, shapes = AutoConfig.from_pretrained(checkpoint), Checkpoint(checkpoint).shapes()
    spec = describe_decoder(config, shapes)
    assert (spec.tensors(), spec.has_experts) == (shapes, (False, True, True))
    assert describe_decoder(config, {**shapes, "model.layers.3.eh_proj.weight": (64, 128)}) == spec
    with pytest.raises(Unsupported, match="1 of its tensors differ"):
        describe_decoder(config, {**shapes, "model.layers.4.eh_proj.weight": (64, 128)})


@pytest.mark.parametrize(
    ("family", "prefix", "mask"),
    [
        ("gpt2", "transformer.", "h.0.attn.bias"),
        ("gpt_neo", "", "transformer.h.1.attn.attention.masked_bias"),
        ("gpt_neox", "", "gpt_neox.layers.2.attention.bias"),
        ("opt", "model.", None),
        ("bloom", "transformer.", None),
    ],
)
def test_names_may_lack_their_prefix_and_masks_are_ignored(
    family: str, prefix: str, mask: str | None, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    expected = open_checkpoint(checkpoint).spec
    with changed_tensors(checkpoint) as tensors:
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)
        if mask is not None:
            tensors[mask] = torch.ones(1, 1, 8, 8)
    opened = open_checkpoint(checkpoint)
    assert opened.spec == expected
    assert expected.tensors().keys() <= opened.tensors.keys()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_frequencies_and_a_second_copy_of_a_tied_head_are_ignored(name: str) -> None:
    config = make_config("llama", tie_word_embeddings=True)
    shapes = shapes_of(config)
    assert describe_decoder(config, shapes | {name: (8,)}) == describe_decoder(config, shapes)


def test_additional_tensor_is_refused() -> None:
    config = make_config("llama")
    with pytest.raises(Unsupported, match=r"mlp\.router"):
        describe_decoder(config, shapes_of(config) | {"model.layers.0.mlp.router.weight": (4, 64)})


@pytest.mark.parametrize(
    ("config", "tensors", "why"),
    [
        ({"model_type": "mpt"}, ("transformer.wte.weight", "lm_head.weight"), "mpt models are not supported"),
        pytest.param(
            {"model_type": "inkling_text"},
            ("lm_head.weight",),
            "inkling_text models are not supported",
            marks=pytest.mark.skipif("inkling_text" not in CONFIG_MAPPING, reason="this transformers is older"),
        ),
        ({"model_type": "qwen2", "tie_word_embeddings": True}, ("lm_head.weight",), "of its tensors differ"),
    ],
    ids=["embedding of another name", "no setting says whether it is tied", "no embedding"],
)
def test_head_of_a_checkpoint_that_is_not_supported_is_no_obstacle(
    config: dict[str, Any], tensors: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.ones(8, 4) for name in tensors}, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match=why):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("merged", "other"), [("phi3", "llama"), ("llama", "phi3")])
def test_tensors_merged_unlike_in_the_family_are_refused(merged: str, other: str) -> None:
    with pytest.raises(Unsupported, match="of its tensors differ"):
        describe_decoder(make_config(merged), shapes_of(make_config(other)))


@pytest.mark.parametrize(
    "rope",
    [{}, {"rope_parameters": YARN}, {"rope_parameters": DYNAMIC}],
    ids=["default", "yarn", "dynamic"],
)
def test_positions_equal_transformers(rope: dict[str, Any]) -> None:
    config = make_config("qwen3", **rope)
    model = AutoModelForCausalLM.from_config(config)
    [(cosines, sines)] = (rope.tables(200) for rope in find_ropes(config))
    expected = model.model.rotary_emb(torch.zeros(1), torch.arange(200)[None])
    for table, whole in zip((cosines, sines), expected, strict=True):
        assert torch.equal(table, whole[0, :, : table.shape[1]])
