"""Requests through the engine in this process, and how close a run comes to the limits of memory and arithmetic."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.cpu_models import num_step_weights, num_weights
from benchmarks.gpu.setting import Notes, Setting, free_memory
from benchmarks.sequences import make_engine, make_sequence
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.facts import no_progress
from triptych.workers.execute.model.step_runner import StepRunner
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.scheduling.proposals import Proposer
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.execute.step import StepInputs

Lengths = tuple[int, int]  # tokens in and out
MAX_TOKEN_ID = 250


class Loaded(NamedTuple):
    """A model ready to run."""

    runner: StepRunner
    card: Any
    scheduler_config: SchedulerConfig
    load_s: float
    capture_s: float


def load(
    setting: Setting,
    name: str,
    *,
    rows: int = 256,
    max_model_len: int = 2048,
    chunk: int = 2048,
    num_speculative_tokens: int = 0,
    kv_dtype: str = "auto",
    draft: str | None = None,
    **options: Any,
) -> Loaded:
    """The random model of that shape on the fused decoder, with captured graphs, and its draft model of that shape;
    ``options`` are those of ``ModelConfig``.
    """
    folder, draft_folder = setting.checkpoint(name), None if draft is None else setting.checkpoint(draft)
    free_memory()
    rows = setting.size(rows, 2)
    scheduler_config = SchedulerConfig(
        max_num_seqs=rows,
        prefill_chunk=setting.size(chunk, 16),
        max_num_batched_tokens=setting.size(2 * chunk, 20),
        num_speculative_tokens=num_speculative_tokens,
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_dir:
        runner, card = build_runner(
            ModelConfig(
                **{
                    "model": str(folder),
                    "device": setting.device.type,
                    "backend": "fused",
                    "dtype": "float32" if setting.is_dry else "bfloat16",
                    "max_model_len": setting.size(max_model_len, 64),
                    **options,
                }
            ),
            CacheConfig(num_pages=32 if setting.is_dry else None, kv_dtype=kv_dtype),
            scheduler_config,
            model_dir=folder,
            draft_folder=draft_folder,
            run_dir=Path(run_dir),
        )
    runner.warm_up()
    loaded_at = time.perf_counter()
    runner.capture_graphs()
    if runner.proposer is not None:
        runner.proposer.warm_up(no_progress, is_first=True)
        runner.proposer.measure_costs(runner.decode_s)
    return Loaded(runner, card, scheduler_config, loaded_at - start, time.perf_counter() - loaded_at)


def note_start(note: Notes, loaded: Loaded) -> None:
    """How long the start took, and what it left for pages."""
    note("load_s", loaded.load_s)
    note("capture_s", loaded.capture_s)
    note("num_pages", loaded.card.num_pages)


def make_sequences(lengths: Items[Lengths], *, seed: int = 0, **sampling: Any) -> list[Sequence]:
    """Requests of random tokens that only end by their length, greedy unless ``sampling`` says otherwise."""
    rng = np.random.default_rng(seed)
    return [
        make_sequence(
            index, rng.integers(1, MAX_TOKEN_ID, num_in).tolist(), num_out, generation=seed, seed=index, **sampling
        )
        for index, (num_in, num_out) in enumerate(lengths)
    ]


class Preceded:
    """A callable that calls something else before each call."""

    def __init__(self, function: Callable[..., Any], before: Callable[[], None]) -> None:
        self._function, self._before = function, before

    def __call__(self, *arguments: Any) -> Any:
        self._before()
        return self._function(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


class TimedRunner:
    """A runner with a mark on the device's timeline before and after the computation of each step.

    The first mark is recorded after the step's inputs were uploaded, right before its graph is replayed or its first
    layer launched. So a device that waits for the host to prepare a step counts as idle. Waits within a step, possible
    without a graph, count as busy.
    """

    def __init__(self, runner: StepRunner, *, on_gpu: bool) -> None:
        self._runner: Any = runner
        self._on_gpu = on_gpu
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None
        self.move, self.collect, self.is_fatal = runner.move, runner.collect, runner.is_fatal
        self.prepare, self.show_progress = runner.prepare, runner.show_progress
        self.load_adapters = runner.load_adapters
        self.is_batch_invariant, self.overlaps = runner.is_batch_invariant, runner.overlaps
        self.page_records = runner.page_records
        self.hides_planning = runner.hides_planning
        self.proposer, self.check_costs = runner.proposer, runner.check_costs

    @property
    def num_graph_steps(self) -> int:
        return int(self._runner.num_graph_steps)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Within this block, the runner marks where its steps begin."""
        runner = self._runner
        forward, graphs = runner._forward, getattr(runner, "_graphs", None)  # a CPU has none
        runner._forward = Preceded(forward, self._begin_step)
        if graphs is not None:
            graphs.run = Preceded(graphs.run, self._begin_step)
        try:
            yield
        finally:
            runner._forward = forward
            if graphs is not None:
                del graphs.run  # the class's own is visible again

    def launch(self, inputs: StepInputs) -> None:
        self._begin = None
        self._runner.launch(inputs)
        self.hides_planning = self._runner.hides_planning  # each step decides anew
        self._marks.append((self._begin, self._mark()))

    def _begin_step(self) -> None:
        # A missing graph runs the forward function too, and may be captured, where no mark is allowed.
        if self._begin is None:
            self._begin = self._mark()

    def idle_share(self) -> float:
        """The share of the time from the first mark to the last between steps: 0 if the host is ahead."""
        if self._on_gpu:
            torch.cuda.synchronize()
        gaps = [self._between(a[1], b[0]) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        total = self._between(self._marks[0][0], self._marks[-1][1])
        return sum(gaps) / total if total else 0.0

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._on_gpu else end - begin


class Run(NamedTuple):
    elapsed_s: float
    plans: list[Plan]
    idle_share: float
    num_graph_steps: int
    num_preemptions: int
    sequences: list[Sequence]

    @property
    def tokens_per_s(self) -> float:
        return sum(s.max_tokens for s in self.sequences) / self.elapsed_s


def run(
    setting: Setting,
    loaded: Loaded,
    lengths: Items[Lengths],
    *,
    seed: int = 0,
    depth: int = 1,
    adapters: Items[int] = (),
    sampling: Mapping[str, Any] = MappingProxyType({}),
    proposer: Proposer | None = None,
    **config: Any,
) -> Run:
    """Run all requests at once, until the last is done. ``config`` changes the scheduler's.

    ``adapters`` has one for each request, counted from 1, or 0 for none. ``sampling`` are parameters of all of them.
    """
    runner = TimedRunner(loaded.runner, on_gpu=not setting.is_dry)
    engine = make_engine(
        runner, loaded.card, dataclasses.replace(loaded.scheduler_config, **config), depth=depth, prefix_cache=False,
        proposer=proposer, check_costs=runner.check_costs,
    )  # fmt: skip
    num_graph_steps = getattr(loaded.runner, "num_graph_steps", 0)
    waiting, plans = make_sequences(lengths, seed=seed, **sampling), []
    sequences = list(waiting)
    for sequence, adapter in zip(sequences, adapters, strict=False):
        sequence.adapter = adapter
    start = time.perf_counter()
    with runner.marking():
        while waiting or engine.has_work:
            while waiting and len(engine.scheduler.live) < engine.scheduler.config.max_live:
                engine.add(waiting.pop(0))
            step = engine.step()
            assert step is not None, "requests are live, but nothing was planned"
            assert not step.progress.failed, f"requests failed: {step.progress.failed}"
            plans.append(step.plan)
            for key in step.progress.finished:
                engine.release(key)
    elapsed_s = time.perf_counter() - start
    num_graph_steps = getattr(loaded.runner, "num_graph_steps", 0) - num_graph_steps
    return Run(elapsed_s, plans, runner.idle_share(), num_graph_steps, engine.stats.num_preemptions, sequences)


def floor_s(setting: Setting, name: str, plans: list[Plan], *, weight_bytes: float = 2.0) -> float | None:
    """The least time of the steps in seconds: each reads its weights and its keys once, or computes its products.

    From the rates that part ``limits`` measured; None without them.
    """
    rates, shape = setting.found("limits"), setting.shape(name)
    if "matmul_flop_per_s" not in rates:
        return None
    layers, head = num_weights(shape)
    token_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    total = 0.0
    for plan in plans:
        num_bytes = num_step_weights(shape, plan.num_tokens) * weight_bytes + head * 2 + plan.num_reads * token_bytes
        num_operations = 2 * layers * plan.num_tokens + 2 * head * len(plan.sampled)
        total += max(num_bytes / rates["copy_bytes_per_s"], num_operations / rates["matmul_flop_per_s"])
    return total


def summary(setting: Setting, name: str, done: Run) -> dict[str, Any]:
    floor = floor_s(setting, name, done.plans)
    return {
        "output_tokens_per_s": round(done.tokens_per_s, 1),
        "elapsed_s": round(done.elapsed_s, 3),
        "of_roofline": None if floor is None else round(floor / done.elapsed_s, 4),
        "idle_share": round(done.idle_share, 4),
        "steps": len(done.plans),
        "graph_steps": done.num_graph_steps,
        "preemptions": done.num_preemptions,  # nonzero if memory does not hold all requests
        "graph_share": round(done.num_graph_steps / len(done.plans), 4),
    }
