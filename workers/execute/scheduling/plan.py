"""What one step computes, as a value that can be recorded, compared and replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

from .moves import NO_MOVES, Moves
from .sequence import Key, Sequence, SequenceState


class Chunk(NamedTuple):
    """Tokens ``start : start + num_tokens`` of one sequence."""

    key: Key
    start: int
    num_tokens: int
    samples: bool  # whether the token after the last of these is sampled
    proposed: tuple[int, ...] = ()  # the last of its tokens, if they are proposals; a token is sampled after each

    @property
    def num_sampled(self) -> int:
        return self.samples + len(self.proposed)


class Start(NamedTuple):
    """A sequence that leaves the queue; after a preemption, it does so again."""

    key: Key
    num_cached_tokens: int  # those of its tokens that need not be computed


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Its pages are reserved, but nothing has touched the device."""

    step: int  # counts from 1
    chunks: tuple[Chunk, ...]  # decodes in row order, then those with proposals, then prompts in the order chosen
    num_decodes: int  # of one token each
    num_checked: int = 0  # with proposals, after the decodes
    moves: Moves = NO_MOVES  # before the forward pass
    starts: tuple[Start, ...] = ()
    preempted: tuple[Key, ...] = ()  # gave up their pages and returned to the queue
    finished: tuple[tuple[Key, str], ...] = ()  # (key, reason): ended without a forward pass
    expired: tuple[tuple[Key, str], ...] = ()  # (key, why): a deadline passed
    failed: tuple[tuple[Key, str], ...] = ()  # (key, why): can never be served

    @property
    def started(self) -> list[Key]:
        return [start.key for start in self.starts]

    @property
    def sampled(self) -> list[Key]:
        """The sequence of each row in the step's result: one with proposals has several consecutive rows."""
        if not self.has_proposals:
            return [chunk.key for chunk in self.chunks if chunk.samples]
        return [chunk.key for chunk in self.chunks for _ in range(chunk.num_sampled)]

    @property
    def has_proposals(self) -> bool:
        return self.num_checked > 0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_tokens_of(self) -> dict[Key, int]:
        return {chunk.key: chunk.num_tokens for chunk in self.chunks}

    @property
    def num_reads(self) -> int:
        """Context tokens that the step's sequences read, including their own."""
        return sum(chunk.start + chunk.num_tokens for chunk in self.chunks)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefills)

    @property
    def checked(self) -> tuple[Chunk, ...]:
        return self.chunks[self.num_decodes : self.num_decodes + self.num_checked]

    @property
    def prefills(self) -> tuple[Chunk, ...]:
        return self.chunks[self.num_decodes + self.num_checked :]

    def halves(self) -> tuple[Plan, Plan]:
        """This step as two, once its moves are done; it must have at least two chunks."""
        is_first = [index < len(self.chunks) // 2 for index in range(len(self.chunks))]
        return self.part(is_first), self.part([not first for first in is_first])

    def part(self, is_in: Seq[bool]) -> Plan:
        """The step with only the selected chunks, once its moves are done."""
        num_decodes, num_checked = sum(is_in[: self.num_decodes]), sum(is_in[self.num_decodes :][: self.num_checked])
        chunks = tuple(compress(self.chunks, is_in))
        return replace(self, chunks=chunks, num_decodes=num_decodes, num_checked=num_checked, moves=NO_MOVES)


MAX_SCORED_TOKENS = 512  # prompt tokens per step whose logprobs are needed: each takes a row of logits


@dataclass(slots=True)
class Draft:
    """A step being planned. Scheduled chunks may be dropped again when their pages are taken for another sequence."""

    step: int
    num_tokens_left: int
    num_reads_left: float = math.inf
    num_prefill_left: float = math.inf  # tokens of prompts
    num_scored_left: int = MAX_SCORED_TOKENS
    lacks_memory: bool = False  # a prompt was held back by lack of memory, not by a budget
    decodes: dict[Key, Chunk] = field(default_factory=dict)
    checked: dict[Key, Chunk] = field(default_factory=dict)  # decodes with proposals, which are added last
    prefills: dict[Key, Chunk] = field(default_factory=dict)
    starts: dict[Key, Start] = field(default_factory=dict)
    preempted: list[Key] = field(default_factory=list)
    finished: list[tuple[Key, str]] = field(default_factory=list)
    expired: list[tuple[Key, str]] = field(default_factory=list)
    failed: list[tuple[Key, str]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.checked or self.prefills)

    def room(self, sequence: Sequence, wanted: int) -> int:
        """How many of the next ``wanted`` tokens of a prompt the budgets allow.

        The first sequence of a step is exempt from the limit on reads: a context above ``max_kv_reads`` must progress.
        """
        num_reads_left = math.inf if self.is_empty else self.num_reads_left
        num_left = min(self.num_tokens_left, self.num_prefill_left, num_reads_left - sequence.num_computed_tokens)
        if not sequence.is_scored:
            num_left = min(num_left, self.num_scored_left)
        return int(max(0, min(wanted, num_left)))

    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        is_decode = sequence.state is SequenceState.DECODING
        chunks = self.decodes if is_decode else self.prefills
        start = sequence.num_computed_tokens
        samples = start + num_tokens == sequence.num_tokens and sequence.max_tokens > 0
        chunks[sequence.key] = Chunk(sequence.key, start, num_tokens, samples)
        self.num_tokens_left -= num_tokens
        self.num_reads_left -= start + num_tokens
        self.num_prefill_left -= 0 if is_decode else num_tokens
        self.num_scored_left -= 0 if sequence.is_scored else num_tokens
        sequence.last_step = self.step

    def propose(self, key: Key, token_ids: list[int]) -> None:
        """Add proposals to a sequence that decodes in this step."""
        chunk = self.decodes.pop(key)
        self.checked[key] = chunk._replace(num_tokens=1 + len(token_ids), proposed=tuple(token_ids))
        self.num_tokens_left -= len(token_ids)
        self.num_reads_left -= len(token_ids)

    def end(self, key: Key, reason: str, why: str = "") -> None:
        """End a sequence without a forward pass; ``why`` is the message of an error."""
        if reason == "error":
            self.failed.append((key, why))
        else:
            self.finished.append((key, reason))

    def drop(self, key: Key) -> None:
        self.starts.pop(key, None)
        chunk = self.decodes.pop(key, None) or self.prefills.pop(key, None)
        if chunk is not None:
            self.num_tokens_left += chunk.num_tokens
            self.num_reads_left += chunk.start + chunk.num_tokens

    def finish(self, moves: Moves) -> Plan | None:
        """The plan, or None if nothing happens in this step."""
        ends = self.finished or self.expired or self.failed
        if self.is_empty and not (moves or self.starts or self.preempted or ends):
            return None
        return Plan(
            step=self.step,
            chunks=(*self.decodes.values(), *self.checked.values(), *self.prefills.values()),
            num_decodes=len(self.decodes),
            num_checked=len(self.checked),
            moves=moves,
            starts=tuple(self.starts.values()),
            preempted=tuple(self.preempted),
            finished=tuple(self.finished),
            expired=tuple(self.expired),
            failed=tuple(self.failed),
        )
