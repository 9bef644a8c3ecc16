"""Damaged copies of valid bytes: flipped bits, pieces cut, doubled or moved, and wrong length fields."""

from __future__ import annotations

import random
from collections.abc import Callable

INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xc0",
    b"\xff\xff\xff\xff",
    b"\x00" * 8,
    b"\xc7",
    b"\xdd\xff\xff\xff\xff",
)
MAX_GROWTH = 64


def mutate(rng: random.Random, source: bytes) -> bytes:
    """One to four damages."""
    damaged = bytearray(source)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(_DAMAGES)(rng, damaged)
    return bytes(damaged)


def _place(rng: random.Random, damaged: bytearray) -> int:
    return rng.randrange(len(damaged) + 1)


def _turn_bits(rng: random.Random, damaged: bytearray) -> None:
    if damaged:
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, damaged: bytearray) -> None:
    piece, at = rng.choice(INTERESTING), _place(rng, damaged)
    damaged[at : at + len(piece)] = piece


def _insert(rng: random.Random, damaged: bytearray) -> None:
    at = _place(rng, damaged)
    damaged[at:at] = rng.choice((rng.choice(INTERESTING), rng.randbytes(rng.randrange(1, 9))))


def _cut(rng: random.Random, damaged: bytearray) -> None:
    at = _place(rng, damaged)
    del damaged[at : at + rng.choice((1, 4, len(damaged)))]


def _repeat(rng: random.Random, damaged: bytearray) -> None:
    at = _place(rng, damaged)
    damaged[at:at] = damaged[at : at + rng.randrange(1, MAX_GROWTH)]


def _nest(rng: random.Random, damaged: bytearray) -> None:
    at = _place(rng, damaged)
    damaged[at:at] = rng.choice((b"\x91", b"\x81\x01", b"[", b'{"a":')) * rng.choice((2, 9, 2000))


_DAMAGES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    _turn_bits, _turn_bits, _overwrite, _insert, _cut, _repeat, _nest,
)  # fmt: skip
