"""The answers that summarize knows: found in the journal, and grown by what execute reports."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ...protocol.errors import JournalError
from ...protocol.journal.deaths import held_against, poisoned
from ...protocol.journal.layout import split_word
from ...protocol.journal.releases import is_acknowledged, is_forgotten, read_release
from ...protocol.journal.requests import read_request
from ...protocol.journal.tokens import read_finish, read_tokens
from ...protocol.messages import FINISH_REASONS, StepDone
from ...protocol.record_key import Key
from ..process import WorkerContext
from .answer import Answer
from .choices import Choices, Requests
from .columns import runs_of
from .deadlines import Deadlines
from .delivery import Delivery
from .ends import Ends
from .figures import Figures
from .texts import Texts

logger = logging.getLogger(__name__)


class Answers(dict[int, Answer]):
    """By slot. What no message of execute delivers is taken from the journal."""

    def __init__(
        self, context: WorkerContext, texts: Texts, ends: Ends, *, delivery: Delivery, deadlines: Deadlines
    ) -> None:
        super().__init__()
        self._journal, self._page = context.journal, context.page
        self._texts, self._ends, self._delivery, self._deadlines = texts, ends, delivery, deadlines
        self.requests = Requests()
        self.figures = Figures()
        self.has_found = False  # tokens in the journal that execute may not have flushed yet
        self._generations = np.zeros(context.journal.num_records, np.uint64)  # last one discovered in each slot
        self._damaged: dict[int, int] = {}  # slot -> generation that was last reported as damaged

    def take(self, step: StepDone) -> None:
        """Add what execute reports of one step, or of several."""
        now_ns = self._journal.now_ns()
        num_new = 0
        for slot, generation, start, token_ids, reason in runs_of(step):
            answer = self.get(slot)
            if answer is None or answer.view.generation != generation:
                if not self._is_newer(slot, generation):
                    self.figures.num_stale_tokens += len(token_ids)
                    continue
                answer = self._discover_slot(slot)
            if answer is None or answer.stream.finish_reason is not None:
                continue
            stop = start + len(token_ids)
            if start <= answer.num_seen < stop:
                num_new += self._push(answer, token_ids[answer.num_seen - start :], now_ns)
            elif start > answer.num_seen:
                self.catch_up(answer)
            if reason and answer.num_seen >= stop:
                self._ends.end(answer, FINISH_REASONS[reason])
        self.figures.add_tokens(num_new)

    def catch_up(self, answer: Answer) -> None:
        """Take from the journal what no message delivered."""
        if answer.stream.is_finished:
            return
        # Read the finish first: no token follows it, so the tokens read afterwards are complete.
        finish = read_finish(self._journal, *answer.key)
        count, _ = split_word(self._journal.tokens_words[answer.view.slot])
        if finish is None and count <= answer.num_seen:
            return
        if finish is None and answer.choices.is_beam_search:
            return  # hypotheses count only once all of them are written
        now_ns = self._journal.now_ns()
        tokens = read_tokens(self._journal, answer.view)
        if tokens is not None and len(tokens) > answer.num_seen:
            answer.note_first_token(self._journal)
            self.has_found = True
            self.figures.add_tokens(self._push(answer, tokens[answer.num_seen :].tolist(), now_ns))
            self._page.progress()
        if finish is not None and (tokens is not None or finish[0] == "error"):
            self._ends.end(answer, finish[0])

    def discover(self) -> None:
        """Find requests in the journal that this process does not know yet."""
        slots = self._journal.slots_in_use()
        for slot in slots[self._journal.generations(slots) != self._generations[slots]].tolist():
            self._discover_slot(slot)

    def drop(self, choices: Choices) -> None:
        """The request can no longer be asked for by anyone."""
        for answer in choices.answers.values():
            if self.get(answer.view.slot) is answer:
                del self[answer.view.slot]
            self._delivery.drop(answer)
        self.requests.drop(choices)
        choices.part()

    def is_open(self, key: Key) -> bool:
        """Whether this answer is known and has not ended."""
        answer = self.get(key[0])
        return answer is not None and answer.key == key and not answer.stream.is_finished

    def _push(self, answer: Answer, token_ids: Sequence[int], now_ns: int) -> int:
        """Returns how many of the tokens became part of the answer."""
        stream = answer.stream
        num_before = len(stream.token_ids)
        if not self._texts.push(answer, token_ids, now_ns):
            return 0
        self._delivery.mark(answer)
        if stream.finish_reason is not None:
            self._ends.release(answer)
        return len(stream.token_ids) - num_before

    def _is_newer(self, slot: int, generation: int) -> bool:
        return slot < self._journal.num_records and generation > int(self._generations[slot])

    def _discover_slot(self, slot: int) -> Answer | None:
        try:
            view = read_request(self._journal, slot)
        except JournalError as error:
            # It will be tried again: on a weakly ordered machine the bytes may just not be visible yet.
            generation = self._journal.generation(slot)
            if self._damaged.get(slot) != generation:
                self._damaged[slot] = generation
                logger.error("a record of the journal is damaged: %s", error)
            return None
        if view is None:
            return None
        self._generations[slot] = view.generation
        if is_forgotten(self._journal, slot, view.generation):
            return None
        answer = Answer(view, self._texts.open(view))
        self[slot] = answer
        self.requests.join(answer)
        self._deadlines.add(answer.key, view.record)
        answer.is_acknowledged = is_acknowledged(self._journal, *answer.key)
        against = held_against(self._journal, "summarize", slot, view.generation)
        answer.is_suspect = against > 0
        if refusal := poisoned(against, "the request crashed the process that turned it into text, twice"):
            self._ends.fail(answer, refusal)
        else:
            self._rebuild(answer)
        self._ends.end_search(answer.choices)
        return answer

    def _rebuild(self, answer: Answer) -> None:
        """Bring an answer to its state in the journal."""
        ended = read_release(self._journal, *answer.key)
        if ended is not None:
            tokens = read_tokens(self._journal, answer.view)
            token_ids = [] if tokens is None else tokens[: ended[0]].tolist()
            if self._texts.push(answer, token_ids, self._journal.now_ns()):
                self._ends.close(answer, ended[1])
                self._ends.decide(answer.choices)
        elif not answer.view.record.is_computed:
            self._ends.end(answer, "length")
        else:
            self.catch_up(answer)
