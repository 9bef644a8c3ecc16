"""Forms of answers: a small language in place of grammars, and their compilation, which takes simulated time.

A form ``modulus least most`` is a regular expression for prepare. The numbers of an answer's tokens, each multiplied by
its place, add up to a sum: the next token must leave the same remainder as this sum. So a token that is consumed twice,
or not at all, changes what may follow. The answer may end after ``least`` tokens and must end after ``most``.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.simulation.network import FakeBell
from triptych.protocol.errors import RequestError
from triptych.workers.execute.grammar.intake import GrammarIntake
from triptych.workers.execute.grammar.masks import NO_MASKS, TokenMasks
from triptych.workers.execute.grammar.matcher import GrammarMatcher
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.process import Execute
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.prepare.process import Prepare
from triptych.workers.prepare.structured import Structured, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.processes import Worker

COMPILE_NS = (1, 30_000_000)
END = 0  # the token that ends an answer
BROKEN = "broken"  # a form that does not compile


class Form(NamedTuple):
    modulus: int
    least: int
    most: int

    @classmethod
    def parse(cls, source: str) -> Form:
        return cls(*map(int, source.split()))

    def __str__(self) -> str:
        return " ".join(map(str, self))

    def allows(self, num_tokens: int, total: int) -> npt.NDArray[np.bool_]:
        """bool [V], which tokens may follow ``num_tokens`` whose sum is ``total``."""
        ids = np.arange(VOCAB_SIZE)
        may_follow: npt.NDArray[np.bool_] = (ids % self.modulus == total % self.modulus) & (num_tokens < self.most)
        may_follow[END] = num_tokens >= self.least
        return may_follow


def sum_of(tokens: Rows[int]) -> int:
    return sum((place + 1) * token for place, token in enumerate(tokens))


class FormMatcher:
    """The part of ``LLMatcher`` that ``GrammarMatcher`` uses."""

    def __init__(self, form: Form) -> None:
        self._form, self._num_tokens, self._total, self._error = form, 0, 0, ""

    def consume_tokens(self, tokens: list[int]) -> None:
        for token in tokens:
            if not self._form.allows(self._num_tokens, self._total)[token]:
                self._error = f"token {token} does not match {self._form} after {self._num_tokens} tokens"
            self._num_tokens += 1
            self._total += self._num_tokens * token

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        bits = np.packbits(self._form.allows(self._num_tokens, self._total), bitorder="little").tobytes()
        ctypes.memmove(address, bits.ljust(num_bytes, b"\0"), num_bytes)

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error


class Masks:
    """A ``MaskMaker`` without threads."""

    def begin(self, sampled: Rows[Sequence]) -> PendingMasks | None:
        rows = [
            (row, sequence.grammar, sequence.output_tokens.copy())
            for row, sequence in enumerate(sampled)
            if isinstance(sequence.grammar, GrammarMatcher)
        ]
        return PendingMasks(rows) if rows else None


class PendingMasks:
    def __init__(self, rows: list[tuple[int, GrammarMatcher, Any]]) -> None:
        self._rows = rows

    def wait(self) -> TokenMasks:
        allowed = {row: matcher.allowed_after(tokens) for row, matcher, tokens in self._rows}
        return TokenMasks(allowed, {}) if allowed else NO_MASKS


class FormCompiler:
    """In place of ``GrammarCompiler``."""

    def compile(self, grammar: str, reasoning: object = None) -> GrammarMatcher:
        matcher: Any = FormMatcher(Form.parse(grammar))
        return GrammarMatcher(matcher, VOCAB_SIZE)


class FormIntake(GrammarIntake):
    """Compiles in simulated time, while execute goes on."""

    def __init__(self, worker: Worker) -> None:
        compiler: Any = FormCompiler()
        bell: Any = FakeBell()
        super().__init__(compiler, bell)
        self._worker = worker

    def add(self, sequence: Sequence, grammar: str, reasoning: object = None) -> None:
        self._pending[sequence.key] = sequence
        _later(self._worker, lambda: self._compile(sequence, grammar, None))


class FormQueue:
    """In place of ``GrammarQueue``: forms are compiled once, in simulated time."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._known: set[Structured] = set()

    def compile(self, owner: object, form: Structured, done: Callable[[str | RequestError], None]) -> None:
        result = refusal("does not compile") if form.source == BROKEN else form.source
        if form in self._known:
            done(result)
            return

        def finish() -> None:
            self._known.add(form)
            done(result)

        _later(self._worker, finish)


def _later(worker: Worker, work: Callable[[], None]) -> None:
    """Do this after some time, as a thread of the worker would, unless it has died."""
    world = worker.world

    def act() -> None:
        if worker.is_alive:
            work()
            worker.wake(world.clock.now_ns)

    world.call(world.clock.now_ns + world.rules.randrange(*COMPILE_NS), act)


def compile_forms(worker: Worker, body: Any) -> Any:
    """Let a worker compile forms in place of grammars; returns its body."""
    if isinstance(body, Prepare):
        queue: Any = FormQueue(worker)
        body._tokenizing._grammars = queue
    elif isinstance(body, Execute):
        body._grammars = FormIntake(worker)
    return body


def random_form(dice: random.Random, max_tokens: int) -> Form:
    least = dice.randrange(max_tokens + 1)
    return Form(dice.choice((2, 5, 40)), least, dice.randrange(max(least, 1), max_tokens + 2))
