"""Delta rules and state spaces at every level that this processor supports, compared with their definitions in
float64.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.workers.execute.kernels.levels import load_cached
from triptych.workers.execute.kernels.compile import available_levels
from triptych.workers.execute.kernels.memory import Arena, padded
from triptych.workers.execute.kernels.structures import DeltaLayer, DeltaShape, StateSpaceLayer, StateSpaceShape

Floats = npt.NDArray[np.float32]
Exact = npt.NDArray[np.float64]

EPS, NUM_TOKENS, NOBODY = 1e-6, 23, 2  # NOBODY: the row of states that are zero


class Recurrence:
    """A random one with two rows of states, which are NaN before a sequence writes them."""

    function: str  # in the library

    def __init__(self, level: str, *shape: int) -> None:
        raise NotImplementedError

    def draw(self, level: str, *, num_outputs: int, taps: int, channels: int, state_size: int, gates: int) -> None:
        """``state_size`` numbers are kept per output, and there are ``gates`` numbers per token, padding included."""
        self.library, self.num_outputs, self.taps, self.channels = load_cached(level), num_outputs, taps, channels
        self.rng = np.random.default_rng(num_outputs + taps + channels)
        self.convolution = self.rng.normal(size=(taps, channels)).astype(np.float32)
        self._arena = Arena(1 << 22)
        sizes = (num_outputs * state_size, (taps - 1) * channels)
        self.kept = [self._arena.floats(3 * size).reshape(3, size) for size in sizes]
        for rows in self.kept:
            rows[:NOBODY] = np.nan
        self.projected = self.rng.normal(size=(NUM_TOKENS, channels + num_outputs)).astype(np.float32)
        self.gates = self.rng.normal(size=(NUM_TOKENS, gates)).astype(np.float32)
        self.shape: ctypes.Structure
        self.layer: ctypes.Structure

    def vector(self, low: float, high: float, size: int) -> Floats:
        return self.rng.uniform(low, high, size).astype(np.float32)

    def addresses(self, **vectors: Floats) -> dict[str, int]:
        """Fields of ``layer``, with those that all recurrences have."""
        vectors |= {"convolution": self.convolution, "states": self.kept[0], "inputs": self.kept[1]}
        self.vectors = vectors  # kept alive
        return {name: vector.ctypes.data for name, vector in vectors.items()}

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
        getattr(self.library, self.function)(
            self.shape, self.layer, EPS, *places, segments[-1][0], read,
            len(segments), ends.ctypes.data, writes.ctypes.data, outputs.ctypes.data,
        )  # fmt: skip

    def mixed(self, biases: Exact | float = 0.0) -> Exact:
        """The outputs of the convolution, [tokens, channels]."""
        inputs = np.concatenate([np.zeros((self.taps - 1, self.channels)), self.projected[:, : self.channels]])
        return silu(biases + sum(self.convolution[tap] * inputs[tap : tap + NUM_TOKENS] for tap in range(self.taps)))

    def exact(self) -> Exact:
        """The definition's result."""
        raise NotImplementedError


class DeltaRule(Recurrence):
    function = "triptych_delta_rule"

    def __init__(self, level: str, *shape: int) -> None:
        self.key_heads, self.heads, self.key_dim, self.value_dim, taps = shape
        num_outputs, gates = self.heads * self.value_dim, 2 * padded(self.heads, 16)
        channels = 2 * self.key_heads * self.key_dim + num_outputs
        self.draw(level, num_outputs=num_outputs, taps=taps, channels=channels, state_size=self.key_dim, gates=gates)
        self.rates, self.biases = (self.vector(0.1, 2, self.heads) for _ in range(2))
        self.norm = self.vector(0.5, 1.5, self.value_dim)
        self.shape = DeltaShape(*shape, 0)
        self.layer = DeltaLayer(**self.addresses(rates=self.rates, rate_biases=self.biases, norm=self.norm))

    def exact(self) -> Exact:
        gates = self.gates.reshape(NUM_TOKENS, 2, -1)[:, :, : self.heads].astype(np.float64)
        keys_end = 2 * self.key_heads * self.key_dim
        queries, keys, values = np.split(self.mixed(), [keys_end // 2, keys_end], 1)
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
            found = normed(np.array(read)) * self.norm
            outputs.append(found * silu(self.projected[:, self.channels :][:, columns]))
        return np.concatenate(outputs, axis=1)


class StateSpace(Recurrence):
    function = "triptych_state_space"

    def __init__(self, level: str, *shape: int) -> None:
        self.heads, self.head_dim, self.groups, self.state_size, taps, self.norm_size, *norms_first = shape
        self.norms_first = any(norms_first)
        num_outputs = self.heads * self.head_dim
        self.draw(
            level,
            num_outputs=num_outputs,
            taps=taps,
            channels=num_outputs + 2 * self.groups * self.state_size,
            state_size=self.state_size,
            gates=self.heads,
        )
        self.rates, self.biases, self.skips = (self.vector(0.1, 2, self.heads) for _ in range(3))
        self.norm, self.convolution_biases = self.vector(0.5, 1.5, num_outputs), self.vector(-1, 1, self.channels)
        self.multipliers = 0.7, 1.3  # of gates and of dt
        self.shape = StateSpaceShape(*shape[:6], self.norms_first, *self.multipliers)
        self.layer = StateSpaceLayer(
            **self.addresses(
                rates=self.rates, dt_biases=self.biases, skips=self.skips, norm=self.norm,
                convolution_biases=self.convolution_biases,
            )
        )  # fmt: skip

    def exact(self) -> Exact:
        ends = [self.num_outputs, self.num_outputs + self.groups * self.state_size]
        xs, bs, cs = np.split(self.mixed(self.convolution_biases.astype(np.float64)), ends, 1)
        dts = np.log1p(np.exp(self.multipliers[1] * self.gates.astype(np.float64) + self.biases))
        outputs = np.empty((NUM_TOKENS, self.num_outputs))
        for head in range(self.heads):
            group = head // (self.heads // self.groups)
            own = slice(group * self.state_size, (group + 1) * self.state_size)
            columns = slice(head * self.head_dim, (head + 1) * self.head_dim)
            state = np.zeros((self.state_size, self.head_dim))
            for t in range(NUM_TOKENS):
                x, dt = xs[t, columns], dts[t, head]
                state = np.exp(-self.rates[head] * dt) * state + np.outer(bs[t, own], dt * x)
                outputs[t, columns] = cs[t, own] @ state + self.skips[head] * x
        gates = silu(self.multipliers[0] * self.projected[:, self.channels :].astype(np.float64))
        if not self.norm_size:
            return outputs * gates
        outputs = outputs if self.norms_first else outputs * gates
        grouped = normed(outputs.reshape(NUM_TOKENS, -1, self.norm_size)).reshape(outputs.shape) * self.norm
        return grouped * gates if self.norms_first else grouped


def silu(x: Any) -> Exact:
    result: Exact = x / (1 + np.exp(-x))
    return result


def normed(x: Exact) -> Exact:
    result: Exact = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)
    return result


def to_length(x: Exact) -> Exact:
    result: Exact = x / np.sqrt((x**2).sum() + 1e-6)
    return result


DELTA_RULES = [(1, 1, 16, 16, 2), (2, 4, 16, 48, 4), (1, 3, 48, 80, 4), (2, 2, 128, 128, 4), (1, 2, 32, 64, 1)]
STATE_SPACES = [(4, 16, 2, 32, 4, 0), (2, 80, 1, 48, 2, 160), (6, 32, 3, 128, 4, 64), (2, 64, 2, 16, 1, 64, 1)]
CASES = [*((DeltaRule, shape) for shape in DELTA_RULES), *((StateSpace, shape) for shape in STATE_SPACES)]

each_case = pytest.mark.parametrize(("kind", "shape"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
each_level = pytest.mark.parametrize("level", available_levels())


@each_level
@each_case
def test_outputs_equal_float64_and_have_the_same_bits_in_any_chunks(
    level: str, kind: type[Recurrence], shape: tuple[int, ...]
) -> None:
    rule = kind(level, *shape)
    whole, exact = rule.run([NUM_TOKENS]), rule.exact()
    assert np.abs(whole - exact).max() < 2e-5 * np.abs(exact).max()
    for chunks in ([1] * NUM_TOKENS, [2, 1, 7, 13], [22, 1], [5, 18]):
        assert np.array_equal(rule.run(chunks), whole), chunks


@each_level
@pytest.mark.parametrize("rule", [(DeltaRule, DELTA_RULES[1]), (StateSpace, STATE_SPACES[0])], ids=["delta", "space"])
def test_initial_state_of_a_step_is_kept(level: str, rule: tuple[type[Recurrence], tuple[int, ...]]) -> None:
    kind, shape = rule
    made = kind(level, *shape)
    made.run([9])
    kept = [rows.copy() for rows in made.kept]
    outputs = np.empty((2, 4, made.num_outputs), np.float32)
    for output in outputs:
        made.step(9, 0, [(4, 1)], output)
    assert np.array_equal(outputs[0], outputs[1])
    for rows, before in zip(made.kept, kept, strict=True):
        assert np.array_equal(rows[0], before[0])
        assert not rows[NOBODY].any()


@each_level
@each_case
def test_chunk_writes_the_state_at_the_end_of_each_segment(
    level: str, kind: type[Recurrence], shape: tuple[int, ...]
) -> None:
    rule = kind(level, *shape)
    whole = rule.run([NUM_TOKENS])
    outputs = np.empty_like(whole)
    rule.step(0, NOBODY, [(7, 0), (NUM_TOKENS, 1)], outputs)
    assert np.array_equal(outputs, whole)
    for read, start, ends in ((0, 7, [1, 2, 5]), (0, 7, [NUM_TOKENS - 7])):
        rest = np.empty((ends[-1], rule.num_outputs), np.float32)
        rule.step(start, read, [(end, 1) for end in ends], rest)
        assert np.array_equal(rest, whole[start : start + ends[-1]])
