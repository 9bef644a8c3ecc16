"""The runner for dense decoders on a CPU: passes steps to the compiled kernels, which compute them in order.

If every sequence of a step is sampled greedily, the kernels pass its tokens on to the next step. The tokens of any
other step are sampled here, and if the next step needs them, before that step is submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from .....protocol.arrays import Int64
from .....protocol.config import ModelConfig
from ...grammar.masks import PendingMasks
from ...sampling.kinds import SamplingKind, kind_of
from ...sampling.sampler import Sampler
from ...scheduling.moves import Moves
from ...scheduling.proposals import CheckCosts
from ...step import Places, StepInputs, StepResult, resolve, states_of
from ..step_runner import StepRunner, trash_decodes, trash_prefill
from .decoder import NativeDecoder
from .late_adapters import LateAdapters
from .lora import PackedAdapters

_WARM_UP_TOKENS = 64  # enough to extrapolate to larger steps


@dataclass(slots=True)
class _Pending:
    """A step that was launched but not collected."""

    inputs: StepInputs
    masks: PendingMasks | None
    is_plain: bool  # sampled greedily, with nothing but the tokens requested
    outcome: StepResult | Exception | None = None  # None: not waited for yet

    @property
    def passes_tokens_on(self) -> bool:
        """Whether the kernels can pass its tokens on to the next step."""
        return self.is_plain and self.outcome is None


class NativeRunner(StepRunner):
    """Owns the decoder, and so the pages."""

    is_batch_invariant = True  # each row of a matrix product is summed in a fixed order
    check_costs: CheckCosts | None = CheckCosts()

    def __init__(
        self, decoder: NativeDecoder, sampler: Sampler, adapters: LateAdapters | None = None, **sizes: int
    ) -> None:
        """``sizes`` are those of ``StepRunner``."""
        super().__init__([torch.from_numpy(pool) for pool in decoder.pools], **sizes)
        self.overlaps = decoder.overlaps
        self._decoder = decoder
        self._sampler = sampler
        self._adapters = adapters
        self._pending: deque[_Pending] = deque()
        self._last_tokens = np.empty(0, np.int32)  # of the step finished last
        decoder.reserve(num_tokens=max(self._prefill_tokens, self._decode_rows), num_rows=self._decode_rows)

    def warm_up(self) -> float:
        """Like ``StepRunner.warm_up``, but extrapolates the time of full steps from small ones."""
        tokens, rows = min(self._prefill_tokens, _WARM_UP_TOKENS), min(self._decode_rows, _WARM_UP_TOKENS)
        prefill_s = self.seconds_of(trash_prefill(tokens, max_len=self._max_model_len)) * self._prefill_tokens / tokens
        return max(prefill_s, self.seconds_of(trash_decodes(rows)) * self._decode_rows / rows)

    def show_progress(self, word: Int64) -> int:
        self._decoder.show_progress(word)
        if self.proposer is not None:
            self.proposer.show_progress(word)
        return self._decoder.num_layers

    def load_adapters(self, config: ModelConfig, places: Places) -> Callable[[], None] | None:
        if self._adapters is None or (packed := self._adapters.load(config, places, self._decoder.adapters)) is None:
            return None
        return partial(self._use_adapters, packed)

    def _use_adapters(self, adapters: PackedAdapters) -> None:
        self._finish_all()
        self._decoder.adapt(adapters)

    def move(self, moves: Moves) -> None:
        self._finish_all()  # steps in flight may read and write these pages
        super().move(moves)

    def launch(self, inputs: StepInputs) -> None:
        masks = self._masks.begin(inputs.sampled)
        is_plain = not inputs.scored and kind_of(inputs.sampled) is SamplingKind.GREEDY
        if inputs.carried is not None and not (self._pending and self._pending[-1].passes_tokens_on):
            self._finish_all()
            inputs = resolve(inputs, self._last_tokens)
        self.hides_planning = self._decoder.submit(inputs, only_greatest=is_plain)
        self._pending.append(_Pending(inputs, masks, is_plain))

    def collect(self) -> StepResult:
        outcome = self._finish(self._pending.popleft())
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _finish_all(self) -> None:
        for pending in self._pending:
            self._finish(pending)

    def _finish(self, pending: _Pending) -> StepResult | Exception:
        """The outcome of a step; waits for the step if it has none yet."""
        if pending.outcome is None:
            try:
                pending.outcome = self._choose(pending)
                self._last_tokens = pending.outcome.token_ids
            except Exception as error:  # affects that step only
                pending.outcome = error
                self._last_tokens = np.zeros(len(pending.inputs.sampled), np.int32)
        return pending.outcome

    def _choose(self, pending: _Pending) -> StepResult:
        outputs = self._decoder.wait()
        if pending.is_plain and np.isfinite(outputs.greatest).all():
            states = states_of(pending.inputs, outputs.hidden)
            return StepResult(outputs.tokens.copy(), states=states)
        with torch.inference_mode():
            logits = torch.from_numpy(outputs.logits)
            return self._sampler.finish(logits, pending.inputs, pending.masks, hidden=outputs.hidden)
