"""Speculative decoding: tokens that are likely to follow are computed before they are sampled.

Tokens are proposed and checked in one step, as a chunk in which every row is sampled. Each row is sampled with the
random number of its own position, so the accepted tokens are those that would have been sampled anyway: proposals
change when a token comes, never which. This requires that a runner's result for a token does not depend on what else is
computed with it.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". Unlike there, a proposal has
no probability to correct for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .cache import PageCache
from .plan import Draft
from .rows import Rows
from .sequence import Key, Sequence

VOID = -1  # in place of a token after a proposal for which the model gave none
MAX_CHECKED_TOKENS = 16  # per step, proposals and the tokens they follow: beyond, each costs nearly a step of its own
TOKEN_COST = 0.04  # of one of these, as a share of the step (0.01 to 0.05 for the first eight, 0.03 to 0.06 beyond)
NEWS = 0.2  # weight of the latest proposal against all those before
RECOVERY = 1.02  # factor on the chance, for each step in which it was too small to propose anything
SURE = 0.99  # the greatest chance


class Proposer:
    """Finds tokens to propose."""

    cost = 0.0  # of finding one token, as a share of a step, excluding the check

    def prepare(self, seconds: float) -> bool:
        """Like ``Runner.prepare``."""
        return False

    def show_progress(self, word: npt.NDArray[np.int64]) -> None:
        """Like ``Runner.show_progress``."""

    def begin(self, wanted: list[tuple[Sequence, int]]) -> None:
        """Announces how many tokens ``propose`` may be asked for, for proposers that find those of all at once."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        """At most ``max_tokens`` tokens that may follow the last one; None if that is not known yet."""
        raise NotImplementedError


class Proposals:
    """Adds proposals to decodes in steps of few tokens, as long as they are likely enough to be worth their cost.

    A step of n sequences yields n tokens. One more is worth checking if its chance of being right exceeds n times its
    cost, and it can be right only if those before it are. The chance is learned for each sequence as it runs. What the
    proposer takes to find one more for every sequence is shared by all of them.
    """

    def __init__(
        self, max_tokens: int, *, cache: PageCache, rows: Rows, max_model_len: int, proposer: Proposer
    ) -> None:
        """``max_tokens`` per sequence and step; 0: no proposals."""
        self._max_tokens = max_tokens
        self._cache, self._rows = cache, rows
        self._max_model_len = max_model_len
        self._proposer = proposer
        self.num_proposed = 0
        self.num_accepted = 0

    @property
    def num_due(self) -> int:
        """The most proposals of the next step for sequences in rows; it needs to know all tokens before them."""
        num_rows = len(self._rows)
        if not self._max_tokens or num_rows >= MAX_CHECKED_TOKENS:
            return 0
        num_worth = sum(self._worth(sequence, num_rows) for sequence in self._rows.seated if _is_guessable(sequence))
        return min(num_worth, MAX_CHECKED_TOKENS - num_rows)

    def add(self, draft: Draft, running: Mapping[Key, Sequence], *, are_tokens_known: bool) -> None:
        """Add proposals to the decodes of an otherwise complete step, as far as budgets and pages allow."""
        num_decodes = len(draft.decodes)
        num_left = min(MAX_CHECKED_TOKENS - num_decodes, draft.num_tokens_left, draft.num_reads_left)
        if not self._max_tokens or num_left <= 0:
            return
        sequences = [s for key, chunk in draft.decodes.items() if chunk.samples and _is_guessable(s := running[key])]
        if are_tokens_known:
            self._proposer.begin(self._shares(sequences, num_decodes, int(num_left)))
        for num_others, sequence in zip(reversed(range(len(sequences))), sequences, strict=True):
            worth = self._worth(sequence, num_decodes)
            if not worth:
                sequence.chance = min(RECOVERY * sequence.chance, SURE)
            elif are_tokens_known:
                num_tokens = min(worth, int(num_left // (num_others + 1)), self._room(sequence))
                if num_tokens <= 0 or (proposed := self._proposer.propose(sequence, num_tokens)) is None:
                    continue
                if placed := proposed[: self._extend(sequence, len(proposed))]:
                    draft.propose(sequence.key, placed)
                    num_left -= len(placed)
                elif not proposed:
                    _learn(sequence, is_right=False)

    def check(self, sequence: Sequence, proposed: tuple[int, ...], said: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens after right proposals; ``said`` [1 + proposals] follow the last token and each proposal."""
        num_right = 0
        while num_right < len(proposed) and said[num_right] == proposed[num_right] and said[num_right + 1] != VOID:
            num_right += 1
            _learn(sequence, is_right=True)
        if num_right < len(proposed):
            _learn(sequence, is_right=False)
        self.num_proposed += len(proposed)
        self.num_accepted += num_right
        return said[1 : 1 + num_right]

    def give_back(self, sequence: Sequence) -> None:
        """Free the pages that contained only wrong proposals."""
        num_pages = self._cache.pages_for(sequence.num_computed_tokens)
        if num_pages < len(sequence.block_table):
            self._rows.drop_pages(sequence, num_pages)
            self._cache.shrink(sequence, num_pages)

    def _shares(self, sequences: list[Sequence], num_decodes: int, num_left: int) -> list[tuple[Sequence, int]]:
        """How many tokens to propose for each sequence if all got their maximum."""
        wanted = [(s, min(self._worth(s, num_decodes), self._room(s))) for s in sequences]
        wanted = [(sequence, num_tokens) for sequence, num_tokens in wanted if num_tokens > 0]
        share = -(-num_left // max(1, len(wanted)))
        return [(sequence, min(num_tokens, share)) for sequence, num_tokens in wanted]

    def _worth(self, sequence: Sequence, num_decodes: int) -> int:
        """How many proposals are worth their cost: the n-th is right with the chance of one to the power of n."""
        least = TOKEN_COST * num_decodes + self._proposer.cost
        if sequence.chance < least:
            return 0
        return min(int(math.log(least) / math.log(sequence.chance)), self._max_tokens)

    def _room(self, sequence: Sequence) -> int:
        """How many tokens may follow the last one if one more is to follow them."""
        return min(len(sequence.tokens), self._max_model_len) - 1 - sequence.num_tokens

    def _extend(self, sequence: Sequence, num_proposed: int) -> int:
        """How many of these have a place after the last token now. No sequence is preempted for them."""
        num_pages = len(sequence.block_table)
        num_placed = self._cache.extend(sequence, 1 + num_proposed) - 1
        if num_pages < len(sequence.block_table):
            self._rows.write_pages(sequence, num_pages)
        return num_placed


def _is_guessable(sequence: Sequence) -> bool:
    """Whether sampling depends on the logits alone, and only the token is needed from them."""
    return not sequence.needs_its_tokens and sequence.params.logprobs is None


def _learn(sequence: Sequence, *, is_right: bool) -> None:
    sequence.chance += NEWS * (SURE * is_right - sequence.chance)
