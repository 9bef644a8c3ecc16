"""The state of requests, for their clients: the answers to GET_STATUS and GET_REQUESTS."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol import messages as m


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """The state of one request. Times are of the service's clock: CLOCK_MONOTONIC of its machine, which a journal on
    disk continues over reboots.
    """

    request_id: str  # as asked for
    state: str  # "queued" | "running" | "finished" | "aborted" | "failed" | "unknown"
    num_tokens: int  # of the answer so far
    received_ns: int | None  # None: unknown
    ended_ns: int | None  # None: not ended

    @property
    def is_live(self) -> bool:
        """Whether it is waiting or running."""
        return self.state in ("queued", "running")


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request in a list. Times are of the service's clock, like ``RequestList.now_ns``."""

    request_id: str
    state: str  # "waiting" | "queued" | "prefill" | "decode" | "ended"; in ``RequestList.ended`` the finish reason
    num_prompt_tokens: int
    num_tokens: int  # of the answer so far
    max_tokens: int
    num_cached_tokens: int  # of the prompt
    num_preemptions: int  # so far
    received_ns: int
    first_token_ns: int  # 0: not yet
    tokens_per_second: float | None  # of the answer so far
    slot: int  # which identifies it in execute
    stages_ms: list[float]  # spent so far, in the order of LEDGER_STAGES


@dataclass(frozen=True, slots=True)
class RequestList:
    """Requests in order of arrival."""

    lines: list[RequestLine]
    num_left_out: int  # later arrivals
    now_ns: int  # when the list was made
    ended: list[RequestLine]  # the most recently ended, newest first; state is "stop", "length", "abort" or "error"

    def age_s(self, line: RequestLine) -> float:
        """Time from its receipt to when the list was made."""
        return (self.now_ns - line.received_ns) / 1e9


def status_of(message: m.Status) -> RequestStatus:
    return RequestStatus(
        message.request_id, message.state, message.num_tokens, message.received_ns or None, message.ended_ns or None
    )


def list_of(message: m.Requests) -> RequestList:
    lines, ended = ([RequestLine(*row) for row in rows] for rows in (message.rows, message.ended))
    return RequestList(lines, message.num_left_out, message.now_ns, ended)
