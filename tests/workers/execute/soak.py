"""Hundreds of thousands of random operations per policy, with every text and page checked; not part of the test suite.

``python -m tests.workers.execute.soak [operations] [seed]`` prints one JSON line with counts of what happened.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from typing import IO, Any

from benchmarks.report import environment
from tests.workers.execute.clients import Clients
from tests.workers.execute.factories import make_beams, make_group, make_sequence, recover
from triptych.protocol.config import POLICIES, PREEMPTIONS
from triptych.workers.execute.engine import StepOutputs
from triptych.workers.execute.scheduling.sequence import Key

OPERATIONS = 100_000
OPERATIONS_A_LIFE = 400  # of one engine, until its settings are drawn again


def main() -> None:
    operations, seed = (*map(int, sys.argv[1:]), *(OPERATIONS, 0)[len(sys.argv) - 1 :])
    report = {"what": "scheduler_soak", **environment("numpy"), "config": {"operations": operations, "seed": seed}}
    for policy in POLICIES:
        begun = time.process_time()
        counts = soak(policy, operations, seed)
        report[policy] = {"processor_s": round(time.process_time() - begun, 1), **dict(sorted(counts.items()))}
    print(json.dumps(report))


def soak(policy: str, operations: int, seed: int = 0) -> Counter[str]:
    """Counts of what happened in that many operations.

    Raises:
        AssertionError, PageLedgerError: a text is wrong, or a page lost; stderr says how to reproduce it.
    """
    counts: Counter[str] = Counter()
    for life in range(-(-operations // OPERATIONS_A_LIFE)):
        visitors = Visitors(random.Random(f"{seed}/{policy}/{life}"), policy, counts)
        try:
            visitors.live()
        except BaseException:
            print(f"soak({policy!r}), seed {seed}, life {life}: {visitors.options}", file=sys.stderr)
            raise
    return counts


def draw_options(rng: random.Random, policy: str, *, is_crowd: bool) -> dict[str, Any]:
    page_size = rng.choice([1, 2, 4, 8])
    return {
        "policy": policy,
        "page_size": page_size,
        "num_pages": (rng.randint(40, 70) if is_crowd else rng.randint(40, 160)) // page_size,
        "max_num_seqs": rng.randint(4, 8) if is_crowd else rng.randint(1, 6),
        "prefill_chunk": rng.randint(1, 20),
        "max_num_batched_tokens": rng.choice([None, rng.randint(1, 24)]),
        "max_kv_reads": rng.choice([None, None, rng.randint(1, 120)]),
        "safety_margin": rng.choice([None, 0.0, 0.0]),
        "max_prefill_skip": rng.randint(1, 8),
        "max_decode_skip": rng.randint(1, 8),
        "decode_join_fill": rng.choice([0.0, 0.0, 0.6, 0.95]),
        "skip_ahead": rng.choice([0, 0, 2]),
        "max_model_len": rng.choice([40, 4096]),
        "preemption": rng.choice(PREEMPTIONS),
        "prefix_cache": rng.random() < 0.8,
        "host_pages": rng.choice([0, 4, 100]),
        "replays": rng.random() < 0.5,
    }


class Visitors:
    """Clients with random actions, for one engine from its start until it is empty again."""

    def __init__(
        self, rng: random.Random, policy: str, counts: Counter[str], *, trace_file: IO[str] | None = None
    ) -> None:
        self.rng, self.counts = rng, counts
        # In half of the runs, many have short prompts and long answers, so memory is always scarce.
        self.is_crowd = rng.random() < 0.5
        self.options = draw_options(rng, policy, is_crowd=self.is_crowd)
        self.longest_prompt, self.longest_answer = (12, 45) if self.is_crowd else (50, 30)
        self.weights = (8, 3, 12, 75, 1, 3) if self.is_crowd else (24, 4, 2, 60, 4, 6)
        self.depth = 0 if trace_file else rng.choice([0, 0, 1])
        self.clients = Clients(trace_file=trace_file, depth=self.depth, **self.options)
        self.beams: set[Key] = set()

    def live(self) -> None:
        operations = [self.add, self.add_group, self.add_search, self.step, self.abort, self.release]
        for _ in range(OPERATIONS_A_LIFE):
            self.rng.choices(operations, self.weights)[0]()
            self.clients.engine.check()
            self.counts["operations"] += 1
        for step in self.clients.close():
            self.count(step)
        for name in ("num_preemptions", "num_swaps", "num_hit_tokens", "num_queried_tokens"):
            self.counts[name] += getattr(self.clients.engine.stats, name)

    def add(self) -> None:
        rng, now_ns = self.rng, self.clients.now_ns
        if not self.clients.room:
            return
        sequence = make_sequence(
            len(self.clients.expected),
            num_tokens=rng.randint(1, self.longest_prompt),
            max_tokens=rng.randint(1, self.longest_answer),
            speaker=rng.randint(0, 3),
            temperature=rng.choice([0.0, 1.0]),
            stop_ids=self.draw_stop_ids(2),
        )
        if rng.random() < 0.5:
            sequence.tokens[rng.randrange(sequence.num_prompt_tokens)] = rng.randint(1, 96)
        recover(sequence, rng.choice([0, 0, 0, rng.randint(0, 5)]))
        sequence.priority, sequence.cache_salt = rng.randint(-2, 2), rng.choice(["", "", "x"])
        sequence.deadline_at = rng.choice([0, 0, now_ns + rng.randint(1, 60)])
        sequence.queue_deadline_at = rng.choice([0, 0, now_ns + rng.randint(1, 20)])
        self.clients.add(sequence)

    def add_group(self) -> None:
        """Samples of one request, as many as may be live."""
        rng = self.rng
        group = make_group(
            len(self.clients.expected),
            min(rng.randint(2, 4), self.clients.room),
            num_tokens=rng.randint(1, self.longest_prompt),
            max_tokens=rng.randint(1, self.longest_answer),
            speaker=rng.randint(0, 3),
            stop_ids=self.draw_stop_ids(2),
        )
        for sequence in group:
            self.clients.add(recover(sequence, rng.choice([0, 0, 0, rng.randint(0, 5)])))
        self.counts["groups"] += len(group) > 1

    def add_search(self) -> None:
        rng = self.rng
        beams = make_beams(
            len(self.clients.expected),
            rng.randint(2, 4),
            num_tokens=rng.randint(1, self.longest_prompt),
            max_tokens=rng.randint(1, self.longest_answer // 2),
            stop_ids=self.draw_stop_ids(3),
            early_stopping=rng.choice([False, True, "never"]),
            length_penalty=rng.choice([0.0, 1.0, 2.0]),
        )
        self.clients.add_search(beams)
        if beams[0].key in self.clients.expected:
            self.beams.update(beam.key for beam in beams)
            self.counts["searches"] += 1

    def step(self) -> None:
        choice = self.rng.randrange(100) if self.rng.random() < 0.05 else None
        step = self.clients.step() if choice is None or not self.clients.live else self.clients.step_with_abort(choice)
        if step is not None:
            self.count(step)

    def abort(self) -> None:
        if self.clients.live:
            self.clients.abort(self.rng.randrange(100))
            self.counts["aborts"] += 1

    def release(self) -> None:
        if self.clients.unreleased:
            self.clients.release(self.rng.randrange(100))

    def draw_stop_ids(self, most: int) -> frozenset[int]:
        return frozenset(self.rng.sample(range(97), self.rng.randint(0, most)))

    def count(self, step: StepOutputs) -> None:
        plan, progress, counts, live = step.plan, step.progress, self.counts, self.clients.engine.scheduler.live
        counts["steps"] += 1
        counts["tokens"] += len(progress.token_ids)
        counts["expired"] += len(progress.expired)
        counts["hypotheses"] += len(progress.hypotheses)
        beams = [live[key] for key in self.beams & set(plan.preempted) if key in live]
        counts["beams_preempted"] += len(beams)
        counts["beams_swapped"] += sum(bool(beam.host_table) for beam in beams)
        for name in ("swap_out", "copies", "swap_in"):
            counts[name] += len(getattr(plan.moves, name))


if __name__ == "__main__":
    main()
