"""Speculative decoding: tokens that are likely to follow are computed before they are sampled.

Tokens are proposed and checked in one step, as a chunk in which every row is sampled. Each row is sampled with the
random number of its own position, so the accepted tokens are those that would have been sampled anyway: proposals
change when a token comes, never which. This holds to the bit where a runner's result for a token does not depend on
what else is computed with it.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". Unlike there, a proposal has
no probability to correct for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cache import PageCache
from .plan import Draft
from .rows import Rows
from .sequence import UNKNOWN_CHANCE, Key, Sequence

VOID = -1  # in place of a token after a proposal for which the model gave none
MAX_CHECKED_TOKENS = 16  # per step, proposals and the tokens they follow: beyond, each costs nearly a step of its own
TOKEN_COST = 0.04  # of one of these, as a share of the step (0.01 to 0.05 for the first eight, 0.03 to 0.06 beyond)
NEWS = 0.2  # weight of the latest proposal against all those before
NEWS_OF_ALL = 0.02  # of one proposal against those of all sequences
RECOVERY = 0.02  # growth of the chance in each step in which it was too small to propose anything
USUAL_COST = 0.4  # of a vain proposal, as a share of a step: where it is more, chances recover more slowly
SURE = 0.99  # the greatest chance


@dataclass(frozen=True, slots=True)
class CheckCosts:
    """What it takes a runner to check proposals, as shares of a step without any."""

    token: float = TOKEN_COST  # of one more token in the step; above 0
    sequence: float = 0.0  # of one more sequence that has any: they are found before the step can be launched
    step: float = 0.0  # of having any: the step has another form, or cannot be planned ahead
    max_tokens: int = MAX_CHECKED_TOKENS  # per step, proposals and the tokens they follow
    beside_prompts: bool = True  # whether steps with prompts may have any


@dataclass(frozen=True, slots=True)
class FindCosts:
    """What it takes to find proposals, as shares of a step without any."""

    token: float = 0.0  # of one for each sequence, excluding the check
    start: float = 0.0  # of any, in addition


class Proposer:
    """Finds tokens to propose."""

    costs: tuple[FindCosts, ...] = (FindCosts(),)  # in a step of one sequence, of two, ...; of more, as of the most
    chance: float | None = None  # that the first of a sequence is right, if sequences are much alike in this

    def warm_up(self, progress: Callable[[int, int], None], *, is_first: bool) -> None:
        """Do now what would delay the first requests.

        ``is_first``: this is no restart, during which requests would wait. ``progress`` gets (done, total).
        """

    def measure_costs(self, decode_s: Callable[[int], float]) -> None:
        """Measure ``costs``, if they can differ. ``decode_s``: the seconds in which the target model decodes a token of
        so many sequences.
        """

    def prepare(self, seconds: float) -> bool:
        """Like ``Runner.prepare``."""
        return False

    def show_progress(self, word: npt.NDArray[np.int64]) -> None:
        """Like ``Runner.show_progress``."""

    def begin(self, wanted: list[tuple[Sequence, int]]) -> None:
        """Announces how many tokens ``propose`` may be asked for, to proposers that find those of all sequences at
        once.
        """

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        """At most ``max_tokens`` tokens that may follow the last one; None if that is not known yet."""
        raise NotImplementedError


class Proposals:
    """Adds proposals to decodes in steps of few tokens, as long as they are likely enough to be worth their cost.

    A step of n sequences yields n tokens, so whatever delays it by a share c of its duration costs c * n tokens. One
    more proposal is worth checking if its chance of being right exceeds that. It can be right only if all proposals
    before it are. The proposals of one sequence together, and those of the whole step, must also be worth the costs
    that arise as soon as there are any (see ``CheckCosts``). The proposer finds one more for all sequences at once,
    which share that cost. Each sequence's chance is learned as it runs; if the proposer says that sequences are alike,
    a new one begins with what was learned from all.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        cache: PageCache,
        rows: Rows,
        max_model_len: int,
        proposer: Proposer,
        costs: CheckCosts,
    ) -> None:
        """``max_tokens`` per sequence and step; 0: no proposals."""
        self._max_tokens = max_tokens
        self._costs = costs
        self._cache, self._rows = cache, rows
        self._max_model_len = max_model_len
        self._proposer = proposer
        self._usual_chance = proposer.chance
        self.num_proposed = 0
        self.num_accepted = 0

    def expect(self, sequence: Sequence) -> None:
        """Estimate the chance of a sequence for which nothing was proposed yet."""
        if self._usual_chance is not None and sequence.chance == UNKNOWN_CHANCE:
            sequence.chance = self._usual_chance

    @property
    def num_due(self) -> int:
        """The most proposals that the next step may have for sequences in rows. If any, all tokens before them must be
        known.
        """
        num_rows = len(self._rows)
        if not self._max_tokens or num_rows >= self._costs.max_tokens:
            return 0
        num_worth = sum(self._worths(list(filter(_is_guessable, self._rows.seated)), num_rows))
        return min(num_worth, self._costs.max_tokens - num_rows)

    @property
    def num_due_beside_prompts(self) -> int:
        """The same for a step with tokens of prompts."""
        return self.num_due if self._costs.beside_prompts else 0

    def add(self, draft: Draft, running: Mapping[Key, Sequence], *, are_tokens_known: bool) -> None:
        """Add proposals to the decodes of an otherwise complete step, as far as budgets and pages allow."""
        num_decodes = len(draft.decodes)
        num_left = min(self._costs.max_tokens - num_decodes, draft.num_tokens_left, draft.num_reads_left)
        if not self._max_tokens or num_left <= 0 or (draft.prefills and not self._costs.beside_prompts):
            return
        sequences = [s for key, chunk in draft.decodes.items() if chunk.samples and _is_guessable(s := running[key])]
        worths = self._worths(sequences, num_decodes)
        if are_tokens_known:
            self._proposer.begin(self._shares(sequences, worths, int(num_left)))
        for num_others, sequence, worth in zip(reversed(range(len(sequences))), sequences, worths, strict=True):
            if not worth:
                sequence.chance = min((1 + self._recovery(num_decodes)) * sequence.chance, SURE)
            elif are_tokens_known:
                num_tokens = min(worth, int(num_left // (num_others + 1)), self._room(sequence))
                if num_tokens <= 0 or (proposed := self._proposer.propose(sequence, num_tokens)) is None:
                    continue
                if placed := proposed[: self._extend(sequence, len(proposed))]:
                    draft.propose(sequence.key, placed)
                    num_left -= len(placed)
                elif not proposed:
                    self._learn(sequence, is_right=False)

    def check(self, sequence: Sequence, proposed: tuple[int, ...], said: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens after right proposals. ``said`` [1 + proposals]: what the model says after the last token and
        after each proposal.
        """
        num_right = 0
        while num_right < len(proposed) and said[num_right] == proposed[num_right] and said[num_right + 1] != VOID:
            num_right += 1
            self._learn(sequence, is_right=True)
        if num_right < len(proposed):
            self._learn(sequence, is_right=False)
        self.num_proposed += len(proposed)
        self.num_accepted += num_right
        return said[1 : 1 + num_right]

    def _recovery(self, num_decodes: int) -> float:
        finding = self._find_costs(num_decodes)
        cost = self._costs.step + finding.start + 2 * (self._costs.token + finding.token)
        return RECOVERY * min(1.0, USUAL_COST / cost)

    def _find_costs(self, num_decodes: int) -> FindCosts:
        costs = self._proposer.costs
        return costs[min(num_decodes, len(costs)) - 1]

    def _learn(self, sequence: Sequence, *, is_right: bool) -> None:
        sequence.chance += NEWS * (SURE * is_right - sequence.chance)
        if self._usual_chance is not None:
            self._usual_chance += NEWS_OF_ALL * (SURE * is_right - self._usual_chance)

    def give_back(self, sequence: Sequence) -> None:
        """Free the pages that contained only wrong proposals."""
        num_pages = self._cache.pages_for(sequence.num_computed_tokens)
        if num_pages < len(sequence.block_table):
            self._rows.drop_pages(sequence, num_pages)
            self._cache.shrink(sequence, num_pages)

    def _shares(self, sequences: list[Sequence], worths: list[int], num_left: int) -> list[tuple[Sequence, int]]:
        """How many tokens to propose for each sequence if all got their maximum."""
        wanted = [(s, min(worth, self._room(s))) for s, worth in zip(sequences, worths, strict=True)]
        wanted = [(sequence, num_tokens) for sequence, num_tokens in wanted if num_tokens > 0]
        share = -(-num_left // max(1, len(wanted)))
        return [(sequence, min(num_tokens, share)) for sequence, num_tokens in wanted]

    def _worths(self, sequences: list[Sequence], num_decodes: int) -> list[int]:
        """How many proposals for each sequence are worth their cost in a step of ``num_decodes``."""
        finding = self._find_costs(num_decodes)
        least = self._costs.token * num_decodes + finding.token
        found = [self._worth(sequence.chance, least) for sequence in sequences]
        share = -(-(self._costs.max_tokens - num_decodes) // max(1, len(found) - found.count(0)))
        worths, total = [], 0.0
        for sequence, worth in zip(sequences, (min(worth, share) for worth in found), strict=True):
            gain = _expected(sequence.chance, worth) - least * worth - self._costs.sequence * num_decodes
            worths.append(worth if gain > 0 else 0)
            total += max(0.0, gain)
        is_worth_it = total > (self._costs.step + finding.start) * num_decodes
        return worths if is_worth_it else [0] * len(worths)

    def _worth(self, chance: float, least: float) -> int:
        """How many proposals of one sequence have a chance of at least this: the n-th is right with the chance of one
        to the power of n.
        """
        return 0 if chance < least else min(int(math.log(least) / math.log(chance)), self._max_tokens)

    def _room(self, sequence: Sequence) -> int:
        """How many proposals have room after the last token, together with the token that is sampled after them."""
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


def _expected(chance: float, count: int) -> float:
    """How many of ``count`` proposals are right on average, if each can be right only if those before it are."""
    return chance * (1 - chance**count) / (1 - chance)
