"""Keys and values in eight bits: the definition, and the Triton kernels that write and read them, which are interpreted
on a CPU and compiled on a GPU.

Every slot that belongs to no sequence of the step is poisoned: its scales are NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import HAS_GPU
from tests.workers.execute.attention.test_paged_attention import STEPS, Scene, make_scene, replace_dtype
from triptych.workers.execute.attention.device_step import upload
from triptych.workers.execute.attention.eight_bits import dequantize, quantize, read_pages, write_tokens
from triptych.workers.execute.attention.interface import AttentionForm, LayerCache
from triptych.workers.execute.attention.reference import ReferenceAttention
from triptych.workers.execute.kernels.sizes import KEY_GROUP
from triptych.workers.execute.model.pool import LayerShape, allocate_pool

pytest.importorskip("triton")

from tests.workers.execute.attention.test_triton_attention import DEVICE, FORMS, TOLERANCES, cut
from triptych.workers.execute.attention.triton import TritonAttention
from triptych.workers.execute.kernels.triton_write import rotate_and_write

WIDE = {"heads": (4, 2), "dims": (40, 40)}  # two groups of channels, the second of them smaller


def poisoned(num_pages: int, page_size: int, num_heads: int, dims: tuple[int, int]) -> LayerCache:
    shape = LayerShape(num_heads, *dims, torch.int8)
    cache = allocate_pool({0: shape}, num_pages - 1, page_size=page_size, device=torch.device("cpu"))[0]
    assert cache.scales is not None
    cache.keys.random_(-128, 128)
    cache.values.random_(-128, 128)
    cache.scales.fill_(torch.nan)
    return cache


def make_eight_bit_scene(lengths: list[tuple[int, int]], **options: Any) -> Scene:
    """The scene with pages in eight bits."""
    scene = make_scene(lengths, **{"dtype": torch.float32, **options})
    num_pages, page_size, num_heads, _ = scene.cache.keys.shape
    dims = (scene.key.shape[2], scene.value.shape[2])
    cache = poisoned(num_pages, page_size, num_heads, dims)
    for table, (cached, _), keys, values in zip(
        scene.inputs.block_tables, lengths, scene.keys, scene.values, strict=True
    ):
        positions = np.arange(cached)
        slots = table[positions // page_size].astype(np.int64) * page_size + positions % page_size
        write_tokens(cache, torch.from_numpy(slots), keys[:cached], values[:cached])
    return replace(scene, cache=cache)


def run(scene: Scene, form: AttentionForm, *, is_invariant: bool = False) -> torch.Tensor:
    """The scene on the device, its outputs on the host; its pages are written to."""
    cache = LayerCache(*(pages.to(DEVICE) for pages in scene.cache.pools))
    moved = replace(
        scene, cache=cache, query=scene.query.to(DEVICE), key=scene.key.to(DEVICE), value=scene.value.to(DEVICE)
    )
    if form.sinks is not None:
        form = form._replace(sinks=form.sinks.to(DEVICE))
    output = moved.run(TritonAttention(DEVICE, is_invariant=is_invariant), form).cpu()
    for pages, found in zip(scene.cache.pools, cache.pools, strict=True):
        pages.copy_(found)
    return output


def expected(scene: Scene, form: AttentionForm) -> torch.Tensor:
    """Attention to what is stored after the step, rounded to the type of the scene, in double precision."""
    pairs = [
        read_pages(scene.cache, torch.from_numpy(table).long()[: -(-context // scene.cache.keys.shape[1])])
        for table, context in zip(scene.inputs.block_tables, scene.inputs.context_lens, strict=True)
    ]
    keys, values = (
        [
            pair[part][:context].to(scene.key.dtype)
            for pair, context in zip(pairs, scene.inputs.context_lens, strict=True)
        ]
        for part in range(2)
    )
    wide = form if form.sinks is None else form._replace(sinks=form.sinks.double())
    return replace_dtype(replace(scene, keys=keys, values=values), torch.float64).expected(wide)


def check(scene: Scene, form: AttentionForm, *, is_invariant: bool = False) -> None:
    tolerance, output = TOLERANCES[scene.query.dtype], run(scene, form, is_invariant=is_invariant)
    torch.testing.assert_close(output.double(), expected(scene, form), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("group", [32, 80])
def test_numbers_are_the_channels_rounded_to_multiples_of_their_scale(group: int) -> None:
    x = torch.randn(50, 3, 80, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None, None]
    numbers, scales = quantize(x, group)
    for first in range(0, 80, group):
        part, scale = x[..., first : first + group], scales[..., first // group].float()
        assert torch.equal(scales[..., first // group], (part.abs().amax(-1) / 127).bfloat16())
        found = numbers[..., first : first + group]
        assert found.abs().amax() == 127
        assert ((found * scale[..., None] - part).abs() <= 0.5005 * scale[..., None]).all()


def test_zeros_stay_zero_and_what_is_not_finite_becomes_nan() -> None:
    x = torch.ones(5, 2, 40)
    x[0], x[1, 0, 3], x[2, 1, 39], x[3, 0, 0] = 0, torch.nan, torch.inf, -torch.inf
    values = dequantize(*quantize(x, 32), 32)
    assert not values[0].any()
    is_nan = torch.zeros(5, 2, 40, dtype=torch.bool)
    is_nan[1, 0, :32] = is_nan[2, 1, 32:] = is_nan[3, 0, :32] = True
    assert torch.equal(values.isnan(), is_nan)


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize(
    ("heads", "dims"), [((4, 2), (40, 40)), ((3, 3), (16, 24)), ((8, 1), (128, 128)), ((2, 2), (96, 64))], ids=str
)
def test_written_tokens_equal_the_definition(heads: tuple[int, int], dims: tuple[int, int], page_size: int) -> None:
    """And no other slot changes."""
    scene = make_eight_bit_scene(STEPS["mixed"], page_size=page_size, heads=heads, dims=dims)
    scene.key[2] = 0
    cache, expected = (LayerCache(*(pages.clone().to(DEVICE) for pages in scene.cache.pools)) for _ in range(2))
    step = upload(scene.inputs, DEVICE)
    key, value = scene.key.to(DEVICE), scene.value.to(DEVICE)
    write_tokens(expected, step.slot_mapping.long(), key, value)
    kernel = TritonAttention(DEVICE)
    kernel.use(step)
    kernel.write(cache, key, value)
    for pages, wanted in zip(cache.pools, expected.pools, strict=True):
        torch.testing.assert_close(pages, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("dim", "num_heads"), [(16, 1), (80, 2), (96, 3), (128, 8), (256, 2)])
def test_rotated_keys_are_rounded_once(dim: int, num_heads: int, has_norms: bool) -> None:
    """They equal the definition for those that are written in float32. Compiled, these may differ in the last bit: two
    kernels may fuse products and sums differently.
    """
    torch.manual_seed(0)
    page_size, num_tokens = 4, 5
    qkv = torch.randn(num_tokens, 4 * num_heads * dim, device=DEVICE)
    qkv[1] = 0
    slots = torch.tensor([13, 2, 7, 30, 4], dtype=torch.int32, device=DEVICE)
    angles = torch.rand(64, dim // 2, device=DEVICE)
    norms = (torch.rand(dim, device=DEVICE), torch.rand(dim, device=DEVICE)) if has_norms else None
    form: dict[str, Any] = {
        "slots": slots, "positions": slots, "rope": (angles.cos(), angles.sin()), "norms": norms, "norm_eps": 1e-6,
        "num_heads": 2 * num_heads,
    }  # fmt: skip
    plain = [torch.zeros(9, page_size, num_heads, dim, device=DEVICE) for _ in range(2)]
    queries = rotate_and_write(qkv, plain[0], plain[1], **form)
    cache = LayerCache(*(pages.to(DEVICE) for pages in poisoned(9, page_size, num_heads, (dim, dim)).pools))
    expected = LayerCache(*(pages.clone() for pages in cache.pools))
    write_tokens(expected, slots.long(), *(pages.flatten(0, 1)[slots.long()] for pages in plain))
    found = rotate_and_write(qkv, cache.keys, cache.values, scales=cache.scales, **form)
    is_exact = DEVICE.type == "cpu"
    torch.testing.assert_close(found, queries, rtol=0 if is_exact else 1e-5, atol=0 if is_exact else 1e-6)
    for pages, wanted in zip(cache.pools, expected.pools, strict=True):
        last_bit = 1 if pages.dtype == torch.int8 else 2**-8
        torch.testing.assert_close(
            pages, wanted, rtol=0 if is_exact else 2**-8, atol=0 if is_exact else last_bit, equal_nan=True
        )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_token_that_is_not_finite_only_spoils_its_own_sequence(part: str, value: float) -> None:
    form = AttentionForm(scale=0.3)
    wanted = run(make_eight_bit_scene(STEPS["decodes of far lengths"], **WIDE), form)
    scene = make_eight_bit_scene(STEPS["decodes of far lengths"], **WIDE)
    getattr(scene, part)[3, 1, 35] = value
    output = run(scene, form)
    assert output[3, 2:].isnan().any(dim=1).all()
    torch.testing.assert_close(output[[0, 1, 2, 4]], wanted[[0, 1, 2, 4]], rtol=0, atol=0)


@pytest.mark.parametrize("step", ["mixed", "decodes of far lengths"])
@pytest.mark.parametrize(
    ("form", "is_invariant"),
    [*((form, False) for form in FORMS.values()), (FORMS["plain"], True), (FORMS["all"], True)],
    ids=[*FORMS, "invariant plain", "invariant all"],
)
def test_kernel_equals_attention_to_the_stored_values(form: dict[str, Any], step: str, is_invariant: bool) -> None:
    scene = make_eight_bit_scene(STEPS[step], **WIDE)
    check(scene, AttentionForm(scale=0.3, **form), is_invariant=is_invariant)


@pytest.mark.parametrize(("page_size", "window"), [(1, None), (16, None), (64, None), (64, 70), (256, 70)])
def test_page_size_changes_nothing(page_size: int, window: int | None) -> None:
    """Sequences of several pages, ending in the middle of one, at its end and at its beginning."""
    steps = [(140, 1), (63, 1), (64, 1), (0, 40), (70, 20)]
    scene = make_eight_bit_scene(steps, page_size=page_size, dims=(16, 16))
    check(scene, AttentionForm(scale=0.3, sliding_window=window))


@pytest.mark.parametrize(
    ("heads", "dims"),
    [((1, 1), (64, 64)), ((6, 2), (80, 80)), ((5, 1), (24, 16)), ((4, 4), (8, 40)), ((2, 1), (512, 512))],
    ids=str,
)
def test_any_heads_and_channels(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(make_eight_bit_scene(STEPS["mixed"], heads=heads, dims=dims), AttentionForm(scale=0.1, sliding_window=6))


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(seed: int) -> None:
    """Including half precision, in which the kernels multiply what they read."""
    rng = np.random.default_rng(seed)
    decodes = [(int(n), 1) for n in rng.integers(0, 400, rng.integers(1, 5))]
    chunks = [(int(c), int(n)) for c, n in zip(rng.integers(0, 60, 2), rng.integers(2, 40, 2), strict=True)]
    dtype, page_size = [torch.float32, torch.float16][seed % 2], int(2 ** rng.integers(4, 9))
    scene = make_eight_bit_scene(
        decodes + chunks, page_size=page_size, heads=(8, 2), dims=(48, 48), dtype=dtype, seed=seed
    )
    check(scene, AttentionForm(scale=0.15, sliding_window=[None, 17][seed // 2]))


@pytest.mark.parametrize("is_invariant", [False, True])
def test_split_keys_change_nothing(is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of decodes, and those before short chunks."""
    monkeypatch.setattr("triptych.workers.execute.attention.triton._MIN_SPLIT_KEYS", 64)
    monkeypatch.setattr("triptych.workers.execute.attention.triton._FIXED_SPLIT_KEYS", 128)
    monkeypatch.setattr("triptych.workers.execute.attention.triton.num_processors", lambda _device: 16)
    scene = make_eight_bit_scene([(200, 1), (20, 3), (290, 5)], page_size=16, dims=(16, 16))
    check(scene, AttentionForm(scale=0.2), is_invariant=is_invariant)


@pytest.mark.usefixtures("rows_by_themselves")
@pytest.mark.parametrize("split_keys", [2048, 64])
def test_row_does_not_depend_on_batch_or_chunking(split_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The basis of ``--deterministic``."""
    monkeypatch.setattr("triptych.workers.execute.attention.triton._FIXED_SPLIT_KEYS", split_keys)
    whole = make_eight_bit_scene([(0, 90), (3, 5)], dims=(16, 16))
    form = AttentionForm(scale=0.3)
    together = run(whole, form, is_invariant=True)[:90]
    for cached in (60, 89):
        assert torch.equal(run(cut(whole, cached, 90), form, is_invariant=True), together[cached:])


def test_reference_attends_to_the_stored_values() -> None:
    scene, form = make_eight_bit_scene(STEPS["mixed"], **WIDE), AttentionForm(scale=0.3)
    output = scene.run(ReferenceAttention(), form)
    torch.testing.assert_close(output.double(), expected(scene, form), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("bias", "most", "of_one_scale"), [(0.0, 0.01, 1.0), (50.0, 0.1, 0.8)])
def test_error_of_outputs(bias: float, most: float, of_one_scale: float) -> None:
    """Also if a few channels of all keys are much larger: it is smaller than with one scale for all channels."""
    scene = make_scene([(400, 1)] * 4, heads=(4, 2), dims=(128, 128), dtype=torch.float32)
    for keys in scene.keys:
        keys[..., [5, 9]] += bias
    form = AttentionForm(scale=128**-0.5)
    exact = replace_dtype(scene, torch.float64).expected(form)

    def error(group: int) -> float:
        keys = [dequantize(*quantize(x, group), group) for x in scene.keys]
        values = [dequantize(*quantize(x, 128), 128) for x in scene.values]
        found = replace_dtype(replace(scene, keys=keys, values=values), torch.float64).expected(form)
        return float((found - exact).norm() / exact.norm())

    assert error(KEY_GROUP) < most
    assert error(KEY_GROUP) < of_one_scale * error(128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "page_size", "is_invariant"),
    [(64, 64, False), (96, 16, False), (128, 16, False), (128, 64, False), (128, 64, True), (256, 256, False)],
)
def test_long_contexts_on_a_gpu(dim: int, page_size: int, is_invariant: bool, dtype: torch.dtype) -> None:
    """Up to 32k keys, compared with the definition in double precision."""
    assert HAS_GPU
    rng = np.random.default_rng(dim + page_size)
    lengths = [(int(n), 1) for n in rng.integers(1, 32_768, 6)] + [(32_767, 1), (0, 1)]
    lengths += [(int(n), int(rng.integers(2, 600))) for n in (0, 5000, 31)]
    scene = make_eight_bit_scene(lengths, page_size=page_size, heads=(8, 2), dims=(dim, dim), dtype=dtype)
    form = AttentionForm(scale=dim**-0.5, sliding_window=[None, 4096][page_size == 16])
    output = run(scene, form, is_invariant=is_invariant)
    wide = replace(
        scene,
        cache=LayerCache(*(pages.to(DEVICE) for pages in scene.cache.pools)),
        query=scene.query.to(DEVICE, torch.float64),
        key=scene.key.to(DEVICE),
        value=scene.value.to(DEVICE),
    )
    wanted = wide.run(ReferenceAttention(), form).cpu()
    torch.testing.assert_close(output.double(), wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
