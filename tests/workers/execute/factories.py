"""Small sequences, schedulers and engines for tests, with every number that matters set by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any

import numpy as np

from tests.workers.execute.grammar.form import fitting_ids
from tests.workers.execute.recurrent_hash import RecurrentHashRunner
from triptych.protocol.arrays import Float32
from triptych.protocol.config import SchedulerConfig
from triptych.protocol.sampling import SamplingParams
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import HashRunner, expected_tokens, hidden_of, logprob_of, state_of
from triptych.workers.execute.kv_file import KvFile
from triptych.workers.execute.scheduling.audit import check_plan
from triptych.workers.execute.scheduling.beam_search import BeamSearch, Candidates, Hypothesis, num_candidates
from triptych.workers.execute.scheduling.page_records import PageRecords
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.scheduling.progress import Progress
from triptych.workers.execute.scheduling.proposals import Proposer
from triptych.workers.execute.scheduling.scheduler import Scheduler
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.trace import StepTrace

VOCAB_SIZE = 97
NUM_PAGES, PAGE_SIZE = 64, 4


def make_sequence(
    index: int = 0,
    *,
    num_tokens: int = 5,
    max_tokens: int = 8,
    speaker: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    **params: Any,
) -> Sequence:
    """Sequence number ``index``: its key is (index, 0), its arrival ``index``, its prompt is unique.

    Prompts of the same ``speaker`` have a common prefix, and differ only in their length.
    """
    tokens = np.zeros(num_tokens + max_tokens, np.int32)
    first = index if speaker is None else speaker
    tokens[:num_tokens] = [(7 * first + 3 * i) % (VOCAB_SIZE - 1) + 1 for i in range(num_tokens)]
    return Sequence(
        key=(index, 0),
        tokens=tokens,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        params=SamplingParams(max_tokens=max_tokens, **params),
        seed=index,
        arrival=index,
        stop_ids=stop_ids,
    )


def make_sequences(count: int, **options: Any) -> list[Sequence]:
    return [make_sequence(index, **options) for index in range(count)]


def make_group(index: int, size: int, **options: Any) -> list[Sequence]:
    """Sequences ``index`` to ``index + size - 1``: samples of one request, with the prompt of the first."""
    group = [make_sequence(index + i, **{"speaker": index, "temperature": 1.0, **options}) for i in range(size)]
    for sequence in group:
        sequence.group_key = (index, 0)
    return group


def make_beams(index: int, num_beams: int, **options: Any) -> list[Sequence]:
    """The sequences of one beam search."""
    return make_group(index, num_beams, temperature=0.0, num_beams=num_beams, **options)


def expected_hypotheses(beam: Sequence, vocab_size: int = VOCAB_SIZE) -> list[Hypothesis]:
    """The hypotheses of this beam's search, from the definition of the hash model alone, without pages."""
    search = BeamSearch(beam.params, stop_ids=beam.stop_ids, max_tokens=beam.max_tokens)
    prompt = beam.tokens[: beam.num_prompt_tokens].tolist()
    count = min(num_candidates(beam.params, len(beam.stop_ids)), vocab_size - 1)
    outputs: list[list[int]] = [[]]
    while outputs:
        found = []
        for output in outputs:
            state = state_of(prompt + output)
            ids = [(state + rank) % (vocab_size - 1) + 1 for rank in range(count)]
            logprobs = [logprob_of(state, token_id, vocab_size) for token_id in ids]
            found.append(Candidates(np.array(ids, np.int32), np.array(logprobs, np.float32)))
        outputs = [[*outputs[branch.parent], branch.token_id] for branch in search.advance(outputs, found)]
    return search.hypotheses


def expected_output(sequence: Sequence) -> list[int]:
    """The hash model's tokens after the prompt of ``sequence``, up to its stop token or max_tokens. A sequence with a
    grammar has that of ``make_form``.
    """
    prompt = sequence.tokens[: sequence.num_prompt_tokens].tolist()
    options: dict[str, Any] = {"temperature": sequence.params.temperature, "seed": sequence.seed}
    options["adapter"] = sequence.adapter
    tokens: list[int] = []
    if sequence.grammar is None:
        tokens = expected_tokens(prompt, sequence.max_tokens, VOCAB_SIZE, **options)
    while len(tokens) < sequence.max_tokens:
        [likeliest] = expected_tokens([*prompt, *tokens], 1, VOCAB_SIZE, **options)
        fitting = fitting_ids(tokens, VOCAB_SIZE)
        tokens.append(int(fitting[np.searchsorted(fitting, likeliest) % len(fitting)]))
    for count in range(max(1, sequence.params.min_tokens), len(tokens)):
        if tokens[count - 1] in sequence.stop_ids:
            return tokens[:count]
    return tokens


def expected_embedding(sequence: Sequence) -> Float32:
    """That of the hash model for its prompt: by numpy, from the states of all tokens."""
    ends = range(1, sequence.num_prompt_tokens + 1)
    states = np.array([hidden_of(state_of(sequence.tokens[:end], sequence.adapter)) for end in ends], np.float64)
    states = states[:, : sequence.embedding_size]
    poolings = {
        "lasttoken": states[-1],
        "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean": np.average(states, 0, weights=ends),
    }
    pooled = poolings[sequence.pooling.mode]
    return np.asarray(pooled / np.linalg.norm(pooled) if sequence.pooling.normalizes else pooled, np.float32)


def recover(sequence: Sequence, num_output_tokens: int) -> Sequence:
    """``sequence`` as recovered after a crash before which that many of its tokens had been emitted."""
    for token_id in expected_output(sequence)[:num_output_tokens]:
        sequence.append(token_id)
        sequence.num_scored_tokens = sequence.num_prompt_tokens  # these logprobs are written before the first token
    return sequence


Propose = Callable[[Sequence, int], list[int]]  # (sequence, maximum number) -> tokens that may follow its last one


class Told(Proposer):
    """Proposes the tokens returned by a function."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return self._propose(sequence, max_tokens)


def make_scheduler(
    *sequences: Sequence,
    num_pages: int = NUM_PAGES,
    page_size: int = PAGE_SIZE,
    max_model_len: int = 4096,
    prefix_cache: bool = False,
    host_pages: int = 0,
    num_snapshots: int | None = None,
    page_records: PageRecords | None = None,
    **config: Any,
) -> Scheduler:
    replays = bool(config.pop("replays", False))
    propose, proposer, costs = (config.pop(name, None) for name in ("propose", "proposer", "check_costs"))
    options = {"max_num_seqs": 4, "prefill_chunk": 8, "safety_margin": 0.0, **config}
    scheduler = Scheduler(
        SchedulerConfig(**options),
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        prefix_cache=prefix_cache,
        num_host_pages=host_pages,
        num_snapshots=num_snapshots,
        page_records=page_records,
        replays=replays,
        proposer=Told(propose) if propose else proposer,
        check_costs=costs,
    )
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


class CheckedEngine(Engine):
    """Checks that every step writes only to its sequences' own pages."""

    def plan(self) -> Plan | None:
        plan = super().plan()
        if plan is not None:
            check_plan(self.scheduler, plan)
        return plan


def make_engine(
    *sequences: Sequence,
    runner: type[HashRunner] | None = None,
    clock: Callable[[], int] = lambda: 0,
    depth: int = 0,
    trace_file: IO[str] | None = None,
    kv_file: KvFile | None = None,
    **options: Any,
) -> Engine:
    """An engine with the hash model and ``sequences`` added; options as for ``make_scheduler``."""
    kind = runner or (RecurrentHashRunner if options.get("num_snapshots") is not None else HashRunner)
    num_pages, page_size = options.setdefault("num_pages", NUM_PAGES), options.setdefault("page_size", PAGE_SIZE)
    made = kind(
        VOCAB_SIZE, num_pages=num_pages, page_size=page_size, num_host_pages=options.get("host_pages", 0),
        kv_file=kv_file,
    )  # fmt: skip
    scheduler = make_scheduler(page_records=made.page_records, **options)
    engine = CheckedEngine(
        scheduler,
        made,
        clock=clock,
        depth=depth,
        trace=None if trace_file is None else StepTrace(trace_file, scheduler, secret=b"secret"),
    )
    for sequence in sequences:
        engine.add(sequence)
    return engine


def advance(scheduler: Scheduler, *, token_id: int = 1) -> Plan:
    """One step without a model, in which every sequence samples ``token_id``."""
    plan = scheduler.plan()
    assert plan is not None, "nothing was planned"
    scheduler.apply(plan, [token_id] * len(plan.sampled))
    return plan


def advance_until(scheduler: Scheduler, is_reached: Callable[[Plan], object], *, max_steps: int = 1000) -> Plan:
    """Run steps without a model up to the first plan that satisfies the condition; returns that plan."""
    for _ in range(max_steps):
        plan = advance(scheduler)
        if is_reached(plan):
            return plan
    raise AssertionError(f"not reached in {max_steps} steps")


def chunks_of(plan: Plan) -> dict[int, int]:
    """Sequence number -> tokens in this step."""
    return {chunk.key[0]: chunk.num_tokens for chunk in plan.chunks}


def run(engine: Engine, *, max_steps: int = 10_000) -> dict[Key, list[int]]:
    """Run until nothing is left to do, checking every invariant after each step; all output tokens by sequence."""
    outputs = {key: sequence.output_tokens.tolist() for key, sequence in engine.scheduler.live.items()}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        step = engine.step()
        assert step is not None, "sequences are live, but nothing was planned"
        engine.check()
        for key, index, token_id in tokens_of(step.progress):
            assert index == len(outputs[key]), f"{key}: token {index} after {len(outputs[key])}"
            outputs[key].append(token_id)
    raise AssertionError(f"{len(engine.scheduler.live)} sequences live after {max_steps} steps")


def step_tokens(engine: Engine) -> dict[Key, int]:
    """Run one step; its tokens by sequence, none if there is nothing to do."""
    step = engine.step()
    return {} if step is None else step.progress.by_key()


def tokens_of(progress: Progress) -> list[tuple[Key, int, int]]:
    """(key, token index, token id) of every token of a step."""
    return list(zip(progress.keys, progress.token_indices, progress.token_ids, strict=True))
