"""Arithmetic for the sizes of launches and of pages in eight bits.

Triton's functions of these names can be called in kernels too, which costs the host 2 us per call: a sixth of the time
that the launches of a step take.
"""

from __future__ import annotations

KEY_GROUP = 32  # channels of a key that share a scale in eight bits


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def num_scales(key_dim: int) -> int:
    """Scales of a token and head in eight bits: those of the key's groups, and that of the value."""
    return cdiv(key_dim, KEY_GROUP) + 1
