"""Checkpoints in four bits of which some matrices have eight, or groups of another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.workers.execute.model.checkpoint import four_bit_checkpoints
from tests.workers.execute.model.checkpoint.four_bit_checkpoints import SCHEME, make_pair, words
from tests.workers.execute.model.checkpoint.test_four_bits import load
from tests.workers.execute.model.native.decoders import change_config, changed_tensors, pack
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.matrix import FourBits
from triptych.workers.execute.kernels.structures import Format
from triptych.workers.execute.model.checkpoint.stored_weights import open_tensors, read_settings
from triptych.workers.execute.model.spec.decoder import Unsupported

DOWN = "model.layers.0.mlp.down_proj"
EIGHT_BITS = {"weights": {**SCHEME["weights"], "num_bits": 8, "group_size": 32}}
# Of the same weights in other layouts: how the config says that some of them have eight bits.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "gptq": {"dynamic": {"+:.*down_proj.*": {"bits": 8, "group_size": 32}}},
    "auto-round": {"extra_config": {".*down_proj.*": {"bits": 8, "group_size": 32}}},
    "compressed-tensors": {"config_groups": {"group_0": SCHEME, "group_1": EIGHT_BITS}},
}


def in_eight_bits(layout: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights, and values near them in groups of 32 as ``value``."""
    groups = values.view(len(values), -1, 32)
    scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(2) / 100)))
    numbers = torch.round(groups / scales[:, :, None]) + 120
    value = ((numbers - 120) * scales[:, :, None]).view(values.shape)
    raw, zeros = numbers.view(values.shape).numpy(), np.full(scales.shape, 120)
    order = (0, 1, 2, 3)
    if layout == "compressed-tensors":
        parts = {
            "weight_packed": words(raw, order),
            "weight_scale": scales.bfloat16(),
            "weight_zero_point": words(zeros.T, order).T.contiguous(),
            "weight_shape": torch.tensor(values.shape),
        }
    else:
        parts = {
            "qweight": words(raw, order).T.contiguous(),
            "qzeros": words(zeros.T - (layout == "gptq"), order),
            "scales": scales.T.contiguous().half(),
        }
    return {**parts, "value": value}


# As tools write it that keep the most sensitive matrices in more bits.
@pytest.mark.parametrize("layout", EXCEPTIONS)
def test_matrices_may_have_bits_and_groups_of_their_own(layout: str, tmp_path: Path) -> None:
    stored, plain = make_pair("llama", layout, tmp_path, **EXCEPTIONS[layout])
    tensors = load_file(plain / "model.safetensors")
    with changed_tensors(stored) as parts:
        for name in [name for name in tensors if "down_proj.weight" in name]:
            module = name.removesuffix("weight")
            for part in [part for part in parts if part.startswith(module)]:
                del parts[part]
            eight = in_eight_bits(layout, tensors[name])
            tensors[name] = eight.pop("value")
            parts |= {f"{module}{part}": values for part, values in eight.items()}
    checkpoint = open_tensors(stored)
    for name, tensor in tensors.items():
        assert checkpoint.shapes()[name] == tuple(tensor.shape)
        assert checkpoint.has_four_bits(name) == (".layers." in name and tensor.dim() == 2 and "down" not in name)
        if not checkpoint.has_four_bits(name):
            assert torch.equal(checkpoint[name].float(), tensor)
    layer = pack(stored, available_levels()[0], Format.INT4).layers[0]
    assert (Format(layer.qkv.format), Format(layer.down.format)) == (Format.INT4, Format.INT8)
    assert load(stored).backend.startswith("native int4")  # and the self-test passes


def test_matrix_may_have_smaller_groups_of_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coarse, _ = make_pair("llama", "auto-round", tmp_path / "coarse")
    monkeypatch.setattr(four_bit_checkpoints, "GROUP", 32)
    fine, plain = make_pair("llama", "auto-round", tmp_path / "fine", extra_config={DOWN: {"group_size": 32}})
    smaller = {name: part for name, part in load_file(fine / "model.safetensors").items() if DOWN in name}
    with changed_tensors(coarse) as parts:
        parts |= smaller
    change_config(coarse, quantization_config=read_settings(fine))
    checkpoint = open_tensors(coarse)
    assert checkpoint.quantised_format is Format.FINE_INT4
    expected = load_file(plain / "model.safetensors")[f"{DOWN}.weight"]
    found = checkpoint.four_bits(f"{DOWN}.weight")
    assert isinstance(found, FourBits)
    assert np.array_equal(found.floats(Format.FINE_INT4), expected)
    others = checkpoint.four_bits("model.layers.1.mlp.down_proj.weight")
    assert np.array_equal(others.scales[:, ::4], others.scales[:, 3::4])  # groups of 128, as four of 32


@pytest.mark.parametrize(("num_words", "num_groups", "error", "reason"), [
    (8, 2, Unsupported, f"{DOWN} has 2 bits"),
    (16, 3, ConfigError, f"{DOWN} has 3 groups for 256 inputs"),
    (16, 16, ConfigError, f"{DOWN} has 16 groups for 256 inputs"),
])  # fmt: skip
def test_other_grids_are_named(
    num_words: int, num_groups: int, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    stored, _ = make_pair("llama", "auto-round", tmp_path, extra_config={DOWN: {}})
    with changed_tensors(stored) as parts:
        parts[f"{DOWN}.scales"] = torch.ones(num_groups, 128, dtype=torch.float16)
        parts[f"{DOWN}.qzeros"] = torch.zeros(num_groups, num_words, dtype=torch.int32)
    with pytest.raises(error, match=reason):
        open_tensors(stored)
