"""Embeddings through the whole pipeline: exact for any chunks, beside any requests, and after crashes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.waiting import eventually
from triptych import Client, Driver
from triptych.driver.embedding import Embedding
from triptych.protocol.errors import InvalidRequest, RequestError, RequestTooLong
from triptych.workers.execute.hash_build import MAX_MODEL_LEN
from triptych.workers.execute.hash_lm import EMBEDDING_SIZE, hidden_of, state_of

PROMPT = [(7 * i) % 250 + 1 for i in range(100)]


def assert_embedded(embedding: Embedding, prompt: Sequence[int] = PROMPT, dimensions: int = EMBEDDING_SIZE) -> None:
    hidden = hidden_of(state_of(prompt))[:dimensions].astype(np.float64)
    np.testing.assert_array_equal(embedding.values, (hidden / np.sqrt(np.square(hidden).sum())).astype(np.float32))


def test_prompts_are_embedded_beside_answers(driver: Driver) -> None:
    mates = [driver.submit(PROMPT[: 10 + i], max_tokens=50) for i in range(5)]
    prompts = [PROMPT[:n] for n in (1, 2, 99, 100)]
    seen: list[Embedding] = []
    for prompt, embedding in zip(prompts, driver.embed_all(prompts, progress=seen.append), strict=True):
        assert_embedded(embedding, prompt)
        assert embedding.usage["prompt_tokens"] == len(prompt)
        assert embedding.usage["completion_tokens"] == 0
    assert len(seen) == len(prompts)
    assert all(mate.result(30).embedding is None for mate in mates)


@pytest.mark.parametrize(("name", "instruction"), [("query", "find: "), ("document", ""), ("", ""), (None, "")])
def test_instruction_of_the_checkpoint_is_put_before_a_text(driver: Driver, name: str | None, instruction: str) -> None:
    embedding = driver.embed("as text", prompt_name=name)
    assert_embedded(embedding, [1 + byte for byte in f"{instruction}as text".encode()])


def test_fewer_dimensions_have_length_1_again(driver: Driver) -> None:
    embedding = driver.embed("as text", dimensions=3)
    assert_embedded(embedding, [1 + byte for byte in b"as text"], 3)
    assert np.linalg.norm(embedding.values) == pytest.approx(1.0)
    assert sum(embedding.ledger["stages_ms"].values()) == pytest.approx(embedding.ledger["wall_ms"])


def test_prompt_may_fill_the_whole_context(driver: Driver) -> None:
    prompt = (PROMPT * 50)[:MAX_MODEL_LEN]
    assert_embedded(driver.embed(prompt), prompt)
    assert_embedded(driver.embed([9, *prompt], truncation="left"), prompt)
    with pytest.raises(RequestTooLong):
        driver.embed([9, *prompt])


@pytest.mark.parametrize("role", ["prepare", "execute", "summarize"])
def test_embedding_survives_a_crash_of_any_worker(slow_prefill: Driver, role: str) -> None:
    before = slow_prefill.stats()["execute"]["prefill_tokens"]
    stream = slow_prefill.submit(PROMPT, embedding=True)
    stream.accepted(30)
    eventually(lambda: slow_prefill.stats()["execute"]["prefill_tokens"] > before + 8 or stream.done)
    pid = slow_prefill.pids[role]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert_embedded(Embedding.of(stream.result(60)))
    eventually(lambda: slow_prefill.pids[role] not in (None, pid) and slow_prefill.health().status == "ok", timeout=30)


def test_another_client_gets_it_with_the_end(slow_prefill: Driver) -> None:
    prompt = PROMPT * 5  # half a second, so that the first client has left before the end
    with Client(slow_prefill.run_dir) as first:
        request_id = first.submit(prompt, embedding=True).accepted(30).request_id
    with Client(slow_prefill.run_dir) as second:
        assert_embedded(Embedding.of(second.resume(request_id).result(30)), prompt)


def test_aborted_request_has_no_embedding(slow_prefill: Driver) -> None:
    stream = slow_prefill.submit(PROMPT * 20, embedding=True)
    stream.accepted(30)
    stream.abort()
    with pytest.raises(RequestError, match="abort"):
        Embedding.of(stream.result(30))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"dimensions": EMBEDDING_SIZE + 1}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"prompt_name": "query"}, "prompt_name"),  # before token ids
        ({"prompt_name": 1}, "prompt_name"),
        ({"embedding": False, "prompt_name": "query"}, "prompt_name"),
        ({"embedding": 1}, "embedding"),
        ({"embedding": False, "dimensions": 3}, "dimensions"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"temperature": 0.5}, "temperature"),
        ({"structured": {"regex": "a"}}, "structured"),
    ],
    ids=str,
)
def test_what_an_embedding_cannot_have_is_refused_by_name(driver: Driver, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        driver.generate(PROMPT, **{"embedding": True, **options})
    assert caught.value.param == param
