"""The gated delta rule at every level that this processor supports, compared with its definition in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.library import load_library
from triptych.workers.execute.kernels.memory import Arena, padded
from triptych.workers.execute.kernels.structures import DeltaLayer, DeltaShape

Floats = npt.NDArray[np.float32]
Exact = npt.NDArray[np.float64]

EPS, NUM_TOKENS, NOBODY = 1e-6, 23, 2  # NOBODY: the row of states that are zero
SHAPES = [(1, 1, 16, 16, 2), (2, 4, 16, 48, 4), (1, 3, 48, 80, 4), (2, 2, 128, 128, 4), (1, 2, 32, 64, 1)]

load_cached = cache(load_library)


class Rule:
    """A random one with two rows of states, which are NaN before a sequence writes them."""

    def __init__(self, level: str, shape: tuple[int, int, int, int, int]) -> None:
        self.key_heads, self.heads, self.key_dim, self.value_dim, self.taps = shape
        self.library, self.shape = load_cached(level), DeltaShape(*shape, 0)
        self.num_outputs = self.heads * self.value_dim
        self.channels = 2 * self.key_heads * self.key_dim + self.num_outputs
        rng = np.random.default_rng(sum(shape))
        self.convolution = rng.normal(size=(self.taps, self.channels)).astype(np.float32)
        self.rates, self.biases = (rng.uniform(0.1, 2, self.heads).astype(np.float32) for _ in range(2))
        self.norm = rng.uniform(0.5, 1.5, self.value_dim).astype(np.float32)
        self._arena = Arena(1 << 22)
        sizes = (self.num_outputs * self.key_dim, (self.taps - 1) * self.channels)
        self.kept = [self._arena.floats(3 * size).reshape(3, size) for size in sizes]
        for rows in self.kept:
            rows[:NOBODY] = np.nan
        vectors = (self.convolution, self.rates, self.biases, self.norm, *self.kept)
        fields = ("convolution", "rates", "rate_biases", "norm", "states", "inputs")
        self.layer = DeltaLayer(
            **{field: vector.ctypes.data for field, vector in zip(fields, vectors, strict=True)}
        )  # fmt: skip
        self.projected = rng.normal(size=(NUM_TOKENS, self.channels + self.num_outputs)).astype(np.float32)
        self.gates = rng.normal(size=(NUM_TOKENS, 2, padded(self.heads, 16))).astype(np.float32)

    def run(self, chunks: list[int]) -> Floats:
        """[tokens, outputs] of a sequence with these chunks, alternating between the rows."""
        outputs, start, read = np.empty((sum(chunks), self.num_outputs), np.float32), 0, NOBODY
        for index, count in enumerate(chunks):
            self.step(start, read, [(count, index % 2)], outputs[start:])
            start, read = start + count, index % 2
        return outputs

    def step(self, start: int, read: int, segments: list[tuple[int, int]], outputs: Floats) -> None:
        """A chunk from token ``start`` on, in segments of (tokens of the chunk up to its end, row to write)."""
        places = (array[start:].ctypes.data for array in (self.projected, self.gates))
        ends, writes = np.array(segments, np.int32).T.copy()
        self.library.triptych_delta_rule(
            self.shape, self.layer, EPS, *places, segments[-1][0], read,
            len(segments), ends.ctypes.data, writes.ctypes.data, outputs.ctypes.data,
        )  # fmt: skip

    def exact(self) -> Exact:
        """The definition's result."""
        projected, gates = self.projected.astype(np.float64), self.gates[:, :, : self.heads].astype(np.float64)
        before = np.zeros((self.taps - 1, self.channels))
        inputs = np.concatenate([before, projected[:, : self.channels]])
        mixed = silu(sum(self.convolution[tap] * inputs[tap : tap + NUM_TOKENS] for tap in range(self.taps)))
        queries, keys, values = np.split(mixed, [self.key_heads * self.key_dim, 2 * self.key_heads * self.key_dim], 1)
        repeat, outputs = self.heads // self.key_heads, []
        betas = 1 / (1 + np.exp(-gates[:, 0]))
        decays = np.exp(-self.rates * np.log1p(np.exp(gates[:, 1] + self.biases)))
        for head in range(self.heads):
            own = slice(head // repeat * self.key_dim, (head // repeat + 1) * self.key_dim)
            columns = slice(head * self.value_dim, (head + 1) * self.value_dim)
            state = np.zeros((self.key_dim, self.value_dim))
            read = []
            for t in range(NUM_TOKENS):
                query, key = to_length(queries[t, own]) / self.key_dim**0.5, to_length(keys[t, own])
                state = decays[t, head] * state
                state = state + np.outer(key, betas[t, head] * (values[t, columns] - key @ state))
                read.append(query @ state)
            found = np.array(read)
            found = found / np.sqrt((found**2).mean(axis=1, keepdims=True) + EPS) * self.norm
            outputs.append(found * silu(projected[:, self.channels :][:, columns]))
        return np.concatenate(outputs, axis=1)


def silu(x: Exact) -> Exact:
    result: Exact = x / (1 + np.exp(-x))
    return result


def to_length(x: Exact) -> Exact:
    result: Exact = x / np.sqrt((x**2).sum() + 1e-6)
    return result


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_equal_float64_and_have_the_same_bits_in_any_chunks(
    level: str, shape: tuple[int, int, int, int, int]
) -> None:
    rule = Rule(level, shape)
    whole, exact = rule.run([NUM_TOKENS]), rule.exact()
    assert np.abs(whole - exact).max() < 2e-5 * np.abs(exact).max()
    for chunks in ([1] * NUM_TOKENS, [2, 1, 7, 13], [22, 1], [5, 18]):
        assert np.array_equal(rule.run(chunks), whole), chunks


@pytest.mark.parametrize("level", available_levels())
def test_initial_state_of_a_step_is_kept(level: str) -> None:
    rule = Rule(level, SHAPES[1])
    rule.run([9])
    kept = [rows.copy() for rows in rule.kept]
    outputs = np.empty((2, 4, rule.num_outputs), np.float32)
    for output in outputs:
        rule.step(9, 0, [(4, 1)], output)
    assert np.array_equal(outputs[0], outputs[1])
    for rows, before in zip(rule.kept, kept, strict=True):
        assert np.array_equal(rows[0], before[0])
        assert not rows[NOBODY].any()


@pytest.mark.parametrize("level", available_levels())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunk_writes_the_state_at_the_end_of_each_segment(level: str, shape: tuple[int, int, int, int, int]) -> None:
    rule = Rule(level, shape)
    whole = rule.run([NUM_TOKENS])
    outputs = np.empty_like(whole)
    rule.step(0, NOBODY, [(7, 0), (NUM_TOKENS, 1)], outputs)
    assert np.array_equal(outputs, whole)
    for read, start, ends in ((0, 7, [1, 2, 5]), (0, 7, [NUM_TOKENS - 7])):
        rest = np.empty((ends[-1], rule.num_outputs), np.float32)
        rule.step(start, read, [(end, 1) for end in ends], rest)
        assert np.array_equal(rest, whole[start : start + ends[-1]])
