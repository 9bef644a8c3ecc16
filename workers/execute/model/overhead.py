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
    free_before = _free_bytes(device)
    runner = make_runner(PoolSize(1, max_model_len))  # padding writes to the trash page and reads nothing else
    runner.warm_up()
    # The largest graphs bring the memory that all of them share; of the others only the recording counts.
    num_more_graphs = runner.capture_graphs(lambda _done, _total: None, at_most=2)
    # What the allocator holds now was needed at some time, and stays with it.
    overhead = max(0, free_before - _free_bytes(device)) + num_more_graphs * _GRAPH_BYTES + _SLACK_BYTES
    del runner
    _free_bytes(device)
    torch.cuda.empty_cache()
    logger.info("activations and graphs take %.2f GiB", overhead / (1 << 30))
    return overhead


def _free_bytes(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]
