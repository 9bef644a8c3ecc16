"""A model without weights whose text depends on every cache cell that it should read, and on no other.

The next token is ``(n + sum_i (i + 1) * token_i) mod (V - 1) + 1`` over the n tokens of the context, read from the
cells that the block table names (without n, token V - 1 would repeat forever). A wrong page, a stale prefix, a lost
chunk, a wrong position or a neighbour's token changes the text, and the expected text takes a few lines of plain
Python.

With an adapter, its number is added to every token in the cache, so that tokens cached under another adapter, or under
none, lead to a different text.

The hidden state of a token is made of random numbers, whose seed is the same sum.

Under a grammar the next token is the first allowed one from there on, wrapping around to 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ...protocol.arrays import Float32, Int32, Int64
from ...protocol.config import HASH_MODEL, ModelConfig
from ...protocol.scores import ScoreColumns
from .grammar.masks import NO_MASKS, MaskMaker, PendingMasks, first_allowed
from .kernels.memory import padded
from .kv_file import KvFile
from .scheduling.beam_search import Candidates, num_candidates
from .scheduling.moves import Moves
from .scheduling.page_records import PageRecords
from .scheduling.proposals import CheckCosts, Proposer
from .scheduling.sequence import Sequence
from .step import (
    Places,
    PromptScores,
    PromptSpan,
    PromptStates,
    StepInputs,
    StepResult,
    TokenLogprobs,
    resolve,
    states_of,
)

_STRIDE = (1 << 31) - 1  # a cell is position * _STRIDE + token, so that a token at a wrong position is a wrong token
EMBEDDING_SIZE = 32
_POISON = (1 << 61) - 1  # both are prime, so that they do not vanish modulo a vocabulary size


def expected_tokens(
    prompt: Iterable[int],
    num_tokens: int,
    vocab_size: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    adapter: int = 0,
) -> list[int]:
    """The hash model's output tokens after ``prompt``, from the definition alone."""
    context = list(prompt)
    state, output = state_of(context, adapter), []
    for position in range(len(context), len(context) + num_tokens):
        noise = _noise(seed, position) if temperature > 0 else 0
        token = (state + noise) % (vocab_size - 1) + 1
        output.append(token)
        state += 1 + (position + 1) * (token + adapter)  # the state after ``token``, without another sum over all
    return output


class HashRunner:
    """A ``Runner`` for the hash model. Its cache holds tokens where a real one holds keys and values."""

    is_batch_invariant = True
    overlaps = False
    hides_planning = True
    num_graph_steps = 0
    proposer: Proposer | None = None
    check_costs: CheckCosts | None = CheckCosts()

    def __init__(
        self,
        vocab_size: int,
        *,
        num_pages: int,
        page_size: int,
        num_host_pages: int = 0,
        step_ms: float = 0.0,  # simulated duration of a step
        token_us: float = 0.0,  # additional duration per token
        kv_file: KvFile | None = None,  # where the cache outlives this process
    ) -> None:
        self._vocab_size = vocab_size
        self._page_size = page_size
        self._step_s = step_ms / 1e3
        self._token_s = token_us / 1e6
        self._cells: Int64 = np.full((num_pages + 1, page_size), _POISON, np.int64)
        self.page_records: PageRecords | None = None
        if kv_file is not None:
            num_bytes = self._cells.nbytes
            arena = kv_file.arena(padded(num_bytes), num_pages=num_pages, page_size=page_size, key=HASH_MODEL)
            memory, self.page_records = arena.take(num_bytes).view(np.int64), kv_file.records
            if kv_file.is_new:
                memory[:] = _POISON
            self._cells = memory.reshape(num_pages + 1, page_size)
        self._host_cells: Int64 = np.full((num_host_pages, page_size), _POISON, np.int64)
        self._masks = MaskMaker()
        self._results: deque[StepResult] = deque()
        self._last_tokens: Int32 = np.empty(0, np.int32)  # of the latest launched step

    def is_fatal(self, error: Exception) -> bool:
        return False  # there is no device that could fail

    def prepare(self, seconds: float) -> bool:
        return False

    def show_progress(self, word: Int64) -> int:
        return 1

    def load_adapters(self, config: ModelConfig, places: Places) -> Callable[[], None] | None:
        return lambda: None  # an adapter is its number

    def move(self, moves: Moves) -> None:
        cells, host_cells = self._cells, self._host_cells
        for page, host_page in moves.swap_out:
            host_cells[host_page] = cells[page]
        for source, target in moves.copies:
            cells[target] = cells[source]
        for page, host_page in moves.swap_in:
            cells[page] = host_cells[host_page]

    def launch(self, inputs: StepInputs) -> None:
        masks = self._masks.begin(inputs.sampled)
        if pretended_s := self._step_s + self._token_s * len(inputs.token_ids):
            time.sleep(pretended_s)
        inputs = resolve(inputs, self._last_tokens)
        cells = inputs.positions.astype(np.int64) * _STRIDE + inputs.token_ids
        if (adapters := inputs.token_adapters) is not None:
            cells += adapters
        self._cells.reshape(-1)[inputs.slot_mapping] = cells
        self._cells[0] = _POISON  # reading the trash page changes the text
        result = self._sample(inputs, masks)
        if inputs.scored:
            result = replace(result, scores=self._score(inputs))
        if inputs.embedded:
            result = replace(result, states=self._embed(inputs))
        self._last_tokens = result.token_ids
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def _sample(self, inputs: StepInputs, masks: PendingMasks | None) -> StepResult:
        allowed, failed = NO_MASKS if masks is None else masks.wait()
        owners = np.searchsorted(inputs.query_starts, inputs.sample_rows, side="right") - 1
        token_ids = np.zeros(len(owners), np.int32)
        logprobs, candidates = {}, {}
        num_behind = inputs.query_starts[owners + 1] - 1 - inputs.sample_rows  # in the same sequence, in this step
        lengths = (inputs.context_lens[owners] - num_behind).tolist()
        for row, (owner, num_tokens, sequence) in enumerate(zip(owners, lengths, inputs.sampled, strict=True)):
            state = self._read(inputs.block_tables[owner], num_tokens) + num_tokens
            noise = 0 if sequence.params.is_greedy else _noise(sequence.seed, num_tokens)
            token_ids[row] = self._choose(sequence, state + noise)
            if row in allowed:
                token_ids[row] = first_allowed(allowed[row], int(token_ids[row]))
            if sequence.params.logprobs is not None:
                logprobs[row] = self._logprobs(state, int(token_ids[row]), sequence.params.logprobs)
            if sequence.is_beam:
                count = num_candidates(sequence.params, len(sequence.stop_ids))
                likeliest = self._logprobs(state, int(token_ids[row]), min(count, self._vocab_size - 1))
                candidates[row] = Candidates(likeliest.token_ids, likeliest.logprobs)
        return StepResult(token_ids, logprobs, failed, candidates)

    def _choose(self, sequence: Sequence, state: int) -> int:
        """The next token, unless a grammar forbids it."""
        return state % (self._vocab_size - 1) + 1

    def _score(self, inputs: StepInputs) -> list[PromptScores]:
        firsts = np.cumsum([0, *(span.num_rows for span in inputs.scored)])[:-1]
        owners = np.searchsorted(inputs.query_starts, inputs.score_rows[firsts], side="right") - 1
        return [
            self._score_span(span, inputs.block_tables[owner])
            for span, owner in zip(inputs.scored, owners, strict=True)
        ]

    def _score_span(self, span: PromptSpan, block_table: Int32) -> PromptScores:
        count = span.sequence.params.prompt_logprobs or 0
        lengths = range(span.start + 1, span.start + 1 + span.num_rows)
        states = [self._read(block_table, length) + length for length in lengths]
        known = [self._logprobs(s, int(t), count) for s, t in zip(states, span.targets, strict=True)]
        ranks = [(int(t) - 1 - s) % (self._vocab_size - 1) + 1 for s, t in zip(states, span.targets, strict=True)]
        columns = ScoreColumns(
            np.array([each.chosen for each in known], np.float32),
            np.array(ranks, np.int32),
            np.array([each.token_ids for each in known], np.int32).reshape(len(known), count),
            np.array([each.logprobs for each in known], np.float32).reshape(len(known), count),
        )
        return PromptScores(span.sequence.key, span.start, columns)

    def _embed(self, inputs: StepInputs) -> list[PromptStates]:
        first = len(inputs.context_lens) - len(inputs.embedded)  # they are the last of the step
        counts = [span.num_rows for span in inputs.embedded]
        tables = np.repeat(inputs.block_tables[first:], counts, axis=0)
        lengths = (inputs.positions[inputs.embedded_rows] + 1).tolist()
        hidden = [hidden_of(self._read(table, n) + n) for table, n in zip(tables, lengths, strict=True)]
        return states_of(inputs, np.array(hidden))

    def _read(self, block_table: Int32, num_tokens: int) -> int:
        """``sum_i (i + 1) * token_i`` over the cells that ``block_table`` names."""
        num_pages = -(-num_tokens // self._page_size)
        cells = self._cells[block_table[:num_pages]].reshape(-1)[:num_tokens]
        index = np.arange(num_tokens)
        return int(np.dot(index + 1, cells - index * _STRIDE))

    def _logprobs(self, state: int, token_id: int, num_alternatives: int) -> TokenLogprobs:
        ranks = np.arange(num_alternatives)
        best = (state % (self._vocab_size - 1) + ranks) % (self._vocab_size - 1) + 1
        logprobs = (ranks + 1) * logprob_of(state, int(best[0]) if len(best) else token_id, self._vocab_size)
        chosen = logprob_of(state, token_id, self._vocab_size)
        return TokenLogprobs(chosen, best.astype(np.int32), logprobs.astype(np.float32))


def logprob_of(state: int, token_id: int, vocab_size: int) -> float:
    """Made up, but a function of the context's hash and the token: each rank lowers the logprob by the surprise of the
    likeliest token, which depends on the context.
    """
    rank = (token_id - 1 - state) % (vocab_size - 1)
    surprise = 0.25 + (state * 0x9E3779B97F4A7C15 % (1 << 64)) / (1 << 64)
    return -(rank + 1) * surprise


def state_of(tokens: Iterable[int], adapter: int = 0) -> int:
    """The hash of a context, which determines the next token and all logprobs."""
    tokens = [int(token) + adapter for token in tokens]
    return len(tokens) + sum((i + 1) * token for i, token in enumerate(tokens))


def hidden_of(state: int) -> Float32:
    """float32 [EMBEDDING_SIZE], made up, but a function of the context's hash."""
    steps = np.arange(1, EMBEDDING_SIZE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (np.uint64(state % (1 << 64)) ^ steps) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(40)).astype(np.float32) - np.float32(1 << 23)


def _noise(seed: int, position: int) -> int:
    """A number that depends only on seed and position, as from a counter-based generator."""
    return ((seed + 1) * 0x9E3779B97F4A7C15 ^ (position + 1) * 0xBF58476D1CE4E5B9) % (1 << 64) >> 20
