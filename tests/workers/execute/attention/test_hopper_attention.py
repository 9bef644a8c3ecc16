"""The kernel for Hopper compared with attention in double precision: run as Python, or compiled on a GPU of that kind.

Every slot that belongs to no sequence of the step is poisoned.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import HAS_GPU
from tests.workers.execute.attention.test_paged_attention import Scene, make_scene, replace_dtype
from triptych.workers.execute.attention.device_step import DeviceStep, upload
from triptych.workers.execute.attention.hopper import HopperChunks
from triptych.workers.execute.attention.interface import AttentionForm, LayerCache
from triptych.workers.execute.attention.reference import ReferenceAttention
from triptych.workers.execute.kernels.support import is_hopper

pytest.importorskip("triton.experimental.gluon")

from tests.workers.execute.attention.fake_gluon import FakeHopper
from tests.workers.execute.attention.test_triton_attention import cut, written
from triptych.workers.execute.attention.triton import TritonAttention
from triptych.workers.execute.kernels import triton_chunk_hopper
from triptych.workers.execute.kernels.triton_chunk_hopper import (
    LARGE,
    NUM_ROWS,
    SMALL,
    HopperTile,
    hopper_attention,
    hopper_tile,
)

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FORM = AttentionForm(scale=0.2)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.skipif(HAS_GPU and not is_hopper(DEVICE), reason="another GPU")


@pytest.fixture(autouse=True, params=[0])
def seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the order in which copies end, where a CPU stands in for the GPU."""
    number: int = request.param
    if not HAS_GPU:
        launch = FakeHopper(triton_chunk_hopper._chunk_hopper, number)
        monkeypatch.setattr(triton_chunk_hopper, "_chunk_hopper", launch)
    return number


def scene_of(lengths: list[tuple[int, int]], **options: Any) -> Scene:
    """Its keys are written."""
    return written(make_scene(lengths, **{"page_size": 64, "dims": (64, 64), "dtype": torch.bfloat16, **options}))


def on_device(scene: Scene) -> LayerCache:
    return LayerCache(*(pages.to(DEVICE) for pages in scene.cache.pools))


def attend(scene: Scene, *, num_processors: int = 3, num_padded: int = 0, tile: HopperTile = LARGE) -> torch.Tensor:
    """The outputs, with those of so many more tokens, in chunks that attend to nothing."""
    step, cache = upload(scene.inputs, DEVICE), on_device(scene)
    query = torch.cat([scene.query, torch.full((num_padded, *scene.query.shape[1:]), 5.0, dtype=scene.query.dtype)])
    query, ends = query.to(DEVICE), [len(scene.query)] * 2 * (num_padded > 0) + [len(query)] * (num_padded > 0)
    output = torch.full_like(query, torch.nan)
    hopper_attention(
        query, cache.keys, cache.values, output,
        block_tables=torch.cat([step.block_tables, torch.zeros_like(step.block_tables[:1]).expand(len(ends), -1)]),
        context_lens=torch.cat([step.context_lens, step.context_lens.new_zeros(len(ends))]),
        query_starts=torch.cat([step.query_starts, step.query_starts.new_tensor(ends)]) + 9,
        scale=FORM.scale, num_processors=num_processors, tile=tile,
    )  # fmt: skip
    return output.cpu()


def check(scene: Scene, output: torch.Tensor, first: int = 0) -> None:
    expected = replace_dtype(scene, torch.float64).run(ReferenceAttention(), FORM)[first:]
    tolerance = TOLERANCE[scene.query.dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def run(scene: Scene, kernel: TritonAttention) -> torch.Tensor:
    kernel.begin_step(scene.inputs)
    return kernel.attend(on_device(scene), scene.query.to(DEVICE), FORM).cpu()


@pytest.mark.parametrize("seed", range(3), indirect=True)
@pytest.mark.parametrize("num_processors", [1, 5, 1000])
def test_kernel_equals_plain_attention(num_processors: int, seed: int) -> None:
    """Chunks that end in a page, at its end and at its beginning; one or several programs for all tiles."""
    scene = scene_of([(0, 1), (200, 1), (0, 64), (63, 65), (640, 70), (31, 2), (500, 12)], seed=seed)
    output = attend(scene, num_processors=num_processors)
    check(scene, output)
    assert torch.equal(attend(scene, tile=SMALL), output)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 64), ((6, 2), 128), ((5, 1), 128), ((8, 1), 64)], ids=str)
@pytest.mark.parametrize("page_size", [64, 256])
def test_any_heads_and_pages(page_size: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    scene = scene_of([(70, 90), (0, 40)], heads=heads, dims=(dim, dim), page_size=page_size, dtype=dtype)
    check(scene, attend(scene))


def test_launch_for_any_chunks_of_so_many_tokens() -> None:
    """As in a graph: some chunks are empty, and the last has the padding."""
    scene = scene_of([(100, 20), (0, 30), (3, 1)])
    output = attend(scene, num_padded=150)
    check(scene, output[:51])
    assert not output[51:].any()


def test_bits_of_a_token_are_the_same_in_any_chunk() -> None:
    """Also in another place of its tile of queries, and whatever the other rows see."""
    whole = scene_of([(0, 300), (0, 70)])
    together = attend(whole)
    for cached in (37, 220, 299):
        assert torch.equal(attend(cut(whole, cached, 300)), together[cached:300])


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_chunks() -> None:
    """Of as many tokens. It contains how pages are addressed, and nothing else of its first step."""
    first, then = (scene_of(lengths, seed=1) for lengths in ([(100, 90), (0, 30)], [(0, 20), (400, 100)]))
    steps, expected = [upload(scene.inputs, DEVICE) for scene in (first, then)], attend(then)
    width = max(step.block_tables.shape[1] for step in steps)
    tables, starts, contexts = (
        torch.zeros(*shape, dtype=torch.int32, device=DEVICE) for shape in ((2, width), (3,), (2,))
    )
    keys, values = (torch.cat(pools).to(DEVICE) for pools in zip(first.cache.pools, then.cache.pools, strict=True))
    query = first.query.to(DEVICE).contiguous()
    output = torch.full_like(query, torch.nan)

    def prepare(step: DeviceStep, scene: Scene, first_page: int) -> None:
        tables[:, : step.block_tables.shape[1]] = step.block_tables + first_page
        starts.copy_(step.query_starts)
        contexts.copy_(step.context_lens)
        query.copy_(scene.query)

    def launch() -> None:
        hopper_attention(
            query, keys, values, output, block_tables=tables, context_lens=contexts, query_starts=starts,
            scale=FORM.scale, num_processors=3,
        )  # fmt: skip

    prepare(steps[0], first, 0)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    prepare(steps[1], then, len(first.cache.keys))
    graph.replay()
    assert torch.equal(output.cpu(), expected)


@pytest.mark.parametrize(
    ("form", "tokens", "is_taken"),
    [
        (FORM, 5 * NUM_ROWS, True),
        (FORM, 4 * NUM_ROWS, False),  # too few to occupy all processors
        (FORM._replace(sliding_window=50), 5 * NUM_ROWS, False),
        (FORM._replace(softcap=3.0), 5 * NUM_ROWS, False),
    ],
    ids=["plain", "small", "window", "softcap"],
)
def test_which_chunks_are_left_to_the_other_kernel(
    form: AttentionForm, tokens: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.workers.execute.attention.hopper.is_hopper", lambda _device: True)
    scene, chunks = scene_of([(1, 1), (0, tokens)], dtype=torch.float16), HopperChunks(DEVICE, 12)
    output = torch.full_like(scene.query, torch.nan).to(DEVICE)
    step, query = upload(scene.inputs, DEVICE), scene.query.to(DEVICE)
    assert chunks.attend(on_device(scene), query[1:], output[1:], form, step) == is_taken
    assert bool(output[1:].isfinite().all()) == is_taken
    assert output[0].isnan().all(), "a decode, which is not its own"
    if is_taken:
        check(scene, output[1:].cpu(), first=1)


def test_fewer_queries_have_smaller_programs() -> None:
    """By the shapes of Qwen3-8B on an H200."""
    assert [hopper_tile(num_tokens, 32, 1, 132) for num_tokens in (512, 1024, 2048)] == [SMALL, SMALL, LARGE]
    assert [hopper_tile(2048, 32, num_chunks, 132) for num_chunks in (2, 16)] == [LARGE, SMALL]


def lacks_function(*_arguments: Any, **_options: Any) -> None:
    raise AttributeError("no such function")


def writes_queries(query: torch.Tensor, _keys: object, _values: object, output: torch.Tensor, **_options: Any) -> None:
    output.copy_(query)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        pytest.param(lacks_function, "no such function", id="lacks_function"),
        pytest.param(writes_queries, "its outputs differ by", id="writes_queries"),
    ],
)
def test_a_kernel_that_another_triton_breaks_is_not_used(
    kernel: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once."""
    monkeypatch.setattr("triptych.workers.execute.attention.hopper.is_hopper", lambda _device: True)
    monkeypatch.setattr(triton_chunk_hopper, "hopper_attention", kernel)
    scene, attention = scene_of([(0, 40)], dtype=torch.float16), TritonAttention(DEVICE)
    attention._hopper._num_processors = 1
    for _ in range(2):
        check(scene, run(scene, attention))
    assert caplog.text.count(reason) == 1


@pytest.mark.parametrize("is_invariant", [False, True])
def test_bits_that_must_not_depend_on_the_batch_come_from_one_kernel(
    is_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def noted(query: torch.Tensor, *arguments: Any, **options: Any) -> None:
        called.append(len(query))
        hopper_attention(query, *arguments, **options)

    monkeypatch.setattr("triptych.workers.execute.attention.hopper.is_hopper", lambda _device: True)
    monkeypatch.setattr(triton_chunk_hopper, "hopper_attention", noted)
    scene, kernel = scene_of([(0, 1), (0, 40)], dtype=torch.float16), TritonAttention(DEVICE, is_invariant=is_invariant)
    kernel._hopper._num_processors = 1
    for _ in range(2):
        check(scene, run(scene, kernel))
    assert called == ([] if is_invariant else [200, 200, 40, 40])  # it is compared with the other kernel once
