"""The runner of dense decoders on a CPU: one call into the compiled kernels a step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ..sampling.sampler import Sampler
from ..scheduling.sequence import Sequence
from ..step import StepInputs, StepResult
from .native_decoder import NativeDecoder
from .step_runner import StepRunner


class NativeRunner(StepRunner):
    """Owns the decoder and with it the pages."""

    is_batch_invariant = True  # each row of a matrix product is summed up in one fixed order

    def __init__(self, decoder: NativeDecoder, sampler: Sampler, **sizes: int) -> None:
        """``sizes`` are those of ``StepRunner``."""
        super().__init__([torch.from_numpy(pool) for pool in decoder.pools], **sizes)
        self._decoder = decoder
        self._sampler = sampler

    def _step(self, inputs: StepInputs) -> StepResult:
        masks = self._masks.begin(inputs.sampled)
        outputs = self._decoder.run(inputs)
        if masks is None and not inputs.scored and _all_plain(inputs.sampled) and np.isfinite(outputs.greatest).all():
            return StepResult(outputs.tokens.copy())
        with torch.inference_mode():
            return self._sampler.finish(torch.from_numpy(outputs.logits), inputs, masks)


def _all_plain(sequences: Iterable[Sequence]) -> bool:
    """Whether every sequence takes the token with the greatest logit, and asks for nothing else."""
    return all(
        p.temperature == 0.0
        and p.logprobs is None
        and not p.is_beam_search
        and p.repetition_penalty == 1.0
        and p.presence_penalty == p.frequency_penalty == 0.0
        and not p.min_tokens
        and not p.logit_bias
        for p in (sequence.params for sequence in sequences)
    )
