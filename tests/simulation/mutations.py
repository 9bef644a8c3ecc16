"""Mistakes that a program like this one makes, each planted where it would be made: the simulation must find them."""

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
from triptych.protocol.journal.layout import ACCEPTED, FREE, extent, split_word, word
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestWriter
from triptych.protocol.journal.tokens import MULTIPLIER, TokenWriter
from triptych.workers.execute import hash_lm
from triptych.workers.execute import process as execute
from triptych.workers.execute.bookkeeping import NO_TOKEN
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.process import Execute
from triptych.workers.prepare.intake import KnownIds
from triptych.workers.prepare.process import Prepare
from triptych.workers.summarize.answer import Answer
from triptych.workers.summarize.choices import Choices
from triptych.workers.summarize.ends import Ends
from triptych.workers.summarize.process import Summarize

Patch = pytest.MonkeyPatch


def no_deduplication(patch: Patch) -> None:
    """The client appends what it gets, whether it has it already or not."""
    real = Assembly.add

    def add(self: Assembly, offset: int, text_offset: int, *rest: Any) -> Any:
        return real(self, self.num_tokens, self.num_chars, *rest)

    patch.setattr(Assembly, "add", add)


def count_before_token(patch: Patch) -> None:
    """execute publishes the count, and then writes the tokens that it counts."""

    def publish(self: Any, slots: Any, indices: Any, token_ids: Any, now_ns: int) -> None:
        words, tokens = self._journal.words, token_ids.view(np.uint32)
        self._checks[slots] = self._checks[slots] * MULTIPLIER + tokens + 1
        self._journal.tokens_words[slots] = (indices + 1) << 32 | self._checks[slots]
        words.put(self._tokens_at[slots] + indices, tokens)
        words.put(self._times_at[slots] + indices, 0)

    patch.setattr(TokenWriter, "publish", publish)


def state_before_record(patch: Patch) -> None:
    """prepare publishes a record, and then fills it."""
    real = RequestWriter._write

    def write(self: RequestWriter, slot: int, *rest: Any) -> int:
        entry = self._journal.records[slot]
        entry["prepare_word"] = word((split_word(entry["prepare_word"])[0] + 1) & 0xFFFFFFFF or 1, ACCEPTED)
        entry["prepare_word"] = word(split_word(entry["prepare_word"])[0] - 1, ACCEPTED)
        return real(self, slot, *rest)

    patch.setattr(RequestWriter, "_write", write)


def stateful_random_numbers(patch: Patch) -> None:
    """Random numbers come from a generator that goes on from draw to draw."""
    draws = itertools.count()
    patch.setattr(hash_lm, "_noise", lambda seed, position: seed * 7919 + next(draws) * 104729)
    assert HashRunner._sample.__globals__["_noise"] is hash_lm._noise


def accepted_before_record(patch: Patch) -> None:
    """prepare says ACCEPTED, and then writes the record."""
    real = Prepare._accept

    def accept(self: Prepare, intake: Any, admission: Any) -> None:
        message = m.Accepted(intake.request_id, len(admission.token_ids), 0, admission.capacity)
        self._router.send(intake.peer, message)
        real(self, intake, admission)

    patch.setattr(Prepare, "_accept", accept)


def ids_are_not_remembered(patch: Patch) -> None:
    """A SUBMIT that was sent again is another request."""
    patch.setattr(KnownIds, "seen", lambda self, request_id, digest: False)


def live_requests_are_not_counted_after_a_restart(patch: Patch) -> None:
    """A restarted prepare believes that every credit is free."""
    real = Prepare._adopt_journal

    def adopt(self: Prepare) -> None:
        real(self)
        self._live.clear()

    patch.setattr(Prepare, "_adopt_journal", adopt)


def prepare_never_reads_the_journal(patch: Patch) -> None:
    """Releases that were lost on the way are lost."""
    patch.setattr(Prepare, "_scan", lambda self: None)


def execute_never_reads_the_journal(patch: Patch) -> None:
    """Requests and releases that were lost on the way are lost."""
    patch.setattr(Execute, "_scan", lambda self: None)


def records_are_reused_while_execute_still_writes(patch: Patch) -> None:
    """A record whose answer is read goes to the next request, whatever execute is about to write into it."""

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


def what_has_ended_goes_on_in_a_new_life(patch: Patch) -> None:
    """execute takes up every request that is not released, also one that it wrote an end of before it died."""
    patch.setattr(execute, "read_finish", lambda *_: None)


def gaps_are_ignored(patch: Patch) -> None:
    """summarize takes every token for the next one, whatever its index says."""
    _rewrite_steps(patch, lambda self, slot, column: (self._answers[slot].num_seen, column[1]))


def generations_are_ignored(patch: Patch) -> None:
    """summarize gives the tokens of an earlier request in a slot to the present one."""
    _rewrite_steps(patch, lambda self, slot, column: (self._answers[slot].num_seen, self._answers[slot].key[1]))


def new_connections_are_not_noticed(patch: Patch) -> None:
    """Text goes to the connection that asked first, until the client says that it misses something."""
    real = Answer.follow
    readers: dict[Answer, bytes] = {}

    def follow(self: Answer, peer: bytes, offset: int, again: bool) -> None:
        if again or self not in readers:
            readers[self] = peer
        real(self, readers[self], offset, again)

    patch.setattr(Answer, "follow", follow)


def answers_end_before_their_tokens_are_counted(patch: Patch) -> None:
    """summarize writes the word that releases, and then what it releases."""

    def release(
        self: ReleaseWriter, slot: int, generation: int, *, num_tokens: int, reason: str, code: str = ""
    ) -> None:
        entry = self._journal.records[slot]
        entry["release_word"] = word(generation, 1)
        entry["end_code"] = code.encode()
        entry["end_tokens"], entry["end_reason"] = num_tokens, m.FINISH_REASONS.index(reason)

    patch.setattr(ReleaseWriter, "release", release)


def nobody_is_blamed(patch: Patch) -> None:
    """The driver does not ask what a worker died of."""
    patch.setattr(Blame, "note_death", lambda self, role, *, internal: self._board.intent(role).clear())


def kills_from_outside_blame(patch: Patch) -> None:
    """Whoever was in the hands of a worker that somebody killed is a suspect."""
    real = Blame.note_death
    patch.setattr(Blame, "note_death", lambda self, role, *, internal: real(self, role, internal=True))


def suspects_are_acquitted_by_tokens_that_were_known_before_the_death(patch: Patch) -> None:
    """execute does not say how many steps it has done and not written down, which are done again before the one that
    kills.
    """
    real = Intent.begin
    patch.setattr(Intent, "begin", lambda self, *, num_ahead=0: real(self))


def choices_are_taken_from_those_who_were_found(patch: Patch) -> None:
    """A new life of summarize ranks the candidates that it has found so far, and does not wait for the others."""
    patch.setattr(Choices, "are_complete", True)


def only_a_beam_that_fails_now_ends_its_search(patch: Patch) -> None:
    """What a new life of summarize finds ended, or finds later than the end of another beam, is nobody's concern."""
    real = Summarize._discover_slot

    def discover_slot(self: Summarize, slot: int) -> Answer | None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Ends, "end_search", lambda self, choices: None)
            return real(self, slot)

    patch.setattr(Summarize, "_discover_slot", discover_slot)


def who_aborts_a_choice_aborts_all(patch: Patch) -> None:
    """Also where the choices are known from the beginning, and do not compete."""
    patch.setattr(Choices, "of", lambda self, wire_id: list(self.answers.values()))


def unknown_is_unknown(patch: Patch) -> None:
    """The client believes that a request which was accepted is not known, whatever overtook what."""
    patch.setattr(Exchange, "_begin_anew", lambda self, request: False)


def _rewrite_steps(patch: Patch, rewrite: Callable[[Summarize, int, tuple[int, int]], tuple[int, int]]) -> None:
    real = Summarize._step_done

    def step_done(self: Summarize, step: m.StepDone) -> None:
        columns = [np.frombuffer(c, "<u4").tolist() for c in (step.slots, step.indices, step.generations)]
        new = [
            rewrite(self, slot, (index, generation))
            if slot in self._answers and index != NO_TOKEN
            else (index, generation)
            for slot, index, generation in zip(*columns, strict=True)
        ]
        indices, generations = np.array(new, "<u4").reshape(-1, 2).T
        changed = (step.step, step.finished_ns, step.slots, generations.tobytes(), indices.tobytes())
        real(self, m.StepDone(*changed, step.token_ids, step.finish_reasons))

    patch.setattr(Summarize, "_step_done", step_done)


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
    what_has_ended_goes_on_in_a_new_life,
    gaps_are_ignored,
    generations_are_ignored,
    new_connections_are_not_noticed,
    answers_end_before_their_tokens_are_counted,
    nobody_is_blamed,
    kills_from_outside_blame,
    suspects_are_acquitted_by_tokens_that_were_known_before_the_death,
    choices_are_taken_from_those_who_were_found,
    only_a_beam_that_fails_now_ends_its_search,
    who_aborts_a_choice_aborts_all,
    unknown_is_unknown,
)
