"""Progress bars: for anything countable, and for a batch with its token rate and remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..batch import Batch
from .report import number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

WINDOW_S = 3.0  # over which the rate is averaged


class TokenRate:
    """Tokens per second over the last ``WINDOW_S`` seconds, from a growing count."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, num_tokens: int, *, now: float) -> float:
        """The rate, given the count at the time ``now`` in seconds."""
        self._samples.append((now, num_tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        return (num_tokens - before) / (now - then) if now > then else 0.0


@contextmanager
def count_bar(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to be called with the number done, of ``total``; shown on a terminal."""
    if not console.is_terminal:
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def answers_bar(
    console: Console, total: int, fields: Callable[[], Mapping[str, Any]], *columns: ProgressColumn
) -> Iterator[None]:
    """A bar that asks for its fields, such as ``completed``, whenever it is drawn, until this block ends."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    class LiveProgress(Progress):
        def get_renderables(self):  # type: ignore[no-untyped-def]
            for task in self.tasks:
                self.update(task.id, **fields())
            return super().get_renderables()

    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), *columns)
    with LiveProgress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        progress.add_task("", total=total, **fields())
        yield


@contextmanager
def batch_bar(console: Console, batch: Batch) -> Iterator[None]:
    """A bar that follows the batch inside this block."""
    from rich.progress import ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    rate = TokenRate()

    class RateColumn(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            return Text(f"{number(rate.update(batch.num_tokens, now=time.monotonic()))} tok/s", style="cyan")

    columns = (RateColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with answers_bar(console, batch.num_jobs, lambda: {"completed": batch.num_ended}, *columns):
        yield
