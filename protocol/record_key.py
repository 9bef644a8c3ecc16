"""A request as workers name it to each other: the slot of its record in the journal, and the record's generation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .messages import Forgotten, Release

Key = tuple[int, int]  # slot and generation: no two records ever have the same


def number_of(key: Key) -> int:
    """The key as 64 bits, for an intent."""
    return key[0] << 32 | key[1]


def key_of(number: int) -> Key:
    """The inverse of ``number_of``."""
    return number >> 32, number & 0xFFFFFFFF


def key_columns(keys: Sequence[Key]) -> tuple[bytes, bytes]:
    """Slots and generations as columns of a message, uint32."""
    slots, generations = np.array(keys, "<u4").reshape(-1, 2).T
    return slots.tobytes(), generations.tobytes()


def keys_in(message: Release | Forgotten) -> list[Key]:
    """The inverse of ``key_columns``."""
    slots, generations = (np.frombuffer(each, "<u4").tolist() for each in (message.slots, message.generations))
    return list(zip(slots, generations, strict=True))
