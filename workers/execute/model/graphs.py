"""Which steps run as graphs, and what records them. Nothing here needs a GPU but ``CudaGraphCapture``."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from ..sampling.kinds import SamplingKind
from ..step import StepInputs

Replay = Callable[[], None]

_STEPS_BETWEEN_CAPTURES = 16  # after a restart, so that those who wait are not held up by all graphs in a row


class GraphKey(NamedTuple):
    """A graph is for so many rows, and ends where the host has to take over."""

    num_rows: int
    kind: SamplingKind


class GraphCapture(Protocol):
    """Records what a function launches on the device, as it is, with all numbers and addresses it has now."""

    def __call__(self, run: Replay) -> Replay:
        """A function that launches the same again. ``run`` has run before; recording computes nothing."""
        ...


class CudaGraphCapture:
    """CUDA graphs of one memory pool: what one needs while it runs, the others use too, since one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()
        replay: Replay = graph.replay
        return replay


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
    """Graphs by key. One that is missing is captured when its turn comes; until then its steps run as they are."""

    def __init__(self, capture: GraphCapture, make_run: Callable[[GraphKey], Replay]) -> None:
        self._capture = capture
        self._make_run = make_run
        self._replays: dict[GraphKey, Replay] = {}
        self._missed: Counter[GraphKey] = Counter()
        self._num_waited = 0
        self.num_replays = 0

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    def capture_all(self, keys: Iterable[GraphKey], progress: Callable[[int, int], None]) -> None:
        """Records graphs, those with most rows first: the smaller ones then fit into their memory."""
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
        if self._num_waited >= _STEPS_BETWEEN_CAPTURES and key == self._missed.most_common(1)[0][0]:
            self._replays[key] = self._capture(run)
            del self._missed[key]
            self._num_waited = 0
