"""The state of every request, for monitoring: a bounded number of rows, without any content."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import islice

from ...protocol import messages as m
from ...protocol.journal.layout import DISPATCHED, Journal, word
from ...protocol.owners import HOUSE, may_ask
from .answer import Answer
from .ledger import book_stages


class Ended:
    """The most recently ended requests, including those whose answers are no longer kept."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, m.RequestRow]] = deque(maxlen=m.MAX_ENDED_ROWS)  # with the owner of each

    def add(self, journal: Journal, answer: Answer) -> None:
        row = _row(journal, answer)
        row[1] = answer.stream.finish_reason or "error"
        self._rows.appendleft((answer.view.record.owner, row))

    def newest(self, limit: int, *, asker: int) -> list[m.RequestRow]:
        return list(islice((row for owner, row in self._rows if may_ask(asker, owner)), limit))


def list_requests(
    journal: Journal, answers: Iterable[Answer], limit: int, ended: Ended, *, asker: int = HOUSE
) -> m.Requests:
    """The first ``limit`` answers in order of arrival, and as many ended ones, of those that ``asker`` may access."""
    num_rows = max(0, min(limit, m.MAX_REQUEST_ROWS))
    listed = [answer for answer in answers if may_ask(asker, answer.view.record.owner)]
    first = heapq.nsmallest(num_rows, listed, key=lambda answer: answer.view.arrival)
    rows = [_row(journal, answer) for answer in first]
    left_out = len(listed) - len(rows)
    return m.Requests(limit, rows, left_out, journal.now_ns(), ended.newest(num_rows, asker=asker))


def _row(journal: Journal, answer: Answer) -> m.RequestRow:
    record, entry = answer.view.record, journal.records[answer.view.slot]
    until_ns = answer.ended_ns if answer.stream.is_finished else journal.now_ns()
    # Before its first token these fields may still be those of an earlier request in the slot.
    is_known = answer.num_seen > 0
    return [
        answer.wire_id,
        _state(journal, answer),
        record.num_prompt_tokens,
        answer.stream.num_tokens,
        record.token_capacity,
        int(entry["num_cached_tokens"]) if is_known else 0,
        int(entry["num_preemptions"]) if is_known else 0,
        int(entry["received_ns"]),
        answer.first_token_ns,
        answer.tokens_per_second,
        answer.view.slot,
        [round(ns / 1e6, 3) for ns in book_stages(answer.marks(journal, until_ns)).values()],
    ]


def _state(journal: Journal, answer: Answer) -> str:
    """The state of a ``RequestRow``."""
    if answer.stream.is_finished:
        return "ended"
    if answer.num_seen:
        return "decode"
    if answer.has_begun(journal):
        return "prefill"
    is_dispatched = int(journal.prepare_words[answer.view.slot]) == word(answer.view.generation, DISPATCHED)
    return "queued" if is_dispatched else "waiting"
