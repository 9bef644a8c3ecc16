"""Where the time of single steps goes: into launches, and into which kernels."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.runs import Loaded
from benchmarks.gpu.setting import Setting
from triptych.workers.execute.model.step_runner import trash_decodes, trash_prefill
from triptych.workers.execute.step import StepInputs

NUM_PROFILED = 3  # steps of each size
NUM_KERNELS = 12  # reported kernels, the longest ones


class Step(NamedTuple):
    """Equally long sequences."""

    num_seqs: int
    num_before: int  # tokens of each that are in its pages
    num_tokens: int  # of each, in this step


def step_times(setting: Setting, loaded: Loaded) -> dict[str, Any]:
    """Milliseconds of steps of several sizes, and of their kernels. A failure is reported in its place."""
    context, most = setting.size(1024, 20), loaded.scheduler_config.token_budget
    steps = {f"decode_{n}": Step(n, context - 1, 1) for n in (1, 32, 256) if n <= loaded.scheduler_config.num_rows}
    for n in (64, 512, 2048, 4096):
        if (size := setting.size(n, 2 + n // 256)) <= most:
            steps[f"prefill_{n}"] = Step(-(-size // context), 0, min(size, context))
    inputs = {name: step_inputs(loaded, step) for name, step in steps.items()}
    # A prompt that arrives while others are being answered.
    for name in ("prefill_64", "prefill_512"):
        if {name, "decode_32"} <= inputs.keys():
            inputs[f"decode_32_{name}"] = joined(inputs["decode_32"], inputs[name])
    found: dict[str, Any] = {}
    for name, each in inputs.items():
        try:
            found[name] = times(setting, loaded, each)
        except Exception as error:  # as if there were no profiler: the other results are worth more
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return found


def step_inputs(loaded: Loaded, step: Step) -> StepInputs:
    """Sequences with their own pages, as far as there are enough; whatever these contain is read and written."""
    page_size, end = loaded.card.page_size, step.num_before + step.num_tokens
    width = -(-end // page_size)
    tables = 1 + np.arange(step.num_seqs * width, dtype=np.int32).reshape(step.num_seqs, width) % loaded.card.num_pages
    if step.num_tokens == 1:
        inputs = trash_decodes(step.num_seqs)
    else:
        inputs = trash_prefill(step.num_seqs * step.num_tokens, max_len=step.num_tokens)
    positions = inputs.positions + np.int32(step.num_before)
    owners = np.repeat(np.arange(step.num_seqs), step.num_tokens)
    slots = tables[owners, positions // page_size].astype(np.int64) * page_size + positions % page_size
    return dataclasses.replace(
        inputs, positions=positions, slot_mapping=slots, block_tables=tables,
        context_lens=np.full(step.num_seqs, end, np.int32),
    )  # fmt: skip


def joined(decodes: StepInputs, prompts: StepInputs) -> StepInputs:
    """One step of both."""

    def both(name: str) -> Any:
        return np.concatenate([getattr(decodes, name), getattr(prompts, name)])

    names = ("token_ids", "positions", "slot_mapping", "context_lens")
    num_tokens, width = len(decodes.token_ids), decodes.block_tables.shape[1]
    tables = np.pad(prompts.block_tables, ((0, 0), (0, width - prompts.block_tables.shape[1])))
    return dataclasses.replace(
        decodes,
        **{name: both(name) for name in names},
        query_starts=np.concatenate([decodes.query_starts, num_tokens + prompts.query_starts[1:]]),
        block_tables=np.concatenate([decodes.block_tables, tables]),
        sample_rows=np.concatenate([decodes.sample_rows, num_tokens + prompts.sample_rows]),
        sampled=[*decodes.sampled, *prompts.sampled],
        cut=None,
    )


def times(setting: Setting, loaded: Loaded, inputs: StepInputs) -> dict[str, Any]:
    """``launch_share`` near 1 means that the device waits for its launches."""
    runner, launches, steps = loaded.runner, [], []
    for _ in range(setting.size(13, 2)):
        start = time.perf_counter()
        runner.launch(inputs)
        launched = time.perf_counter()
        runner.collect()
        launches.append(launched - start)
        steps.append(time.perf_counter() - start)
    launch_s, step_s = (statistics.median(times[len(times) // 4 :]) for times in (launches, steps))
    found = {
        "launch_ms": round(1e3 * launch_s, 3),
        "step_ms": round(1e3 * step_s, 3),
        "launch_share": round(launch_s / step_s, 3),
    }
    return found if setting.is_dry else found | _kernels(loaded, inputs)


def _kernels(loaded: Loaded, inputs: StepInputs) -> dict[str, Any]:
    """By name: how often a step runs it, and its total milliseconds per step; or why there is no profile."""
    try:
        return _profiled(loaded, inputs)
    except Exception as error:  # torch without CUPTI, or a machine that lets nobody profile
        return {"kernels_error": f"{type(error).__name__}: {str(error)[:300]}"}


def _profiled(loaded: Loaded, inputs: StepInputs) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(NUM_PROFILED):
            loaded.runner.launch(inputs)
            loaded.runner.collect()
    return summed(profiler.key_averages())


def summed(events: Iterable[Any]) -> dict[str, Any]:
    """Of ``NUM_PROFILED`` steps: the device's kernels, the longest first."""
    taken = [event for event in events if event.self_device_time_total > 0]
    taken.sort(key=lambda event: -event.self_device_time_total)
    of_step = 1e3 * NUM_PROFILED  # microseconds of all steps to milliseconds of one
    return {
        "kernels_ms": round(sum(event.self_device_time_total for event in taken) / of_step, 3),
        "kernels": {
            event.key[:80]: [event.count / NUM_PROFILED, round(event.self_device_time_total / of_step, 4)]
            for event in taken[:NUM_KERNELS]
        },
    }
