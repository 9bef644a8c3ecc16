"""Random operations by the hundred thousand for each policy, every text and every page checked; outside the suite.

``python -m tests.workers.execute.soak [operations] [seed]`` prints a JSON line a policy: what happened, and how often.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from typing import IO, Any

from tests.workers.execute.factories import (
    expected_hypotheses,
    expected_output,
    make_beams,
    make_engine,
    make_group,
    make_sequence,
    recover,
    tokens_of,
)
from triptych.protocol.config import POLICIES, PREEMPTIONS
from triptych.workers.execute.engine import Engine, StepOutputs
from triptych.workers.execute.scheduling.beam_search import Hypothesis
from triptych.workers.execute.scheduling.sequence import Key, Sequence

OPERATIONS = 100_000
OPERATIONS_A_LIFE = 400  # of one engine, until its settings are drawn anew


def main() -> None:
    operations, seed = (*map(int, sys.argv[1:]), *(OPERATIONS, 0)[len(sys.argv) - 1 :])
    for policy in POLICIES:
        begin = time.perf_counter()
        counts = soak(policy, operations, seed)
        print(json.dumps({"policy": policy, "seconds": round(time.perf_counter() - begin, 1), **counts}), flush=True)


def soak(policy: str, operations: int, seed: int = 0) -> Counter[str]:
    """Counts of what happened in so many operations.

    Raises:
        AssertionError, PageLedgerError: a text is wrong, or a page lost; the message starts with how to see it again.
    """
    counts: Counter[str] = Counter()
    for life in range(-(-operations // OPERATIONS_A_LIFE)):
        rng = random.Random(f"{seed}/{policy}/{life}")
        clients = Clients(rng, policy, counts)
        try:
            clients.live()
        except BaseException as error:
            error.add_note(f"soak({policy!r}), seed {seed}, life {life}: {clients.options}")
            raise
    return counts


def draw_options(rng: random.Random, policy: str) -> dict[str, Any]:
    page_size = rng.choice([1, 2, 4, 8])
    return {
        "policy": policy,
        "page_size": page_size,
        "num_pages": rng.randint(40, 160) // page_size,
        "max_num_seqs": rng.randint(1, 6),
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


class Clients:
    """Adds, aborts and releases at random, in one engine from its start until it is empty again."""

    def __init__(
        self, rng: random.Random, policy: str, counts: Counter[str], *, trace_file: IO[str] | None = None
    ) -> None:
        self.rng, self.counts, self.is_traced = rng, counts, trace_file is not None
        self.options = draw_options(rng, policy)
        self.now_ns = 0
        self.engine: Engine = make_engine(clock=lambda: self.now_ns, trace_file=trace_file, **self.options)
        self.outputs: dict[Key, list[int]] = {}
        self.expected: dict[Key, list[int]] = {}
        self.unreleased: list[Key] = []
        self.hypotheses: dict[Key, Hypothesis] = {}

    def live(self) -> None:
        for _ in range(OPERATIONS_A_LIFE):
            operations = [self.add, self.add_group, self.add_search, self.step, self.abort, self.release]
            # A trace does not hold what a search found, so it cannot be run again.
            operation = self.rng.choices(operations, [24, 4, 0 if self.is_traced else 2, 60, 4, 6])[0]
            operation()
            self.engine.check()
            self.counts["operations"] += 1
        while self.engine.has_work:
            self.step()
        while self.unreleased:
            self.release()
        self.engine.check()
        stats = self.engine.stats
        assert stats.num_free_pages + stats.num_idle_pages == stats.num_pages
        for name in ("num_preemptions", "num_swaps", "num_hit_tokens", "num_queried_tokens"):
            self.counts[name] += getattr(stats, name)

    def add(self) -> None:
        scheduler = self.engine.scheduler
        if len(scheduler.live) == scheduler.config.max_live:
            return
        rng = self.rng
        sequence = make_sequence(
            len(self.expected),
            num_tokens=rng.randint(1, 50),
            max_tokens=rng.randint(1, 30),
            speaker=rng.randint(0, 3),
            temperature=rng.choice([0.0, 1.0]),
            stop_ids=frozenset(rng.sample(range(97), rng.randint(0, 2))),
        )
        if rng.random() < 0.5:
            sequence.tokens[rng.randrange(sequence.num_prompt_tokens)] = rng.randint(1, 96)
        recover(sequence, rng.choice([0, 0, 0, rng.randint(0, 5)]))
        sequence.priority, sequence.cache_salt = rng.randint(-2, 2), rng.choice(["", "", "x"])
        sequence.deadline_at = rng.choice([0, 0, self.now_ns + rng.randint(1, 60)])
        sequence.queue_deadline_at = rng.choice([0, 0, self.now_ns + rng.randint(1, 20)])
        self.take_in(sequence)

    def add_group(self) -> None:
        """Samples of one request, as many as there is room for."""
        scheduler, rng = self.engine.scheduler, self.rng
        size = min(rng.randint(2, 4), scheduler.config.max_live - len(scheduler.live))
        num_tokens, max_tokens = rng.randint(1, 50), rng.randint(1, 30)
        group = make_group(
            len(self.expected),
            size,
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            speaker=rng.randint(0, 3),
            stop_ids=frozenset(rng.sample(range(97), rng.randint(0, 2))),
        )
        for sequence in group:
            self.take_in(recover(sequence, rng.choice([0, 0, 0, rng.randint(0, 5)])))

    def add_search(self) -> None:
        """A beam search, if there is room for it now and in the pool."""
        scheduler, rng = self.engine.scheduler, self.rng
        num_beams = rng.randint(2, 4)
        beams = make_beams(
            len(self.expected),
            num_beams,
            num_tokens=rng.randint(1, 20),
            max_tokens=rng.randint(1, 8),
            stop_ids=frozenset(rng.sample(range(97), rng.randint(0, 3))),
            early_stopping=rng.choice([False, True, "never"]),
            length_penalty=rng.choice([0.0, 1.0, 2.0]),
        )
        fits = scheduler.beams.num_pages(beams[0]) <= scheduler.cache.num_pages
        fits &= len(scheduler.live) + num_beams <= scheduler.config.max_live
        if fits and len(beams[0].tokens) <= scheduler.max_model_len:
            for beam, found in zip(beams, expected_hypotheses(beams[0]), strict=True):
                self.hypotheses[beam.key] = found
                self.outputs[beam.key] = self.expected[beam.key] = []
                self.engine.add(beam)

    def take_in(self, sequence: Sequence) -> None:
        scheduler = self.engine.scheduler
        self.outputs[sequence.key] = sequence.output_tokens.tolist()
        in_pool = scheduler.cache.num_pages * scheduler.cache.pool.page_size + 1
        room = min(scheduler.max_model_len, in_pool) - sequence.num_prompt_tokens
        self.expected[sequence.key] = expected_output(sequence)[: max(room, sequence.num_output_tokens)]
        self.engine.add(sequence)

    def step(self) -> None:
        self.now_ns += 1
        plan = self.engine.plan()
        if plan is None:
            assert not self.engine.has_work, "sequences are live, and nothing was planned"
            return
        self.engine.launch(plan)
        if self.rng.random() < 0.05:
            self.abort()
        self.take(self.engine.collect())

    def abort(self) -> None:
        if live := list(self.engine.scheduler.live):
            key = self.rng.choice(live)
            self.engine.release(key)
            self.unreleased += [other for other in live if other != key and other not in self.engine.scheduler.live]

    def release(self) -> None:
        if self.unreleased:
            self.engine.release(self.unreleased.pop(self.rng.randrange(len(self.unreleased))))

    def take(self, step: StepOutputs) -> None:
        plan, progress = step.plan, step.progress
        self.engine.check()
        assert step.stats.num_lost_pages == 0
        assert not (plan.moves.swap_out and plan.moves.swap_in), "a step swaps out and in"
        for key, index, token_id in tokens_of(progress):
            assert index == len(self.outputs[key]), f"{key}: token {index} after {len(self.outputs[key])}"
            assert token_id == self.expected[key][index], f"{key}: token {index} is wrong"
            self.outputs[key].append(token_id)
        for key in progress.finished:
            assert self.outputs[key] == self.expected[key], f"{key} ended too soon"
            assert progress.hypotheses.get(key) == self.hypotheses.get(key), f"the search of {key} found something else"
        self.unreleased += [*progress.finished, *progress.expired, *progress.failed]
        self.counts["expired"] += len(progress.expired)
        self.counts["hypotheses"] += len(progress.hypotheses)
        self.counts["steps"] += 1
        self.counts["tokens"] += len(progress.token_ids)
        for name in ("swap_out", "copies", "swap_in"):
            self.counts[name] += len(getattr(plan.moves, name))


if __name__ == "__main__":
    main()
