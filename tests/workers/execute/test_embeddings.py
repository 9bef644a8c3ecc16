"""Embeddings in the engine: one for each prompt and right, however it is cut, shared, preempted or interrupted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.workers.execute.factories import expected_embedding, expected_output, make_engine, make_sequence
from triptych.protocol.arrays import Float32
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import EMBEDDING_SIZE, HashRunner, hidden_of, state_of
from triptych.workers.execute.scheduling.pooling import (
    LAST_STATE,
    MEAN,
    MEAN_SQRT,
    POOLINGS,
    WEIGHTED_MEAN,
    Pooling,
    pool,
)
from triptych.workers.execute.scheduling.recording import describe_sequence, rebuild_sequence
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step import StepInputs

ALL_POOLINGS = pytest.mark.parametrize("pooling", [Pooling(mode, mode != "mean") for mode in POOLINGS], ids=POOLINGS)


def embedded(index: int, *, pooling: Pooling = LAST_STATE, **options: Any) -> Sequence:
    sequence = make_sequence(index, max_tokens=0, **options)
    sequence.embedding_size, sequence.pooling = EMBEDDING_SIZE, pooling
    return sequence


def run(engine: Engine) -> tuple[dict[Key, Float32], dict[Key, list[int]]]:
    """Embeddings and tokens of every sequence, with the invariants checked."""
    embeddings: dict[Key, Float32] = {}
    tokens: dict[Key, list[int]] = {}
    while engine.has_work:
        outputs = engine.step()
        assert outputs is not None
        engine.check()
        assert not outputs.embeddings.keys() & embeddings.keys(), "a prompt was embedded twice"
        embeddings |= outputs.embeddings
        for key, token_id in outputs.progress.by_key().items():
            tokens.setdefault(key, []).append(token_id)
    return embeddings, tokens


def assert_right(sequence: Sequence, embeddings: dict[Key, Float32]) -> None:
    np.testing.assert_allclose(embeddings[sequence.key], expected_embedding(sequence), rtol=1e-6)
    assert sequence.finish_reason == "length"


@ALL_POOLINGS
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prompts_are_embedded_in_any_batch(chunk: int, depth: int, pooling: Pooling) -> None:
    sequences = [embedded(i, num_tokens=n, pooling=pooling) for i, n in enumerate((60, 1, 31))]
    mates = [make_sequence(i, num_tokens=20, max_tokens=30, prompt_logprobs=i - 3) for i in (3, 4)]
    embeddings, tokens = run(make_engine(mates[0], *sequences, mates[1], prefill_chunk=chunk, depth=depth))
    for sequence in sequences:
        assert_right(sequence, embeddings)
    assert embeddings.keys() == {sequence.key for sequence in sequences}
    assert tokens == {mate.key: expected_output(mate) for mate in mates}


@ALL_POOLINGS
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_prompts_are_embedded(preemption: str, pooling: Pooling) -> None:
    sequences = [embedded(i, num_tokens=40, pooling=pooling) for i in range(3)]
    mates = [make_sequence(i, num_tokens=20, max_tokens=40) for i in range(3, 6)]
    options: dict[str, Any] = {"preemption": preemption, "host_pages": 20 * (preemption == "swap")}
    engine = make_engine(*mates, *sequences, num_pages=22, prefill_chunk=8, **options)
    embeddings, _ = run(engine)
    assert engine.stats.num_preemptions > 0
    for sequence in sequences:
        assert_right(sequence, embeddings)


def test_cached_prompt_is_embedded_from_its_last_token() -> None:
    first, second = (embedded(i, speaker=0, num_tokens=40) for i in range(2))
    engine = make_engine(first, prefix_cache=True)
    embeddings, _ = run(engine)
    engine.add(second)
    embeddings |= run(engine)[0]
    assert_right(first, embeddings)
    assert_right(second, embeddings)
    assert second.num_cached_tokens == 39


def test_mean_of_a_cached_prompt_has_the_states_of_all_tokens() -> None:
    first, second = (embedded(i, speaker=0, num_tokens=40, pooling=Pooling(MEAN)) for i in range(2))
    mate = make_sequence(2, speaker=0, num_tokens=40, max_tokens=5)
    engine = make_engine(first, prefix_cache=True)
    embeddings, _ = run(engine)
    engine.add(second)
    engine.add(mate)
    embeddings |= run(engine)[0]
    assert_right(second, embeddings)
    np.testing.assert_array_equal(embeddings[second.key], embeddings[first.key])
    assert (second.num_cached_tokens, mate.num_cached_tokens) == (0, 39)


@ALL_POOLINGS
def test_replayed_prompt_starts_at_the_same_token(pooling: Pooling) -> None:
    """That of a mean is not taken from the cache there either."""
    sequence = embedded(0, num_tokens=40, pooling=pooling)
    replayed = rebuild_sequence(sequence.key, describe_sequence(sequence, sequence.tokens))
    assert replayed.num_reusable_tokens == sequence.num_reusable_tokens == (39 if pooling.mode == "lasttoken" else 0)


def test_mean_does_not_depend_on_its_chunks() -> None:
    """By no bit, though the sum of these numbers depends on how they are grouped."""
    rng = np.random.default_rng(0)
    states = (rng.standard_normal((60, 8)) * 10.0 ** rng.integers(-9, 9, (60, 8))).astype(np.float32)
    found = []
    for cuts in ([], [7], [20, 21, 50], range(1, 60)):
        sequence = embedded(0, num_tokens=60, pooling=Pooling(MEAN))
        sequence.embedding_size = 8
        for start, part in zip([0, *cuts], np.split(states, cuts), strict=True):
            found.append(pool(sequence, start, part))
            sequence.num_pooled_tokens = start + len(part)
    complete = [each for each in found if each is not None]
    assert len(complete) == 4
    assert all(np.array_equal(each, complete[0]) for each in complete)


@pytest.mark.parametrize("mode", [MEAN, MEAN_SQRT, WEIGHTED_MEAN])
def test_embedding_that_is_not_scaled_to_one_has_the_length_of_its_mode(mode: str) -> None:
    states = np.stack([hidden_of(state_of(range(end)))[:EMBEDDING_SIZE] for end in range(1, 11)])
    sequence = embedded(0, num_tokens=10, pooling=Pooling(mode, normalizes=False))
    sequence.tokens[:10] = range(10)
    found = pool(sequence, 0, states)
    assert found is not None
    np.testing.assert_allclose(found, expected_embedding(sequence), rtol=1e-6)


def test_prompt_whose_embedding_is_known_is_not_embedded_again() -> None:
    sequence = embedded(0, num_tokens=30)
    sequence.embedding_size = 0  # as the bookkeeper sets it if the journal has the embedding
    assert run(make_engine(sequence))[0] == {}
    assert sequence.finish_reason == "length"


def test_prompt_that_cannot_be_embedded_fails_alone() -> None:
    class Broken(HashRunner):
        def launch(self, inputs: StepInputs) -> None:
            if any(span.sequence.key == (1, 0) for span in inputs.embedded):
                raise RuntimeError("no")
            super().launch(inputs)

        def collect(self) -> Any:
            result = super().collect()
            for states in result.states:
                if states.key == (2, 0):
                    states.values[0] = np.nan
            return result

    sequences = [embedded(i, num_tokens=30) for i in range(4)]  # all in one step
    embeddings, _ = run(make_engine(*sequences, runner=Broken, prefill_chunk=30, max_num_batched_tokens=120))
    assert [sequence.finish_reason for sequence in sequences] == ["length", "error", "error", "length"]
    for sequence in (sequences[0], sequences[3]):
        assert_right(sequence, embeddings)
