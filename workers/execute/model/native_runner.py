"""The runner of dense decoders on a CPU: one call into the compiled kernels a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from ..sampling.sampler import Sampler
from ..scheduling.moves import Moves
from ..scheduling.sequence import Sequence
from ..step import StepInputs, StepResult
from .moves import PageMover
from .native_decoder import NativeDecoder
from .runner import trash_decodes, trash_prefill


class NativeRunner:
    """Computes steps in the order of their launch. Owns the decoder and with it the pages."""

    def __init__(
        self,
        decoder: NativeDecoder,
        sampler: Sampler,
        *,
        prefill_tokens: int,
        decode_rows: int,
        num_host_pages: int = 0,
    ) -> None:
        self._decoder = decoder
        self._mover = PageMover([torch.from_numpy(pool) for pool in decoder.pools], num_host_pages)
        self._sampler = sampler
        self._prefill_tokens = prefill_tokens  # of the greatest step that warm_up tries
        self._decode_rows = decode_rows
        self._results: deque[StepResult] = deque()

    def move(self, moves: Moves) -> None:
        self._mover(moves)

    def launch(self, inputs: StepInputs) -> None:
        """Computes the step before it returns: on a CPU there is nobody to wait for."""
        self._results.append(self._step(inputs))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def warm_up(self) -> float:
        """Seconds of the slower of a full step of prefill and one of decodes. Only the trash page is written."""
        seconds = []
        for inputs in (trash_prefill(self._prefill_tokens), trash_decodes(self._decode_rows)):
            start = time.perf_counter()
            self._step(inputs)
            seconds.append(time.perf_counter() - start)
        return max(seconds)

    def _step(self, inputs: StepInputs) -> StepResult:
        outputs = self._decoder.run(inputs)
        if _all_plain(inputs.sampled) and np.isfinite(outputs.greatest).all():
            return StepResult(outputs.tokens.copy())
        with torch.inference_mode():
            return self._sampler.sample(torch.from_numpy(outputs.logits), inputs.sampled)


def _all_plain(sequences: Iterable[Sequence]) -> bool:
    """Whether every sequence takes the token with the greatest logit, and asks for nothing else."""
    return all(
        p.temperature == 0.0
        and p.logprobs is None
        and p.repetition_penalty == 1.0
        and p.presence_penalty == p.frequency_penalty == 0.0
        and not p.min_tokens
        and not p.logit_bias
        for p in (sequence.params for sequence in sequences)
    )
