"""Random clients against random settings: texts stay exact, and no page is ever lost."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

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

SETTINGS = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 4]),
        "num_pages": st.integers(3, 24),
        "max_num_seqs": st.integers(1, 5),
        "prefill_chunk": st.integers(1, 9),
        "max_num_batched_tokens": st.integers(1, 12),
        "policy": st.sampled_from(POLICIES),
        "priority_ageing": st.sampled_from([1, 64]),
        "safety_margin": st.sampled_from([None, 0.0, 0.2, 1.0]),
        "max_prefill_skip": st.integers(1, 4),
        "max_decode_skip": st.integers(1, 4),
        "max_kv_reads": st.sampled_from([None, 1, 20, 60]),
        "decode_join_fill": st.sampled_from([0.0, 0.5, 0.95]),
        "skip_ahead": st.integers(0, 3),
        "max_model_len": st.sampled_from([24, 4096]),
        "prefix_cache": st.booleans(),
        "host_pages": st.sampled_from([0, 3, 20]),
        "preemption": st.sampled_from(PREEMPTIONS),
        "depth": st.sampled_from([0, 1]),
        "replays": st.booleans(),
    }
)


class Clients(RuleBasedStateMachine):
    """Adds, aborts and releases at will; after every step the whole ledger is checked."""

    engine: Engine
    now_ns: int
    outputs: dict[Key, list[int]]
    expected: dict[Key, list[int]]
    hypotheses: dict[Key, Hypothesis]  # that a search must find
    unreleased: list[Key]  # finished or failed, and nobody has said so

    @initialize(options=SETTINGS)
    def start(self, options: dict[str, Any]) -> None:
        self.now_ns = 0
        self.engine = make_engine(clock=lambda: self.now_ns, **options)
        self.outputs, self.expected, self.unreleased = {}, {}, []
        self.hypotheses = {}

    @property
    def live(self) -> list[Key]:
        return list(self.engine.scheduler.live)

    @precondition(lambda self: len(self.live) < self.engine.scheduler.config.max_live)
    @rule(
        num_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 25),
        num_emitted=st.integers(0, 6),
        temperature=st.sampled_from([0.0, 1.0]),
        stop_ids=st.frozensets(st.integers(0, 96), max_size=4),
        speaker=st.integers(0, 2),
        salt=st.sampled_from(["", "", "x"]),
        other_end=st.integers(0, 3),
        priority=st.integers(-2, 2),
        patience=st.sampled_from([(0, 0), (0, 0), (0, 5), (20, 0), (20, 5)]),
    )
    def add(
        self, num_emitted: int, priority: int, salt: str, other_end: int, patience: tuple[int, int], **options: Any
    ) -> None:
        """Few speakers, so that prompts begin alike; the last few tokens may differ."""
        sequence = make_sequence(len(self.expected), **options)
        sequence.tokens[: sequence.num_prompt_tokens][-other_end or sequence.num_tokens :] += other_end
        recover(sequence, num_emitted)
        sequence.priority, sequence.cache_salt = priority, salt
        deadlines = [self.now_ns + steps if steps else 0 for steps in patience]
        sequence.deadline_at, sequence.queue_deadline_at = deadlines
        self.take_in(sequence)

    @precondition(lambda self: len(self.live) + 1 < self.engine.scheduler.config.max_live)
    @rule(
        size=st.integers(2, 4),
        num_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 25),
        emitted=st.lists(st.integers(0, 6), min_size=4, max_size=4),
        temperature=st.sampled_from([0.0, 1.0]),
        stop_ids=st.frozensets(st.integers(0, 96), max_size=4),
        speaker=st.integers(0, 2),
        waits=st.booleans(),
    )
    def add_group(self, size: int, emitted: list[int], waits: bool, **options: Any) -> None:
        """Samples of one request, perhaps after a crash; the last one may come a step later."""
        scheduler = self.engine.scheduler
        size = min(size, scheduler.config.max_live - len(self.live))
        for index, sequence in enumerate(make_group(len(self.expected), size, **options)):
            if waits and index == size - 1:
                self.step()
            if len(scheduler.live) < scheduler.config.max_live:
                self.take_in(recover(sequence, emitted[index]))

    @precondition(lambda self: len(self.live) + 1 < self.engine.scheduler.config.max_live)
    @rule(
        num_beams=st.integers(2, 3),
        num_tokens=st.integers(1, 10),
        max_tokens=st.integers(1, 5),
        stop_ids=st.frozensets(st.integers(0, 96), max_size=4),
        speaker=st.integers(0, 2),
        early_stopping=st.sampled_from([False, True, "never"]),
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    )
    def add_search(self, num_beams: int, **options: Any) -> None:
        """A beam search that the pool and the context have room for, as admission sees to."""
        scheduler = self.engine.scheduler
        num_beams = min(num_beams, scheduler.config.max_live - len(self.live))
        beams = make_beams(len(self.expected), num_beams, **options)
        fits = scheduler.beams.num_pages(beams[0]) <= scheduler.cache.num_pages
        if fits and len(beams[0].tokens) <= scheduler.max_model_len:
            for beam, found in zip(beams, expected_hypotheses(beams[0]), strict=True):
                self.hypotheses[beam.key] = found
                self.outputs[beam.key] = self.expected[beam.key] = []
                self.engine.add(beam)

    def take_in(self, sequence: Sequence) -> None:
        self.outputs[sequence.key] = sequence.output_tokens.tolist()
        self.expected[sequence.key] = self.cut(sequence, expected_output(sequence))
        self.engine.add(sequence)

    def cut(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """What of ``tokens`` the context and the pool have room for. The last token of all needs none in the pool."""
        scheduler = self.engine.scheduler
        in_pool = scheduler.cache.num_pages * scheduler.cache.pool.page_size + 1
        room = min(scheduler.max_model_len, in_pool) - sequence.num_prompt_tokens
        return tokens[: max(room, sequence.num_output_tokens)]

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int) -> None:
        self.give_up(choice)
        self.engine.check()

    def give_up(self, choice: int) -> None:
        """With one beam its whole search ends."""
        live = self.live
        key = live[choice % len(live)]
        self.engine.release(key)
        self.unreleased += [other for other in live if other != key and other not in self.engine.scheduler.live]

    @precondition(lambda self: self.unreleased)
    @rule(choice=st.integers(0, 100), is_doubled=st.booleans())
    def release(self, choice: int, is_doubled: bool) -> None:
        key = self.unreleased.pop(choice % len(self.unreleased))
        for _ in range(1 + is_doubled):
            self.engine.release(key)
        self.engine.check()

    @rule(slot=st.integers(0, 40), generation=st.integers(1, 3))
    def release_a_stranger(self, slot: int, generation: int) -> None:
        self.engine.release((slot, generation))
        self.engine.check()

    @rule()
    def step(self) -> None:
        self.now_ns += 1
        step = self.engine.step()
        assert (step is not None) or not self.engine.has_work, "sequences are live, and nothing was planned"
        if step is not None:
            self.take(step)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 100))
    def abort_during_a_step(self, choice: int) -> None:
        is_ahead = bool(self.engine._in_flight)
        if self.engine.may_plan:
            plan = self.engine.plan()
            assert plan is not None or is_ahead
            if plan is not None:
                self.engine.launch(plan)
        if self.live:
            self.give_up(choice)
        self.take(self.engine.collect())

    def take(self, step: StepOutputs) -> None:
        self.engine.check()
        assert step.stats.num_lost_pages == 0
        budget = self.engine.scheduler.config.token_budget
        assert sum(chunk.num_tokens for chunk in step.plan.chunks) <= budget
        max_reads = self.engine.scheduler.config.max_kv_reads
        assert max_reads is None or step.plan.num_reads <= max_reads or len(step.plan.chunks) == 1
        assert not {chunk.key for chunk in step.plan.chunks} & set(step.plan.preempted)
        assert not (step.plan.moves.swap_out and step.plan.moves.swap_in)
        for key, index, token_id in tokens_of(step.progress):
            assert index == len(self.outputs[key])
            assert self.expected[key][index] == token_id
            self.outputs[key].append(token_id)
        for key in step.progress.finished:
            assert self.outputs[key] == self.expected[key]
            assert step.progress.hypotheses.get(key) == self.hypotheses.get(key)
        for key in step.progress.expired:
            assert self.outputs[key] == self.expected[key][: len(self.outputs[key])]
        self.unreleased += [*step.progress.finished, *step.progress.expired, *step.progress.failed]

    def teardown(self) -> None:
        """Everybody is served in bounded time, and after everybody was released every page is free."""
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"{self.live} are not done after 5000 steps"
        for key in self.unreleased:
            self.engine.release(key)
        self.engine.check()
        stats = self.engine.stats
        assert stats.num_free_pages + stats.num_idle_pages == stats.num_pages
        assert stats.num_free_host_pages + stats.num_idle_host_pages == stats.num_host_pages


TestClients = Clients.TestCase
TestClients.settings = settings(
    max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
