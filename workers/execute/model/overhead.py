"""What steps take of a GPU's memory beside weights and pages: measured by running the largest ones."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from .pool import PoolSize
from .step_runner import StepRunner

logger = logging.getLogger(__name__)

_GRAPH_BYTES = 8 << 20  # of a recording of some hundred launches
_SLACK_BYTES = 256 << 20  # fragments, and libraries that load what they need at their first use


def step_overhead(make_runner: Callable[[PoolSize], StepRunner], device: torch.device, max_model_len: int) -> int:
    """Bytes that activations and graphs take at most. 0 on a CPU, whose pool leaves room by itself."""
    if device.type != "cuda":
        return 0
    _settle(device)
    torch.cuda.reset_peak_memory_stats(device)
    held_before, outside_before = torch.cuda.memory_reserved(device), _outside_bytes(device)
    runner = make_runner(PoolSize(1, max_model_len))  # padding writes to the trash page and reads nothing else
    # Before the largest steps: graphs keep their memory while steps run, and what is captured empties the cache first,
    # so that the peaks of steps before it would not be seen together with it.
    num_more_graphs = runner.capture_largest()
    runner.warm_up()
    held = torch.cuda.max_memory_reserved(device) - held_before
    outside = max(0, _outside_bytes(device) - outside_before)
    overhead = held + outside + num_more_graphs * _GRAPH_BYTES + _SLACK_BYTES
    del runner
    _settle(device)
    logger.info("activations and graphs take %.2f GiB", overhead / (1 << 30))
    return overhead


def _settle(device: torch.device) -> None:
    """Nothing is computed any more, and nothing is held that nobody uses."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _outside_bytes(device: torch.device) -> int:
    """What torch's allocator does not know of: kernels, graphs, work space of libraries, other processes."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
