"""The group of processes that compute one model together, each with a shard of every layer.

All of them run the same steps: each holds its share of the attention heads, and keeps their keys and values in pages of
its own with the same page ids. Layers sum over the ranks by torch.distributed, following transformers' plan for the
model family.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .....protocol.errors import ConfigError
from ..checkpoint.find import has_recurrent_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Longer than any other detection: rank 0 watches for ranks that exit, and the supervisor for ranks that hang.
_TIMEOUT = timedelta(hours=1)
_CPU = torch.device("cpu")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Group:
    """This process's rank among those that share a model."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    def least(self, value: int) -> int:
        """Return the minimum of ``value`` over all ranks; every rank must call this once."""
        if self.size == 1:
            return value
        least = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least.item())

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Group()


def join_group(device: torch.device, *, rank: int, size: int, rendezvous: Path) -> Group:
    """Wait for all ``size`` processes to meet at the file ``rendezvous``, which must be new."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine: do not listen on the network
    os.environ["LOCAL_RANK"] = str(rank)  # transformers selects the device by it
    own = torch.device("cuda", rank) if device.type == "cuda" else device
    if own.type == "cuda":
        torch.cuda.set_device(own)
    store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
    dist.init_process_group(_BACKENDS[own.type], store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return Group(rank, size, own)


def check_divides(config: PretrainedConfig, device: torch.device, size: int) -> None:
    """Raise ConfigError if the model cannot be split into ``size`` equal parts, or if there is no device for each."""
    if find_spec("accelerate") is None:  # transformers needs it to place shards, but complains only while loading
        _refuse(f"tensor_parallel_size is {size}, which needs accelerate: pip install 'triptych[parallel]'")
    text = config.get_text_config()
    if not text.base_model_tp_plan:
        _refuse(f"model family {config.model_type!r} has no tensor-parallel plan, tensor_parallel_size must be 1")
    if has_recurrent_layers(config):
        _refuse(f"model family {config.model_type!r} has recurrent layers, tensor_parallel_size must be 1")
    heads = text.num_attention_heads
    for what, count in (
        ("attention heads", heads),
        ("key/value heads", getattr(text, "num_key_value_heads", None) or heads),
    ):
        if count % size:
            _refuse(f"tensor_parallel_size is {size}, which does not divide the model's {count} {what}")
    if device.index:
        last = f"cuda:{size - 1}"
        _refuse(
            f"tensor_parallel_size is {size}, which takes cuda:0 to {last}, and the device is {str(device)!r}: set "
            "CUDA_VISIBLE_DEVICES to the devices to be used"
        )
    if device.type == "cuda" and torch.cuda.device_count() < size:
        _refuse(f"tensor_parallel_size is {size}, torch sees {torch.cuda.device_count()} CUDA devices")
    if device.type == "cpu" and torch.cuda.is_available():  # transformers uses the GPU regardless
        _refuse("tensor parallelism on the CPU needs a process that sees no GPU: set CUDA_VISIBLE_DEVICES to nothing")


def _refuse(reason: str) -> None:
    raise ConfigError(reason, param="tensor_parallel_size")
