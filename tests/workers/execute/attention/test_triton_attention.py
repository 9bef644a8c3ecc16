"""The Triton kernels compared with attention in double precision; interpreted on a CPU, compiled on a GPU.

Every slot that belongs to no sequence of the step is poisoned.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import HAS_GPU
from tests.workers.execute.attention.test_paged_attention import (
    STEPS,
    Scene,
    make_scene,
    replace_dtype,
)
from triptych.workers.execute.attention.device_step import upload
from triptych.workers.execute.attention.interface import AttentionForm, LayerCache
from triptych.workers.execute.attention.reference import ReferenceAttention

pytest.importorskip("triton")

from triptych.workers.execute.attention.triton import TritonAttention
from triptych.workers.execute.kernels.triton_chunk import ChunkTile, KeySplits, chunk_attention, chunk_tile
from triptych.workers.execute.kernels.triton_decode import decode_attention

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "all": {"sliding_window": 3, "softcap": 1.5, "sinks": SINKS},
}
# Of one rounding of the outputs' type; products of float32 are exact to it.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def run(scene: Scene, form: AttentionForm, *, is_invariant: bool = False) -> torch.Tensor:
    """The scene on the device, its outputs on the host."""
    moved = replace(
        scene,
        cache=LayerCache(*(pages.to(DEVICE) for pages in scene.cache.pools)),
        query=scene.query.to(DEVICE),
        key=scene.key.to(DEVICE),
        value=scene.value.to(DEVICE),
    )
    if form.sinks is not None:
        form = form._replace(sinks=form.sinks.to(DEVICE))
    return moved.run(TritonAttention(DEVICE, is_invariant=is_invariant), form).cpu()


def check(scene: Scene, form: AttentionForm, *, is_invariant: bool = False) -> None:
    wide = form if form.sinks is None else form._replace(sinks=form.sinks.double())
    expected = replace_dtype(scene, torch.float64).expected(wide)
    tolerance = TOLERANCES[scene.query.dtype]
    output = run(scene, form, is_invariant=is_invariant)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


# The deterministic kernel differs in how the keys are split, which no form of the scores depends on.
@pytest.mark.parametrize("step", ["mixed", "decodes of far lengths"])
@pytest.mark.parametrize(
    ("form", "is_invariant"),
    [*((form, False) for form in FORMS.values()), (FORMS["plain"], True), (FORMS["all"], True)],
    ids=[*FORMS, "invariant plain", "invariant all"],
)
def test_kernel_equals_plain_attention(form: dict[str, Any], step: str, is_invariant: bool) -> None:
    scene = make_scene(STEPS[step], dtype=torch.float32)
    check(scene, AttentionForm(scale=0.3, **form), is_invariant=is_invariant)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_page_size_changes_nothing(page_size: int) -> None:
    check(make_scene(STEPS["mixed"], page_size=page_size, dtype=torch.float32), AttentionForm(scale=0.3))


@pytest.mark.parametrize("window", [None, 70])
def test_tiles_within_pages(window: int | None) -> None:
    """Sequences of several such pages, ending in the middle of one, at its end and at its beginning."""
    steps = [(140, 1), (63, 1), (64, 1), (0, 70), (70, 58)]
    check(make_scene(steps, page_size=64, dtype=torch.float32), AttentionForm(scale=0.3, sliding_window=window))


@pytest.mark.parametrize(
    ("heads", "dims"),
    [((1, 1), (64, 64)), ((6, 2), (80, 80)), ((5, 1), (24, 16)), ((4, 4), (8, 40)), ((2, 1), (512, 512))],
    ids=str,
)
def test_any_heads_and_channels(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    scene = make_scene(STEPS["mixed"], heads=heads, dims=dims, dtype=torch.float32)
    check(scene, AttentionForm(scale=0.1, sliding_window=6))


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(seed: int) -> None:
    """Including half precision, in which the kernels multiply without conversion."""
    rng = np.random.default_rng(seed)
    decodes = [(int(n), 1) for n in rng.integers(0, 400, rng.integers(1, 5))]
    chunks = [(int(c), int(n)) for c, n in zip(rng.integers(0, 60, 2), rng.integers(2, 40, 2), strict=True)]
    dtype = [torch.float32, torch.float16][seed % 2]
    scene = make_scene(decodes + chunks, page_size=16, heads=(8, 2), dims=(16, 16), dtype=dtype, seed=seed)
    check(scene, AttentionForm(scale=0.25, sliding_window=[None, 17][seed // 2]))


def test_write_only_touches_the_slots_of_the_step() -> None:
    scene = make_scene(STEPS["mixed"], dtype=torch.float32)
    cache = LayerCache(*(pages.to(DEVICE) for pages in scene.cache.pools))
    kernel = TritonAttention(DEVICE)
    kernel.begin_step(scene.inputs)
    kernel.write(cache, scene.key.to(DEVICE), scene.value.to(DEVICE))
    expected = LayerCache(*(pages.clone() for pages in scene.cache.pools))
    reference = ReferenceAttention()
    reference.begin_step(scene.inputs)
    reference.write(expected, scene.key, scene.value)
    for pages, wanted in zip(cache.pools, expected.pools, strict=True):
        torch.testing.assert_close(pages.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def decode(scene: Scene, num_splits: int, *, context_lens: torch.Tensor | None = None) -> torch.Tensor:
    step = upload(scene.inputs, DEVICE)
    lens = step.context_lens if context_lens is None else context_lens
    cache = LayerCache(*(pages.to(DEVICE) for pages in scene.cache.pools))
    return decode_attention(
        scene.query.to(DEVICE), cache.keys, cache.values, block_tables=step.block_tables, context_lens=lens, scale=0.3,
        window=None, softcap=None, sinks=None, num_splits=num_splits,
    ).cpu()  # fmt: skip


def written(scene: Scene) -> Scene:
    kernel = ReferenceAttention()
    kernel.begin_step(scene.inputs)
    kernel.write(scene.cache, scene.key, scene.value)
    return scene


@pytest.mark.parametrize("num_splits", [2, 8])
def test_splits_of_the_keys_change_nothing(num_splits: int) -> None:
    """Including more splits than tiles of keys: empty splits have no weight."""
    scene = written(make_scene([(299, 1), (0, 1), (64, 1), (127, 1)], dtype=torch.float32))
    torch.testing.assert_close(decode(scene, num_splits), decode(scene, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_padded_row_is_zero_whatever_its_page_holds(num_splits: int) -> None:
    scene = written(make_scene([(30, 1), (7, 1)], dtype=torch.float32))
    lens = torch.tensor([31, 0], dtype=torch.int32, device=DEVICE)
    output = decode(scene, num_splits, context_lens=lens)
    assert not output[1].any()
    torch.testing.assert_close(output[0], decode(scene, num_splits)[0], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
def test_sequence_of_nans_only_spoils_its_own_output() -> None:
    scene = make_scene(STEPS["decodes of far lengths"], dtype=torch.float32)
    form = AttentionForm(scale=0.3)
    expected = run(scene, form)
    scene.key[3] = torch.nan
    output = run(scene, form)
    assert output[3].isnan().all()
    torch.testing.assert_close(output[[0, 1, 2, 4]], expected[[0, 1, 2, 4]], rtol=0, atol=0)


@pytest.mark.usefixtures("rows_by_themselves")
@pytest.mark.parametrize(("window", "split_keys"), [(None, 2048), (None, 64), (37, 64)])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 8), pytest.param(torch.bfloat16, 128, marks=pytest.mark.gpu)], ids=str
)
def test_row_of_the_chunk_kernel_does_not_depend_on_batch_or_chunking(
    window: int | None, split_keys: int, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The basis of ``--deterministic``: the last tokens of a prompt, as one chunk, as two, and one by one; and with
    split keys, computed by one program each and by one for all.
    """
    monkeypatch.setattr("triptych.workers.execute.attention.triton._FIXED_SPLIT_KEYS", split_keys)
    # So few that the splits of the whole chunk are computed by one program, and those of a few tokens by many.
    monkeypatch.setattr("triptych.workers.execute.attention.triton.num_processors", lambda _device: 4)
    whole = make_scene([(0, 150), (3, 20)], heads=(4, 2), dims=(dim, dim), dtype=dtype)
    form = AttentionForm(scale=0.3, sliding_window=window)
    together = run(whole, form, is_invariant=True)[:150]
    # The same sequence alone, its first 149 or 100 tokens already in its pages.
    for cached in (100, 149):
        alone = cut(whole, cached, 150)
        assert torch.equal(run(alone, form, is_invariant=True), together[cached:])


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[KeySplits | None]:
    """Those of chunks, in the order of the calls."""
    found: list[KeySplits | None] = []

    def noted(*arguments: Any, **options: Any) -> None:
        found.append(options["splits"])
        chunk_attention(*arguments, **options)

    monkeypatch.setattr("triptych.workers.execute.attention.triton.chunk_attention", noted)
    return found


@pytest.mark.parametrize("form", [FORMS["plain"], {**FORMS["all"], "sliding_window": 200}], ids=["plain", "all"])
@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 8), pytest.param(torch.bfloat16, 128, marks=pytest.mark.gpu)], ids=str
)
def test_keys_before_short_chunks_are_split(
    dtype: torch.dtype,
    dim: int,
    is_invariant: bool,
    form: dict[str, Any],
    splits: list[KeySplits | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes stay with the other kernel, and a sequence may be shorter than a split."""
    monkeypatch.setattr("triptych.workers.execute.attention.triton._MIN_SPLIT_KEYS", 64)
    monkeypatch.setattr("triptych.workers.execute.attention.triton._FIXED_SPLIT_KEYS", 128)
    monkeypatch.setattr("triptych.workers.execute.attention.triton.num_processors", lambda _device: 16)
    scene = make_scene([(200, 1), (20, 3), (290, 5)], page_size=16, dims=(dim, dim), dtype=dtype)
    check(scene, AttentionForm(scale=0.8 * dim**-0.5, **form), is_invariant=is_invariant)
    num_keys = 304  # in the longest table; the tokens of a tile see less with a window
    if "sliding_window" in form:
        num_keys = min(num_keys, form["sliding_window"] + chunk_tile(dim, dtype).num_rows // 2)
    fixed, fitting = KeySplits(128, True), KeySplits(64, True, num_keys // 64)
    assert splits == [fixed if is_invariant else fitting]


def cut(scene: Scene, cached: int, end: int) -> Scene:
    """The first sequence of the scene alone, from token ``cached`` on."""
    written(scene)
    inputs = replace(
        scene.inputs,
        positions=scene.inputs.positions[cached:end],
        token_ids=scene.inputs.token_ids[cached:end],
        slot_mapping=scene.inputs.slot_mapping[cached:end],
        query_starts=np.array([0, end - cached], np.int32),
        context_lens=np.array([end], np.int32),
        block_tables=scene.inputs.block_tables[:1],
        num_decodes=int(end - cached == 1),
    )
    tokens = slice(cached, end)
    return replace(
        scene, inputs=inputs, query=scene.query[tokens], key=scene.key[tokens], value=scene.value[tokens],
        keys=scene.keys[:1], values=scene.values[:1],
    )  # fmt: skip


@pytest.mark.parametrize("tile", [ChunkTile(16, 16, 1, 1), ChunkTile(32, 64, 4, 2)])
def test_tiles_change_nothing_but_rounding(tile: ChunkTile) -> None:
    scene = written(make_scene([(10, 37), (0, 3)], dtype=torch.float32))
    step = upload(scene.inputs, DEVICE)
    output = torch.full_like(scene.query, torch.nan).to(DEVICE)
    keys, values = (pages.to(DEVICE) for pages in scene.cache.pools)
    chunk_attention(
        scene.query.to(DEVICE), keys, values, output, block_tables=step.block_tables,
        context_lens=step.context_lens, query_starts=step.query_starts, scale=0.3,
        window=None, softcap=None, sinks=None, tile=tile,
    )  # fmt: skip
    expected = replace_dtype(scene, torch.float64).expected(AttentionForm(scale=0.3))
    torch.testing.assert_close(output.cpu().double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("rows_by_themselves")
@pytest.mark.parametrize("splits", [None, KeySplits(32, False), KeySplits(32, True), KeySplits(32, True, 3)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_launch_for_any_chunks_of_so_many_tokens(seed: int, splits: KeySplits | None) -> None:
    """As in a graph: some chunks are empty, and the last has the padding, which attends to nothing."""
    rng = np.random.default_rng(seed)
    lengths = [(int(c), int(n)) for c, n in zip(rng.integers(0, 150, 5), rng.integers(1, 40, 5), strict=True)]
    scene = written(make_scene(lengths, dtype=torch.float32))
    query = torch.cat([scene.query, torch.full((30, 4, 8), 5.0)]).to(DEVICE)
    starts = scene.inputs.query_starts
    tables = np.pad(scene.inputs.block_tables, ((0, 3), (0, 7)))
    output = torch.full_like(query, torch.nan)
    chunk_attention(
        query, scene.cache.keys.to(DEVICE), scene.cache.values.to(DEVICE), output,
        block_tables=torch.from_numpy(tables).to(DEVICE),
        context_lens=torch.tensor([*scene.inputs.context_lens, 0, 0, 0], dtype=torch.int32, device=DEVICE),
        query_starts=torch.tensor([*starts, starts[-1], starts[-1], len(query)], dtype=torch.int32, device=DEVICE) + 9,
        scale=0.3, window=20 if seed else None, softcap=None, sinks=None, splits=splits,
    )  # fmt: skip
    form = AttentionForm(scale=0.3, sliding_window=20 if seed else None)
    expected = replace_dtype(scene, torch.float64).expected(form)
    torch.testing.assert_close(output[:-30].cpu().double(), expected, rtol=2e-5, atol=2e-5)
    assert not output[-30:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "page_size", "is_invariant"),
    [*product((64, 96, 128, 256), (16, 64, 256), (False,)), (512, 16, False), (128, 16, True), (128, 64, True)],
)
def test_long_contexts_on_a_gpu(dim: int, page_size: int, is_invariant: bool, dtype: torch.dtype) -> None:
    """Up to 32k keys, compared with the reference in double precision on the device."""
    rng = np.random.default_rng(dim + page_size)
    lengths = [(int(n), 1) for n in rng.integers(1, 32_768, 6)] + [(32_767, 1), (0, 1)]
    lengths += [(int(n), int(rng.integers(2, 600))) for n in (0, 5000, 31)]
    scene = make_scene(lengths, page_size=page_size, heads=(8, 2), dims=(dim, dim), dtype=dtype)
    form = AttentionForm(scale=dim**-0.5, sliding_window=[None, 4096][page_size == 64])
    output = run(scene, form, is_invariant=is_invariant)
    wide = replace(
        scene,
        cache=LayerCache(*(pages.to(DEVICE, torch.float64) for pages in scene.cache.pools)),
        query=scene.query.to(DEVICE, torch.float64),
        key=scene.key.to(DEVICE, torch.float64),
        value=scene.value.to(DEVICE, torch.float64),
    )
    expected = wide.run(ReferenceAttention(), form).cpu()
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
