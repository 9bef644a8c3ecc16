"""Ends answers, each exactly once, with everything that follows: the journal's word, notices, statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...protocol.board import Board
from ...protocol.errors import RequestError
from ...protocol.journal.layout import Journal
from ...protocol.journal.releases import ReleaseWriter, is_released, read_end_code
from ...protocol.journal.tokens import read_finish
from ..process import StatsPublisher
from .answer import Answer
from .choices import Choices
from .delivery import Delivery
from .histograms import RequestHistograms
from .listing import Ended
from .notices import Notices

EMBEDDING = "embedding"  # counted in place of "length", which otherwise says how many answers were cut
MAX_COUNTED_ADAPTERS = 256  # the statistics must fit on the board, however many come and go


class Ends:
    """Ends answers and releases requests. The only writer of ``release_word``."""

    def __init__(
        self, journal: Journal, board: Board, delivery: Delivery, notices: Notices, stats: StatsPublisher
    ) -> None:
        self._journal, self._board = journal, board
        self._delivery, self._notices, self._stats = delivery, notices, stats
        self._writer = ReleaseWriter(journal)
        self.num_ended: Counter[str] = Counter()  # by finish reason, or EMBEDDING
        self.num_adapted: dict[str, int] = {}  # by adapter, the latest last, for answers that used one
        self.num_unread = 0  # requests whose answers nobody read
        self.histograms = RequestHistograms()
        self.latest = Ended()

    def end(self, answer: Answer, reason: str) -> None:
        """End an answer, unless it has already ended."""
        if answer.stream.is_finished and answer.ended_ns:
            return
        answer.was_cut_by_a_crash = reason in ("abort", "error") and not self._board.ready("execute")
        self.close(answer, reason)
        self.release(answer)

    def fail(self, answer: Answer, error: RequestError) -> None:
        """End an answer with an error found by this process.

        An answer that ended before a restart keeps the end in the journal, as its resources were already returned; only
        clients that ask for its text now get this error.
        """
        if answer.ended_ns:
            return
        answer.error, answer.end_code = (error.code, error.message), error.code
        if is_released(self._journal, *answer.key):
            self.close(answer, "error")
            self.decide(answer.choices)
        else:
            self.end(answer, "error")

    def close(self, answer: Answer, reason: str) -> None:
        """End an answer for its readers; its end is already in the journal, or ``release`` will write it."""
        if reason == "error" and answer.error is None:
            finish = read_finish(self._journal, *answer.key)
            code, _, text = (finish[1] if finish else "").partition("\n")
            code = read_end_code(self._journal, *answer.key) or code or RequestError.code
            answer.error = (code, text or f"the request failed: {code}")
        answer.stream.finish(reason)
        answer.ended_ns = answer.text_done_ns = self._journal.now_ns()
        self._delivery.mark(answer)

    def release(self, answer: Answer) -> None:
        """Write the end of an answer whose stream has ended to the journal: returns its credit and its pages."""
        answer.ended_ns = answer.ended_ns or self._journal.now_ns()
        reason = answer.stream.finish_reason or "error"
        slot, generation = answer.key
        self._writer.release(slot, generation, num_tokens=answer.stream.num_tokens, reason=reason, code=answer.end_code)
        self._notices.released.append(answer.key)
        if answer.view.record.is_computed:  # otherwise it only asked about its prompt, such as for its tokens
            self._count(answer, reason)
        self.latest.add(self._journal, answer)
        self._stats.changed = True
        self.end_search(answer.choices)
        self.decide(answer.choices)

    def _count(self, answer: Answer, reason: str) -> None:
        is_embedding = reason == "length" and answer.view.record.embedding_size > 0
        self.num_ended[EMBEDDING if is_embedding else reason] += 1
        if (name := answer.view.record.lora) != "":
            self.num_adapted[name] = self.num_adapted.pop(name, 0) + 1
            if len(self.num_adapted) > MAX_COUNTED_ADAPTERS:
                del self.num_adapted[next(iter(self.num_adapted))]
        self.histograms.observe(*answer.account(self._journal))

    def end_search(self, choices: Choices) -> None:
        """A beam search cannot continue without one of its beams: the others end with it, even if discovered later."""
        answers = choices.answers.values() if choices.is_beam_search else ()
        broken = next((answer for answer in answers if answer.stream.finish_reason in ("abort", "error")), None)
        if broken is None:
            return
        for other in answers:
            other.error = other.error or broken.error
            other.end_code = broken.error[0] if broken.error else ""
            self.end(other, broken.stream.finish_reason or "error")

    def decide(self, choices: Choices) -> None:
        """Inform the readers, if it is now determined which answers are the choices."""
        for answer in choices.decide(self._journal):
            self._delivery.mark(answer)

    def acknowledge(self, answers: Iterable[Answer]) -> None:
        """The client has these answers, but not yet the other choices of their request."""
        for answer in answers:
            self._writer.acknowledge(*answer.key)

    def forget(self, choices: Choices) -> None:
        """The client has all choices."""
        for answer in choices.answers.values():
            self._writer.forget(*answer.key)
            self._notices.forgotten.append(answer.key)

    def give_up(self, choices: Choices) -> None:
        """No client will come for it."""
        self.num_unread += 1
        for answer in choices.answers.values():
            self._writer.give_up(*answer.key)
            self._notices.forgotten.append(answer.key)
