"""The choices of one request: which answers they are, and who reads each."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from ...protocol.errors import UnknownRequest
from ...protocol.journal.layout import Journal
from ...protocol.journal.prompt_results import has_prompt_results
from ...protocol.journal.releases import read_release
from ...protocol.journal.requests import RequestView
from ...protocol.journal.tokens import read_logprobs
from ...protocol.messages import Failed
from ...protocol.owners import HOUSE, may_ask
from ...protocol.request_ids import member_id, request_of
from ..process import STOPPED_S
from .answer import Answer


class _Reader(NamedTuple):
    """The last FOLLOW of a choice that is not determined yet."""

    peer: bytes
    offset: int
    again: bool


class Choices:
    """All answers of a request, of which a client sees ``n``; a plain request has one.

    Invariant: the answer of a choice never changes. If more answers than choices compete, the choices are determined
    once, when all answers have ended, and from the journal only, so that a restarted process determines the same ones.
    """

    def __init__(self, view: RequestView, lease_until: float) -> None:
        params = view.record.params
        self.request_id = request_of(view.record.request_id)
        self.group, self.owner = view.group, view.record.owner
        self.lease_s = view.record.lease_s
        self.lease_until = lease_until  # time.monotonic()
        self.was_followed = False  # as far as this process knows
        self.answers: dict[int, Answer] = {}  # by index among the sequences of the request
        self._n = params.n
        self._indices = {member_id(self.request_id, index, self._n): index for index in range(self._n)}
        self._size = params.group_size
        self._is_ranked, self.is_beam_search = params.is_ranked, params.is_beam_search
        self._choices: dict[int, Answer] = {}
        self._readers: dict[int, _Reader] = {}

    def join(self, answer: Answer) -> None:
        index = answer.view.record.index
        self.answers[index] = answer
        answer.choices = self
        if not self._is_ranked:
            self._choices[index] = answer

    def part(self) -> None:
        """Let go of the answers, which refer to these choices and to each other: with all their text, they would stay
        until a search for garbage finds them, and it looks that far only once in thousands of requests.
        """
        for answer in self.answers.values():
            answer.candidates = ()
        self.answers.clear()
        self._choices.clear()

    def index_of(self, wire_id: str) -> int | None:
        """The choice that has this id; None if there is none."""
        return self._indices.get(wire_id)

    def of(self, wire_id: str) -> list[Answer]:
        """The answers affected by an operation on this id: one choice, or all while they are not determined."""
        index = self.index_of(wire_id)
        if wire_id != self.request_id and index is None:
            return []
        if index is None or self._is_ranked:
            return list(self.answers.values())
        return [self._choices[index]] if index in self._choices else []

    def follow(self, index: int, peer: bytes, offset: int, again: bool) -> Answer | None:
        """A client reads a choice; returns its answer, if it is determined."""
        self.was_followed = True
        answer = self._choices.get(index)
        if answer is None:
            self._readers[index] = _Reader(peer, offset, again)
        else:
            answer.follow(peer, offset, again)
        return answer

    def left_to_ask_s(self, journal: Journal) -> float:
        """Seconds left for a client that has resent its SUBMIT to follow, since ACCEPTED was last sent to it.

        ACCEPTED may be lost, and prepare be down, so the lease of such a client restarts with each ACCEPTED. Another
        client may have followed the request before.
        """
        told_ns = int(journal.records["told_ns"][self.group[0]])
        return self._left_s(journal, told_ns) if told_ns else 0.0

    def left_to_come_s(self, journal: Journal) -> float:
        """Seconds for which the end is kept for a client that has followed the request and may come back."""
        return self._left_s(journal, max(a.ended_ns for a in self.answers.values())) if self.was_followed else 0.0

    def _left_s(self, journal: Journal, since_ns: int) -> float:
        return self.lease_s - (journal.now_ns() - since_ns) / 1e9

    def decide(self, journal: Journal) -> list[Answer]:
        """Determine the choices, if all answers have ended; returns those newly known, with their readers attached."""
        if self._choices or not (self.are_complete and self.have_ended):
            return []
        for answer in self.answers.values():
            answer.score = self._score(answer, journal)
        ranked = sorted(self.answers.values(), key=lambda answer: _rank(answer, journal))
        for index, answer in enumerate(ranked[: self._n]):
            answer.wire_id = member_id(self.request_id, index, self._n)
            answer.index, answer.candidates = index, ranked
            self._choices[index] = answer
            if (reader := self._readers.pop(index, None)) is not None:
                answer.follow(*reader)
        return list(self._choices.values())

    def acknowledge(self, wire_id: str) -> list[Answer]:
        """A client has the end of a choice, or of all; returns the answers newly acknowledged."""
        index = self.index_of(wire_id)
        if index is None and wire_id != self.request_id:
            return []
        named = [answer for i, answer in self._choices.items() if index in (None, i)]
        news = [answer for answer in named if answer.stream.is_finished and not answer.is_acknowledged]
        for answer in news:
            answer.is_acknowledged = True
        return news

    @property
    def are_acknowledged(self) -> bool:
        """Whether a client has the ends of all choices."""
        return len(self._choices) == self._n and all(answer.is_acknowledged for answer in self._choices.values())

    @property
    def are_complete(self) -> bool:
        """Whether all answers are known. They are discovered one by one, and after a crash some may be gone already."""
        return len(self.answers) == self._size

    @property
    def have_ended(self) -> bool:
        return all(answer.stream.is_finished for answer in self.answers.values())

    def _score(self, answer: Answer, journal: Journal) -> float | None:
        """For a hypothesis, the score of the search; for a sample, the mean logprob of its tokens."""
        num_tokens, _ = _written_end(answer, journal)
        if not num_tokens:
            return None
        if self.is_beam_search:
            return float(journal.records["score"][answer.view.slot])
        rows: list[Any] = read_logprobs(journal, answer.view, 0, num_tokens)
        return float(sum(chosen for chosen, _ in rows)) / num_tokens


class Requests:
    """The requests that are live or kept, by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, Choices] = {}
        self._looked_at = time.monotonic()

    def get(self, wire_id: str, *, asker: int = HOUSE) -> Choices | None:
        """The request with this id, or with a choice of this id, if ``asker`` may access it."""
        choices = self._by_id.get(request_of(wire_id))
        return choices if choices is not None and may_ask(asker, choices.owner) else None

    def join(self, answer: Answer) -> None:
        view = answer.view
        choices = self.get(view.record.request_id)
        if choices is None or choices.group != view.group:
            choices = Choices(view, time.monotonic() + view.record.lease_s)
            self._by_id[choices.request_id] = choices
        choices.join(answer)

    def drop(self, choices: Choices) -> None:
        if self._by_id.get(choices.request_id) is choices:
            del self._by_id[choices.request_id]

    def overdue(self, now: float) -> list[Choices]:
        """Requests whose lease has expired. Called several times a second.

        While this process is stopped, as in a paused container, leases do not run: clients there are stopped as well,
        and have only now begun to send again.
        """
        stopped_s, self._looked_at = now - self._looked_at, now
        if stopped_s > STOPPED_S:
            for choices in self._by_id.values():
                choices.lease_until = min(choices.lease_until + stopped_s, now + choices.lease_s)
        return [choices for choices in self._by_id.values() if now > choices.lease_until]


def unknown(wire_id: str, choices: Choices | None) -> Failed:
    """The reply to a FOLLOW of an unknown id."""
    text = f"no request {wire_id!r:.100} is live or kept"
    if choices is not None:
        text = f"request {choices.request_id!r} has several choices, {wire_id!r:.100} is not one of them"
    return Failed(wire_id, 0, 0, b"", "", None, UnknownRequest.code, text, {})


def _rank(answer: Answer, journal: Journal) -> tuple[bool, bool, bool, float, int]:
    """Lowest first: failed answers come last, empty ones before them; ties in order of creation.

    An answer that ended before its prompt had the logprobs that were asked for comes first: the client must learn of
    its end, as the others do not have them.
    """
    _, reason = _written_end(answer, journal)
    lacks_scores = answer.view.record.num_prompt_logprobs is not None and not has_prompt_results(journal, answer.view)
    return not lacks_scores, reason == "error", answer.score is None, -(answer.score or 0.0), answer.view.record.index


def _written_end(answer: Answer, journal: Journal) -> tuple[int, str]:
    """Tokens and finish reason from the journal: this process may be unable to decode the text."""
    end = read_release(journal, *answer.key)
    assert end is not None, f"{answer.wire_id} has ended, but its end is not in the journal"
    return end
