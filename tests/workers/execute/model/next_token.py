"""A model without weights and pages, for tests of its callers."""

from __future__ import annotations

import torch

from triptych.workers.execute.attention.device_step import DeviceStep


class NextToken:
    """A model whose next token is the last one plus one; it records the number of tokens of each pass."""

    vocab_size = 97

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def __call__(self, step: DeviceStep, token_ids: torch.Tensor) -> torch.Tensor:
        self.num_tokens.append(len(token_ids))
        following = (token_ids[step.sample_rows.long()] + 1) % self.vocab_size
        return torch.nn.functional.one_hot(following, self.vocab_size).float()
