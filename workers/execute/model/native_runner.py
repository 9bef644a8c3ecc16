"""The runner of dense decoders on a CPU: steps go to the compiled kernels, which compute them one after another.

A step of which every sequence takes the likeliest token hands it on to the next one by itself. Of any other step the
tokens are chosen here, and if they are wanted by the next one, before that is submitted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from ..grammar.masks import PendingMasks
from ..sampling.kinds import SamplingKind, kind_of
from ..sampling.sampler import Sampler
from ..scheduling.moves import Moves
from ..step import StepInputs, StepResult, resolve
from .native_decoder import NativeDecoder
from .step_runner import StepRunner, trash_decodes, trash_prefill

_WARM_UP_TOKENS = 64  # enough to know what more would take


@dataclass(slots=True)
class _Pending:
    """A step that was launched and not collected."""

    inputs: StepInputs
    masks: PendingMasks | None
    is_plain: bool  # its tokens are those with the greatest logits, and nothing else is asked for
    outcome: StepResult | Exception | None = None  # None: nobody has waited for it yet

    @property
    def hands_on(self) -> bool:
        """Whether the kernels can take its tokens from it."""
        return self.is_plain and self.outcome is None


class NativeRunner(StepRunner):
    """Owns the decoder and with it the pages."""

    is_batch_invariant = True  # each row of a matrix product is summed up in one fixed order

    def __init__(self, decoder: NativeDecoder, sampler: Sampler, **sizes: int) -> None:
        """``sizes`` are those of ``StepRunner``."""
        super().__init__([torch.from_numpy(pool) for pool in decoder.pools], **sizes)
        self.overlaps = decoder.overlaps
        self._decoder = decoder
        self._sampler = sampler
        self._pending: deque[_Pending] = deque()
        self._last_tokens = np.empty(0, np.int32)  # of the step that was finished last

    def warm_up(self) -> float:
        """As ``StepRunner.warm_up``, but the steps are small ones, by which the time of full ones is estimated."""
        tokens, rows = min(self._prefill_tokens, _WARM_UP_TOKENS), min(self._decode_rows, _WARM_UP_TOKENS)
        self._decoder.reserve(num_tokens=max(self._prefill_tokens, self._decode_rows), num_rows=self._decode_rows)
        prefill_s = self.seconds_of(trash_prefill(tokens, max_len=self._max_model_len)) * self._prefill_tokens / tokens
        return max(prefill_s, self.seconds_of(trash_decodes(rows)) * self._decode_rows / rows)

    def move(self, moves: Moves) -> None:
        self._finish_all()  # what is under way may read and write these pages
        super().move(moves)

    def launch(self, inputs: StepInputs) -> None:
        masks = self._masks.begin(inputs.sampled)
        is_plain = not inputs.scored and kind_of(inputs.sampled) is SamplingKind.GREEDY
        if inputs.carried is not None and not (self._pending and self._pending[-1].hands_on):
            self._finish_all()
            inputs = resolve(inputs, self._last_tokens)
        self.hides_planning = self._decoder.submit(inputs)
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
        """What became of a step; waits for it once."""
        if pending.outcome is None:
            try:
                pending.outcome = self._choose(pending)
                self._last_tokens = pending.outcome.token_ids
            except Exception as error:  # of that step alone
                pending.outcome = error
                self._last_tokens = np.zeros(len(pending.inputs.sampled), np.int32)
        return pending.outcome

    def _choose(self, pending: _Pending) -> StepResult:
        outputs = self._decoder.wait()
        if pending.is_plain and np.isfinite(outputs.greatest).all():
            return StepResult(outputs.tokens.copy())
        with torch.inference_mode():
            return self._sampler.finish(torch.from_numpy(outputs.logits), pending.inputs, pending.masks)
