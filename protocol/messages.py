"""Everything that crosses a process boundary, one frozen dataclass per message.

Names say what happened or what is asked; each docstring names sender and receiver. Fields are plain values; columns of
numbers travel as little-endian bytes. A receiver never changes a message. New fields go at the end of a message, with a
new protocol version; a tag (see ``codec``) is never reused for something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FINISH_REASONS = ("", "stop", "length", "abort", "error")  # StepDone and the journal hold the index


def finish_reason(index: int) -> str:
    """The reason with this index; "error" for an index that no worker writes, as on a damaged disk."""
    return FINISH_REASONS[index] if index < len(FINISH_REASONS) else "error"


# [request id, index of the first token, characters of text before it, token ids as int32 bytes, text, logprobs or
# None, tokens per second so far or None]. The two offsets make a row idempotent: a client that already has part of it
# takes only the rest.
DeltaRow = list[Any]

# [request id, state ("waiting", "queued", "prefill", "decode" or "ended"), prompt tokens, output tokens so far, output
# tokens at most, prompt tokens found in the prefix cache, preemptions, time of receipt, time of the first token or 0,
# tokens per second so far or None, slot in the journal, ms spent in each of LEDGER_STAGES so far]
RequestRow = list[Any]
MAX_REQUEST_ROWS = 256
MAX_REFUSED_ID_CHARS = 1 << 10  # of an invalid id quoted in a refusal
MAX_FOLLOW_ENTRIES = 1 << 10  # of one FOLLOW
MAX_ENDED_ROWS = 64  # ended requests that are remembered
LEDGER_STAGES = (
    "queue", "tokenize", "credit", "schedule", "prefill", "decode", "wire", "detokenize", "deliver", "preempted",
    "recovered",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Submit:
    """client -> prepare. Resent until answered by ``Accepted`` or ``Rejected``; the id makes that harmless."""

    request_id: str
    request: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Accepted:
    """prepare -> client: the request is in the journal and will get exactly one terminal message."""

    request_id: str
    num_prompt_tokens: int
    num_truncated_tokens: int
    max_tokens: int  # the effective value: never more than the context has room for


@dataclass(frozen=True, slots=True)
class Rejected:
    """prepare -> client: the request was refused. An empty id, from either socket: a frame was not a message."""

    request_id: str
    code: str
    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class GetInfo:
    """client -> prepare."""


@dataclass(frozen=True, slots=True)
class Info:
    """prepare -> client: the model card and the limits of the service."""

    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Follow:
    """client -> summarize: for each ``[request id, number of tokens the client has, again]``, send what comes after.

    Serves as request, acknowledgement and resume at once, and as the sign of life that renews the lease. ``again`` (a
    boolean) asks to resend everything after the offset: for a client that sees a gap.
    """

    entries: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Abort:
    """client -> summarize: end this request now; the reply is its terminal message."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """client -> summarize: these terminal messages arrived; their records may be forgotten."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class GetStatus:
    """client -> summarize."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Status:
    """summarize -> client: where a request stands. Times are of the journal's clock, 0: not yet."""

    request_id: str
    state: str  # "queued" | "running" | "finished" | "aborted" | "failed" | "unknown"
    num_tokens: int
    received_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class GetStats:
    """client -> summarize."""


@dataclass(frozen=True, slots=True)
class Stats:
    """summarize -> client: one map per stage."""

    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GetRequests:
    """client -> summarize."""

    limit: int  # rows in the reply at most, capped at MAX_REQUEST_ROWS


@dataclass(frozen=True, slots=True)
class Requests:
    """summarize -> client: requests that are live or whose answer is kept, in order of arrival; never their content."""

    limit: int  # as requested
    rows: list[RequestRow]
    num_left_out: int  # later arrivals beyond the limit
    now_ns: int  # time of this snapshot; of the journal's clock, like all times in the rows
    ended: list[RequestRow]  # the most recently ended, newest first, with the finish reason as state


@dataclass(frozen=True, slots=True)
class Text:
    """summarize -> client: what became final since the client's last offset, for all of its requests together."""

    deltas: list[DeltaRow]


@dataclass(frozen=True, slots=True)
class Finished:
    """summarize -> client: the last delta and the end. Terminal."""

    request_id: str
    offset: int  # of this last delta, as in a row of Text
    text_offset: int
    token_ids: bytes
    text: str
    logprobs: list[Any] | None
    finish_reason: str  # "stop" | "length" | "abort"
    summary: dict[str, Any]  # usage, ledger, and which stop string or token ended it


@dataclass(frozen=True, slots=True)
class Failed:
    """summarize -> client: the request ended with an error after these last tokens. Terminal."""

    request_id: str
    offset: int
    text_offset: int
    token_ids: bytes
    text: str
    logprobs: list[Any] | None
    code: str
    message: str
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """prepare -> execute: a request holds a credit and may be scheduled. ``record`` is the journal's record."""

    slot: int
    generation: int
    record: bytes


@dataclass(frozen=True, slots=True)
class StepDone:
    """execute -> summarize: the tokens of one step, or of several very short ones, in columns of equal length."""

    slots: bytes  # uint32
    generations: bytes  # uint32
    indices: bytes  # uint32, index of the token among the request's output tokens
    token_ids: bytes  # int32
    finish_reasons: bytes  # uint8, index into FINISH_REASONS; 0: not finished


@dataclass(frozen=True, slots=True)
class Release:
    """summarize -> execute and prepare: these requests ended; their pages and credits are free."""

    slots: bytes  # uint32
    generations: bytes  # uint32


@dataclass(frozen=True, slots=True)
class Forgotten:
    """summarize -> prepare: the clients have these answers; their records may be reused."""

    slots: bytes  # uint32
    generations: bytes  # uint32
