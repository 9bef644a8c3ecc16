"""The common base of runners for real models: steps in order, page moves, and warm-up steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ....protocol.arrays import Int64
from ....protocol.config import ModelConfig
from ....protocol.sampling import MAX_LOGPROBS, SamplingParams
from ..grammar.masks import MaskMaker
from ..scheduling.moves import Moves
from ..scheduling.page_records import PageRecords
from ..scheduling.proposals import CheckCosts, Proposer
from ..scheduling.sequence import Sequence
from ..scheduling.states import NO_ROW, Segment
from ..step import Places, PromptSpan, StepCut, StepInputs, StepResult
from .facts import Progress, no_progress
from .memory import is_out_of_memory
from .moves import PageMover
from .prefault import Prefault

_TRIALS = 3
_ENOUGH_S = 0.1  # of trials: what disturbs a step that takes longer is a small part of it
_OF_THE_DEVICE = ("CUDA error", "Triton Error [CUDA]")  # prefixes of driver errors in torch and Triton


class StepRunner(ABC):
    """Computes steps in the order of their launch; subclasses implement ``launch`` and ``collect``."""

    is_batch_invariant = False
    overlaps = False
    hides_planning = True
    proposer: Proposer | None = None
    check_costs: CheckCosts | None = None
    page_records: PageRecords | None = None

    def __init__(
        self,
        pools: list[torch.Tensor],
        *,
        prefill_tokens: int,
        decode_rows: int,
        num_host_pages: int = 0,
        max_model_len: int | None = None,
    ) -> None:
        """``pools`` are the tensors that hold the pages, see ``PageMover``."""
        self._masks = MaskMaker()
        self._mover = PageMover(pools, num_host_pages)
        self._prefault = Prefault(pools)
        self._prefill_tokens = prefill_tokens  # of the largest step in warm_up
        self._decode_rows = decode_rows
        self._max_model_len = max_model_len or prefill_tokens  # no sequence of these steps is longer

    @property
    def num_graph_steps(self) -> int:
        return 0

    def prepare(self, seconds: float) -> bool:
        return self._prefault.advance(seconds) or (self.proposer is not None and self.proposer.prepare(seconds))

    def show_progress(self, word: Int64) -> int:
        return 1

    def load_adapters(self, config: ModelConfig, places: Places) -> Callable[[], None] | None:
        return None

    @torch.inference_mode()
    def move(self, moves: Moves) -> None:
        self._mover(moves)

    @abstractmethod
    def launch(self, inputs: StepInputs) -> None: ...

    @abstractmethod
    def collect(self) -> StepResult: ...

    def capture_graphs(self, progress: Progress = no_progress) -> None:
        """Capture graphs before the first request, the largest first. Does nothing except on a GPU.

        ``progress`` gets (done, total).
        """
        return

    def capture_largest(self) -> int:
        """Capture only the graphs whose memory all others share; returns how many others may follow (0 on CPU)."""
        return 0

    def warm_up(self) -> float:
        """Run full steps of prefill and of decodes; returns the seconds of the slower. Writes only the trash page."""
        prefill = trash_prefill(self._prefill_tokens, max_len=self._max_model_len)
        return max(self.seconds_of(prefill), self.seconds_of(trash_decodes(self._decode_rows)))

    def decode_s(self, num_rows: int) -> float:
        """Measure the seconds from one token of so many sequences to the next. Writes only the trash page."""
        return self.best_seconds_of(trash_decodes(num_rows))

    def best_seconds_of(self, inputs: StepInputs) -> float:
        """The least of a few trials, fewer of a long step."""
        found = [self.seconds_of(inputs)]
        while len(found) < _TRIALS and sum(found) < _ENOUGH_S:
            found.append(self.seconds_of(inputs))
        return min(found)

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device is unusable after this error. Running out of memory is not fatal, as the memory is free
        again at the next step.
        """
        if is_out_of_memory(error):
            return False
        said = str(error)
        return isinstance(error, torch.AcceleratorError) or any(start in said for start in _OF_THE_DEVICE)

    def seconds_of(self, inputs: StepInputs) -> float:
        start = time.perf_counter()
        self._step(inputs)
        return time.perf_counter() - start

    def _step(self, inputs: StepInputs) -> StepResult:
        self.launch(inputs)
        return self.collect()


def trash_prefill(num_tokens: int, *, max_len: int | None = None) -> StepInputs:
    """A prefill of ``num_tokens`` tokens or a few more, in as few sequences of at most ``max_len`` as possible."""
    num_sequences = -(-num_tokens // (max_len or num_tokens))
    return _trash_step(num_sequences=num_sequences, tokens_each=-(-num_tokens // num_sequences))


def trash_decodes(num_rows: int) -> StepInputs:
    return _trash_step(num_sequences=num_rows, tokens_each=1)


def trash_checks(num_sequences: int, num_tokens: int) -> StepInputs:
    """Sequences with proposals, of ``num_tokens`` each, all of which are sampled."""
    inputs = _trash_step(num_sequences=num_sequences, tokens_each=num_tokens)
    total = num_sequences * num_tokens
    return replace(inputs, sample_rows=np.arange(total, dtype=np.int32), sampled=[inputs.sampled[0]] * total)


def trash_scores(num_tokens: int) -> StepInputs:
    """A prefill in which every token is scored, with the maximum number of alternatives."""
    inputs = trash_prefill(num_tokens)
    params = SamplingParams(prompt_logprobs=MAX_LOGPROBS)
    somebody = replace(inputs.sampled[0], tokens=np.zeros(num_tokens + 1, dtype=np.int32), params=params)
    rows = np.arange(num_tokens, dtype=np.int32)
    return replace(inputs, score_rows=rows, scored=(PromptSpan(somebody, 0, num_tokens),))


def with_adapter(inputs: StepInputs) -> StepInputs:
    """The same step, with the first adapter for all sequences."""
    return replace(inputs, adapters=np.ones(len(inputs.context_lens), np.int32))


def with_longest_tables(inputs: StepInputs, max_pages: int) -> StepInputs:
    """The same step, as if beside a sequence of ``max_pages`` pages: a kernel may be chosen by the longest table."""
    return replace(inputs, block_tables=np.zeros((len(inputs.context_lens), max_pages), np.int32))


def _trash_step(*, num_sequences: int, tokens_each: int) -> StepInputs:
    """Sequences that write to slot 0 and to state row 0, and read from the whole trash page. The last token of each is
    sampled.
    """
    total, num_decodes = num_sequences * tokens_each, num_sequences if tokens_each == 1 else 0
    ends = np.arange(1, num_sequences + 1, dtype=np.int32) * tokens_each
    nobody = Sequence(
        key=(0, 0),
        tokens=np.zeros(2, dtype=np.int32),
        num_prompt_tokens=1,
        num_tokens=1,
        params=SamplingParams(),
        seed=0,
        arrival=0,
    )
    return StepInputs(
        token_ids=np.zeros(total, dtype=np.int32),
        positions=np.tile(np.arange(tokens_each, dtype=np.int32), num_sequences),
        slot_mapping=np.zeros(total, dtype=np.int64),
        query_starts=np.concatenate([np.zeros(1, dtype=np.int32), ends]),
        context_lens=np.full(num_sequences, tokens_each, dtype=np.int32),
        block_tables=np.zeros((num_sequences, tokens_each), dtype=np.int32),
        num_decodes=num_decodes,
        sample_rows=ends - 1,
        sampled=[nobody] * num_sequences,
        cut=StepCut.of([Segment(NO_ROW, NO_ROW, 0, tokens_each)] * num_sequences, num_decodes=num_decodes),
    )
