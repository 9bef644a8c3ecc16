"""Where every request stands, for whoever watches: a bounded number of rows, and nothing of what they say."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from ...protocol import messages as m
from ...protocol.journal.layout import DISPATCHED, Journal, word
from .answer import Answer


def list_requests(journal: Journal, answers: Collection[Answer], limit: int) -> m.Requests:
    """The first ``limit`` of the answers in order of arrival."""
    num_rows = max(0, min(limit, m.MAX_REQUEST_ROWS))
    first = heapq.nsmallest(num_rows, answers, key=lambda answer: answer.view.arrival)
    rows = [_row(journal, answer) for answer in first]
    return m.Requests(limit, rows, len(answers) - len(rows), journal.now_ns())


def _row(journal: Journal, answer: Answer) -> m.RequestRow:
    record, entry = answer.view.record, journal.records[answer.view.slot]
    # Before its first token these fields may still be those of an earlier request in the slot.
    is_known = answer.num_seen > 0
    return [
        answer.wire_id,
        _state(journal, answer),
        len(record.prompt) // 4,
        answer.stream.num_tokens,
        record.token_capacity,
        int(entry["num_cached_tokens"]) if is_known else 0,
        int(entry["num_preemptions"]) if is_known else 0,
        int(entry["received_ns"]),
        answer.first_token_ns,
        answer.tokens_per_second,
    ]


def _state(journal: Journal, answer: Answer) -> str:
    """One of ``REQUEST_STATES``: for a credit, in execute for a step, computing its prompt, its answer, or done."""
    if answer.stream.is_finished:
        return "ended"
    if answer.num_seen:
        return "decode"
    if answer.has_begun(journal):
        return "prefill"
    is_dispatched = int(journal.prepare_words[answer.view.slot]) == word(answer.view.generation, DISPATCHED)
    return "queued" if is_dispatched else "waiting"
