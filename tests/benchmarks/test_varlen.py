"""The arguments passed to torch's paged FlashAttention have the meaning it expects; the function itself needs a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.conftest import HAS_GPU
from tests.workers.execute.attention.test_paged_attention import STEPS, make_scene, plain, replace_dtype
from triptych.workers.execute.attention.interface import AttentionForm

pytest.importorskip("triton")

from benchmarks.gpu.varlen import VarlenAttention, find_varlen


def definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: None, max_q: int,
    max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """torch's documentation of the function, sequence by sequence."""
    outputs = []
    for s, count in enumerate(seqused_k.tolist()):
        start, end = cu_seq_q[s : s + 2].tolist()
        assert end - start <= max_q
        assert count <= max_k
        keys, values = (pages[block_table[s].long()].flatten(0, 1)[:count] for pages in (key, value))
        window = None if window_size[0] < 0 else window_size[0] + 1
        outputs.append(plain(query[start:end], keys, values, AttentionForm(scale, window)))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 5])
def test_arguments_describe_the_step(window: int | None) -> None:
    scene = make_scene(STEPS["mixed"], dtype=torch.float16)
    form = AttentionForm(scale=0.3, sliding_window=window)
    output = scene.run(VarlenAttention(torch.device("cpu"), definition), form)
    expected = replace_dtype(scene, torch.float64).expected(form)
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=2e-2)


def test_unsupported_cases_use_the_triton_kernel() -> None:
    scene = make_scene(STEPS["mixed"], dtype=torch.float32)
    form = AttentionForm(scale=0.3, softcap=2.0)
    device = torch.device("cuda" if HAS_GPU else "cpu")
    if HAS_GPU:
        pytest.skip("the scene is on the host")
    output = scene.run(VarlenAttention(device, definition), form)
    expected = replace_dtype(scene, torch.float64).expected(form)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)


def test_function_is_used_only_if_it_supports_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(query: Any, key: Any) -> Any: ...

    found = find_varlen()
    known = set(inspect.signature(definition).parameters)
    assert found is None or known <= set(inspect.signature(found).parameters)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", without)
    assert find_varlen() is None
