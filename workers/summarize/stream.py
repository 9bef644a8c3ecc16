"""A growing answer: its tokens, the text of each, and where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...protocol.sampling import SamplingParams
from .detokenizer import make_detokenizer
from .stop_strings import StopMatcher
from .vocabulary import Vocabulary


class Delta(NamedTuple):
    """A range of an answer's tokens, and the text that became final with them."""

    token_ids: list[int]
    text: str


class OutputStream:
    """Tokens in, text out, ended by a stop string, a stop token, or ``finish``.

    Invariants: the text of a token never changes once it was pushed, and depends only on the tokens up to it. So a
    stream rebuilt from its first token gives the same delta for the same range, and an answer can be resumed at any
    token, by another process. The deltas of all tokens plus ``tail`` are the whole text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        params: SamplingParams,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        final_ids: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> None:
        """``stop_token_ids``: every id that ends the answer, including the model's own unless they are ignored; those
        of ``final_ids`` do so before ``min_tokens`` too.

        ``context``: the prompt's last tokens, if the text continues theirs (see ``make_detokenizer``).
        """
        self.token_ids: list[int] = []
        self.tail = ""  # text that became final with the end, not with a token; sent with the terminal message
        self.finish_reason: str | None = None  # None while the answer grows
        self.matched: str | int | None = None  # the stop string or stop token id that ended it
        self._texts: list[str] = []  # [num_tokens]
        self._stop_token_ids = stop_token_ids
        self._final_ids = final_ids
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str
        self._stops = params.stop
        self._matcher: StopMatcher | None = None  # created with the first text, as it may take a megabyte
        self._detokenizer = make_detokenizer(
            vocabulary, skip_special_tokens=params.skip_special_tokens, context=context
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All text that is final so far."""
        return "".join(self._texts) + self.tail

    def push(self, token_ids: Iterable[int]) -> None:
        """Take the next tokens. Those after the end are dropped."""
        for token_id in token_ids:
            if self.finish_reason is not None:
                return
            self.token_ids.append(token_id)
            if token_id in self._final_ids or (token_id in self._stop_token_ids and self._may_end):
                self._stop_at(token_id)
            else:
                text = self._detokenizer.push(token_id)
                self._texts.append(self._scan(text) if self._stops else text)

    def finish(self, reason: str) -> None:
        """End the answer here, unless it ended by itself, possibly by a stop string in the text held back."""
        if self.finish_reason is not None:
            return
        if reason == "error":  # it stays an error, whatever the text held back contains
            self.tail = self._held() + self._detokenizer.flush()
        else:
            self.tail = self._scan(self._detokenizer.flush()) + self._held()
        if self.finish_reason is None:
            self._end(reason, matched=None)

    def abandon(self, reason: str) -> None:
        """End the answer without processing the text held back: for an answer whose tokens cannot be decoded."""
        self.finish_reason = self.finish_reason or reason

    def delta(self, start: int, stop: int | None = None) -> Delta:
        """Tokens ``start:stop`` and their text, without ``tail``."""
        return Delta(self.token_ids[start:stop], "".join(self._texts[start:stop]))

    def _stop_at(self, token_id: int) -> None:
        # The token stays in the ids. Its text is not shown, special or not, unless the client asks for it.
        self._texts.append(self._scan(self._detokenizer.push(token_id)) if self._include_stop else "")
        self.finish("stop")
        if self.matched is None:
            self.matched = token_id

    @property
    def _may_end(self) -> bool:
        return len(self.token_ids) >= self._min_tokens

    def _scan(self, text: str) -> str:
        """What may be shown of new text; a stop string in it ends the answer."""
        if not self._stops or not text:
            return text
        if self._matcher is None:
            self._matcher = StopMatcher(self._stops, include_stop_str=self._include_stop)
        scan = self._matcher.push(text, may_end=self._may_end)
        if scan.stop is not None:
            self._end("stop", matched=scan.stop)
        return scan.text

    def _held(self) -> str:
        return self._matcher.flush() if self._matcher else ""

    def _end(self, reason: str, *, matched: str | None) -> None:
        self.finish_reason, self.matched, self._matcher = reason, matched, None
