"""One token stream: its tokens, its pages, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ....protocol.sampling import SamplingParams
from .prefix import PageNode

if TYPE_CHECKING:
    from .groups import Group
    from .states import StateRows

Int32 = npt.NDArray[np.int32]
Key = tuple[int, int]  # (slot, generation) in the journal


class SequenceState(Enum):
    WAITING = "waiting"  # no pages, nothing computed (new, or preempted)
    SWAPPED = "swapped"  # waits too, with what was computed on host pages
    PREFILLING = "prefilling"  # some chunks computed
    PAUSED = "paused"  # a beam that has taken its step, until the others of its search have
    READY = "ready"  # prompt computed, first token sampled, no row yet
    DECODING = "decoding"  # holds a row
    ENDING = "ending"  # its last token is being computed
    FINISHED = "finished"  # row given back, pages in limbo until released


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in execute. ``tokens[:num_tokens]`` are the prompt and what was sampled so far.

    Invariant: keys and values of ``tokens[:num_computed_tokens]`` are in the pages of ``block_table``, and
    ``len(block_table) == ceil(tokens with a place / page_size)``: never a page more. Its first ``tip.depth`` pages are
    full and may be in other tables too; nobody writes to them.
    """

    key: Key
    tokens: Int32  # [prompt + capacity for output], allocated once
    num_prompt_tokens: int
    num_tokens: int  # prompt and output; above num_prompt_tokens at once for a sequence that is recovered
    params: SamplingParams
    seed: int
    arrival: int  # order of acceptance, kept over preemption and recovery
    stop_ids: frozenset[int] = frozenset()  # end of sequence and stop_token_ids; empty parts as ignore_eos says
    group_key: Key | None = None  # of the request it is one sequence of, if there are others; they begin alike
    group: Group | None = None  # while it is live
    accepted_at: int = 0  # when the service took it, ns of the engine's clock; nothing is decided by it
    final_ids: frozenset[int] = frozenset()  # end of sequence under a grammar: ends it also before min_tokens
    grammar: object | None = None  # what says which tokens may follow, see execute/grammar; None: all of them
    cache_salt: str = ""  # prefixes are shared among sequences of the same salt only; other adapters, other salts
    adapter: int = 0  # that it is computed with, counted from 1; 0: none
    deadline_at: int = 0  # ns of the engine's clock by which it must have ended; 0: none
    queue_deadline_at: int = 0  # by which it must have begun
    priority: int = 0  # the lowest goes first, see policy.Priority
    replays: bool = False  # computed again, its output is decoded token by token, as it was the first time
    chunk_ends: list[int] = field(default_factory=list)  # of the prompt, as it was cut the first time
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of these, found in the cache when it first started
    num_scored_tokens: int = 0  # leading tokens of the prompt whose successor has its logprob, if these are wanted
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)  # host pages, while it is swapped out
    shares_tail: bool = False  # its last page, half full, may be in other tables too: it is copied before it grows
    tip: PageNode | None = None  # the last of its pages that others may share
    state: SequenceState = SequenceState.WAITING
    state_rows: StateRows | None = None  # of its recurrent state, while it runs on a model that keeps one
    row: int | None = None  # index into the decode buffers, 0..max_num_seqs-1
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    num_preemptions: int = 0
    num_overtaken: int = 0  # sequences behind it that started while it did not fit
    chance: float = 0.5  # that a token which is proposed to follow is right, as it was lately; 0: none ever is proposed
    last_step: int = 0  # number of the last step that reads or writes its pages

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Output tokens this sequence may have; prepare cut it to the context."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that are computed in chunks; what follows them is decoded."""
        return self.num_prompt_tokens if self.replays else self.num_tokens

    @property
    def is_scored(self) -> bool:
        """Whether no logprobs of its prompt are wanted any more. They are made once, whatever is computed again."""
        return self.params.prompt_logprobs is None or self.num_scored_tokens >= self.num_prompt_tokens - 1

    def unscored_rows(self, start: int, num_tokens: int) -> range:
        """Positions in this chunk whose logits are wanted for what they say of the next token of the prompt."""
        return range(max(start, self.num_scored_tokens), min(start + num_tokens, self.num_prompt_tokens - 1))

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that need not be computed where their keys and values are found: nobody wants their logits."""
        return self.num_tokens - 1 if self.is_scored else self.num_scored_tokens

    @property
    def output_tokens(self) -> Int32:
        """int32 [num_output_tokens], a view."""
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def needs_its_tokens(self) -> bool:
        """Whether the host must know every token before it can ask for the next one."""
        p = self.params
        has_penalties = p.repetition_penalty != 1.0 or bool(p.presence_penalty or p.frequency_penalty)
        return self.is_beam or has_penalties or self.grammar is not None

    @property
    def is_beam(self) -> bool:
        """Whether its next token is chosen among those of other sequences too, once all of them are known."""
        return self.params.is_beam_search

    @property
    def is_complete(self) -> bool:
        """Whether its prompt is computed, and no token was wanted but the logprobs of these."""
        return self.max_tokens == 0 and self.num_uncomputed_tokens == 0

    def is_full(self, max_model_len: int) -> bool:
        """Whether no token has room after the last one."""
        return self.num_tokens >= min(len(self.tokens), max_model_len)

    def append(self, token_id: int) -> None:
        """Adds what was sampled after the last token."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def end_reason(self, max_model_len: int) -> str | None:
        """Why no token may follow the last one: "stop", "length", or None while one may."""
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        may_stop = self.stop_ids and num_output_tokens >= max(1, self.params.min_tokens)
        if may_stop and int(self.tokens[self.num_tokens - 1]) in self.stop_ids:
            return "stop"
        if self.final_ids and int(self.tokens[self.num_tokens - 1]) in self.final_ids:
            return "stop"
        return "length" if self.is_full(max_model_len) else None


def num_common(first: Sequence, second: Sequence, limit: int) -> int:
    """How many of the first ``limit`` tokens are the same."""
    differs = first.tokens[:limit] != second.tokens[:limit]
    return int(differs.argmax()) if differs.any() else limit
