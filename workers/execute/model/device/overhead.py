"""GPU memory that steps need in addition to weights and pages, measured by running the largest steps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from .....protocol.errors import ConfigError
from ..memory import is_out_of_memory
from ..pool import PoolSize
from ..step_runner import StepRunner

logger = logging.getLogger(__name__)

_GRAPH_BYTES = 8 << 20  # per graph of a few hundred launches
_SLACK_BYTES = 256 << 20  # fragmentation, and what libraries load at their first use


def step_overhead(make_runner: Callable[[PoolSize], StepRunner], device: torch.device, max_model_len: int) -> int:
    """The most bytes that activations and graphs take. 0 on a CPU, where the size of the pool leaves enough room.

    Raises:
        ConfigError: they take more than the device has beside the weights.
    """
    if device.type != "cuda":
        return 0
    _settle(device)
    torch.cuda.reset_peak_memory_stats(device)
    held_before, outside_before = torch.cuda.memory_reserved(device), _outside_bytes(device)
    try:
        runner = make_runner(PoolSize(1, max_model_len))  # padding writes to the trash page and reads nothing else
        # Before the largest steps: graphs keep their memory while steps run. A capture empties the allocator's cache
        # first, so in the reverse order the peak of the steps would not be measured together with the graphs.
        num_more_graphs = runner.capture_largest()
        runner.warm_up()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the largest steps need more memory than {device} has beside the weights: lower max_num_seqs and "
            f"prefill_chunk ({error})",
            param="max_num_seqs",
        ) from error
    held = torch.cuda.max_memory_reserved(device) - held_before
    outside = max(0, _outside_bytes(device) - outside_before)
    overhead = held + outside + num_more_graphs * _GRAPH_BYTES + _SLACK_BYTES
    del runner
    _settle(device)
    logger.info("activations and graphs take %.2f GiB", overhead / (1 << 30))
    return overhead


def _settle(device: torch.device) -> None:
    """Wait until the device is idle, and release all unused memory."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _outside_bytes(device: torch.device) -> int:
    """Memory outside torch's allocator: kernels, graphs, workspaces of libraries, other processes."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
