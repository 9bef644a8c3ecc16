"""Which steps run as graphs, and what records them. Nothing here needs a GPU but ``CudaGraphCapture``."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ..sampling.kinds import SamplingKind
from ..step import StepInputs

logger = logging.getLogger(__name__)

Replay = Callable[[], None]

_STEPS_BETWEEN_CAPTURES = 16  # after a restart, so that those who wait are not held up by all graphs in a row


class GraphKey(NamedTuple):
    """A graph is for so many rows, ends where the host has to take over, and adds what adapters add, or does not."""

    num_rows: int
    kind: SamplingKind
    is_adapted: bool = False


class CaptureFailed(Exception):
    """A function cannot be recorded, as one that waits for the device. The device goes on as if it was not tried."""


class GraphCapture(Protocol):
    """Records what a function launches on the device, as it is, with all numbers and addresses it has now."""

    def __call__(self, run: Replay) -> Replay:
        """A function that launches the same again. ``run`` has run before; recording computes nothing.

        Raises:
            CaptureFailed: it cannot be recorded.
        """
        ...


class CudaGraphCapture:
    """CUDA graphs of one memory pool: what one needs while it runs, the others use too, since one runs at a time."""

    # For as long as the process lives, as does the allocator of pinned memory, which goes on asking them whether they
    # capture: the runner that the memory is measured with is gone by the time of the next answer.
    _failed: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Replay) -> Replay:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                run()
        except RuntimeError as error:
            self._failed.append(graph)
            self._unwind(stream)
            # The allocator of pinned memory still takes the capture for one under way, and would refuse the next into
            # this pool. Graphs that are there keep it alive.
            self._pool = None
            # What ended the capture is told by ``run``; that the capture was invalid, by its end.
            raise CaptureFailed(str(error.__context__ or error)) from error
        replay: Replay = graph.replay
        return replay

    def _unwind(self, stream: torch.cuda.Stream) -> None:
        """What an invalid capture leaves undone, as its end raises before it gets there.

        Without it the allocator takes the capture for one under way, and the next ``empty_cache`` is an internal error
        (mended in torch 2.12, pytorch/pytorch#180395).
        """
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()  # raises where the device itself is lost
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # of a torch that has done so
            torch._C._cuda_endAllocateToPool(device, self._pool)
        # The same state once more, but not one that counts for a capture: else the next random number that torch draws
        # on the device is an internal error, too.
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())


def decode_buckets(max_rows: int) -> list[int]:
    """Numbers of rows that have a graph: 1, 2, 4, then every eighth, and the most there can be.

    Source: the spacing of vLLM's and SGLang's capture sizes; a padded row costs little where rows are few.
    """
    sizes = [1, 2, 4, *range(8, max_rows + 1, 8), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


class Router:
    """The rule: a step of decodes alone that no bucket is too small for takes a graph, every other step does not."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        self.buckets = decode_buckets(max_rows)
        self._max_pages = max_pages

    def bucket(self, inputs: StepInputs) -> int | None:
        """The smallest number of rows that holds the step, or None where it has to run without a graph."""
        num_rows, num_pages = inputs.block_tables.shape
        is_pure = 0 < inputs.num_decodes == num_rows == len(inputs.sample_rows)
        if not is_pure or num_rows > self.buckets[-1] or num_pages > self._max_pages:
            return None
        return self.buckets[bisect_left(self.buckets, num_rows)]


class GraphShelf:
    """Graphs by key. One that is missing is captured when its turn comes; until then its steps run as they are.

    After one that could not be captured no other is tried: those that are there stay.
    """

    def __init__(self, capture: GraphCapture, make_run: Callable[[GraphKey], Replay]) -> None:
        self._capture = capture
        self._make_run = make_run
        self._replays: dict[GraphKey, Replay] = {}
        self._missed: Counter[GraphKey] = Counter()
        self._num_waited = 0
        self._may_capture = True
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    def capture_all(self, keys: Iterable[GraphKey], progress: Callable[[int, int], None]) -> None:
        """Records graphs, those with most rows first: the smaller ones then fit into their memory.

        Raises:
            CaptureFailed: one cannot be recorded.
        """
        ordered = sorted(keys, reverse=True)
        for done, key in enumerate(ordered, start=1):
            run = self._make_run(key)
            run()  # what is compiled or allocated at the first call must not be while it is recorded
            self._replays[key] = self._capture(run)
            progress(done, len(ordered))

    def run(self, key: GraphKey) -> None:
        """Computes the step that lies in the static buffers."""
        replay = self._replays.get(key)
        if replay is not None:
            self.num_replays += 1
            replay()
            return
        run = self._make_run(key)
        run()
        self._missed[key] += 1
        self._num_waited += 1
        is_its_turn = self._num_waited >= _STEPS_BETWEEN_CAPTURES and key == self._missed.most_common(1)[0][0]
        if is_its_turn and self._may_capture:
            self._capture_late(key, run)

    def _capture_late(self, key: GraphKey, run: Replay) -> None:
        try:
            self._replays[key] = self._capture(run)
        except CaptureFailed as error:
            self._may_capture = False
            logger.warning("no more graphs are captured, since %s could not be: %s", key, error)
        del self._missed[key]
        self._num_waited = 0
