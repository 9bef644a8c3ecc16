"""Embeddings in the engine: one for each prompt and right, however it is cut, shared, preempted or interrupted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.workers.execute.factories import expected_output, make_engine, make_sequence
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.hash_lm import EMBEDDING_SIZE, HashRunner, hidden_of, state_of
from triptych.workers.execute.scheduling.sequence import Key, Sequence
from triptych.workers.execute.step import PromptEmbedding, StepInputs


def embedded(index: int, **options: Any) -> Sequence:
    sequence = make_sequence(index, max_tokens=0, **options)
    sequence.embedding_size = EMBEDDING_SIZE
    return sequence


def run(engine: Engine) -> tuple[dict[Key, PromptEmbedding], dict[Key, list[int]]]:
    """Embeddings and tokens of every sequence, with the invariants checked."""
    embeddings: dict[Key, PromptEmbedding] = {}
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


def assert_right(sequence: Sequence, embeddings: dict[Key, PromptEmbedding]) -> None:
    expected = PromptEmbedding.of(sequence, hidden_of(state_of(sequence.tokens)))
    np.testing.assert_array_equal(embeddings[sequence.key].values, expected.values)
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prompts_are_embedded_in_any_batch(chunk: int, depth: int) -> None:
    sequences = [embedded(i, num_tokens=n) for i, n in enumerate((60, 1, 31))]
    mates = [make_sequence(i, num_tokens=20, max_tokens=30, prompt_logprobs=i - 3) for i in (3, 4)]
    embeddings, tokens = run(make_engine(mates[0], *sequences, mates[1], prefill_chunk=chunk, depth=depth))
    for sequence in sequences:
        assert_right(sequence, embeddings)
    assert embeddings.keys() == {sequence.key for sequence in sequences}
    assert tokens == {mate.key: expected_output(mate) for mate in mates}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_prompts_are_embedded(preemption: str) -> None:
    sequences = [embedded(i, num_tokens=40) for i in range(3)]
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


def test_prompt_whose_embedding_is_known_is_not_embedded_again() -> None:
    sequence = embedded(0, num_tokens=30)
    sequence.embedding_size = 0  # as the bookkeeper sets it if the journal has the embedding
    assert run(make_engine(sequence))[0] == {}
    assert sequence.finish_reason == "length"


def test_prompt_that_cannot_be_embedded_fails_alone() -> None:
    class Broken(HashRunner):
        def launch(self, inputs: StepInputs) -> None:
            if any(sequence.key == (1, 0) for sequence in inputs.embedded):
                raise RuntimeError("no")
            super().launch(inputs)

        def collect(self) -> Any:
            result = super().collect()
            for embedding in result.embeddings:
                if embedding.key == (2, 0):
                    embedding.values[0] = np.nan
            return result

    sequences = [embedded(i, num_tokens=30) for i in range(4)]
    embeddings, _ = run(make_engine(*sequences, runner=Broken))
    assert [sequence.finish_reason for sequence in sequences] == ["length", "error", "error", "length"]
    for sequence in (sequences[0], sequences[3]):
        assert_right(sequence, embeddings)
