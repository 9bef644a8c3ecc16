"""Which steps run as graphs, and that a graph computes the same as its step (without a GPU: test_fake_cuda_runs)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.adapters import make_adapter
from tests.conftest import HAS_GPU
from tests.workers.execute.model.fused.short_self_test import shorten_self_test
from tests.workers.execute.model.native.decoders import NativeEngine, make_checkpoint, make_request, some_of
from triptych.workers.execute.model.device.buckets import StepSize
from triptych.workers.execute.model.device.graphs import CaptureFailed, CudaGraphCapture, GraphKey, GraphShelf
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.step_runner import trash_decodes
from triptych.workers.execute.sampling.kinds import SamplingKind
from triptych.workers.execute.scheduling.sequence import Sequence

pytest.importorskip("triton")

from triptych.workers.execute.model.device.runner import DeviceRunner

DEVICE = "cuda" if HAS_GPU else "cpu"
GREEDY = SamplingKind.GREEDY


class Notes:
    """Records the runs and captures of a shelf, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def make_run(self, key: GraphKey) -> Callable[[], None]:
        return lambda: self.log.append(("run", key.size.num_rows))

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.log.append(("capture", 0))
        return lambda: self.log.append(("replay", 0))


def ignore(_key: GraphKey) -> None: ...


def test_graphs_are_captured_largest_first_after_one_plain_run_each() -> None:
    notes, progress = Notes(), []
    shelf = GraphShelf(notes.capture, notes.make_run, ignore)
    shelf.capture_all(
        [GraphKey(StepSize(n), GREEDY) for n in (1, 4, 2)], lambda done, total: progress.append((done, total))
    )
    assert [number for what, number in notes.log if what == "run"] == [4, 2, 1]
    assert [what for what, _ in notes.log] == ["run", "capture"] * 3
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_after_a_restart_graphs_are_captured_one_at_a_time_most_used_first() -> None:
    notes = Notes()
    shelf = GraphShelf(notes.capture, notes.make_run, ignore)
    rows = [8, 4, 8] * 8
    for num_rows in rows:
        shelf.run(GraphKey(StepSize(num_rows), GREEDY))
    assert shelf.num_graphs == 1
    shelf.run(GraphKey(StepSize(8), GREEDY))
    shelf.run(GraphKey(StepSize(4), GREEDY))
    assert notes.log[-2:] == [("replay", 0), ("run", 4)]


def refuse(run: Callable[[], None]) -> Callable[[], None]:
    raise CaptureFailed("operation not permitted when stream is capturing")


def test_capture_that_fails_while_serving_is_logged_once_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    shelf = GraphShelf(refuse, notes.make_run, ignore)
    for _ in range(100):
        shelf.run(GraphKey(StepSize(8), GREEDY))
    assert notes.log == [("run", 8)] * 100
    assert caplog.text.count("operation not permitted when stream is capturing") == 1


def test_lack_of_memory_while_idle_costs_no_process(caplog: pytest.LogCaptureFixture) -> None:
    """Others may have taken what the start left free. Steps then run without the graphs that are missing."""
    notes = Notes()

    def make_run(_: GraphKey) -> Callable[[], None]:
        def run() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        return run

    shelf = GraphShelf(notes.capture, make_run, ignore)
    assert not shelf.capture_next([GraphKey(StepSize(4), GREEDY), GraphKey(StepSize(8), GREEDY)])
    assert not shelf.capture_next([GraphKey(StepSize(4), GREEDY), GraphKey(StepSize(8), GREEDY)])
    assert notes.log == []
    assert caplog.text.count("CUDA out of memory") == 1


class Random:
    """A random number generator whose state counts the numbers drawn in the current capture."""

    def __init__(self) -> None:
        self.is_capturing = False

    def clone_state(self) -> Random:
        return Random()

    def graphsafe_set_state(self, state: Random) -> None:
        self.is_capturing = state.is_capturing


class Cuda:
    """A torch.cuda whose captures are made invalid by what raises in them, and then raise where they end.

    What is pinned is recorded as well, and an invalid capture leaves that recording open for good.
    """

    def __init__(self, *, is_lost: bool = False) -> None:
        self.is_lost = is_lost
        self.stream = "ours"
        self.recording: set[int] = set()
        self.recording_pinned: set[int] = set()
        self.num_pools = 0
        self.streams: list[object] = []  # of the captures
        self.default_generators = [Random()]

    class CUDAGraph:
        def replay(self) -> None: ...

    class Stream:
        pass

    def graph_pool_handle(self) -> int:
        self.num_pools += 1
        return self.num_pools

    def current_device(self) -> int:
        return 0

    def end_allocation(self, _device: int, pool: int) -> None:
        self.recording.remove(pool)

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    @contextmanager
    def graph(self, _graph: object, pool: int, stream: object) -> Iterator[None]:
        self.streams.append(stream)
        before, self.stream = self.stream, "of the capture"
        for recording in (self.recording, self.recording_pinned):
            assert pool not in recording, "already recording to this pool"
            recording.add(pool)
        self.default_generators[0].is_capturing = True
        try:
            yield
        except RuntimeError as error:
            raise torch.AcceleratorError("operation failed due to a previous error during capture") from error
        self.recording.remove(pool)
        self.recording_pinned.remove(pool)
        self.default_generators[0].is_capturing = False
        self.stream = before

    def synchronize(self) -> None:
        if self.is_lost:
            raise torch.AcceleratorError("an illegal memory access was encountered")


def wait_for_the_device() -> None:
    raise torch.AcceleratorError("operation not permitted when stream is capturing")


@pytest.fixture(name="cuda")
def fixture_cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr("torch.cuda", cuda)
    monkeypatch.setattr("torch._C._cuda_endAllocateToPool", cuda.end_allocation, raising=False)
    return cuda


def test_failed_capture_gives_the_reason_and_restores_the_device(cuda: Cuda) -> None:
    with pytest.raises(CaptureFailed, match="not permitted when stream is capturing"):
        CudaGraphCapture()(wait_for_the_device)
    assert (cuda.stream, cuda.recording) == ("ours", set())
    assert not cuda.default_generators[0].is_capturing


def test_captures_after_a_failed_one_share_a_new_pool(cuda: Cuda) -> None:
    capture = CudaGraphCapture()
    capture(lambda: None)
    with pytest.raises(CaptureFailed):
        capture(wait_for_the_device)
    for _ in range(2):
        capture(lambda: None)
    assert cuda.num_pools == 2


def test_captures_of_one_owner_share_a_stream_that_no_other_uses(cuda: Cuda) -> None:
    """A graph that is freed takes along what cuBLAS keeps for the stream of its capture."""
    for capture in (CudaGraphCapture(), CudaGraphCapture()):
        for _ in range(2):
            capture(lambda: None)
    assert cuda.streams[0] is cuda.streams[1] is not cuda.streams[2]
    assert cuda.streams[2] is cuda.streams[3]


def test_graph_of_a_failed_capture_outlives_its_owner(cuda: Cuda) -> None:
    """The allocator of pinned memory keeps its address, and never learns that the capture ended."""
    graphs: list[weakref.ref[Any]] = []

    class Noted(Cuda.CUDAGraph):
        def __init__(self) -> None:
            graphs.append(weakref.ref(self))

    cuda.CUDAGraph = Noted
    with pytest.raises(CaptureFailed):
        CudaGraphCapture()(wait_for_the_device)
    CudaGraphCapture()(lambda: None)
    gc.collect()
    assert [graph() is not None for graph in graphs] == [True, False]


def test_device_lost_during_a_capture_is_not_reported_as_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda", Cuda(is_lost=True))
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        CudaGraphCapture()(wait_for_the_device)


@pytest.mark.gpu
def test_step_that_waits_for_the_device_is_not_captured_and_the_device_still_works() -> None:
    with torch.inference_mode():  # as in a runner: torch's generator refuses captures of both kinds in one process
        x, capture = torch.ones(4, device="cuda"), CudaGraphCapture()
        with pytest.raises(CaptureFailed):
            capture(lambda: x.sum().item())  # type: ignore[arg-type]
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.empty_cache()
        assert torch.rand(4, device="cuda").isfinite().all()
        replay = capture(lambda: x.add_(1))  # type: ignore[arg-type]
        replay()
        assert x.tolist() == [2.0] * 4


# Graphs of a whole decoder


@pytest.fixture(scope="module", name="engine")
def fixture_engine(tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    folder = tmp_path_factory.mktemp("graphs")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    checkpoint = make_checkpoint("qwen3", folder / "checkpoint", num_hidden_layers=1, sliding_window=None, **heads)
    with pytest.MonkeyPatch.context() as patch:
        shorten_self_test(patch)
        adapter = make_adapter(folder / "a", checkpoint, rank=4)
        modules = (f"a={adapter}",)
        return NativeEngine(checkpoint, folder, backend="fused", device=DEVICE, cuda_graphs=False, lora_modules=modules)


def with_graphs(engine: NativeEngine, capture: Any, **options: Any) -> DeviceRunner:
    """A runner with graphs for the same decoder and pages."""
    plain = engine.runner
    assert isinstance(plain, DeviceRunner)
    return DeviceRunner(
        plain._mover._device,
        plain._forward,
        plain._sampler,
        device=torch.device(DEVICE),
        max_sampled=12,
        max_pages=64,
        capture=capture,
        is_adapted=True,
        prefill_tokens=16,
        decode_rows=8,
        **options,
    )


def requests() -> list[Sequence]:
    """One request of each kind that a graph supports, and one with logprobs and an adapter."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 5}, {"logprobs": 2}]
    made = [make_request(i, 3 + 5 * i, 6 - i, **params) for i, params in enumerate(kinds)]
    made[-1].adapter = 1
    return made


def run(engine: NativeEngine, runner: Any, **sizes: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """All tokens, and all pages except the trash page. The pages are overwritten before the run."""
    before, engine.runner = engine.runner, runner
    pools = runner._mover._device
    try:
        for pool in pools:
            pool.fill_(7.0)
        return engine.run(*requests(), **{"max_num_seqs": 4, "prefill_chunk": 32, **sizes}), [
            pool[1:].clone() for pool in pools
        ]
    finally:
        engine.runner = before


def capture_graphs(runner: DeviceRunner, keys: list[GraphKey]) -> None:
    assert runner._graphs is not None
    with torch.inference_mode():
        runner._graphs.capture_all(keys, no_progress)


def capture_some(runner: DeviceRunner) -> None:
    """The one that is left in the end is greedy."""
    kinds = (SamplingKind.GREEDY, SamplingKind.DRAWN, SamplingKind.CUT)
    keys = [GraphKey(StepSize(1), GREEDY), *(GraphKey(StepSize(4), kind) for kind in kinds)]
    capture_graphs(runner, [*keys, GraphKey(StepSize(4), SamplingKind.CUT, True)])


def check_equal(engine: NativeEngine, runner: DeviceRunner, plain: Any) -> None:
    capture_some(runner)
    expected_tokens, expected_pages = run(engine, plain)
    assert runner.num_graph_steps == 0
    tokens, pages = run(engine, runner)
    assert tokens == expected_tokens
    assert all(torch.equal(a, b) for a, b in zip(pages, expected_pages, strict=True))


def test_steps_with_prompts_have_the_same_tokens_as_graphs(engine: NativeEngine) -> None:
    """With padding: decodes and chunks beside one another, prompts in several chunks, and all kinds of sampling."""
    runner, sizes = with_graphs(engine, Rerun()), {"max_num_batched_tokens": 16}
    expected_tokens, expected_pages = run(engine, engine.runner, **sizes)
    graphs = ((0, False), (8, True))  # rows of decodes, and whether with adapters
    capture_graphs(runner, [GraphKey(StepSize(rows, 16), SamplingKind.HOST, is_adapted) for rows, is_adapted in graphs])
    tokens, pages = run(engine, runner, **sizes)
    assert tokens == expected_tokens
    for found, expected in zip(pages, expected_pages, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert runner.num_graph_steps == 3


def test_steps_with_proposals_have_the_same_tokens_as_graphs(engine: NativeEngine) -> None:
    """Of all kinds of sampling, beside a request that gets no proposals, with an adapter."""
    expected, _ = run(engine, engine.runner)
    runner, guesses = with_graphs(engine, Rerun(), max_proposals=3), {"num_speculative_tokens": 3}
    capture_graphs(runner, runner._check_keys())
    assert run(engine, runner, propose=some_of(expected), **guesses)[0] == expected
    assert runner.num_graph_steps > 0


@pytest.mark.gpu
def test_cuda_graph_of_proposals_equals_its_step_bit_for_bit(engine: NativeEngine) -> None:
    expected, _ = run(engine, engine.runner)
    options: dict[str, Any] = {"propose": some_of(expected), "num_speculative_tokens": 3}
    found = []
    for capture in (Rerun(), CudaGraphCapture()):
        runner = with_graphs(engine, capture, max_proposals=3)
        capture_graphs(runner, runner._check_keys())
        found.append(run(engine, runner, **options))
        assert runner.num_graph_steps > 0
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.gpu
def test_cuda_graph_equals_its_step_bit_for_bit(engine: NativeEngine) -> None:
    """Both have the same padding, since cuBLAS may use another kernel for three rows than for four."""
    runner, plain = with_graphs(engine, CudaGraphCapture()), with_graphs(engine, Rerun())
    capture_some(plain)
    check_equal(engine, runner, plain)
    assert 0 < runner.num_graph_steps < runner.num_steps


def test_rows_of_a_larger_step_do_not_leak_into_a_smaller_one(engine: NativeEngine) -> None:
    """Buffers are reused without being cleared, so each step must write its padding."""
    runner = with_graphs(engine, Rerun())
    buffers = runner._buffers
    full = trash_decodes(4)
    full.slot_mapping[:] = 500
    buffers.fill(full, 4)
    buffers.fill(trash_decodes(1), 2)
    step = buffers.step(2)
    assert step.slot_mapping.tolist() == [0, 0]
    assert step.context_lens.tolist() == [1, 0]
    assert np.all(step.carried.cpu().numpy() == -1)


class Rerun:
    """A capture that records nothing; a replay runs the function again."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        return run
