"""The orders of rank 0 to the other ranks, as bytes: the arrays of a step, or the pages to move before one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from ...scheduling.moves import Moves
from ...step import StepInputs

_ARRAYS = {
    "token_ids": "<i4",
    "positions": "<i4",
    "slot_mapping": "<i8",
    "query_starts": "<i4",
    "context_lens": "<i4",
    "sample_rows": "<i4",
}


def encode_order(order: StepInputs | Moves) -> bytes:
    """Encode an order as one MessagePack map. Sampled sequences are left out, as only rank 0 samples tokens."""
    packed: bytes = msgpack.packb(_step_map(order) if isinstance(order, StepInputs) else _moves_map(order))
    return packed


def decode_order(order: dict[str, Any]) -> StepInputs | Moves:
    if "moves" in order:
        return Moves(*(tuple((int(a), int(b)) for a, b in pairs) for pairs in order["moves"]))
    arrays: dict[str, Any] = {
        name: np.frombuffer(order[name], dtype).copy() for name, dtype in _ARRAYS.items()
    }  # torch needs writable arrays
    num_sequences = len(arrays["context_lens"])
    adapters = order["adapters"]
    return StepInputs(
        **arrays,
        block_tables=np.frombuffer(order["block_tables"], "<i4").reshape(num_sequences, -1).copy(),
        num_decodes=order["num_decodes"],
        adapters=None if adapters is None else np.frombuffer(adapters, "<i4").copy(),
        sampled=(),
    )


def _step_map(inputs: StepInputs) -> dict[str, Any]:
    wanted = replace(inputs, sample_rows=inputs.logit_rows)  # includes the rows of scored tokens
    arrays = {name: getattr(wanted, name).astype(dtype).tobytes() for name, dtype in _ARRAYS.items()}
    tables = np.ascontiguousarray(inputs.block_tables, "<i4").tobytes()
    adapters = None if inputs.adapters is None else inputs.adapters.astype("<i4").tobytes()
    return {**arrays, "block_tables": tables, "num_decodes": int(inputs.num_decodes), "adapters": adapters}


def _moves_map(moves: Moves) -> dict[str, Any]:
    return {"moves": [moves.swap_out, moves.copies, moves.swap_in]}
