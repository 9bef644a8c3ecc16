"""Any transformers model with its attention switched to pages: the way that is open to every family."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .....protocol.config import ModelConfig
from ...attention.cpu import CpuAttention
from ...attention.forward_context import PagedLayers
from ...attention.interface import LayerCache
from ...attention.reference import ReferenceAttention
from ...kernels.support import why_no_triton
from ...sampling.sampler import Sampler
from ..device.forward import DeviceAttention, DeviceForward
from ..facts import ModelFacts, Progress, wanted_len
from ..lora import Adapter
from ..parallel.group import Group
from ..pool import EIGHT_BIT_PAGES, PoolSize, allocate_pool
from ..states import SequenceStates
from ..step_runner import StepRunner
from ..threads import num_threads
from .device_forward import TransformersForward
from .forward import PagedForward
from .loader import load_model
from .lora import TorchAdapters
from .runner import TorchRunner
from .self_test import LayerMemory, switch_to_pages

if TYPE_CHECKING:
    from ..parallel.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelOnPages:
    """A model that passed the self-test, but has no pages yet."""

    model: PreTrainedModel
    facts: ModelFacts
    kernel: CpuAttention | ReferenceAttention | DeviceAttention
    memory: LayerMemory
    device: torch.device
    group: Group
    adapters: TorchAdapters | None

    @property
    def backend(self) -> str:
        shared = f" on {self.group.size} ranks" if self.group.size > 1 else ""
        pages = EIGHT_BIT_PAGES if any(shape.dtype == torch.int8 for shape in self.memory.pages.values()) else ""
        return f"transformers with {type(self.kernel).__name__}{shared}{pages}"

    @property
    def keeps_states(self) -> bool:
        """Whether it has recurrent layers."""
        return bool(self.memory.states.shapes)

    def make_runner(
        self,
        size: PoolSize,
        *,
        page_size: int,
        num_state_rows: int,
        sizes: dict[str, int],
        ranks: Ranks | None,
        on_device: Callable[[DeviceForward, Iterable[LayerCache]], StepRunner],
    ) -> StepRunner:
        """``sizes`` are those of ``StepRunner``; ``on_device`` makes the runner if another one is better: it launches
        steps in the background, but not on several ranks.
        """
        states = SequenceStates(self.memory.states, num_state_rows, self.device) if self.keeps_states else None
        pool = allocate_pool(self.memory.pages, size.num_pages, page_size=page_size, device=self.device)
        forward = PagedForward(self.model, PagedLayers(self.kernel, pool), adapters=self.adapters, states=states)
        if self.group.size == 1 and not isinstance(self.kernel, (CpuAttention, ReferenceAttention)):
            return on_device(TransformersForward(forward, self.kernel), pool.values())
        sampler = Sampler(self.facts.eos_token_ids)
        if ranks is None:
            return TorchRunner(forward, sampler, **sizes)
        from ..parallel.ranks import LeadingRunner  # here, as only this needs msgpack

        return LeadingRunner(ranks, forward, sampler, **sizes)


def load_on_pages(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    config: ModelConfig,
    *,
    device: torch.device,
    group: Group,
    adapters: Sequence[Adapter],
    has_eight_bit_pages: bool,
    progress: Progress,
) -> ModelOnPages:
    """
    Raises:
        ConfigError: the checkpoint is missing something or damaged, its family cannot run on paged attention, or an
            adapter does not fit it.
    """
    model, facts = load_model(folder, tokenizer, dtype=config.dtype, device=device, progress=progress, group=group)
    torch.set_num_threads(num_threads(config.threads, facts.num_parameters, num_ranks=group.size))
    kernel = CpuAttention() if device.type == "cpu" else _device_kernel(device)
    hooks = TorchAdapters(model, adapters, group) if adapters else None
    memory = switch_to_pages(
        model,
        kernel,
        max_model_len=wanted_len(config, facts),
        adapters=hooks,
        has_eight_bit_pages=has_eight_bit_pages,
    )
    return ModelOnPages(model, facts, kernel, memory, device, group, hooks)


def _device_kernel(device: torch.device) -> DeviceAttention | ReferenceAttention:
    """Attention by Triton if available, otherwise by its definition, which is slow."""
    if (why := why_no_triton(device)) is not None:
        logger.warning("attention runs by its definition, which is slow: %s", why)
        return ReferenceAttention()
    from ...attention.triton import TritonAttention

    return TritonAttention(device)
