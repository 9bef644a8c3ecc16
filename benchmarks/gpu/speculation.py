"""Proposals: the tokens with and without them, and the time of a step that checks some beside one that does not."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.models import warm
from benchmarks.gpu.runs import Lengths, Loaded, Run, load, note_start, run
from benchmarks.gpu.setting import Notes, Setting
from benchmarks.gpu.step_times import Step, step_inputs, times
from triptych.workers.execute.model.device.graphs import GraphKey
from triptych.workers.execute.sampling.kinds import SamplingKind
from triptych.workers.execute.scheduling.proposals import FindCosts, Proposer
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step import StepInputs

NUM_PROPOSED, NUM_DRAFTED = 5, 4
RIGHT = (1.0, 0.8, 0.5, 0.0)  # shares of right guesses
SAMPLED = {"one": {}, "several": {"temperature": 0.8, "top_p": 0.95}}


class Known(Proposer):
    """Proposes what came in an earlier run, except for every eighth token."""

    def __init__(self, done: Run) -> None:
        self._outputs: dict[Key, list[int]] = {s.key: s.output_tokens.tolist() for s in done.sequences}

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        count = sequence.num_output_tokens
        known = self._outputs[sequence.key][count : count + max_tokens]
        return [token ^ (place % 8 == 7) for place, token in enumerate(known, count)]


class Guessed(Known):
    """Has a draft model compute its guesses, and then replaces them, so that the given share is right."""

    def __init__(self, done: Run, draft: Proposer, share: float) -> None:
        super().__init__(done)
        self._draft, self._share = draft, share
        self.costs, self.chance = draft.costs, draft.chance

    def begin(self, wanted: list[tuple[Sequence, int]]) -> None:
        self._draft.begin(wanted)

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        if (guessed := self._draft.propose(sequence, max_tokens)) is None:
            return None
        count = sequence.num_output_tokens
        known = self._outputs[sequence.key][count : count + len(guessed)]
        rights = [random.Random(f"{sequence.key}/{count + i}").random() < self._share for i in range(len(known))]
        return [token if is_right else token ^ 1 for token, is_right in zip(known, rights, strict=True)]


def speculation(setting: Setting, note: Notes) -> None:
    """Qwen3-0.6B with ``--deterministic``: proposals change no token; one stream, and sixteen."""
    loaded = load(setting, "qwen3-0.6b", num_speculative_tokens=NUM_PROPOSED, deterministic=True)
    note("check_costs", costs_of(loaded))
    note("replay_equals_launches", replay_equals_launches(setting, loaded))
    warm(setting, loaded)
    lengths = [(setting.size(100 + 37 * i, 3 + 2 * i), setting.size(128, 6)) for i in range(setting.size(16, 2))]
    found = {name: with_and_without(setting, loaded, each, name) for name, each in streams(lengths).items()}
    note("equal_without", all(each["is_equal"] for each in found.values()))
    for name, num_seqs in (("one", 1), ("several", len(lengths))):
        note(name, found[name] | check_times(setting, loaded, num_seqs))


def speculation_large(setting: Setting, note: Notes) -> None:
    """Qwen3-8B: how much faster streams get. Without ``--deterministic``, a token that is rounded otherwise would make
    all proposals after it wrong.
    """
    loaded = load(setting, "qwen3-8b", num_speculative_tokens=NUM_PROPOSED, deterministic=True)
    note("check_costs", costs_of(loaded))
    warm(setting, loaded)
    lengths = [(setting.size(256, 3), setting.size(256, 6))] * setting.size(16, 2)
    for name, each in streams(lengths).items():
        note(name, with_and_without(setting, loaded, each, name) | check_times(setting, loaded, len(each)))


def draft_equal(setting: Setting, note: Notes) -> None:
    """Qwen3-0.6B as its own draft model, with ``--deterministic``: guesses change no token, and most are right. Some
    are not, since the draft model does without that option.
    """
    name = "qwen3-0.6b"
    loaded = load(setting, name, draft=name, num_speculative_tokens=NUM_DRAFTED, deterministic=True)
    note_start(note, loaded)
    warm(setting, loaded)
    lengths = [(setting.size(100 + 37 * i, 3 + 2 * i), setting.size(128, 6)) for i in range(setting.size(16, 2))]
    for streams_name, each in streams(lengths).items():
        note(streams_name, drafted(setting, loaded, each, SAMPLED[streams_name]))


def drafted(setting: Setting, loaded: Loaded, lengths: list[Lengths], sampling: dict[str, Any]) -> dict[str, Any]:
    """The guesses of the draft model as they are, as if they cost nothing, so that there are as many as possible."""
    draft: Any = loaded.runner.proposer
    plain = run(setting, loaded, lengths, sampling=sampling, num_speculative_tokens=0)
    costs, draft.costs = draft.costs, Proposer.costs
    before = steps_of(draft)
    done = run(setting, loaded, lengths, sampling=sampling, proposer=draft)
    num_steps, num_graph_steps = (after - each for after, each in zip(steps_of(draft), before, strict=True))
    draft.costs = costs
    tokens = [[s.output_tokens.tolist() for s in each.sequences] for each in (plain, done)]
    return {
        "is_equal": tokens[0] == tokens[1],
        "accepted": share_accepted(done),
        "steps": [len(plain.plans), len(done.plans), num_steps],
        "graph_share": round(num_graph_steps / max(1, num_steps), 4),
        "costs": rounded(costs),
    }


def steps_of(draft: Any) -> tuple[int, int]:
    """All steps of the draft model, and those that were graphs. A dry run is on a CPU, where nothing counts them."""
    return getattr(draft.runner, "num_steps", 0), draft.runner.num_graph_steps


def draft_speed(setting: Setting, note: Notes) -> None:
    """Qwen3-0.6B guesses for Qwen3-8B: how much faster streams get, by the share of guesses that are right. Those would
    be wrong after the first token that is rounded otherwise, hence ``--deterministic``.
    """
    loaded = load(
        setting, "qwen3-8b", draft="qwen3-0.6b", rows=64, num_speculative_tokens=NUM_DRAFTED, deterministic=True
    )
    draft = loaded.runner.proposer
    assert draft is not None, "it was loaded"
    note_start(note, loaded)
    note("costs", rounded(draft.costs) | costs_of(loaded))
    warm(setting, loaded)
    for num_streams in (1, 4, 16):
        lengths = [(setting.size(256, 3), setting.size(128, 6))] * setting.size(num_streams, min(2, num_streams))
        plain = run(setting, loaded, lengths, num_speculative_tokens=0)
        found: dict[str, Any] = {"tokens_per_s_without": round(plain.tokens_per_s, 1)}
        for share in RIGHT:
            done = run(setting, loaded, lengths, proposer=Guessed(plain, draft, share))
            found[f"right_{share:.0%}"] = round(plain.elapsed_s / done.elapsed_s, 3)
            found[f"right_{share:.0%}_steps"] = len(done.plans)
        note(f"streams_{num_streams}", found)


def rounded(costs: tuple[FindCosts, ...]) -> dict[str, float]:
    """Those of steps of one sequence, and of the most."""
    one, most = costs[0], costs[-1]
    found = {"guess": one.token, "first": one.start, "guess_of_many": most.token, "first_of_many": most.start}
    return {name: round(share, 4) for name, share in found.items()}


def share_accepted(done: Run) -> float | None:
    """The share of right guesses. A step of a sequence yields one token more than it has of these."""
    chunks = [chunk for plan in done.plans for chunk in plan.chunks if chunk.samples]
    num_proposed = sum(len(chunk.proposed) for chunk in chunks)
    num_tokens = sum(sequence.max_tokens for sequence in done.sequences)
    return round((num_tokens - len(chunks)) / num_proposed, 4) if num_proposed else None


def streams(lengths: list[Lengths]) -> dict[str, list[Lengths]]:
    return {"one": lengths[-1:], "several": lengths}


def costs_of(loaded: Loaded) -> dict[str, Any]:
    assert loaded.runner.check_costs is not None, "it was loaded to check proposals"
    return dataclasses.asdict(loaded.runner.check_costs)


def with_and_without(setting: Setting, loaded: Loaded, lengths: list[Lengths], name: str) -> dict[str, Any]:
    sampling: dict[str, Any] = SAMPLED[name]
    plain = run(setting, loaded, lengths, sampling=sampling, num_speculative_tokens=0)
    done = run(setting, loaded, lengths, sampling=sampling, proposer=Known(plain))
    tokens = [[s.output_tokens.tolist() for s in each.sequences] for each in (plain, done)]
    return {
        "is_equal": tokens[0] == tokens[1],
        "speedup": round(plain.elapsed_s / done.elapsed_s, 3),
        "steps": [len(each.plans) for each in (plain, done)],
        "graph_share": round(done.num_graph_steps / len(done.plans), 4),
    }


def checks(setting: Setting, loaded: Loaded, num_seqs: int) -> StepInputs:
    """A step in which each of these sequences has ``NUM_PROPOSED`` proposals, after 1023 tokens."""
    inputs = step_inputs(loaded, Step(num_seqs, setting.size(1023, 9), 1 + NUM_PROPOSED))
    total = len(inputs.token_ids)
    return dataclasses.replace(
        inputs, sample_rows=np.arange(total, dtype=np.int32), sampled=[inputs.sampled[0]] * total
    )


def check_times(setting: Setting, loaded: Loaded, num_seqs: int) -> dict[str, Any]:
    """Both steps are serial. Without graphs, the host's launches would take most of the time."""
    decode = times(setting, loaded, step_inputs(loaded, Step(num_seqs, setting.size(1023, 9), 1)))
    check = times(setting, loaded, checks(setting, loaded, num_seqs))
    return {"decode": decode, "check": check, "of_decode": round(check["step_ms"] / decode["step_ms"], 3)}


@torch.inference_mode()
def replay_equals_launches(setting: Setting, loaded: Loaded) -> bool | None:
    """Whether the graph of a step computes the same bits as the same padded step, launched kernel by kernel; None
    without graphs.
    """
    runner: Any = loaded.runner
    if runner._graphs is None:
        return None
    inputs = checks(setting, loaded, setting.size(16, 2))
    size = runner._router.size(inputs)
    key, num_rows = GraphKey(size, SamplingKind.HOST), len(inputs.sampled)
    runner._mixed_buffers.fill(inputs, size)
    found = []
    for compute in (lambda: runner._graphs.run(key), runner._graphs._make_run(key)):
        runner._logits.zero_()
        compute()
        found.append(runner._logits[:num_rows].clone())
    return torch.equal(*found)
