"""Clients that know their expected answers: an engine of the hash model, checked after every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from tests.workers.execute.factories import (
    VOCAB_SIZE,
    expected_embedding,
    expected_hypotheses,
    expected_output,
    make_engine,
    make_sequence,
    tokens_of,
)
from tests.workers.execute.grammar.form import make_form
from triptych.workers.execute.engine import Engine, StepOutputs
from triptych.workers.execute.hash_lm import HashRunner, logprob_of, state_of
from triptych.workers.execute.kv_file import KvFile
from triptych.workers.execute.scheduling.beam_search import Hypothesis
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step import StepInputs, StepResult

# What a process that takes over a sequence reads of it from the journal.
_OF_THE_REQUEST = (
    "key", "num_prompt_tokens", "params", "seed", "arrival", "stop_ids", "group_key", "cache_salt", "adapter",
    "deadline_at", "priority", "embedding_size", "pooling",
)  # fmt: skip


class Flaky(HashRunner):
    """Every few launches a step of several sequences leaves garbage in their pages, and raises when it is collected.

    The step launched behind it, if there is one, is computed from that garbage.
    """

    num_launched = 0
    fails: list[bool]  # of the steps in flight

    def launch(self, inputs: StepInputs) -> None:
        super().launch(inputs)
        self.num_launched += 1
        fails = self.num_launched % 3 == 0 and len(inputs.context_lens) > 1
        if fails:
            self._cells.reshape(-1)[inputs.slot_mapping] = -1
        self.fails = [*getattr(self, "fails", []), fails]

    def collect(self) -> StepResult:
        result = super().collect()
        if self.fails.pop(0):
            raise ValueError("it fails now and then")
        return result


class Clients:
    """Driven by numbers; raises AssertionError or PageLedgerError if something is wrong.

    Their clock advances by one per step.
    """

    def __init__(self, *, trace_file: IO[str] | None = None, kv_path: Path | None = None, **options: Any) -> None:
        """Options are those of ``make_engine``. ``kv_path``: where pages outlive a crash."""
        self.now_ns = 0
        self._options = {"propose": self._propose, "clock": lambda: self.now_ns, "trace_file": trace_file, **options}
        self._kv_path = kv_path
        self.engine = self._make_engine()
        self.outputs: dict[Key, list[int]] = {}
        self.expected: dict[Key, list[int]] = {}
        self.hypotheses: dict[Key, Hypothesis] = {}  # expected hypotheses of a search
        self.sequences: dict[Key, Sequence] = {}
        self.scored: dict[Key, set[int]] = {}  # positions of prompt tokens whose logprobs have come
        self.beams: dict[Key, Sequence] = {}  # as they were added
        self.unreleased: list[Key] = []  # finished or failed, and not released yet

    @property
    def live(self) -> list[Key]:
        return list(self.engine.scheduler.live)

    @property
    def room(self) -> int:
        """The number of sequences that may still be added."""
        scheduler = self.engine.scheduler
        return scheduler.config.max_live - len(scheduler.live)

    def add(self, sequence: Sequence) -> None:
        """Its expected answer ends with the context or the pool; the last token needs no slot."""
        scheduler = self.engine.scheduler
        in_pool = scheduler.cache.num_pages * scheduler.cache.pool.page_size + 1
        room = min(scheduler.max_model_len, in_pool) - sequence.num_prompt_tokens
        self.outputs[sequence.key] = sequence.output_tokens.tolist()
        self.expected[sequence.key] = expected_output(sequence)[: max(room, sequence.num_output_tokens)]
        self.sequences[sequence.key] = sequence
        self.scored[sequence.key] = set(range(1, sequence.num_prompt_tokens)) if sequence.is_scored else set()
        self.engine.add(sequence)

    def add_search(self, beams: list[Sequence]) -> None:
        """Add a beam search if the pool and the context have enough space for it, as admission ensures."""
        scheduler = self.engine.scheduler
        fits = scheduler.beams.num_pages(beams[0]) <= scheduler.cache.num_pages and len(beams) <= self.room
        if fits and len(beams[0].tokens) <= scheduler.max_model_len:
            self.beams |= {beam.key: _copy(beam) for beam in beams}
            for beam, found in zip(beams, expected_hypotheses(beams[0]), strict=True):
                self.hypotheses[beam.key] = found
                self.outputs[beam.key] = self.expected[beam.key] = []
                self.engine.add(beam)

    def crash(self) -> None:
        """Another engine takes over the sequences, with the tokens that have come, as after a kill at this moment."""
        live = sorted(self.engine.scheduler.live.values(), key=lambda sequence: sequence.arrival)
        self.engine = self._make_engine()
        self.engine.check()
        self.unreleased.clear()
        for sequence in live:
            if not sequence.is_beam:
                self.sequences[sequence.key] = sequence = self._adopted(sequence)
            self.engine.add(_copy(self.beams[sequence.key]) if sequence.is_beam else sequence)

    def _make_engine(self) -> Engine:
        return make_engine(**self._options, kv_file=None if self._kv_path is None else KvFile.open(self._kv_path))

    def _adopted(self, sequence: Sequence) -> Sequence:
        """The sequence as the next process makes it from what is recorded."""
        output, is_scored = self.outputs[sequence.key], len(self.scored[sequence.key]) == sequence.num_prompt_tokens - 1
        fresh = Sequence(
            **{name: getattr(sequence, name) for name in _OF_THE_REQUEST},
            tokens=np.zeros_like(sequence.tokens),
            num_tokens=sequence.num_prompt_tokens + len(output),
            chunk_ends=list(sequence.chunk_ends) if output else [],
            grammar=make_form(VOCAB_SIZE) if sequence.grammar else None,
            num_scored_tokens=sequence.num_prompt_tokens if is_scored else 0,
        )
        fresh.tokens[: fresh.num_tokens] = [*self._prompt(sequence.key), *output]
        if not is_scored:
            self.scored[sequence.key].clear()
        return fresh

    def abort(self, choice: int) -> None:
        """Abort a live sequence. Aborting a beam ends its whole search."""
        live = self.live
        key = live[choice % len(live)]
        self.engine.release(key)
        self.unreleased += [other for other in live if other != key and other not in self.engine.scheduler.live]
        self.engine.check()

    def release(self, choice: int, *, times: int = 1) -> None:
        key = self.unreleased.pop(choice % len(self.unreleased))
        for _ in range(times):
            self.engine.release(key)
        self.engine.check()

    def step(self) -> StepOutputs | None:
        self.now_ns += 1
        step = self.engine.step()
        assert step is not None or not self.engine.has_work, "sequences are live, but nothing was planned"
        return None if step is None else self._take(step)

    def step_with_abort(self, choice: int) -> StepOutputs:
        """A step during which a sequence is aborted."""
        self.now_ns += 1
        is_ahead = self.engine.num_in_flight > 0
        if self.engine.may_plan:
            plan = self.engine.plan()
            assert plan is not None or is_ahead, "sequences are live, but nothing was planned"
            if plan is not None:
                self.engine.launch(plan)
        if self.live:
            self.abort(choice)
        return self._take(self.engine.collect())

    def close(self, *, max_steps: int = 5000) -> list[StepOutputs]:
        """Run until every sequence is served. Once all are released, every page is free or cached."""
        steps: list[StepOutputs] = []
        while (step := self.step()) is not None:
            steps.append(step)
            assert len(steps) < max_steps, f"{self.live} are not done after {max_steps} steps"
        while self.unreleased:
            self.release(0)
        stats = self.engine.stats
        assert stats.num_free_pages + stats.num_idle_pages == stats.num_pages
        assert stats.num_free_host_pages + stats.num_idle_host_pages == stats.num_host_pages
        return steps

    def _propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """The expected tokens, except for every fifth; as many as allowed."""
        count = sequence.num_output_tokens
        known = self.expected[sequence.key][count : count + max_tokens]
        return [token + (index % 5 == 0) for index, token in enumerate(known, sequence.num_tokens)]

    def _take(self, step: StepOutputs) -> StepOutputs:
        self.engine.check()
        self._check_plan(step)
        progress = step.progress
        for key, index, token_id in tokens_of(progress):
            assert index == len(self.outputs[key]), f"{key}: token {index} after {len(self.outputs[key])}"
            assert token_id == self.expected[key][index], f"{key}: token {index} is wrong"
            self.outputs[key].append(token_id)
        for key in progress.finished:
            assert self.outputs[key] == self.expected[key], f"{key} ended too soon"
            assert progress.hypotheses.get(key) == self.hypotheses.get(key), f"the search of {key} found something else"
        for key in progress.expired:
            assert self.outputs[key] == self.expected[key][: len(self.outputs[key])]
        self._check_logprobs(step)
        self._check_embeddings(step)
        self.unreleased += [*progress.finished, *progress.expired, *progress.failed]
        return step

    def _check_logprobs(self, step: StepOutputs) -> None:
        """They are those of their contexts, and all that were wanted have come."""
        for key, index, token_id in tokens_of(step.progress):
            if self.sequences[key].params.logprobs is not None:
                context = [*self._prompt(key), *self.outputs[key][:index]]
                assert step.logprobs[key].chosen == self._logprob(key, context, token_id), f"{key}: logprob of {index}"
        for key, scores in step.scores.items():
            prompt = self._prompt(key)
            for position, chosen in enumerate(scores.columns[0].tolist(), scores.start + 1):
                expected = self._logprob(key, prompt[:position], prompt[position])
                assert chosen == np.float32(expected), f"{key}: logprob of the prompt's token {position}"
                self.scored.setdefault(key, set()).add(position)
        for key in step.progress.finished.keys() & self.sequences.keys():
            num_scored = len(self.scored.get(key, ()))
            assert num_scored == self.sequences[key].num_prompt_tokens - 1, (
                f"{key}: {num_scored} logprobs of the prompt"
            )

    def _check_embeddings(self, step: StepOutputs) -> None:
        """They are right, and come with the ends of their sequences."""
        for key, found in step.embeddings.items():
            np.testing.assert_allclose(found, expected_embedding(self.sequences[key]), rtol=1e-6)
        for key in step.progress.finished.keys() & self.sequences.keys():
            assert (key in step.embeddings) == bool(self.sequences[key].embedding_size), f"{key}: an embedding"

    def _prompt(self, key: Key) -> list[int]:
        sequence = self.sequences[key]
        prompt: list[int] = sequence.tokens[: sequence.num_prompt_tokens].tolist()
        return prompt

    def _logprob(self, key: Key, context: list[int], token_id: int) -> float:
        return logprob_of(state_of(context, self.sequences[key].adapter), token_id, VOCAB_SIZE)

    def _check_plan(self, step: StepOutputs) -> None:
        plan, config = step.plan, self.engine.scheduler.config
        assert self.engine.stats.num_lost_pages == 0
        assert plan.num_tokens <= config.token_budget
        assert config.max_kv_reads is None or plan.num_reads <= config.max_kv_reads or len(plan.chunks) == 1
        assert not {chunk.key for chunk in plan.chunks} & set(plan.preempted), "a preempted sequence runs"
        assert not (plan.moves.swap_out and plan.moves.swap_in), "a step swaps both out and in"


def _copy(beam: Sequence) -> Sequence:
    """A search starts over after a crash."""
    return replace(beam, tokens=beam.tokens.copy())


def crowd(beams: list[Sequence], **options: Any) -> Clients:
    """A search, and two earlier sequences that outgrow the pool together with it."""
    options = {"num_pages": 20, "host_pages": 40, "max_num_seqs": 5, "prefill_chunk": 64, **options}
    clients = Clients(**options)
    clients.add_search(beams)
    for sequence in (make_sequence(20 + index, num_tokens=9, max_tokens=30) for index in range(2)):
        sequence.arrival -= 100
        clients.add(sequence)
    return clients
