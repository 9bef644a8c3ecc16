"""What models require of an attention kernel: write keys and values by slot, attend by block table.

Axes: T tokens of the step, H query heads, J key/value heads (H is a multiple of J), D query and key channels,
E value channels, N pages, P tokens per page.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..step import StepInputs


class LayerCache(NamedTuple):
    """The pages of one layer. Page 0 is the trash page: padding writes to it, and its content is meaningless.

    With ``scales``, keys and values are int8; see ``eight_bits``.
    """

    keys: torch.Tensor  # [N, P, J, D]
    values: torch.Tensor  # [N, P, J, E]
    scales: torch.Tensor | None = None  # bfloat16 [N, J, S, P]

    @property
    def pools(self) -> list[torch.Tensor]:
        """All tensors that hold pages."""
        return [pool for pool in self if pool is not None]


class AttentionForm(NamedTuple):
    """The arithmetic of one layer's attention, regardless of where its keys are stored."""

    scale: float
    sliding_window: int | None = None  # keys a token attends to, itself included; None: all before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # [H], a score per head that takes weight but contributes no value


class PagedAttention(Protocol):
    """Causal attention over pages. One object serves all layers of one runner, a step at a time."""

    def begin_step(self, inputs: StepInputs) -> None:
        """Prepare, once, what all layers of the step share."""
        ...

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the step's keys [T, J, D] and values [T, J, E] in the slots of its slot mapping."""
        ...

    def attend(self, cache: LayerCache, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        """Outputs [T, H, E] of queries [T, H, D] over the sequences' written keys, including those of the step."""
        ...
