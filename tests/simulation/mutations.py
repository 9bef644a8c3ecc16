"""Mutations: bugs typical of a program like this one, planted where they would occur. The simulation must find them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from triptych.driver.blame import Blame
from triptych.driver.exchange import Exchange
from triptych.driver.stream import Assembly
from triptych.protocol import messages as m
from triptych.protocol.intent import Intent
from triptych.protocol.journal.layout import ACCEPTED, FREE, RELEASED, extent, split_word, word
from triptych.protocol.journal.releases import ReleaseWriter, release_word
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.journal.tokens import MULTIPLIER, TokenWriter
from triptych.workers.execute import hash_lm
from triptych.workers.execute import process as execute
from triptych.workers.execute.bookkeeping import NO_TOKEN
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.process import Execute
from triptych.workers.prepare.known_ids import KnownIds
from triptych.workers.prepare.process import Prepare
from triptych.workers.summarize import choices
from triptych.workers.summarize.answer import Answer
from triptych.workers.summarize.answers import Answers
from triptych.workers.summarize.choices import Choices
from triptych.workers.summarize.ends import Ends

Patch = pytest.MonkeyPatch


def no_deduplication(patch: Patch) -> None:
    """The client appends what it receives, even if it has it already."""
    real = Assembly.add

    def add(self: Assembly, offset: int, text_offset: int, *rest: Any) -> Any:
        return real(self, self.num_tokens, self.num_chars, *rest)

    patch.setattr(Assembly, "add", add)


def count_before_token(patch: Patch) -> None:
    """execute publishes the count before the tokens that it counts."""

    def publish(self: Any, slots: Any, indices: Any, token_ids: Any, now_ns: int) -> None:
        words, tokens = self._journal.words, token_ids.view(np.uint32)
        self._checks[slots] = self._checks[slots] * MULTIPLIER + tokens + 1
        self._journal.tokens_words[slots] = (indices + 1) << 32 | self._checks[slots]
        words.put(self._tokens_at[slots] + indices, tokens)
        words.put(self._times_at[slots] + indices, 0)

    patch.setattr(TokenWriter, "publish", publish)


def state_before_record(patch: Patch) -> None:
    """prepare publishes a record before it fills it."""
    real = RequestWriter._write

    def write(self: RequestWriter, slot: int, *rest: Any) -> int:
        entry = self._journal.records[slot]
        entry["prepare_word"] = word((split_word(entry["prepare_word"])[0] + 1) & 0xFFFFFFFF or 1, ACCEPTED)
        entry["prepare_word"] = word(split_word(entry["prepare_word"])[0] - 1, ACCEPTED)
        return real(self, slot, *rest)

    patch.setattr(RequestWriter, "_write", write)


def stateful_random_numbers(patch: Patch) -> None:
    """Random numbers come from a generator with state."""
    draws = itertools.count()
    patch.setattr(hash_lm, "_noise", lambda seed, position: seed * 7919 + next(draws) * 104729)
    assert HashRunner._sample.__globals__["_noise"] is hash_lm._noise


def accepted_before_record(patch: Patch) -> None:
    """prepare sends ACCEPTED before it writes the record."""
    real = Prepare._accept

    def accept(self: Prepare, intake: Any, admission: Any) -> None:
        message = m.Accepted(intake.request_id, len(admission.token_ids), 0, admission.capacity)
        self._router.send(intake.peer, message)
        real(self, intake, admission)

    patch.setattr(Prepare, "_accept", accept)


def ids_are_not_remembered(patch: Patch) -> None:
    """A repeated SUBMIT is a new request."""
    patch.setattr(KnownIds, "seen", lambda self, request_id, digest: False)


def live_requests_are_not_counted_after_a_restart(patch: Patch) -> None:
    """A restarted prepare assumes that every credit is free."""
    real = Prepare._adopt_journal

    def adopt(self: Prepare) -> None:
        real(self)
        self._live.clear()

    patch.setattr(Prepare, "_adopt_journal", adopt)


def prepare_never_reads_the_journal(patch: Patch) -> None:
    """Lost releases stay lost."""
    patch.setattr(Prepare, "_scan", lambda self: None)


def execute_never_reads_the_journal(patch: Patch) -> None:
    """Lost requests and releases stay lost."""
    patch.setattr(Execute, "_scan", lambda self: None)


def records_are_reused_while_execute_still_writes(patch: Patch) -> None:
    """A read answer's record is given to the next request although execute may still write to it."""

    def recycle(self: RequestWriter, slot: int, generation: int) -> bool:
        entry = self._journal.records[slot]
        current, state = split_word(entry["prepare_word"])
        if current != generation or state == FREE:
            return False
        offset, size = int(entry["payload_offset"]), int(entry["payload_bytes"])
        end = extent(offset, size, int(entry["token_capacity"]), int(entry["logprob_words"])).end
        entry["prepare_word"] = word(generation, FREE)
        self._arena.give(offset, end)
        self._free.appendleft(slot)
        return True

    patch.setattr(RequestWriter, "recycle", recycle)


def ended_requests_are_resumed_by_a_restarted_execute(patch: Patch) -> None:
    """execute resumes every request that is not released, even if it wrote its end before it died."""
    patch.setattr(execute, "read_finish", lambda *_: None)


def gaps_are_ignored(patch: Patch) -> None:
    """summarize takes every token as the next one, whatever its index is."""
    _rewrite_steps(patch, lambda self, slot, column: (self[slot].num_seen, column[1]))


def generations_are_ignored(patch: Patch) -> None:
    """summarize attributes tokens of an earlier request in a slot to the current one."""
    _rewrite_steps(patch, lambda self, slot, column: (self[slot].num_seen, self[slot].key[1]))


def new_connections_are_not_noticed(patch: Patch) -> None:
    """Text goes to the connection that followed first, until the client reports a gap."""
    real = Answer.follow
    readers: dict[Answer, bytes] = {}

    def follow(self: Answer, peer: bytes, offset: int, again: bool) -> None:
        if again or self not in readers:
            readers[self] = peer
        real(self, readers[self], offset, again)

    patch.setattr(Answer, "follow", follow)


def answers_end_before_their_tokens_are_counted(patch: Patch) -> None:
    """summarize writes the releasing word before what it releases."""

    def release(
        self: ReleaseWriter, slot: int, generation: int, *, num_tokens: int, reason: str, code: str = ""
    ) -> None:
        entry = self._journal.records[slot]
        entry["release_word"] = release_word(self._journal, slot, generation, RELEASED)
        entry["end_code"] = code.encode()
        entry["end_tokens"], entry["end_reason"] = num_tokens, m.FINISH_REASONS.index(reason)

    patch.setattr(ReleaseWriter, "release", release)


def no_request_is_blamed(patch: Patch) -> None:
    """The driver ignores which requests a dead worker had."""
    patch.setattr(Blame, "note_death", lambda self, death: self._board.intent(death.role).clear())


def kills_from_outside_are_blamed_on_requests(patch: Patch) -> None:
    """The requests of a worker killed from outside become suspects."""
    real = Blame.note_death
    patch.setattr(Blame, "note_death", lambda self, death: real(self, death._replace(is_internal=True)))


def suspects_are_cleared_by_tokens_known_before_the_crash(patch: Patch) -> None:
    """execute does not report how many steps it has run but not journaled, which run again before the crashing one."""
    real = Intent.begin
    patch.setattr(Intent, "begin", lambda self, *, num_ahead=0: real(self))


def choices_are_ranked_before_all_candidates_are_known(patch: Patch) -> None:
    """A restarted summarize ranks the candidates found so far, and does not wait for the others."""
    patch.setattr(Choices, "are_complete", True)


def only_a_beam_that_fails_now_ends_its_search(patch: Patch) -> None:
    """A restarted summarize ignores ended beams that it finds at its start, or after the end of another beam."""
    real = Answers._discover_slot

    def discover_slot(self: Answers, slot: int) -> Answer | None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Ends, "end_search", lambda self, choices: None)
            return real(self, slot)

    patch.setattr(Answers, "_discover_slot", discover_slot)


def abort_of_a_choice_aborts_all(patch: Patch) -> None:
    """Even if the choices are fixed from the beginning and do not compete."""
    patch.setattr(Choices, "of", lambda self, wire_id: list(self.answers.values()))


def accepted_request_is_not_resubmitted(patch: Patch) -> None:
    """The client believes that an accepted request is unknown, even if its messages overtook each other."""
    patch.setattr(Exchange, "_resubmit", lambda self, request: False)


def _rewrite_steps(patch: Patch, rewrite: Callable[[Answers, int, tuple[int, int]], tuple[int, int]]) -> None:
    real = Answers.take

    def take(self: Answers, step: m.StepDone) -> None:
        columns = [np.frombuffer(c, "<u4").tolist() for c in (step.slots, step.indices, step.generations)]
        new = [
            rewrite(self, slot, (index, generation)) if slot in self and index != NO_TOKEN else (index, generation)
            for slot, index, generation in zip(*columns, strict=True)
        ]
        indices, generations = np.array(new, "<u4").reshape(-1, 2).T
        changed = (step.slots, generations.tobytes(), indices.tobytes())
        real(self, m.StepDone(*changed, step.token_ids, step.finish_reasons))

    patch.setattr(Answers, "take", take)


def leases_run_while_everything_stands_still(patch: Patch) -> None:
    patch.setattr(choices, "STOPPED_S", float("inf"))


def by_name(*mutations: Callable[[Patch], None]) -> dict[str, Callable[[Patch], None]]:
    return {mutation.__name__: mutation for mutation in mutations}


MUTATIONS = by_name(
    no_deduplication,
    count_before_token,
    state_before_record,
    stateful_random_numbers,
    accepted_before_record,
    ids_are_not_remembered,
    live_requests_are_not_counted_after_a_restart,
    prepare_never_reads_the_journal,
    execute_never_reads_the_journal,
    records_are_reused_while_execute_still_writes,
    ended_requests_are_resumed_by_a_restarted_execute,
    gaps_are_ignored,
    generations_are_ignored,
    new_connections_are_not_noticed,
    answers_end_before_their_tokens_are_counted,
    no_request_is_blamed,
    kills_from_outside_are_blamed_on_requests,
    suspects_are_cleared_by_tokens_known_before_the_crash,
    choices_are_ranked_before_all_candidates_are_known,
    only_a_beam_that_fails_now_ends_its_search,
    abort_of_a_choice_aborts_all,
    accepted_request_is_not_resubmitted,
    leases_run_while_everything_stands_still,
)
