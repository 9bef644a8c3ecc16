"""Mutations that need requests that restrict their tokens, and steps that raise; see ``mutations.py``."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.mutations import Patch, by_name
from triptych.protocol.arrays import Int32
from triptych.protocol.journal.requests import RequestView
from triptych.protocol.record import RequestRecord
from triptych.workers.execute.grammar.intake import GrammarIntake
from triptych.workers.execute.grammar.matcher import Bits, GrammarMatcher
from triptych.workers.execute.process import Execute
from triptych.workers.execute.sampling.token_counts import TokenCounts
from triptych.workers.execute.scheduling.sequence import Sequence
from triptych.workers.summarize.stream import OutputStream
from triptych.workers.summarize.texts import Texts


def execute_ignores_min_tokens(patch: Patch) -> None:
    real = Sequence.end_reason

    def end_reason(self: Sequence, max_model_len: int) -> str | None:
        params, self.params = self.params, replace(self.params, min_tokens=0)
        try:
            return real(self, max_model_len)
        finally:
            self.params = params

    patch.setattr(Sequence, "end_reason", end_reason)


def summarize_ignores_min_tokens(patch: Patch) -> None:
    real = Texts.open

    def open_stream(self: Texts, view: RequestView) -> OutputStream:
        stream = real(self, view)
        stream._min_tokens = 0
        return stream

    patch.setattr(Texts, "open", open_stream)


def matcher_takes_each_token_of_a_step_that_ran_twice(patch: Patch) -> None:
    """It consumes the latest token whenever it is asked what may follow."""
    real = GrammarMatcher._allowed_in_form

    def allowed_in_form(self: GrammarMatcher, tokens: Int32) -> Bits:
        self._num_taken = min(self._num_taken, max(0, len(tokens) - 1))
        return real(self, tokens)

    patch.setattr(GrammarMatcher, "_allowed_in_form", allowed_in_form)


def matcher_begins_with_the_next_token(patch: Patch) -> None:
    """Of a sequence that goes on after a crash."""
    real = GrammarMatcher._allowed_in_form
    seen: set[GrammarMatcher] = set()

    def allowed_in_form(self: GrammarMatcher, tokens: Int32) -> Bits:
        if self not in seen:
            seen.add(self)
            self._num_taken = len(tokens)
        return real(self, tokens)

    patch.setattr(GrammarMatcher, "_allowed_in_form", allowed_in_form)


def grammar_is_forgotten_after_a_crash(patch: Patch) -> None:
    real = Execute._begin

    def begin(self: Execute, sequence: Sequence, record: RequestRecord) -> None:
        real(self, sequence, replace(record, grammar="") if sequence.num_output_tokens else record)

    patch.setattr(Execute, "_begin", begin)


def released_requests_begin_when_their_grammar_is_compiled(patch: Patch) -> None:
    patch.setattr(GrammarIntake, "drop", lambda self, key: None)


def penalties_count_placeholders(patch: Patch) -> None:
    """The next step is planned before the token is known that it must count."""
    patch.setattr(Sequence, "needs_its_tokens", property(lambda self: self.is_beam or self.grammar is not None))


def tokens_before_a_crash_have_no_penalty(patch: Patch) -> None:
    real = TokenCounts.__init__

    def init(self: TokenCounts, sequence: Sequence, *, has_prompt: bool) -> None:
        known, sequence.num_tokens = sequence.num_tokens, sequence.num_prompt_tokens
        real(self, sequence, has_prompt=has_prompt)
        self.num_tokens = sequence.num_tokens = known

    patch.setattr(TokenCounts, "__init__", init)


RULE_MUTATIONS = by_name(
    execute_ignores_min_tokens,
    summarize_ignores_min_tokens,
    matcher_takes_each_token_of_a_step_that_ran_twice,
    matcher_begins_with_the_next_token,
    grammar_is_forgotten_after_a_crash,
    released_requests_begin_when_their_grammar_is_compiled,
    penalties_count_placeholders,
    tokens_before_a_crash_have_no_penalty,
)
