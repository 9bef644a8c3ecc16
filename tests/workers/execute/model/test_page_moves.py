"""A real model gives the same answers with shared, copied, swapped and evicted pages as with unshared ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.conftest import HAS_GPU
from tests.tiny import VOCAB_SIZE, make_tiny_model
from tests.workers.execute.factories import make_scheduler, make_sequence, run
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.attention.interface import LayerCache
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model import moves
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.moves import PageMover
from triptych.workers.execute.scheduling.moves import Moves
from triptych.workers.execute.scheduling.sequence import Sequence

DEVICE = "cuda" if HAS_GPU else "cpu"
PAGE_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def make_engine(folder: Path, *, num_pages: int, host_pages: int = 0, **options: Any) -> Engine:
    runner, card = build_runner(
        ModelConfig(model=str(folder), device="cpu", backend="transformers", threads=1, max_model_len=PAGE_SIZE * 12),
        CacheConfig(num_pages=num_pages, page_size=PAGE_SIZE, host_pages=host_pages),
        SchedulerConfig(max_num_seqs=4, prefill_chunk=16),
        model_dir=folder,
        run_dir=folder,
    )
    size: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": num_pages, "max_model_len": card.max_model_len}
    scheduler = make_scheduler(prefill_chunk=16, host_pages=host_pages, **size, **options)
    return Engine(scheduler, runner)


def conversations() -> list[Sequence]:
    """Prompts with common prefixes; the last one repeats the first."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, VOCAB_SIZE, 40)
    sequences = []
    for index, num_tokens in enumerate((40, 33, 52, 24, 40)):
        sequence = make_sequence(index, num_tokens=num_tokens, max_tokens=24)
        prompt = np.concatenate([prefix, rng.integers(3, VOCAB_SIZE, 12)])
        sequence.tokens[:num_tokens] = prompt[:num_tokens]
        sequences.append(sequence)
    return sequences


def outputs(engine: Engine) -> dict[tuple[int, int], list[int]]:
    """All of them: first one after the other, so that prefixes are cached, and then together."""
    produced = {}
    for number, sequence in enumerate(conversations()):
        engine.add(sequence)
        if number == 0:
            produced.update(run(engine))
            engine.release(sequence.key)
    return {**produced, **run(engine)}


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 64},
        {"num_pages": 14},
        {"num_pages": 14, "host_pages": 40, "preemption": "recompute"},
        {"num_pages": 14, "host_pages": 40, "preemption": "swap"},
    ],
    ids=["shared", "evicted", "to the host and back", "swapped"],
)
def test_answers_do_not_depend_on_page_moves(folder: Path, options: dict[str, Any]) -> None:
    engine = make_engine(folder, prefix_cache=True, **options)
    assert outputs(engine) == outputs(make_engine(folder, num_pages=64, prefix_cache=False))
    assert engine.stats.num_hit_tokens > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pages_are_restored_from_the_host_bit_for_bit(dtype: torch.dtype) -> None:
    pools = [torch.randn(6, *sizes).to(DEVICE, dtype) for sizes in ((4, 2, 8), (4, 2, 8), (2, 3, 4))]
    before = [pages[[2, 4]].clone() for pages in pools]
    mover = PageMover(pools, num_host_pages=3)
    mover(Moves(swap_out=((2, 1), (4, 0))))
    for pages in pools:
        pages.zero_()
    mover(Moves(swap_in=((5, 1), (2, 0))))
    assert all(torch.equal(pages[[5, 2]], kept) for pages, kept in zip(pools, before, strict=True))


def test_pages_are_copied_on_the_device() -> None:
    pages = torch.randn(6, 4, 2, 8, device=DEVICE)
    before = pages.clone()
    PageMover([pages])(Moves(copies=((2, 4), (3, 1))))
    assert torch.equal(pages, before[[0, 3, 2, 3, 2, 5]])


class OnDevice(torch.Tensor):
    """Pages of a device with asynchronous copies: on a CPU, they happen when somebody waits for them."""

    is_cuda = True
    queue: ClassVar[list[Callable[[], object]]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.Tensor.__setitem__, torch.Tensor.copy_):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, OnDevice) else arg for arg in args]
        cls.queue.append(lambda: func(*plain))
        return args[0]


class Event:
    """A torch.cuda.Event of that device."""

    last: Callable[[], object] | None = None

    def record(self) -> None:
        self.last = OnDevice.queue[-1] if OnDevice.queue else None

    def synchronize(self) -> None:
        while self.last in OnDevice.queue:
            OnDevice.queue.pop(0)()


@pytest.fixture(name="pinned")
def fixture_pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of pinned tensors, in a process that believes it has a device. A stage holds two pages."""
    pinned: list[int] = []

    def noted(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*shape: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            pinned.extend(shape[:1] * pin_memory)
            return make(*shape, **options)

        return allocate

    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, noted(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(moves, "_STAGE_BYTES", 2 * 2 * 4 * 3)  # two pages of two layers with three numbers each
    monkeypatch.setattr(OnDevice, "queue", [])
    return pinned


def two_layers(num_pages: int) -> list[torch.Tensor]:
    return [torch.randn(num_pages, 3).as_subclass(OnDevice) for _ in range(2)]


def test_only_a_few_host_pages_are_pinned(pinned: list[int]) -> None:
    PageMover(two_layers(6), num_host_pages=100)
    assert pinned == [2, 2]


def test_no_page_is_overwritten_before_it_was_copied(pinned: list[int]) -> None:
    pools = two_layers(6)
    before = [pages[1:].clone() for pages in pools]
    mover = PageMover(pools, num_host_pages=7)
    mover(Moves(swap_out=tuple((page, page) for page in range(1, 6))))
    for pages in pools:
        pages.zero_()
    mover(Moves(swap_in=tuple((page, page) for page in range(1, 6))))
    for launched in OnDevice.queue:
        launched()
    assert all(torch.equal(pages[1:], kept) for pages, kept in zip(pools, before, strict=True))


def test_incoming_pages_do_not_wait_for_the_step_in_flight(pinned: list[int]) -> None:
    mover = PageMover(two_layers(6), num_host_pages=7)
    OnDevice.queue.append(lambda: pytest.fail("somebody waited"))
    mover(Moves(swap_in=((1, 1), (3, 2))))
    assert len(OnDevice.queue) == 1 + 2


def test_indices_are_sent_once_and_not_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def send(column: torch.Tensor, _place: torch.device) -> torch.Tensor:
        sent.append(column)
        return column

    monkeypatch.setattr("triptych.workers.execute.model.moves._sent", send)
    PageMover([torch.zeros(4, 1, 1, 1) for _ in range(72)])(Moves(copies=((1, 2), (3, 1))))
    assert [column.tolist() for column in sent if len(column)] == [[1, 3], [2, 1]]


def test_page_may_be_copied_away_and_overwritten_in_one_step() -> None:
    cache = LayerCache(torch.arange(4.0).reshape(4, 1, 1, 1).clone(), torch.arange(4.0).reshape(4, 1, 1, 1).clone())
    PageMover(cache.pools)(Moves(copies=((1, 2), (3, 1))))
    assert cache.keys.flatten().tolist() == [0.0, 3.0, 1.0, 3.0]
