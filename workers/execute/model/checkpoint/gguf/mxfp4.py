"""Experts that are in MXFP4 in the file stay so: the kernels compute with these blocks as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, ReaderTensor

from .file import GgufFile

_FAMILY = "gpt-oss"  # the only one that is published so
_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
_TENSORS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")
_NUM_BYTES = 17  # of a block: an exponent, and 32 numbers of four bits
# What is not in blocks, in the words of the published checkpoints.
QUANTISATION: Mapping[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}  # fmt: skip


def kept(file: GgufFile) -> set[str]:
    """The tensors whose blocks are kept: those of all experts, or none."""
    if file.architecture != _FAMILY:
        return set()
    experts = {name: tensor for name, tensor in file.tensors.items() if _TENSORS.fullmatch(name)}
    are_blocks = all(tensor.tensor_type == GGMLQuantizationType.MXFP4 for tensor in experts.values())
    return set(experts) if are_blocks else set()


def in_blocks(weight: str, tensors: Sequence[ReaderTensor]) -> dict[str, torch.Tensor]:
    """A weight of experts as it is published: numbers [experts, rows, blocks, 16], of which two are in a byte, and
    exponents [experts, rows, blocks]. Rows of gates and of the rest take turns.
    """
    assert _EXPERTS.search(weight)
    parts = [np.asarray(tensor.data).reshape(*reversed(tensor.shape[1:]), -1, _NUM_BYTES) for tensor in tensors]
    whole = np.stack(parts, axis=2).reshape(parts[0].shape[0], -1, *parts[0].shape[2:])
    return {
        f"{weight}_blocks": torch.from_numpy(_neighbours_together(whole[..., 1:])),
        f"{weight}_scales": torch.from_numpy(np.ascontiguousarray(whole[..., 0])),
    }


def _neighbours_together(halves: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes with two neighbours each; in the file, a byte has a number of the first half and one of the second."""
    numbers = np.concatenate((halves & 15, halves >> 4), axis=-1)
    together: npt.NDArray[np.uint8] = numbers[..., ::2] | numbers[..., 1::2] << 4
    return together
