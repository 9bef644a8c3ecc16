"""Which steps run as graphs, and what records them. Only ``CudaGraphCapture`` needs a GPU."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ...sampling.kinds import SamplingKind
from ..memory import is_out_of_memory
from .buckets import StepSize

logger = logging.getLogger(__name__)

Replay = Callable[[], None]

_STEPS_BETWEEN_CAPTURES = 16  # at least, so that requests are not held up by captures in a row after a restart


class GraphKey(NamedTuple):
    """A graph has the size of its steps, ends where the host must take over, and applies adapters or does not."""

    size: StepSize
    kind: SamplingKind
    is_adapted: bool = False


def _by_memory(key: GraphKey) -> tuple[int, GraphKey]:
    return key.size.num_chunk_tokens, key


class CaptureFailed(Exception):
    """A function cannot be recorded, for example because it waits for the device. The device remains usable."""


class GraphCapture(Protocol):
    """Records what a function launches on the device, with its current sizes and addresses baked in."""

    def __call__(self, run: Replay) -> Replay:
        """Return a function that launches the same again. ``run`` has run before; recording computes nothing.

        Raises:
            CaptureFailed: ``run`` cannot be recorded.
        """
        ...


class CudaGraphCapture:
    """CUDA graphs that share one memory pool for their temporaries, which is safe since one graph runs at a time.

    They are captured on a stream of their own. From torch 2.12 on, a graph that is freed takes along the workspaces of
    cuBLAS for the stream of its capture (pytorch/pytorch#193402). By default that is the same for all graphs of a
    process, so those of a runner in use would read memory that is gone.
    """

    # Failed graphs are kept for the lifetime of the process. The allocator of pinned memory lives as long and keeps
    # asking them whether they are capturing, even after the runner that measured memory is gone.
    _failed: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, run: Replay) -> Replay:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                run()
        except RuntimeError as error:
            self._failed.append(graph)
            self._unwind(stream)
            # The allocator of pinned memory still believes that the capture is under way, and would refuse the next
            # one into this pool. Existing graphs keep the pool alive.
            self._pool = None
            # The error from ``run`` says why the capture ended; the one from ending it, only that it was invalid.
            raise CaptureFailed(str(error.__context__ or error)) from error
        replay: Replay = graph.replay
        return replay

    def _unwind(self, stream: torch.cuda.Stream) -> None:
        """Do the cleanup that torch skips after an invalid capture, because ending the capture raises first.

        Without it the allocator believes that the capture is under way, and the next ``empty_cache`` is an internal
        error (fixed in torch 2.12, pytorch/pytorch#180395).
        """
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()  # raises if the device itself is lost
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # raised by versions of torch that have done this already
            torch._C._cuda_endAllocateToPool(device, self._pool)
        # Replace the generator's state by a copy that is not marked as capturing: else the next random number that
        # torch draws on the device is an internal error, too.
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())


class GraphShelf:
    """Graphs by key. A missing graph is captured when its turn comes; until then its steps run without a graph.

    Once a capture has failed, no other is attempted; existing graphs stay in use.
    """

    def __init__(
        self, capture: GraphCapture, make_run: Callable[[GraphKey], Replay], clear: Callable[[GraphKey], None]
    ) -> None:
        """``clear`` fills the static buffers of a graph with padding alone: those of the last step name pages that may
        belong to someone else by now.
        """
        self._capture = capture
        self._make_run = make_run
        self._clear = clear
        self._replays: dict[GraphKey, Replay] = {}
        self._missed: Counter[GraphKey] = Counter()
        self._num_waited = 0
        self._may_capture = True
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    def capture_all(self, keys: Iterable[GraphKey], progress: Callable[[int, int], None]) -> None:
        """Record graphs, those with the most tokens and rows first, so that smaller ones fit into their memory.

        Raises:
            CaptureFailed: a graph cannot be recorded.
        """
        ordered = sorted(set(keys), key=_by_memory, reverse=True)
        for done, key in enumerate(ordered, start=1):
            run = self._make_run(key)
            self._clear(key)
            run()  # first-call compilation and allocation must not happen during recording
            self._replays[key] = self._capture(run)
            progress(done, len(ordered))

    def capture_next(self, keys: Iterable[GraphKey]) -> bool:
        """Record the missing graph with the most rows; returns whether another one is missing."""
        missing = sorted((key for key in keys if key not in self._replays), key=_by_memory, reverse=True)
        if not missing or not self._may_capture:
            return False
        run = self._make_run(missing[0])
        self._clear(missing[0])
        try:
            run()
        except Exception as error:  # others may use the device too, and nobody needs this step
            if not is_out_of_memory(error):
                raise
            self._capture_no_more(missing[0], error)
            return False
        self._capture_late(missing[0], run)
        return len(missing) > 1 and self._may_capture

    def run(self, key: GraphKey) -> None:
        """Compute the step that is in the static buffers."""
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
            self._capture_no_more(key, error)
        self._missed.pop(key, None)
        self._num_waited = 0

    def _capture_no_more(self, key: GraphKey, error: Exception) -> None:
        self._may_capture = False
        logger.warning("no more graphs are captured, since %s could not be: %s", key, error)
