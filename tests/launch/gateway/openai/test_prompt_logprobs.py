"""Logprobs of prompts in vLLM's shape, and that of OpenAI's older completions, which evaluations use to score texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch.gateway.conftest import Site
from triptych.launch.gateway.openai.text_offsets import TextOffsets, prompt_offsets
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import logprob_of, state_of

PATH = "/v1/completions"
TEXT = "gr\u00fc\u00dfe, len!"


def scores(ids: list[int]) -> list[float]:
    """Of all tokens but the first, from the hash model's definition."""
    return [logprob_of(state_of(ids[:i]), ids[i], VOCAB_SIZE) for i in range(1, len(ids))]


def ids_of(api: Site, text: str) -> list[int]:
    return api.gateway.words.encode(text)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_echo_with_logprobs_scores_the_prompt(api: Site, max_tokens: int, as_ids: bool) -> None:
    ids = ids_of(api, TEXT)
    prompt: Any = ids if as_ids else TEXT
    asked = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 2, "temperature": 0}
    reply = api.ask(PATH, **asked, return_token_ids=True)
    [choice] = reply["choices"]
    columns = choice["logprobs"]
    assert {len(column) for column in columns.values()} == {len(ids) + max_tokens}
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    assert columns["token_logprobs"][1:] == pytest.approx(scores(ids + choice["token_ids"]), rel=1e-5)
    assert choice["text"].startswith(TEXT)
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (len(ids), max_tokens)
    assert columns["text_offset"][:5] == [0, 1, 2, 2, 3], "the tokens of one character have the same offset"


def test_offsets_of_a_truncated_prompt_are_those_of_its_last_tokens(api: Site) -> None:
    [choice] = api.ask(PATH, prompt=TEXT, truncate_prompt_tokens=4, max_tokens=0, echo=True, logprobs=0)["choices"]
    columns = choice["logprobs"]
    assert (columns["tokens"], choice["text"]) == (["l", "e", "n", "!"], TEXT)
    assert columns["text_offset"] == list(range(len(TEXT) - 4, len(TEXT)))


def test_every_choice_has_the_scores_of_its_own_prompt(api: Site) -> None:
    prompts = ["one prompt", "another"]
    reply = api.ask(PATH, prompt=prompts, n=2, max_tokens=2, echo=True, logprobs=0, seed=1)
    for choice in reply["choices"]:
        ids = ids_of(api, prompts[choice["index"] // 2])
        assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(scores(ids), rel=1e-5)
    assert reply["usage"]["prompt_tokens"] == sum(len(ids_of(api, prompt)) for prompt in prompts)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_prompt_logprobs_have_vllm_s_shape(api: Site, path: str) -> None:
    body: dict[str, Any] = {"prompt": TEXT} if path == PATH else {"messages": [{"role": "user", "content": TEXT}]}
    reply = api.ask(path, **body, max_tokens=1, prompt_logprobs=2, return_token_ids=True)
    found = reply["choices"][0]["prompt_logprobs"] if path == PATH else reply["prompt_logprobs"]
    ids = reply["choices"][0]["prompt_token_ids"]
    assert found[0] is None
    assert len(found) == len(ids)
    for token_id, entries, expected in zip(ids[1:], found[1:], scores(ids), strict=True):
        assert entries[str(token_id)]["logprob"] == pytest.approx(expected, rel=1e-5)
        assert {entry["rank"] for entry in entries.values()} >= {1, 2}
        assert entries[str(token_id)]["decoded_token"] == api.gateway.words.text_of(token_id)


def test_best_of_returns_prompt_logprobs_too(api: Site) -> None:
    reply = api.ask(PATH, prompt=TEXT, best_of=3, max_tokens=2, prompt_logprobs=0, seed=5)
    ids = ids_of(api, TEXT)
    found = [next(iter(entry.values()))["logprob"] for entry in reply["choices"][0]["prompt_logprobs"][1:]]
    assert found == pytest.approx(scores(ids), rel=1e-5)


def test_offsets_point_at_the_text_of_each_token(demo: Site) -> None:
    words, text = demo.gateway.words, "<|user|>Gr\u00fc\u00dfe \U0001f469 len?<|end|>"
    ids = words.encode(text)
    for token_id, offset in zip(ids, prompt_offsets(words, text, ids), strict=True):
        token = words.text_of(token_id)
        assert text.startswith(token, offset) or "\ufffd" in token


def test_skipped_special_token_has_no_width(demo: Site) -> None:
    words = demo.gateway.words
    ids = words.encode("a<|end|>b")
    assert TextOffsets(words, start=7).of(ids) == [7, 8, 8]
    assert TextOffsets(words, skip_special_tokens=False).of(ids) == [0, 1, 8]
    assert prompt_offsets(words, "ab", ids) == [0, 1, 1]
