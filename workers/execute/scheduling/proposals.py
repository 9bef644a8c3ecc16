"""Speculative decoding: tokens that are likely to follow are computed before they are said.

Tokens are proposed and checked in one step, as a chunk of which every row is sampled. Each row draws with the random
number of its own place, so what is accepted is what would have been said without: proposals change when, never what.
That takes a runner whose result for a token does not depend on what is computed with it.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". Other than there, a proposal
has no probability that would have to be corrected for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .cache import PageCache
from .plan import Draft
from .rows import Rows
from .sequence import Key, Sequence

VOID = -1  # in place of a token behind a proposal, where the model gave none
MAX_CHECKED_TOKENS = 16  # of a step, proposals and the tokens they follow: beyond, each costs nearly a step of its own
TOKEN_COST = 0.04  # of one of these, as a share of the step (0.01 to 0.05 for the first eight, 0.03 to 0.06 beyond)
NEWS = 0.2  # weight of the last proposal among all those before
RECOVERY = 1.02  # times the chances, with each step in which they were too small to propose anything
SURE = 0.99  # the greatest chance


class Proposer:
    """Who finds tokens to propose."""

    cost = 0.0  # of one of its tokens, before it is checked, as a share of a step

    def begin(self, wanted: list[tuple[Sequence, int]]) -> None:
        """So many tokens may be asked for next of each: for one that finds those of all at once."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        """Tokens that may follow its last one, so many at most; None where that cannot be said yet."""
        raise NotImplementedError


class Proposals:
    """Proposes for those who decode, in steps of few tokens, what is likely enough to be right to be worth its cost.

    A step of n sequences brings n tokens. One more is worth checking if it is right with a chance above n times its
    cost, and it is right only if those before it are. What the chances are is learned for each sequence as it goes.
    What the proposer takes to find one more for everybody is borne by all of them together.
    """

    def __init__(
        self, max_tokens: int, *, cache: PageCache, rows: Rows, max_model_len: int, proposer: Proposer
    ) -> None:
        """``max_tokens`` for one sequence in one step; 0: none at all."""
        self._max_tokens = max_tokens
        self._cache, self._rows = cache, rows
        self._max_model_len = max_model_len
        self._proposer = proposer
        self.num_proposed = 0
        self.num_accepted = 0

    @property
    def num_due(self) -> int:
        """How many the next step of those in rows has at most; all tokens before it must be known then."""
        num_rows = len(self._rows)
        if not self._max_tokens or num_rows >= MAX_CHECKED_TOKENS:
            return 0
        num_worth = sum(self._worth(sequence, num_rows) for sequence in self._rows.seated if _is_guessable(sequence))
        return min(num_worth, MAX_CHECKED_TOKENS - num_rows)

    def add(self, draft: Draft, running: Mapping[Key, Sequence], *, are_tokens_known: bool) -> None:
        """Proposals for those who decode in a step that is complete otherwise, as far as budgets and pages go."""
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
        """Of what was said after the last token and after each proposal, [1 + proposals], what follows a right one."""
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
        """Takes the pages in which there was nothing but wrong proposals."""
        num_pages = self._cache.pages_for(sequence.num_computed_tokens)
        if num_pages < len(sequence.block_table):
            self._rows.drop_pages(sequence, num_pages)
            self._cache.shrink(sequence, num_pages)

    def _shares(self, sequences: list[Sequence], num_decodes: int, num_left: int) -> list[tuple[Sequence, int]]:
        """How many tokens each would have proposed, if all had as many as they may."""
        wanted = [(s, min(self._worth(s, num_decodes), self._room(s))) for s in sequences]
        wanted = [(sequence, num_tokens) for sequence, num_tokens in wanted if num_tokens > 0]
        share = -(-num_left // max(1, len(wanted)))
        return [(sequence, min(num_tokens, share)) for sequence, num_tokens in wanted]

    def _worth(self, sequence: Sequence, num_decodes: int) -> int:
        """How many proposals are worth their cost: the last one is right with the chance of one, to their number."""
        least = TOKEN_COST * num_decodes + self._proposer.cost
        if sequence.chance < least:
            return 0
        return min(int(math.log(least) / math.log(sequence.chance)), self._max_tokens)

    def _room(self, sequence: Sequence) -> int:
        """Tokens that may follow the last one, if one more is to follow them."""
        return min(len(sequence.tokens), self._max_model_len) - 1 - sequence.num_tokens

    def _extend(self, sequence: Sequence, num_proposed: int) -> int:
        """How many of these have a place behind the last token now. Nobody gives way for them."""
        num_pages = len(sequence.block_table)
        num_placed = self._cache.extend(sequence, 1 + num_proposed) - 1
        if num_pages < len(sequence.block_table):
            self._rows.write_pages(sequence, num_pages)
        return num_placed


def _is_guessable(sequence: Sequence) -> bool:
    """Whether what is drawn at a place depends on the logits alone, and no more than the token is wanted of them."""
    return not sequence.needs_its_tokens and sequence.params.logprobs is None


def _learn(sequence: Sequence, *, is_right: bool) -> None:
    sequence.chance += NEWS * (SURE * is_right - sequence.chance)
