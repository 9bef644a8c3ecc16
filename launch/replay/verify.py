"""Replays a recorded schedule step by step, to check that the scheduler still makes the same decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.errors import ConfigError
from ...workers.execute.scheduling.audit import take_stats
from ...workers.execute.scheduling.plan import Plan
from ...workers.execute.scheduling.recorded_search import NO_CANDIDATES, RecordedChoices
from ...workers.execute.scheduling.recording import (
    FORMAT,
    describe_plan,
    describe_progress,
    rebuild_scheduler,
    rebuild_sequence,
    unpack_tokens,
)
from ...workers.execute.scheduling.scheduler import Scheduler
from ...workers.execute.scheduling.sequence import Key
from .trace_file import Line, malformed, read_json_lines

# Fields of a trace line that are not part of the step's plan.
_OUTCOMES = ("finished", "expired", "failed", "waiting", "running", "pages_free", "pages_cached")
_INPUTS = ("planned_ns", "launched_ns", "collected_ns", "ms", "tokens", "choices")


class Difference(NamedTuple):
    """Where a replay deviates from the recording."""

    line: int
    step: int
    field: str
    recorded: Any
    replayed: Any


@dataclass(slots=True)
class Verdict:
    """What was compared, and the first difference, if any."""

    num_lives: int = 0  # starts of the process that wrote the trace
    num_requests: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_aborted: int = 0  # released before they ended
    num_cached_tokens: int = 0  # of prompts, found in the prefix cache
    difference: Difference | None = field(default=None)

    @property
    def is_exact(self) -> bool:
        return self.difference is None


def verify(path: Path) -> Verdict:
    """Run a trace through the scheduler, up to the first step that is planned differently.

    Raises:
        ConfigError: the file is not a trace that this program can replay.
    """
    verdict, scheduler, choices = Verdict(), None, RecordedChoices()
    during: list[Line] = []  # events while the next step in the file was in flight
    for line in read_json_lines(path):
        try:
            if "trace" in line.values:
                scheduler, during = _begin(line.values, choices), []
                verdict.num_lives += 1
            elif scheduler is None:
                raise ValueError("a trace must begin with a description of its scheduler")
            elif "during" in line.values:
                during.append(line)
            elif "step" in line.values:
                choices.note(line.values.get("choices", {}))
                _step(scheduler, line, during, verdict)
                during = []
            else:
                _event(scheduler, line, verdict)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise malformed(path, line.number, error) from error
        if verdict.difference is not None:
            break
    if verdict.num_lives == 0:
        raise ConfigError(f"{path} has no steps: was it written by --trace?", param="file")
    return verdict


def _begin(header: Mapping[str, Any], choices: RecordedChoices) -> Scheduler:
    if header["format"] != FORMAT:
        raise ValueError(f"the trace has format {header['format']}, this program reads {FORMAT}")
    return rebuild_scheduler(header, choices.make_search)


def _event(scheduler: Scheduler, line: Line, verdict: Verdict) -> None:
    values = line.values
    if "add" in values:
        scheduler.add(rebuild_sequence(_key(values["add"]), values))
        verdict.num_requests += 1
    elif "release" in values:
        key = _key(values["release"])
        verdict.num_aborted += key in scheduler.live
        scheduler.release(key)
    elif "idle_ns" in values:
        scheduler.expire(values["idle_ns"])
        plan = scheduler.plan()
        if plan is not None:
            verdict.difference = Difference(line.number, plan.step, "step", None, plan.step)
    else:
        raise ValueError(f"unknown: {', '.join(values)}")


def _key(value: list[int]) -> Key:
    slot, generation = value
    return slot, generation


def _step(scheduler: Scheduler, line: Line, during: list[Line], verdict: Verdict) -> None:
    recorded = line.values
    scheduler.expire(recorded["planned_ns"])
    plan = scheduler.plan()
    replayed = {} if plan is None else describe_plan(plan)
    planned = {name: value for name, value in recorded.items() if name not in _OUTCOMES and name not in _INPUTS}
    verdict.difference = _compare(line, planned, replayed)
    if plan is None or verdict.difference is not None:
        return
    for event in during:
        _event(scheduler, event, verdict)
    replayed = _apply(scheduler, plan, recorded)
    verdict.difference = _compare(line, {name: recorded[name] for name in _OUTCOMES if name in recorded}, replayed)
    verdict.num_steps += 1
    verdict.num_preemptions += len(plan.preempted)
    verdict.num_cached_tokens += sum(num_cached_tokens for _, num_cached_tokens in plan.starts)


def _apply(scheduler: Scheduler, plan: Plan, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the tokens sampled in the recorded step; returns what the step ended."""
    tokens = unpack_tokens(recorded["tokens"]).tolist() if "tokens" in recorded else []
    failures = recorded.get("failed", {})
    failed = {chunk.key: failures[str(chunk.key[0])] for chunk in plan.chunks if str(chunk.key[0]) in failures}
    beams = {key: NO_CANDIDATES for key in plan.sampled if key in scheduler.running and scheduler.running[key].is_beam}
    progress = scheduler.apply(plan, tokens, failed, beams)
    scheduler.observe(plan, recorded["collected_ns"] - recorded["planned_ns"])
    return describe_progress(progress, take_stats(scheduler))


def _compare(line: Line, recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> Difference | None:
    step = line.values["step"]
    for name in (*recorded, *(name for name in replayed if name not in recorded)):
        if recorded.get(name) != replayed.get(name):
            return Difference(line.number, step, name, recorded.get(name), replayed.get(name))
    return None
