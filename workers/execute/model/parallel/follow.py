"""Tensor parallelism on ranks other than 0: the same model, built the same way, computing what rank 0 orders."""

from __future__ import annotations

from io import RawIOBase
from pathlib import Path

import msgpack
import torch

from .....protocol.config import PipelineConfig
from ...scheduling.moves import Moves
from ..build import build_follower
from .group import join_group
from .orders import decode_order

_MAX_ORDER_BYTES = 1 << 30  # a step has at most 2^20 tokens, and their block tables


def follow(orders: RawIOBase, *, rank: int, rendezvous: Path) -> None:
    """Load this rank's shard and compute until ``orders`` ends. The first order specifies the model."""
    unpacker = msgpack.Unpacker(orders, max_buffer_size=_MAX_ORDER_BYTES)
    setup = next(unpacker)
    config = PipelineConfig.from_json(setup["config"])
    group = join_group(
        torch.device(setup["device"]), rank=rank, size=config.model.tensor_parallel_size, rendezvous=rendezvous
    )
    runner = build_follower(config, folder=Path(setup["folder"]), group=group)
    for order in map(decode_order, unpacker):
        if isinstance(order, Moves):
            runner.move(order)
        else:
            runner.compute_logits(order)
    group.leave()
