"""Each kernel, compared with attention on plain tensors, in random ragged steps.

Axes: T tokens of a step, H query heads, J key heads, D and E channels of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from triptych.workers.execute.attention.cpu import CpuAttention
from triptych.workers.execute.attention.interface import AttentionForm, LayerCache, PagedAttention
from triptych.workers.execute.attention.reference import ReferenceAttention
from triptych.workers.execute.step import StepInputs

KERNELS = [ReferenceAttention, CpuAttention]


@dataclass
class Scene:
    """Some running sequences: their pages, and the step to be computed."""

    inputs: StepInputs
    cache: LayerCache
    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, J, D]
    value: torch.Tensor  # [T, J, E]
    keys: list[torch.Tensor]  # of each sequence, all of them: [context, J, D]
    values: list[torch.Tensor]

    def run(self, kernel: PagedAttention, form: AttentionForm) -> torch.Tensor:
        kernel.begin_step(self.inputs)
        kernel.write(self.cache, self.key, self.value)
        return kernel.attend(self.cache, self.query, form)

    def expected(self, form: AttentionForm) -> torch.Tensor:
        starts = pairwise(self.inputs.query_starts.tolist())
        return torch.cat(
            [plain(self.query[a:b], k, v, form) for (a, b), k, v in zip(starts, self.keys, self.values, strict=True)]
        )


def make_scene(
    lengths: list[tuple[int, int]],
    *,
    page_size: int = 4,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Scene:
    """A scene of sequences with (cached tokens, tokens of this step); decodes come first. Pages are in random order."""
    torch.manual_seed(seed)
    contexts = [cached + new for cached, new in lengths]
    keys = [torch.randn(n, heads[1], dims[0], dtype=dtype) for n in contexts]
    values = [torch.randn(n, heads[1], dims[1], dtype=dtype) for n in contexts]
    num_pages = [-(-n // page_size) for n in contexts]
    ids = np.random.default_rng(seed).permutation(np.arange(1, sum(num_pages) + 3, dtype=np.int32))
    tables = np.zeros((len(lengths), max(num_pages)), dtype=np.int32)
    for s, count in enumerate(num_pages):
        tables[s, :count] = ids[sum(num_pages[:s]) :][:count]
    cache = LayerCache(
        *(torch.full((len(ids) + 1, page_size, heads[1], dim), torch.nan, dtype=dtype) for dim in dims)
    )  # unwritten slots are poison
    slots = [
        tables[s, np.arange(n) // page_size] * page_size + np.arange(n) % page_size for s, n in enumerate(contexts)
    ]
    for s, (cached, _) in enumerate(lengths):
        cache.keys.flatten(0, 1)[slots[s][:cached]] = keys[s][:cached]
        cache.values.flatten(0, 1)[slots[s][:cached]] = values[s][:cached]
    num_new = [new for _, new in lengths]
    inputs = StepInputs(
        token_ids=np.zeros(sum(num_new), np.int32),
        positions=np.concatenate([np.arange(c, c + n, dtype=np.int32) for c, n in lengths]),
        slot_mapping=np.concatenate([s[c:] for s, (c, _) in zip(slots, lengths, strict=True)]).astype(np.int64),
        query_starts=np.cumsum([0, *num_new], dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables,
        num_decodes=[*(new == 1 for new in num_new), False].index(False),
        sample_rows=np.zeros(0, np.int32),
        sampled=(),
    )
    new_keys = torch.cat([k[c:] for k, (c, _) in zip(keys, lengths, strict=True)])
    new_values = torch.cat([v[c:] for v, (c, _) in zip(values, lengths, strict=True)])
    query = torch.randn(heads[0], sum(num_new), dims[0], dtype=dtype).transpose(0, 1)  # strided, as models pass it
    return Scene(inputs, cache, query, new_keys, new_values, keys, values)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    """Attention of the last n of L tokens, head by head and query by query: [n, H, E]."""
    output = q.new_zeros(len(q), q.shape[1], v.shape[2])
    for head in range(q.shape[1]):
        kv_head = head // (q.shape[1] // k.shape[1])
        for i in range(len(q)):
            end = len(k) - len(q) + i + 1
            start = max(0, end - form.sliding_window) if form.sliding_window else 0
            scores = k[start:end, kv_head] @ q[i, head] * form.scale
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            if form.sinks is not None:
                scores = torch.cat([scores, form.sinks[head : head + 1]])
            output[i, head] = scores.softmax(0)[: end - start] @ v[start:end, kv_head]
    return output


STEPS = {
    "one decode": [(6, 1)],
    "decodes of one length": [(9, 1), (9, 1), (9, 1)],
    "decodes of far lengths": [(1, 1), (300, 1), (7, 1), (0, 1), (130, 1)],
    "first chunk": [(0, 7)],
    "later chunk": [(10, 7)],
    "mixed": [(3, 1), (12, 1), (0, 5), (6, 9), (2, 1)],
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "all": {"sliding_window": 3, "softcap": 1.5, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_kernel_equals_plain_attention(
    kernel: type[PagedAttention], form: dict[str, Any], step: list[tuple[int, int]]
) -> None:
    scene = make_scene(step)
    form_ = AttentionForm(scale=0.3, **form)
    torch.testing.assert_close(scene.run(kernel(), form_), scene.expected(form_), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 64])
def test_page_size_changes_nothing(kernel: type[PagedAttention], page_size: int) -> None:
    scene = make_scene(STEPS["mixed"], page_size=page_size)
    form = AttentionForm(scale=0.3)
    torch.testing.assert_close(scene.run(kernel(), form), scene.expected(form), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (12, 6), (4, 16)], ids=str)
def test_any_heads_and_channels(kernel: type[PagedAttention], heads: tuple[int, int], dims: tuple[int, int]) -> None:
    scene = make_scene(STEPS["mixed"], heads=heads, dims=dims)
    form = AttentionForm(scale=0.3, sliding_window=6)
    torch.testing.assert_close(scene.run(kernel(), form), scene.expected(form), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps_in_single_precision(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decodes = [(int(n), 1) for n in rng.integers(0, 200, rng.integers(1, 9))]
    chunks = [(int(c), int(n)) for c, n in zip(rng.integers(0, 60, 3), rng.integers(2, 30, 3), strict=True)]
    scene = make_scene(decodes + chunks, page_size=int(2 ** rng.integers(0, 7)), dtype=torch.float32, seed=seed)
    form = AttentionForm(scale=0.3, sliding_window=[None, 17][seed % 2])
    expected = scene.run(ReferenceAttention(), form)
    torch.testing.assert_close(scene.run(CpuAttention(), form), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_write_only_touches_the_slots_of_the_step(kernel: type[PagedAttention]) -> None:
    scene = make_scene(STEPS["mixed"])
    before = scene.cache.keys.clone()
    scene.run(kernel(), AttentionForm(scale=1.0))
    changed = (scene.cache.keys.flatten(0, 1).nan_to_num(7.0) != before.flatten(0, 1).nan_to_num(7.0)).any(-1).any(-1)
    assert changed.nonzero()[:, 0].tolist() == sorted(scene.inputs.slot_mapping.tolist())


def test_sequence_of_nans_only_spoils_its_own_output() -> None:
    scene = make_scene(STEPS["decodes of far lengths"])
    form = AttentionForm(scale=0.3)
    expected = scene.expected(form)
    scene.key[3] = torch.nan
    output = scene.run(CpuAttention(), form)
    assert output[3].isnan().all()
    torch.testing.assert_close(output[[0, 1, 2, 4]], expected[[0, 1, 2, 4]], rtol=1e-10, atol=1e-10)


def test_long_decode_groups_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.workers.execute.attention.cpu._MAX_GROUP_KEYS", 256)
    scene = make_scene([(100, 1)] * 5 + [(300, 1)] * 2)
    form = AttentionForm(scale=0.3)
    torch.testing.assert_close(scene.run(CpuAttention(), form), scene.expected(form), rtol=1e-10, atol=1e-10)


def test_half_precision_accumulates_in_single() -> None:
    scene = make_scene([(200, 1), (50, 20)], dtype=torch.bfloat16)
    form = AttentionForm(scale=0.3, softcap=5.0)
    wide = replace_dtype(scene, torch.float64)
    torch.testing.assert_close(scene.run(CpuAttention(), form).double(), wide.expected(form), rtol=0.02, atol=0.02)


def replace_dtype(scene: Scene, dtype: torch.dtype) -> Scene:
    return replace(
        scene,
        query=scene.query.to(dtype),
        keys=[k.to(dtype) for k in scene.keys],
        values=[v.to(dtype) for v in scene.values],
    )


def test_cpu_attention_agrees_with_torch_on_one_sequence() -> None:
    scene = make_scene([(0, 33)], heads=(4, 4))
    q, k, v = (x.transpose(0, 1) for x in (scene.query, scene.key, scene.value))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    output = scene.run(CpuAttention(), AttentionForm(scale=8**-0.5))
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
