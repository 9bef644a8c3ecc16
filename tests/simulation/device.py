"""The simulated device of execute: the hash model, with a duration per step and a random moment of computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.simulation.checks import Violation
from tests.simulation.forms import Masks
from tests.simulation.mishaps import Mishaps, spoiled_tokens
from tests.simulation.plan import PlannedDeath
from tests.simulation.proposals import Drafts, Guesses
from tests.simulation.requests import EXECUTE_KILLER, POISON, num_tokens_before_death
from tests.simulation.rules import penalized
from tests.simulation.states import States
from triptych.protocol.config import ModelConfig
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.scheduling.audit import check_plan
from triptych.workers.execute.scheduling.moves import Moves
from triptych.workers.execute.scheduling.plan import Plan
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step import Places, StepInputs, StepResult

if TYPE_CHECKING:
    from tests.simulation.processes import Worker
    from triptych.protocol.model_card import ModelCard
    from triptych.workers.execute.engine import Engine


BROKEN = "broken"  # a folder of an adapter that execute refuses


def added_by(model: ModelConfig, places: Places) -> list[int]:
    """What the adapters at these places add to each token: the name of their folder."""
    folders = {module.name: module.folder.name for module in model.adapters}
    if BROKEN in folders.values():
        raise ConfigError("an adapter is broken")
    return [0 if name is None else int(folders[name]) for name in places]


class _Step(NamedTuple):
    inputs: StepInputs
    killer: list[int] | None  # prompt of the sequence that crashes the process


class Device(HashRunner):
    """Steps take time, during which other processes run. A step that computes ``POISON`` raises, and leaves garbage.

    Some rows fail at random: the same request might succeed after a restart.

    With recurrent layers, the state of each sequence must have seen what its pages hold.

    With overlap, a step is computed at random either when it is launched or when its result is awaited, but always
    after earlier steps; so it can fail or crash at either moment.
    """

    def __init__(self, worker: Worker, card: ModelCard, *, num_host_pages: int) -> None:
        lasting: Any = None if worker.world.lasting is None else worker.world.lasting.open(worker)
        super().__init__(
            VOCAB_SIZE, num_pages=card.num_pages, page_size=card.page_size, num_host_pages=num_host_pages,
            kv_file=lasting,
        )  # fmt: skip
        self.what_adapters_add: list[int] | None = None  # to each token; None: the adapter's number
        world = worker.world
        self.proposer = Drafts(card, world.require) if world.plan.has_draft_model else Guesses()
        self._worker = worker
        self._masks: Any = Masks()
        self._states = None if card.num_snapshots is None else States(card.max_live, card.num_snapshots)
        self.is_batch_invariant = worker.world.plan.is_batch_invariant
        self.overlaps = worker.world.plan.overlaps
        self._mishaps = Mishaps(world.plan.mishap_chance, world.mishaps, failing=world.checks.failing)
        self._orders: deque[Moves | _Step] = deque()  # not computed yet
        self._outcomes: deque[StepResult | Exception] = deque()  # not collected yet
        self._has_failed = False  # the last computed step
        self._writers: dict[int, dict[int, Key]] = {}  # by step in flight: page -> the sequence that writes to it

    def load_adapters(self, config: ModelConfig, places: Places) -> Callable[[], None]:
        added = added_by(config, places)

        def use() -> None:
            self.what_adapters_add = added

        return use

    def move(self, moves: Moves) -> None:
        self._orders.append(moves)

    def launch(self, inputs: StepInputs) -> None:
        self._check_pages()
        self._orders.append(_Step(inputs, _killer_in(inputs)))
        if self.overlaps and self._worker.rng.random() < 0.5:
            return
        self._compute()
        if isinstance(self._outcomes[-1], Exception):
            raise self._outcomes.pop()  # type: ignore[misc]

    def collect(self) -> StepResult:
        world = self._worker.world
        world.run_until(world.clock.now_ns + world.rng.randrange(*world.plan.step_ns))
        if not self._outcomes:
            self._compute()
        outcome = self._outcomes.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _compute(self) -> None:
        """Compute all launched steps."""
        while self._orders:
            self._worker.go_on()
            order = self._orders.popleft()
            if isinstance(order, Moves):
                super().move(order)
            else:
                outcome = self._outcome(order)
                self._has_failed = isinstance(outcome, Exception)
                self._outcomes.append(outcome)

    def _outcome(self, step: _Step) -> StepResult | Exception:
        if ((step.inputs.token_ids == POISON) & (step.inputs.positions == 0)).any():
            return self._spoiled(step.inputs, "poison")
        if self._mishaps.strike(step.inputs):
            return self._spoiled(step.inputs, "bad luck")
        if step.killer is not None:
            self._worker.die_of(step.killer)
        inputs = self._with_adapters(step.inputs)
        try:
            super().launch(inputs)
        except Exception as error:
            self._worker.world.require(self._has_failed, f"a step raised {error!r}")
            return error  # after a failed step, whose tokens cannot be carried over
        if self._states is not None:
            self._check_states(inputs, self._states.compute(inputs))
        return self._with_failures(super().collect(), inputs)

    def _choose(self, sequence: Sequence, state: int) -> int:
        return penalized(sequence, super()._choose(sequence, state))

    def _spoiled(self, inputs: StepInputs, why: str) -> Exception:
        if (masks := self._masks.begin(inputs.sampled)) is not None:
            masks.wait()  # they are computed beside the step
        self._mishaps.spoil(inputs, self._cells, None if self._states is None else self._states.rows)
        if not self._mishaps.keeps_tokens():
            self._last_tokens = spoiled_tokens(inputs)
        return RuntimeError(why)

    def _check_states(self, inputs: StepInputs, states: list[int]) -> None:
        tables, lengths = inputs.block_tables, inputs.context_lens.tolist()
        seen = [self._read(table, length) for table, length in zip(tables, lengths, strict=True)]
        self._worker.world.require(states == seen, f"the states of a step are {states}, its pages hold {seen}")

    def _with_adapters(self, inputs: StepInputs) -> StepInputs:
        if self.what_adapters_add is None or inputs.adapters is None:
            return inputs
        return replace(inputs, adapters=np.array([0, *self.what_adapters_add], np.int32)[inputs.adapters])

    def _with_failures(self, result: StepResult, inputs: StepInputs) -> StepResult:
        """Some rows without a token. Crashes are more likely then, before another process learns of the failure."""
        world, worker = self._worker.world, self._worker
        failed: dict[int, str] = {}
        for row, sequence in enumerate(inputs.sampled):
            if world.plan.failure_chance and world.failures.random() < world.plan.failure_chance:
                world.checks.failing(sequence.key)
                failed[row] = "by chance"
                self._mishaps.spoil_row(inputs, row, self._cells)
        if failed and worker.planned_death is None and world.failures.random() < 0.5:
            worker.planned_death = PlannedDeath("act", world.failures.randrange(12))
        return replace(result, failed=failed) if failed else result

    def check(self) -> None:
        """No page that a step in flight writes to is free."""
        engine: Engine = self._worker.body._engine
        for launched in engine._in_flight:
            for page, key in self._writers.get(launched.plan.step, {}).items():
                self._worker.world.require(
                    engine.scheduler.cache.pool.refs(page) > 0,
                    f"page {page} is free, and a step in flight writes to it for {key}",
                )

    def _check_pages(self) -> None:
        """A page that a step writes to belongs to one sequence, for the steps in flight too."""
        engine: Engine = self._worker.body._engine
        plans = {launched.plan.step: launched.plan for launched in engine._in_flight}
        self._writers = {step: writers for step, writers in self._writers.items() if step in plans}
        plan = next((plan for step, plan in plans.items() if plan.chunks and step not in self._writers), None)
        if plan is None:
            return  # it runs again
        try:
            check_plan(engine.scheduler, plan)
        except AssertionError as error:
            raise Violation(str(error)) from error
        writers = _writers(plan, engine)
        for earlier in self._writers.values():
            for page, key in writers.items():
                self._worker.world.require(
                    earlier.get(page, key) == key,
                    f"{key} writes to page {page}, which a step in flight writes for {earlier.get(page)}",
                )
        self._writers[plan.step] = writers


def _writers(plan: Plan, engine: Engine) -> dict[int, Key]:
    running, size = engine.scheduler.running, engine.scheduler.cache.pool.page_size
    return {
        page: key
        for key, start, num_tokens, *_ in plan.chunks
        for page in running[key].block_table[start // size : (start + num_tokens - 1) // size + 1]
    }


def _killer_in(inputs: StepInputs) -> list[int] | None:
    """The prompt of a sequence whose fatal token this step computes, even after proposed tokens, or its embedding."""
    for sequence, length in zip(inputs.sampled, inputs.sampled_lengths.tolist(), strict=True):
        prompt: list[int] = sequence.tokens[: sequence.num_prompt_tokens].tolist()
        if prompt[0] == EXECUTE_KILLER and length - len(prompt) == num_tokens_before_death(prompt):
            return prompt
    prompts: Iterator[list[int]] = (span.sequence.tokens.tolist() for span in inputs.embedded)
    return next((prompt for prompt in prompts if prompt[0] == EXECUTE_KILLER), None)
