"""One request as summarize sees it: its answer so far, and who has read how much of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocol.journal.layout import Journal
from ...protocol.journal.prompt_results import read_embedding, read_scores
from ...protocol.journal.requests import RequestView
from ...protocol.journal.tokens import read_logprobs, read_times, was_scheduled
from ...protocol.messages import DeltaRow, Failed, Finished
from ...protocol.record_key import Key
from ...protocol.scores import ScoreColumns
from .ledger import Ledger, Marks, make_ledger
from .stream import OutputStream

if TYPE_CHECKING:
    from .choices import Choices


class Account(NamedTuple):
    """Where a request's time went, and when each of its tokens was produced (ns of the journal's clock)."""

    ledger: Ledger
    token_times_ns: list[int]
    num_prompt_tokens: int


class Answer:
    """The answer of one sequence, live or ended.

    Invariants: ``num_acknowledged <= num_sent <= stream.num_tokens`` for the current reader; tokens beyond
    ``num_acknowledged + window`` are not sent, so a stalled reader costs no more than its window.
    """

    choices: Choices  # of its request; set by ``Choices.join``

    def __init__(self, view: RequestView, stream: OutputStream) -> None:
        self.view = view
        self.stream = stream
        self.wire_id = view.record.request_id  # the id its readers use
        self.index = view.record.index  # among the choices of its request, once they are known
        self.score: float | None = None  # what it was ranked by, if it competed with others
        self.candidates: Sequence[Answer] = ()  # those others and itself
        self.num_seen = 0  # tokens received from execute, including those after the end
        self.is_acknowledged = False  # a client has its end
        self.is_suspect = False  # this process once crashed on it, see protocol/journal/deaths.py
        self.error: tuple[str, str] | None = None  # code and message, if the finish reason is "error"
        self.end_code = ""  # of the error, if summarize raised it
        self.peer: bytes | None = None  # the current reader
        self.num_acknowledged = 0
        self.num_sent = 0
        self.num_chars_sent = 0
        self.end_sent_to: bytes | None = None
        self.first_token_ns = 0
        self.arrived_ns = 0
        self.text_done_ns = 0
        self.ended_ns = 0
        self.was_cut_by_a_crash = False  # it was cut off while execute was down
        self._has_logprobs = "logprobs" in view.record.sampling
        self._summary: dict[str, Any] | None = None  # computed once, with the end: it must not change afterwards

    @property
    def key(self) -> Key:
        return self.view.key

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate(self.stream.num_tokens)

    def note_first_token(self, journal: Journal) -> None:
        """Take the first token's time from the journal: it may have been produced long before this process sees it."""
        self.first_token_ns = self.first_token_ns or int(read_times(journal, self.view, 1).tokens_ns[0])

    def push(self, token_ids: Sequence[int], now_ns: int) -> None:
        """Take the next tokens from execute. The caller then sets ``text_done_ns``."""
        self.num_seen += len(token_ids)
        self.first_token_ns = self.first_token_ns or now_ns
        self.arrived_ns = now_ns
        self.stream.push(token_ids)

    def follow(self, peer: bytes, offset: int, again: bool) -> None:
        """A client asks for everything after its first ``offset`` tokens."""
        offset = min(max(offset, 0), self.stream.num_tokens)
        if again or peer != self.peer:
            self.peer = peer
            self.num_sent = offset
            self.num_chars_sent = len(self.stream.delta(0, offset).text)
            self.end_sent_to = None
        self.num_acknowledged = min(offset, self.num_sent)

    def next_row(self, journal: Journal, window: int) -> DeltaRow | None:
        """What may be sent now, or None. Counts as sent once ``sent`` is called with it."""
        stop = min(len(self.stream.token_ids), self.num_acknowledged + window)
        return self._row(journal, stop) if stop > self.num_sent else None

    def sent(self, row: DeltaRow) -> None:
        self.num_sent = row[1] + len(row[3]) // 4
        self.num_chars_sent = row[2] + len(row[4])

    def next_end(self, journal: Journal, window: int) -> Finished | Failed | None:
        """The terminal message with the last delta, if it is due."""
        left = self.stream.num_tokens - self.num_acknowledged
        if not self.stream.is_finished or left > window or self.end_sent_to is not None:
            return None
        request_id, offset, text_offset, token_ids, text, logprobs, _ = self._row(journal, self.stream.num_tokens)
        last = (request_id, offset, text_offset, token_ids, text + self.stream.tail, logprobs)
        if self._summary is None:
            self._summary = self._summarize(journal)
        if self.error is not None:
            return Failed(*last, *self.error, self._summary)
        return Finished(*last, self.stream.finish_reason or "", self._summary)

    def has_begun(self, journal: Journal) -> bool:
        """Whether execute has computed any of it."""
        return self.num_seen > 0 or was_scheduled(journal, self.view.slot, self.view.accepted_ns)

    def _row(self, journal: Journal, stop: int) -> DeltaRow:
        token_ids, text = self.stream.delta(self.num_sent, stop)
        logprobs = read_logprobs(journal, self.view, self.num_sent, stop) if self._has_logprobs else None
        packed = array("i", token_ids)  # half the time of numpy for one or two tokens
        return [self.wire_id, self.num_sent, self.num_chars_sent, packed.tobytes(), text, logprobs, self._rate(stop)]

    def _rate(self, num_tokens: int) -> float | None:
        elapsed_ns = self.arrived_ns - self.first_token_ns
        return (num_tokens - 1) * 1e9 / elapsed_ns if num_tokens > 1 and elapsed_ns > 0 else None

    def marks(self, journal: Journal, until_ns: int) -> Marks:
        """How far this request has come; a stage in progress lasts until ``until_ns``.

        The last token ends the decode stage only of an answer that was not aborted or failed.
        """
        entry, is_complete = journal.records[self.view.slot], self.stream.finish_reason in ("stop", "length")
        times = read_times(journal, self.view, self.stream.num_tokens)
        if not is_complete:
            if self.was_cut_by_a_crash and not times.recovered_since_ns:  # what execute will note for those that go on
                times = times._replace(recovered_since_ns=_at(times.tokens_ns, -1) or times.scheduled_ns)
            times = times.until(self.ended_ns or until_ns)
        return Marks(
            received=int(entry["received_ns"]),
            tokenize_start=int(entry["tokenize_start_ns"]),
            tokenize_end=int(entry["tokenize_end_ns"]),
            accepted=self.view.accepted_ns,
            dispatched=int(entry["dispatched_ns"]),
            scheduled=times.scheduled_ns,
            first_token=_at(times.tokens_ns, 0),
            last_token=_at(times.tokens_ns, -1) if is_complete else 0,
            arrived=self.arrived_ns if is_complete else 0,
            text_done=self.text_done_ns if self.stream.is_finished else 0,
            sent=until_ns,
            preempted_ns=times.preempted_ns,
            recovered_ns=times.recovered_ns,
            lost_early_ns=times.lost_early_ns,
            num_cached_tokens=times.num_cached_tokens,
            num_preemptions=times.num_preemptions,
            token_times=times.tokens_ns.tolist(),
        )

    def account(self, journal: Journal) -> Account:
        """Where the time of this request went so far."""
        marks = self.marks(journal, journal.now_ns())
        return Account(make_ledger(marks), marks.token_times, self.view.record.num_prompt_tokens)

    def _summarize(self, journal: Journal) -> dict[str, Any]:
        ledger, record = self.account(journal).ledger, self.view.record
        usage = {
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": self.stream.num_tokens,
            "cached_tokens": ledger.num_cached_tokens,
            "truncated_tokens": record.num_truncated_tokens,
        }
        if self.candidates:
            times = [read_times(journal, other.view, 0) for other in self.candidates]
            usage["cached_tokens"] = min(each.num_cached_tokens for each in times)
            usage["candidate_tokens"] = sum(other.stream.num_tokens for other in self.candidates)
        facts = {"usage": usage, "ledger": ledger.to_wire(), "matched": self.stream.matched}
        summary: dict[str, Any] = {**facts, "index": self.index, "score": self.score}
        scores = self._prompt_scores(journal)
        if scores is not None:
            summary["prompt_logprobs"] = scores.to_wire()
        if record.return_prompt or scores is not None:
            summary["prompt_token_ids"] = record.prompt
        if (embedding := read_embedding(journal, self.view)) is not None:
            summary["embedding"] = embedding.astype("<f4").tobytes()
        return summary

    def _prompt_scores(self, journal: Journal) -> ScoreColumns | None:
        """Scores of the request's prompt, for its first choice only; the first sequence holds them, chosen or not."""
        keeper = self.choices.answers.get(0)
        return read_scores(journal, keeper.view) if keeper is not None and self.index == 0 else None


def _at(times_ns: npt.NDArray[np.int64], index: int) -> int:
    return int(times_ns[index]) if len(times_ns) else 0
