"""The fake CUDA device refuses what a GPU refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.conftest import HAS_GPU

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.fake_cuda import fake_cuda
from tests.fake_cuda.device import FakeCuda

pytestmark = pytest.mark.skipif(HAS_GPU, reason="there is a real device")


@pytest.fixture(name="device")
def fixture_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as device:
        yield device


@triton.jit  # type: ignore[untyped-decorator]
def _double(x_ptr, size: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at))


def test_operators_compute_without_waiting(device: FakeCuda) -> None:
    x = torch.ones(3, 4, device="cuda")
    x[1] = 2
    y = (x @ torch.full((4, 2), 0.5, device="cuda"))[1:]
    assert (y.device.type, y.is_cuda, device.waits) == ("cuda", True, {})
    assert y.cpu().tolist() == [[4, 4], [2, 2]]
    assert device.waits.total() == 1


def test_operands_on_two_devices_are_refused(device: FakeCuda) -> None:
    x = torch.ones(3, device="cuda")
    assert (x + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]  # as on a GPU, a single number may be on the host
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x[torch.tensor([0, 1])]


def test_kernels_refuse_host_tensors(device: FakeCuda) -> None:
    x = torch.ones(4, device="cuda")
    _double[(1,)](x, 4)
    assert x.tolist() == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="cpu tensor"):
        _double[(1,)](torch.ones(4), 4)


def test_operators_whose_result_depends_on_data_wait(device: FakeCuda) -> None:
    x = torch.tensor([0.0, 1.0], device="cuda")
    device.pageable.clear()
    reads: list[Callable[[], object]] = [
        lambda: float(x[1]), lambda: x.nonzero(), lambda: x[x > 0], lambda: bool(x.any()),
    ]  # fmt: skip
    for number, read in enumerate(reads):
        read()
        assert device.waits.total() == number + 1
    x[[0]] = 2  # torch sends the list
    assert device.pageable.total() == 1


def test_copy_to_pinned_memory_arrives_with_its_event(device: FakeCuda) -> None:
    x = torch.tensor([1, 2, 3], device="cuda")
    pinned = torch.empty(3, dtype=torch.int64, pin_memory=True)
    early = torch.cuda.Event()  # type: ignore[no-untyped-call]
    early.record()
    pinned.copy_(x, non_blocking=True)
    x.zero_()
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    early.synchronize()
    assert pinned.tolist() != [1, 2, 3]
    done.synchronize()
    assert pinned.tolist() == [1, 2, 3]


def test_pinned_memory_must_not_change_before_it_is_copied(device: FakeCuda) -> None:
    pinned = torch.zeros(3).pin_memory()
    pinned.to("cuda", non_blocking=True)
    pinned[0] = 1
    with pytest.raises(AssertionError, match="changed before"):
        torch.cuda.synchronize()


def test_graph_replays_numbers_and_addresses_of_its_capture(device: FakeCuda) -> None:
    x, total = torch.ones(4, device="cuda"), torch.zeros((), device="cuda")
    graph, factor = torch.cuda.CUDAGraph(), 3
    with torch.cuda.graph(graph):
        scaled = x * factor
        _double[(1,)](scaled, 4)
        total += scaled.sum()
    factor = 5
    assert float(total) == 0  # a capture computes nothing
    x.fill_(2)
    graph.replay()
    graph.replay()
    assert float(total) == 2 * 4 * 2 * 3 * 2


@pytest.mark.parametrize("forbidden", ["item", "download", "upload"])
def test_capture_refuses_to_wait(forbidden: str, device: FakeCuda) -> None:
    x = torch.ones(4, device="cuda")
    pinned = torch.ones(4, pin_memory=True)
    actions: dict[str, Callable[[], object]] = {
        "item": lambda: x[0].item(),
        "download": lambda: pinned.copy_(x, non_blocking=True),
        "upload": lambda: x.copy_(torch.ones(4)),
    }
    with pytest.raises(RuntimeError, match="when stream is capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        actions[forbidden]()
    assert x.tolist() == [1, 1, 1, 1]


def double_beside(x: torch.Tensor, *, forks: bool = True, joins: bool = True) -> torch.Tensor:
    """What is read of x while a kernel on another stream doubles it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    if forks:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _double[(1,)](x, 4)
    meanwhile = x + 0
    if joins:
        torch.cuda.current_stream().wait_stream(stream)
    return meanwhile


def test_kernel_on_a_stream_beside_runs_when_it_is_waited_for(device: FakeCuda) -> None:
    x = torch.ones(4, device="cuda")
    assert double_beside(x).tolist() == [1, 1, 1, 1]
    assert x.tolist() == [2, 2, 2, 2]
    with pytest.raises(AssertionError, match="has not waited"):
        double_beside(x, forks=False)


def test_capture_refuses_to_leave_a_stream_beside(device: FakeCuda) -> None:
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double_beside(x)
    graph.replay()
    assert x.tolist() == [2, 2, 2, 2]
    with pytest.raises(AssertionError, match="unjoined"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        double_beside(x, joins=False)


def test_modules_move_to_the_device(device: FakeCuda) -> None:
    linear = torch.nn.Linear(4, 2)
    x = torch.randn(3, 4)
    expected = linear(x)
    moved = linear.to("cuda")
    assert moved.weight.is_cuda
    assert torch.equal(moved(x.to("cuda")).cpu(), expected)
