"""A model without weights and pages, for tests of its callers, and a device runner with it."""

from __future__ import annotations

from typing import Any

import torch

from triptych.workers.execute.attention.device_step import DeviceStep
from triptych.workers.execute.model.device.graphs import GraphCapture
from triptych.workers.execute.model.device.runner import DeviceRunner
from triptych.workers.execute.sampling.sampler import Sampler


class NextToken:
    """A model whose next token is the last one plus one; it records the number of tokens of each pass."""

    vocab_size = 97

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        self.num_tokens.append(len(token_ids))
        following = (token_ids[step.logit_rows.long()] + 1) % self.vocab_size
        return torch.nn.functional.one_hot(following, self.vocab_size).float()


def make_runner(forward: NextToken, capture: GraphCapture | None = None, **options: Any) -> DeviceRunner:
    return DeviceRunner(
        [], forward, Sampler(()), device=torch.device("cpu"), max_sampled=8, max_pages=16, capture=capture,
        **{"prefill_tokens": 8, "decode_rows": 4, **options},
    )  # fmt: skip
