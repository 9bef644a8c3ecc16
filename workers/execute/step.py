"""The border between deciding and computing: what a runner gets for one step, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...protocol.scores import ScoreColumns
from .scheduling.beam_search import Candidates
from .scheduling.moves import Moves
from .scheduling.proposals import Proposer
from .scheduling.sequence import Key, Sequence
from .scheduling.states import Segment

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class ScoreSpan(NamedTuple):
    """Tokens of one prompt in a step, of which each says how likely the one after it is."""

    sequence: Sequence
    start: int  # position of the first of them
    num_rows: int

    @property
    def targets(self) -> Int32:
        """int32 [num_rows], the tokens that are scored, each by the row of the one before it."""
        return self.sequence.tokens[self.start + 1 : self.start + 1 + self.num_rows]


def _no_rows() -> Int32:
    return np.empty(0, np.int32)


class StepCut(NamedTuple):
    """How a step divides into segments for recurrent layers, which compute sequences one by one.

    G segments side by side: one for each sequence, and more where a snapshot of its state is taken in between.
    """

    reads: Int32  # [G], row of the state before each segment; ignored if it starts at 0
    writes: Int32  # [G], row of the state after it, which the next segment of the same sequence reads
    starts: Int32  # [G], position of its first token
    lengths: Int32  # [G], its number of tokens
    num_decodes: int  # the first so many segments are decodes

    @classmethod
    def of(cls, segments: list[Segment], *, num_decodes: int) -> StepCut:
        reads, writes, starts, lengths = np.array(segments, np.int32).T.copy()
        return cls(reads, writes, starts, lengths, num_decodes)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass over S sequences with T tokens altogether, ragged, decodes first.

    Page 0 is the trash page: no sequence holds it, padding writes to it and may read it.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T], each token's index in its sequence
    slot_mapping: Int64  # [T], page_id * page_size + offset: where each token's key and value go
    query_starts: Int32  # [S + 1], tokens of sequence s are query_starts[s]:query_starts[s + 1]
    context_lens: Int32  # [S], keys that the sequence's last token attends to, this step's included
    block_tables: Int32  # [S, P], page ids in order, padded with page 0
    num_decodes: int  # the first so many sequences have one token each
    sample_rows: Int32  # [R], indices into the T tokens whose next token is wanted
    sampled: Rows[Sequence]  # [R], the sequences these rows belong to
    # [T], rows of the step before whose token is meant, which the host does not know yet; -1 where token_ids has it
    carried: Int32 | None = None
    adapters: Int32 | None = None  # [S], each sequence's, counted from 1; 0: none. None: nobody has one
    cut: StepCut | None = None  # None: the model keeps no states
    score_rows: Int32 = field(default_factory=_no_rows)  # [C], indices into the T tokens: those of ``scored``, in order
    scored: Rows[ScoreSpan] = ()  # of prompts whose logprobs are wanted

    @property
    def sampled_lengths(self) -> Int32:
        """[R], tokens of each sampled sequence. A step that is planned ahead may have counted one more since."""
        return self.positions[self.sample_rows] + np.int32(1)

    @property
    def token_adapters(self) -> Int32 | None:
        """[T], the adapter of each token's sequence."""
        return None if self.adapters is None else np.repeat(self.adapters, np.diff(self.query_starts))

    @property
    def logit_rows(self) -> Int32:
        """[R + C], whose logits are wanted: to sample first, then to score."""
        return np.concatenate([self.sample_rows, self.score_rows]) if len(self.score_rows) else self.sample_rows


def resolve(inputs: StepInputs, last_tokens: Int32) -> StepInputs:
    """The step with the carried tokens put in, for runners whose steps are computed when ``launch`` returns.

    ``last_tokens`` [R] are those of the step before.
    """
    if inputs.carried is None:
        return inputs
    is_carried = inputs.carried >= 0
    token_ids = inputs.token_ids.copy()
    token_ids[is_carried] = last_tokens[inputs.carried[is_carried]]
    return replace(inputs, token_ids=token_ids, carried=None)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the raw model's probabilities (before penalties and temperature) at one position."""

    chosen: float
    token_ids: Int32  # [k], the k most likely tokens, best first
    logprobs: Float32  # [k]


class PromptScores(NamedTuple):
    """How likely some tokens of a prompt are, of which the first is token ``start + 1``."""

    key: Key
    start: int
    columns: ScoreColumns


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, a row for each of ``StepInputs.sampled``."""

    token_ids: Int32  # [R]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # row -> for those who asked
    failed: dict[int, str] = field(default_factory=dict)  # row -> why it has no valid token (its id is then void)
    candidates: dict[int, Candidates] = field(default_factory=dict)  # row -> of the beams, whose token id is void
    scores: Rows[PromptScores] = ()  # one for each of ``StepInputs.scored``


class Runner(Protocol):
    """Computes steps over pages it owns. ``launch`` may return before the result is there; ``collect`` waits for it."""

    is_batch_invariant: bool  # a token's result is the same to the bit, whoever and however many are computed with it
    overlaps: bool  # launched steps are computed while nobody waits for them
    hides_planning: bool  # it pays to plan the next step while the one that was launched last is computed
    proposer: Proposer | None  # a smaller model that guesses what this one says

    def is_fatal(self, error: Exception) -> bool:
        """Whether what a step raised makes every later one fail too, so that the process must end."""
        ...

    def move(self, moves: Moves) -> None:
        """Copies pages as ``moves`` says, before the step that is launched next and after those launched before."""
        ...

    def launch(self, inputs: StepInputs) -> None: ...

    def collect(self) -> StepResult:
        """The result of the oldest launched step that was not collected."""
        ...
