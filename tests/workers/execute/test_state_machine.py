"""Random clients with random settings: texts stay exact, and no page is ever lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.workers.execute.clients import Clients, Flaky
from tests.workers.execute.factories import VOCAB_SIZE, make_beams, make_group, make_sequence, recover
from tests.workers.execute.grammar.form import make_form
from triptych.protocol.config import POLICIES, PREEMPTIONS
from triptych.workers.execute.hash_lm import EMBEDDING_SIZE
from triptych.workers.execute.scheduling.pooling import POOLINGS, Pooling
from triptych.workers.execute.scheduling.proposals import CheckCosts
from triptych.workers.execute.scheduling.sequence import Sequence

GPU_COSTS = CheckCosts(token=0.002, step=0.3, max_tokens=64, beside_prompts=False)
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
        "num_speculative_tokens": st.sampled_from([0, 0, 2, 15]),
        "check_costs": st.sampled_from([None, None, GPU_COSTS]),
        "num_snapshots": st.sampled_from([None, None, None, None, 0, 1, 3]),
        "runner": st.sampled_from([None, None, Flaky]),
        "retains": st.booleans(),
    }
)
OF_PAGES_ALONE = {
    "host_pages": 0,
    "depth": 0,
    "num_speculative_tokens": 0,
    "runner": None,
}  # what a recurrent model does not support
LASTING = {"prefix_cache": True, "host_pages": 0, "num_snapshots": None}  # what it takes for pages to outlive a crash
PATIENCE = st.sampled_from([(0, 0), (0, 0), (0, 5), (20, 0), (20, 5)])  # steps to the end, and in the queue; 0: any
VARIATION = st.fixed_dictionaries(
    {
        "has_form": st.sampled_from([False, False, True]),
        "adapter": st.sampled_from([0, 0, 0, 1, 2]),
        "salt": st.sampled_from(["", "", "x"]),
        "priority": st.integers(-2, 2),
    }
)
STOP_IDS = st.frozensets(st.integers(0, 96), max_size=4)


class Machine(RuleBasedStateMachine):
    """Random adds, aborts and releases; after every step the whole page ledger is checked."""

    clients: Clients

    @initialize(options=SETTINGS)
    def start(self, options: dict[str, Any]) -> None:
        self.kv_file = os.memfd_create("kv")
        if options.pop("retains"):
            options = options | LASTING | {"kv_path": Path(f"/proc/self/fd/{self.kv_file}")}
        self.clients = Clients(**(options | (OF_PAGES_ALONE if options["num_snapshots"] is not None else {})))

    @precondition(lambda self: self.clients.room)
    @rule(
        num_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 25),
        num_emitted=st.integers(0, 6),
        temperature=st.sampled_from([0.0, 1.0]),
        stop_ids=STOP_IDS,
        speaker=st.integers(0, 2),
        other_end=st.integers(0, 3),
        patience=PATIENCE,
        min_tokens=st.sampled_from([0, 0, 1, 9]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
        variation=VARIATION,
    )
    def add(
        self,
        num_emitted: int,
        other_end: int,
        patience: tuple[int, int],
        min_tokens: int,
        variation: dict[str, Any],
        **options: Any,
    ) -> None:
        """Few speakers, so that prompts share prefixes; the last few tokens may differ."""
        clients = self.clients
        options["min_tokens"] = min(min_tokens, options["max_tokens"])
        sequence = make_sequence(len(clients.expected), **options)
        sequence.tokens[: sequence.num_prompt_tokens][-other_end or sequence.num_tokens :] += other_end
        self._vary(sequence, **variation)
        recover(sequence, num_emitted)
        self._limit(sequence, patience)
        clients.add(sequence)

    @precondition(lambda self: self.clients.room > 1)
    @rule(
        size=st.integers(2, 4),
        num_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 25),
        emitted=st.lists(st.integers(0, 6), min_size=4, max_size=4),
        temperature=st.sampled_from([0.0, 1.0]),
        stop_ids=STOP_IDS,
        speaker=st.integers(0, 2),
        waits=st.booleans(),
        patience=st.lists(PATIENCE | st.just((2, 0)), min_size=4, max_size=4),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
        variation=VARIATION,
    )
    def add_group(
        self,
        size: int,
        emitted: list[int],
        waits: bool,
        patience: list[tuple[int, int]],
        variation: dict[str, Any],
        **options: Any,
    ) -> None:
        """Samples of one request, perhaps after a crash; the last one may arrive a step later."""
        clients = self.clients
        size = min(size, clients.room)
        for index, sequence in enumerate(make_group(len(clients.expected), size, **options)):
            if waits and index == size - 1:
                clients.step()
            if clients.room:
                self._vary(sequence, **variation)
                self._limit(sequence, patience[index])
                clients.add(recover(sequence, emitted[index]))

    @precondition(lambda self: self.clients.room > 1)
    @rule(
        num_beams=st.integers(2, 3),
        num_tokens=st.integers(1, 10),
        max_tokens=st.integers(1, 5),
        stop_ids=STOP_IDS,
        speaker=st.integers(0, 2),
        early_stopping=st.sampled_from([False, True, "never"]),
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    )
    def add_search(self, num_beams: int, **options: Any) -> None:
        num_beams = min(num_beams, self.clients.room)
        self.clients.add_search(make_beams(len(self.clients.expected), num_beams, **options))

    @precondition(lambda self: self.clients.room)
    @rule(
        num_tokens=st.integers(1, 30),
        speaker=st.integers(0, 2),
        pooling=st.builds(Pooling, st.sampled_from(POOLINGS), st.booleans()),
        size=st.sampled_from([1, EMBEDDING_SIZE]),
        variation=VARIATION,
        patience=PATIENCE,
    )
    def add_embedding(
        self, pooling: Pooling, size: int, variation: dict[str, Any], patience: tuple[int, int], **options: Any
    ) -> None:
        sequence = make_sequence(len(self.clients.expected), max_tokens=0, **options)
        sequence.embedding_size, sequence.pooling = size, pooling
        self._vary(sequence, **variation | {"has_form": False})
        self._limit(sequence, patience)
        self.clients.add(sequence)

    @precondition(lambda self: self.clients.live)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int) -> None:
        self.clients.abort(choice)

    @precondition(lambda self: self.clients.unreleased)
    @rule(choice=st.integers(0, 100), is_doubled=st.booleans())
    def release(self, choice: int, is_doubled: bool) -> None:
        self.clients.release(choice, times=1 + is_doubled)

    @rule(slot=st.integers(0, 40), generation=st.integers(1, 3))
    def release_an_unknown_key(self, slot: int, generation: int) -> None:
        self.clients.engine.release((slot, generation))
        self.clients.engine.check()

    @rule()
    def step(self) -> None:
        self.clients.step()

    @precondition(lambda self: self.clients.live)
    @rule(choice=st.integers(0, 100))
    def abort_during_a_step(self, choice: int) -> None:
        self.clients.step_with_abort(choice)

    @rule()
    def crash(self) -> None:
        """Another process goes on, perhaps with the pages of this one."""
        self.clients.crash()

    def _vary(self, sequence: Sequence, *, has_form: bool, adapter: int, salt: str, priority: int) -> None:
        sequence.grammar = make_form(VOCAB_SIZE) if has_form else None
        sequence.adapter, sequence.cache_salt, sequence.priority = adapter, f"{salt}{adapter or ''}", priority

    def _limit(self, sequence: Sequence, patience: tuple[int, int]) -> None:
        deadlines = [self.clients.now_ns + steps if steps else 0 for steps in patience]
        sequence.deadline_at, sequence.queue_deadline_at = deadlines

    def teardown(self) -> None:
        """Every sequence is served in bounded time, and after all were released, every page is free."""
        if hasattr(self, "clients"):
            self.clients.close()
            os.close(self.kv_file)


TestClients = Machine.TestCase
TestClients.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
