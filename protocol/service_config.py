"""Settings of the client-facing side: endpoints, limits, and the journal."""

from __future__ import annotations

from dataclasses import dataclass

from .endpoints import check_endpoint
from .settings import between, one_of, option, require

FLUSHES = ("none", "interval", "accept", "step")
MIN_LEASE_S, MAX_LEASE_S = 0.05, 86_400.0  # how long an unread answer occupies memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The client-facing side: endpoints and limits."""

    submit: str | None = option(
        None,
        "endpoint for requests: ipc://PATH instead of the one in the run directory, or an additional tcp://HOST:PORT",
    )
    follow: str | None = option(None, "endpoint for answers, as for submit")
    curve_keys: str | None = option(None, "a folder made by triptych keys init; required for tcp:// endpoints")
    share_requests: bool = option(False, "holders of any key may follow, abort and list all requests, by their ids")
    chat_template: str | None = option(
        None, "a file with the Jinja template of chats, read once at the start; by default the model's own"
    )
    max_client_requests: int | None = option(
        None,
        "unanswered requests per client, which each gateway process is; n choices or beams count as n;"
        " by default 768, or three quarters of max_queue if that is more",
    )
    max_client_bytes: int = option(48 << 20, "prompts per client that wait for the tokenizer, in bytes")
    tokenize_timeout_s: float = option(30.0, "time limit for tokenizing one long prompt or chat")
    max_queue: int = option(1024, "accepted requests that wait for a credit")
    max_frame_bytes: int = option(8 << 20, "maximum size of a message from a client")
    max_pending_bytes: int = option(64 << 20, "prompts that wait for the tokenizer, in bytes")
    window_tokens: int = option(
        256, "tokens sent to a client beyond those it has acknowledged; below 64, every answer takes longer"
    )
    report_interval_ms: float | None = option(
        None, "steps of at most half this time are reported together at this interval; by default 10 on a CPU, else 1"
    )
    grammar_timeout_s: float = option(2.0, "time limit for compiling a grammar for structured")
    grammar_bytes: int = option(256 << 20, "memory limit for compiling a grammar for structured")
    lease_s: float = option(10.0, "time without a follower after which a request is aborted and an answer dropped")
    max_records: int = option(4096, "journal: requests accepted, running, or answered and not yet acknowledged")
    arena_bytes: int = option(48 << 20, "journal: size of their prompts and tokens")
    journal: str | None = option(
        None, "path of the journal; on disk it survives a reboot; by default in the run directory"
    )
    journal_flush: str = option(
        "accept",
        f"for a journal on disk: {', '.join(FLUSHES)}; accept: before ACCEPTED, step: also after each step",
    )
    journal_flush_ms: float = option(100.0, "time between two flushes, for --journal-flush interval")

    def __post_init__(self) -> None:
        for name in ("submit", "follow"):
            check_endpoint(name, getattr(self, name), has_keys=self.curve_keys is not None)
        for name in ("curve_keys", "journal", "chat_template"):
            require(getattr(self, name) != "", name, "is empty")  # not the same as not given
        between("max_queue", self.max_queue, 1, 1 << 20)
        between("max_frame_bytes", self.max_frame_bytes, 1 << 10, 1 << 30)
        between("max_pending_bytes", self.max_pending_bytes, self.max_frame_bytes)
        between("max_client_requests", self.max_client_requests, 1, 1 << 20)
        between("max_client_bytes", self.max_client_bytes, 1, 1 << 40)
        between("tokenize_timeout_s", self.tokenize_timeout_s, 0.01, 86_400)
        between("window_tokens", self.window_tokens, 1, 1 << 20)
        between("report_interval_ms", self.report_interval_ms, 0, 1000)
        between("grammar_timeout_s", self.grammar_timeout_s, 0.05, 60)
        between("grammar_bytes", self.grammar_bytes, 1 << 20, 1 << 40)
        between("lease_s", self.lease_s, MIN_LEASE_S, MAX_LEASE_S)
        one_of("journal_flush", self.journal_flush, FLUSHES)
        between("journal_flush_ms", self.journal_flush_ms, 1, 60_000)
        between("max_records", self.max_records, 1, 1 << 20)
        between("arena_bytes", self.arena_bytes, 1 << 16, 1 << 40)

    @property
    def client_requests(self) -> int:
        """Unanswered requests one client may have: by default it leaves a quarter of the queue to others."""
        return max(768, 3 * self.max_queue // 4) if self.max_client_requests is None else self.max_client_requests

    @property
    def max_client_records(self) -> int:
        """Journal records one client may hold, including unread answers: leaves room for other clients."""
        return max(self.client_requests, self.max_records // 2)

    @property
    def flushes_accepted(self) -> bool:
        """Whether a request is on the disk before its client is told ACCEPTED."""
        return self.journal is not None and self.journal_flush in ("accept", "step")

    @property
    def flushes_steps(self) -> bool:
        """Whether a token is on the disk before any client sees it."""
        return self.journal is not None and self.journal_flush == "step"

    @property
    def flush_interval_s(self) -> float | None:
        """Time between two background flushes; None if there are none."""
        return self.journal_flush_ms / 1e3 if self.journal is not None and self.journal_flush == "interval" else None
