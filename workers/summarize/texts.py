"""Tokens to text, for one request at a time, with an intent: if this process dies, the driver knows the culprit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...protocol.errors import RequestError
from ...protocol.journal.deaths import note_survival
from ...protocol.journal.requests import RequestView
from ...protocol.model_card import ModelCard
from ...protocol.record_key import number_of
from ..process import WorkerContext
from .answer import Answer
from .ends import Ends
from .stream import OutputStream
from .vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class Texts:
    """Opens the streams of answers and pushes tokens through them."""

    def __init__(self, context: WorkerContext, card: ModelCard, vocabulary: Vocabulary, ends: Ends) -> None:
        self._journal, self._intent = context.journal, context.intent
        self._card, self._vocabulary, self._ends = card, vocabulary, ends

    def open(self, view: RequestView) -> OutputStream:
        """The stream of a request, still empty."""
        params, eos = view.record.params, frozenset(self._card.eos_token_ids)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        has_grammar = bool(view.record.grammar)
        # Decoders drop a leading space, unless it is amid a text; what matches a grammar must stay as it is, too.
        context = self._vocabulary.amid_text if has_grammar or view.record.continues_prompt else ()
        final_ids = eos if has_grammar else frozenset()
        return OutputStream(self._vocabulary, params, stop_token_ids=stop_ids, final_ids=final_ids, context=context)

    def push(self, answer: Answer, token_ids: Sequence[int], now_ns: int) -> bool:
        """Take the next tokens of an answer; False if that failed, which ends it."""
        try:
            self._intent.begin_one(number_of(answer.key))
            answer.push(token_ids, now_ns)
            answer.text_done_ns = self._journal.now_ns()
            if answer.is_suspect:
                answer.is_suspect = False
                note_survival(self._journal, "summarize", *answer.key)
        except BaseException as error:  # a panic of the tokenizer's Rust code is not an Exception
            logger.exception("request %s could not be turned into text", answer.wire_id)
            answer.stream.abandon("error")
            self._ends.fail(answer, RequestError(f"the tokens could not be turned into text: {type(error).__name__}"))
            return False
        finally:
            self._intent.end()
        return True
