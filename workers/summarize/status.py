"""The state of a request, from its answers."""

from __future__ import annotations

from collections.abc import Sequence

from ...protocol.journal.layout import Journal
from ...protocol.messages import Status
from .answer import Answer

_ENDS = {"error": "failed", "abort": "aborted"}
_UNDER_WAY = {"queued", "running"}


def status_of(wire_id: str, answers: Sequence[Answer], journal: Journal) -> Status:
    """With several answers: running as long as one is, and at the end failed or aborted if one is."""
    if not answers:
        return Status(wire_id, "unknown", 0, 0, 0)
    states = {_state_of(answer, journal) for answer in answers}
    goes_on = bool(states & _UNDER_WAY)
    if goes_on:
        state = "queued" if states == {"queued"} else "running"
    else:
        state = next(state for state in (*_ENDS.values(), "finished") if state in states)
    return Status(
        wire_id,
        state,
        sum(answer.stream.num_tokens for answer in answers),
        int(journal.records["received_ns"][answers[0].view.slot]),
        0 if goes_on else max(answer.ended_ns for answer in answers),
    )


def _state_of(answer: Answer, journal: Journal) -> str:
    if answer.stream.is_finished:
        return _ENDS.get(answer.stream.finish_reason or "", "finished")
    return "running" if answer.has_begun(journal) else "queued"
