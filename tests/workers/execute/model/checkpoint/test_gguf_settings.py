"""Settings of GGUF files that transformers does not read: they are kept, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.workers.execute.model.checkpoint.gguf_files import Arrays, build, make_gguf
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.model.checkpoint.find import find_checkpoint, read_config
from triptych.workers.execute.model.checkpoint.gguf import settings as settings_of_files

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(tmp_path: Path, architecture: str, **options: Any) -> Any:
    make_gguf(tmp_path / "x.gguf", architecture, **options)
    return read_config(find_checkpoint(tmp_path / "x.gguf"))


def divisors() -> np.ndarray[Any, np.dtype[np.float32]]:
    """What llama.cpp's converter writes of Llama 3.1's scaling."""
    config: Any = build("llama", rope_parameters=LLAMA3, max_position_embeddings=131072).config
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = 1 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    result: np.ndarray[Any, np.dtype[np.float32]] = (plain / frequencies).numpy()
    return result


def test_scaling_of_llama_3_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    def with_divisors(arrays: Arrays) -> Arrays:
        return {**arrays, "rope_freqs.weight": divisors()}

    config = config_of(tmp_path, "llama", tensors=with_divisors)
    assert config.rope_parameters == LLAMA3


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    def with_divisors(arrays: Arrays) -> Arrays:
        return {**arrays, "rope_freqs.weight": divisors() * np.linspace(1, 2, 8, dtype=np.float32)}

    with pytest.raises(ConfigError, match=r"rope_freqs.weight in .* is not what Llama 3"):
        config_of(tmp_path, "llama", tensors=with_divisors)


def test_yarn_is_kept(tmp_path: Path) -> None:
    settings = {
        "ARCH.rope.scaling.yarn_beta_fast": 16.0,
        "ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.factor": 4.0,
        "ARCH.rope.scaling.original_context_length": 128,
    }  # fmt: skip
    rope = config_of(tmp_path, "qwen2", settings=settings).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128)
    assert rope["beta_fast"] == 16.0


def test_gemma_scales_only_the_layers_without_a_window(tmp_path: Path) -> None:
    settings = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 8.0}
    rope = config_of(tmp_path, "gemma3", settings=settings).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert rope["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize(("num_layers", "divisor"), [(3, 16), (46, 256)])
def test_the_largest_gemma_2_divides_scores_by_something_else(
    num_layers: int, divisor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(settings_of_files._LAYERS_OF_27B, "gemma2", num_layers)  # the model has 3
    assert config_of(tmp_path, "gemma2").query_pre_attn_scalar == divisor


def test_phi_keeps_its_factors_for_long_contexts(tmp_path: Path) -> None:
    settings = {
        "ARCH.rope.dimension_count": 12, "ARCH.rope.scaling.original_context_length": 64,
        "ARCH.rope.scaling.attn_factor": 1.2247449, "ARCH.attention.sliding_window": 0,
    }  # fmt: skip

    def with_factors(arrays: Arrays) -> Arrays:
        factors = {"long": np.linspace(2, 8, 6, dtype=np.float32), "short": np.ones(6, np.float32)}
        return {**arrays, **{f"rope_factors_{name}.weight": array for name, array in factors.items()}}

    config = config_of(tmp_path, "phi3", settings=settings, tensors=with_factors)
    assert config.rope_parameters["long_factor"] == pytest.approx([2.0, 3.2, 4.4, 5.6, 6.8, 8.0])
    assert config.rope_parameters["partial_rotary_factor"] == 0.75
    assert (config.rope_parameters["rope_type"], config.original_max_position_embeddings) == ("longrope", 64)
    assert config.sliding_window is None  # Phi-4 states 0
    settings["ARCH.rope.scaling.attn_factor"] = 1.5
    with pytest.raises(ConfigError, match=r"states phi3.rope.scaling.attn_factor = 1.5, which is not supported"):
        config_of(tmp_path, "phi3", settings=settings, tensors=with_factors)


@pytest.mark.parametrize("pattern", [6, [True] * 5 + [False]])
def test_layers_with_a_window_have_frequencies_of_their_own(pattern: Any, tmp_path: Path) -> None:
    settings = {
        "ARCH.rope.freq_base_swa": 5000.0, "ARCH.attention.sliding_window_pattern": pattern,
        "ARCH.attention.key_length_swa": 16,
    }  # fmt: skip
    rope = config_of(tmp_path, "gemma3", settings=settings).rope_parameters
    assert (rope["sliding_attention"]["rope_theta"], rope["full_attention"]["rope_theta"]) == (5000.0, 1e6)


@pytest.mark.parametrize(
    "settings",
    [
        {"ARCH.attention.sliding_window_pattern": 3}, {"ARCH.attention.sliding_window_pattern": [True, False] * 3},
        {"ARCH.attention.key_length_swa": 8},
    ],
)  # fmt: skip
def test_other_windows_than_the_family_has_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"states gemma3.attention.*, which is not supported"):
        config_of(tmp_path, "gemma3", settings=settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ARCH.rope.scaling.type": "longrope"}, "scales its frequencies by 'longrope', known are: linear, yarn"),
        ({"ARCH.rope.scaling.attn_factor": 1.2}, "states llama.rope.scaling.attn_factor = 1.2"),
        ({"ARCH.logit_scale": 0.5}, "states llama.logit_scale = 0.5"),
        ({"ARCH.expert_count": 8}, "does not state llama.expert_used_count"),
        ({"ARCH.expert_group_count": 8}, "states llama.expert_group_count = 8"),
        ({"ARCH.rope.dimension_count": 8}, "rotates 8 of the 16 channels"),
        ({"ARCH.block_count": None}, "does not state llama.block_count"),
        ({"ARCH.context_length": "long"}, "cannot use the settings"),
        ({"ARCH.block_count": 1 << 30}, "states llama.block_count = 1073741824 and has 3 layers"),
        ({"ARCH.nextn_predict_layers": 3}, "states llama.nextn_predict_layers = 3 of 3 layers"),
        ({"ARCH.nextn_predict_layers": 1 << 31}, "states llama.nextn_predict_layers = 2147483648 of 3 layers"),
        ({"ARCH.nextn_predict_layers": -1}, "states llama.nextn_predict_layers = -1 of 3 layers"),
        ({"ARCH.embedding_length": 32}, r"has shape \(272, 64\), its settings say \(272, 32\)"),
    ],
)
def test_what_would_be_lost_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        config_of(tmp_path, "llama", settings=settings)
    assert raised.value.param == "model"


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    def with_guessing(arrays: Arrays) -> Arrays:
        return {
            **arrays,
            "blk.4.attn_norm.weight": np.ones(64, np.float32),
            "blk.4.nextn.enorm.weight": np.ones(64, np.float32),
        }

    settings: dict[str, Any] = {"ARCH.block_count": 5, "ARCH.nextn_predict_layers": 1}
    settings["ARCH.attention.recurrent_layers"] = [True, True, True, False, False]
    assert config_of(tmp_path, "qwen35", settings=settings, tensors=with_guessing).num_hidden_layers == 4


@pytest.mark.parametrize("settings", [{"ARCH.expert_count": 0}, {"ARCH.something_new": 7}])
def test_what_changes_nothing_is_let_pass(settings: dict[str, Any], tmp_path: Path) -> None:
    config_of(tmp_path, "llama", settings=settings)
