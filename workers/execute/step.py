"""The interface between scheduling and computation: what a runner gets for one step, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from ...protocol.arrays import Float32, Int32, Int64
from ...protocol.config import ModelConfig
from ...protocol.scores import ScoreColumns
from .scheduling.beam_search import Candidates
from .scheduling.moves import Moves
from .scheduling.page_records import PageRecords
from .scheduling.proposals import CheckCosts, Proposer
from .scheduling.sequence import Key, Sequence
from .scheduling.states import Segment


class PromptStates(NamedTuple):
    """The hidden states of consecutive prompt tokens, the first of which is token ``start``."""

    key: Key
    start: int
    values: Float32  # [tokens, channels]


class PromptSpan(NamedTuple):
    """Consecutive tokens of one prompt in a step, whose logits or hidden states are needed."""

    sequence: Sequence
    start: int  # position of the first of them
    num_rows: int

    @property
    def targets(self) -> Int32:
        """int32 [num_rows], the token after each of them: its logprob is found by their logits."""
        return self.sequence.tokens[self.start + 1 : self.start + 1 + self.num_rows]


def _no_rows() -> Int32:
    return np.empty(0, np.int32)


class StepCut(NamedTuple):
    """How a step is divided into segments for recurrent layers, which compute sequences one by one.

    There are G segments: one per sequence, and more where a snapshot of its state is taken in between.
    """

    reads: Int32  # [G], row of the state before each segment; ignored if it starts at 0
    writes: Int32  # [G], row of the state after it, which the next segment of the same sequence reads
    starts: Int32  # [G], position of its first token
    lengths: Int32  # [G], its number of tokens
    num_decodes: int  # the first num_decodes segments are decodes

    @classmethod
    def of(cls, segments: list[Segment], *, num_decodes: int) -> StepCut:
        reads, writes, starts, lengths = np.array(segments, np.int32).T.copy()
        return cls(reads, writes, starts, lengths, num_decodes)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass over S sequences with T tokens in total, ragged, decodes first.

    Page 0 is the trash page: no sequence holds it; padding writes to it and may read it.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T], each token's index in its sequence
    slot_mapping: Int64  # [T], page_id * page_size + offset: where each token's key and value go
    query_starts: Int32  # [S + 1], tokens of sequence s are query_starts[s]:query_starts[s + 1]
    context_lens: Int32  # [S], keys that the sequence's last token attends to, this step's included
    block_tables: Int32  # [S, P], page ids in order, padded with page 0
    num_decodes: int  # the first num_decodes sequences have one token each
    sample_rows: Int32  # [R], indices of the tokens whose next token is wanted
    sampled: Rows[Sequence]  # [R], the sequences these rows belong to
    # [T], row of this token in the previous step's result, as the host does not know it yet; -1: it is in token_ids
    carried: Int32 | None = None
    adapters: Int32 | None = None  # [S], each sequence's, counted from 1; 0: none. None: no sequence has one
    cut: StepCut | None = None  # None: the model keeps no states
    score_rows: Int32 = field(default_factory=_no_rows)  # [C], indices into the T tokens: those of ``scored``, in order
    scored: Rows[PromptSpan] = ()  # of prompts whose logprobs are wanted
    embedded_rows: Int32 = field(default_factory=_no_rows)  # [E], indices into the T tokens: those of ``embedded``
    embedded: Rows[PromptSpan] = ()  # of prompts whose embeddings are wanted: the last sequences of the step

    @property
    def sampled_lengths(self) -> Int32:
        """[R], tokens of each sampled sequence, which may count one more by now if the next step was planned ahead."""
        return self.positions[self.sample_rows] + np.int32(1)

    @property
    def checks_proposals(self) -> bool:
        """Whether some sequences have proposals, and all tokens are theirs or decodes, so that all are sampled."""
        return len(self.sampled) == len(self.token_ids) > len(self.context_lens)

    @property
    def token_adapters(self) -> Int32 | None:
        """[T], the adapter of each token's sequence."""
        return None if self.adapters is None else np.repeat(self.adapters, np.diff(self.query_starts))

    @property
    def logit_rows(self) -> Int32:
        """[R + C], the tokens whose logits are wanted: first to sample, then to score."""
        return np.concatenate([self.sample_rows, self.score_rows]) if len(self.score_rows) else self.sample_rows


def resolve(inputs: StepInputs, last_tokens: Int32) -> StepInputs:
    """The step with the carried tokens filled in, for runners that have computed a step when ``launch`` returns.

    ``last_tokens`` [R] are those of the previous step.
    """
    if inputs.carried is None:
        return inputs
    is_carried = inputs.carried >= 0
    token_ids = inputs.token_ids.copy()
    token_ids[is_carried] = last_tokens[inputs.carried[is_carried]]
    return replace(inputs, token_ids=token_ids, carried=None)


def states_of(inputs: StepInputs, hidden: Float32) -> list[PromptStates]:
    """The hidden states of ``inputs.embedded``, copied from those of ``inputs.embedded_rows`` [E, channels]."""
    ends = np.cumsum([span.num_rows for span in inputs.embedded])
    parts = np.split(hidden, ends[:-1]) if len(ends) else []
    return [
        PromptStates(span.sequence.key, span.start, part.copy())
        for span, part in zip(inputs.embedded, parts, strict=True)
    ]


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the raw model's probabilities (before penalties and temperature) at one position."""

    chosen: float
    token_ids: Int32  # [k], the k most likely tokens, best first
    logprobs: Float32  # [k]


class PromptScores(NamedTuple):
    """The scores of consecutive prompt tokens, the first of which is token ``start + 1``."""

    key: Key
    start: int
    columns: ScoreColumns


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, one row for each of ``StepInputs.sampled``."""

    token_ids: Int32  # [R]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, where requested
    failed: dict[int, str] = field(default_factory=dict)  # by row: why it has no valid token (its id is then void)
    candidates: dict[int, Candidates] = field(default_factory=dict)  # by row, of beams, whose token id is void
    scores: Rows[PromptScores] = ()  # one for each of ``StepInputs.scored``
    states: Rows[PromptStates] = ()  # one for each of ``StepInputs.embedded``


Places = Rows[str | None]  # names of adapters by their numbers in steps, counted from 1; None: nobody has this number


class Runner(Protocol):
    """Computes steps over pages it owns. ``launch`` may return before the result is ready; ``collect`` waits for it."""

    is_batch_invariant: bool  # a token's result is bitwise the same, whatever is computed along with it
    overlaps: bool  # launched steps are computed in the background
    hides_planning: bool  # it pays to plan the next step while the latest launched one is computed
    proposer: Proposer | None  # a smaller model that proposes tokens for this one
    check_costs: CheckCosts | None  # None: it is not meant to check proposals
    page_records: PageRecords | None  # of its pages; None: they end with this process

    @property
    def num_graph_steps(self) -> int:
        """Steps that have run as graphs."""
        ...

    def is_fatal(self, error: Exception) -> bool:
        """Whether an error raised by a step makes every later one fail too, so that the process must end."""
        ...

    def prepare(self, seconds: float) -> bool:
        """Spend about that long on work that makes later steps faster, while idle; returns whether any is left."""
        ...

    def show_progress(self, word: Int64) -> int:
        """From now on, store CLOCK_MONOTONIC in ``word`` [1], in ns, whenever a step advances. None may be in flight.

        Returns the least number of parts, of about the same duration, into which this divides a step; 1 if this runner
        shows nothing.
        """
        ...

    def load_adapters(self, config: ModelConfig, places: Places) -> Callable[[], None] | None:
        """Load the adapters of ``config``, whose numbers follow from ``places``. May be called in any thread, while
        steps run.

        Returns a function that puts them to use from the next step on, and must be called between two steps; or None if
        only another runner can serve them.

        Raises:
            ConfigError: an adapter cannot be read.
        """
        ...

    def move(self, moves: Moves) -> None:
        """Copy pages according to ``moves``, after the steps already launched and before the next one."""
        ...

    def launch(self, inputs: StepInputs) -> None: ...

    def collect(self) -> StepResult:
        """The result of the oldest launched step that is not collected yet; waits for it."""
        ...
