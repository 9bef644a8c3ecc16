"""Where requests stand, as their client sees it: the answers to GET_STATUS and GET_REQUESTS."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol import messages as m


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """The status of one request. Times are CLOCK_MONOTONIC of the service's machine."""

    request_id: str  # as asked for
    state: str  # "queued" | "running" | "finished" | "aborted" | "failed" | "unknown"
    num_tokens: int  # of the answer so far
    received_ns: int | None  # None: unknown
    ended_ns: int | None  # None: not ended yet

    @property
    def is_live(self) -> bool:
        """Whether the request waits or runs."""
        return self.state in ("queued", "running")


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One row of a ``RequestList``. Times are CLOCK_MONOTONIC of the service's machine."""

    request_id: str
    state: str  # "waiting" | "queued" | "prefill" | "decode" | "ended"; of one that has ended, how
    num_prompt_tokens: int
    num_tokens: int  # of the answer so far
    max_tokens: int
    num_cached_tokens: int  # of the prompt
    num_preemptions: int  # so far
    received_ns: int
    first_token_ns: int  # 0: not yet
    tokens_per_second: float | None  # of the answer so far
    slot: int  # its number within execute
    stages_ms: list[float]  # time spent so far, in the order of LEDGER_STAGES


@dataclass(frozen=True, slots=True)
class RequestList:
    """Requests in order of arrival."""

    lines: list[RequestLine]
    num_left_out: int  # number of later arrivals that are not listed
    now_ns: int  # when the list was made
    ended: list[RequestLine]  # the last ended requests, newest first; state is "stop", "length", "abort" or "error"

    def age_s(self, line: RequestLine) -> float:
        """Seconds from the receipt of the request until the list was made."""
        return (self.now_ns - line.received_ns) / 1e9


def status_of(message: m.Status) -> RequestStatus:
    return RequestStatus(
        message.request_id, message.state, message.num_tokens, message.received_ns or None, message.ended_ns or None
    )


def list_of(message: m.Requests) -> RequestList:
    lines, ended = ([RequestLine(*row) for row in rows] for rows in (message.rows, message.ended))
    return RequestList(lines, message.num_left_out, message.now_ns, ended)
