"""/v1/completions, compared with the definition of the hash model, which determines every token."""

from __future__ import annotations

import pytest

from tests.launch.gateway.conftest import Site
from tests.launch.gateway.scripted import Dictation
from tests.launch.gateway.sse import stream, text_of
from tests.pipeline.checks import expected

PATH = "/v1/completions"
PROMPT = [5, 6, 7]
CHAT_PATH, USER = "/v1/chat/completions", {"role": "user", "content": "hi"}


def test_completion_has_the_tokens_of_the_model(api: Site) -> None:
    reply = api.ask(PATH, model="hash-lm", prompt=PROMPT, max_tokens=20, temperature=0, return_token_ids=True)
    [choice] = reply["choices"]
    assert choice["token_ids"] == expected(PROMPT, 20)
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == api.gateway.words.decode(choice["token_ids"])
    assert (choice["finish_reason"], reply["object"], reply["model"]) == ("length", "text_completion", "hash-lm")
    assert {k: reply["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23
    }  # fmt: skip


def test_streamed_text_equals_the_complete_text(api: Site) -> None:
    whole = api.ask(PATH, prompt="some text", max_tokens=60, temperature=0)
    found = stream(api.http, PATH, prompt="some text", max_tokens=60, temperature=0)
    assert text_of(found) == whole["choices"][0]["text"]
    assert found[-1].data == "[DONE]"
    assert found[-2].data["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in event.data for event in found[:-1])


@pytest.mark.parametrize(("path", "prompt"), [(PATH, {"prompt": "hi"}), (CHAT_PATH, {"messages": [USER]})])
def test_unicode_line_separators_do_not_end_an_event(
    api: Site, path: str, prompt: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "one\u2028two\x85three\u2029four"
    Dictation(api, monkeypatch, text)
    assert text_of(stream(api.http, path, **prompt, max_tokens=60)) == text


def test_usage_is_in_the_last_chunk_only_and_only_if_requested(api: Site) -> None:
    found = stream(api.http, PATH, prompt=PROMPT, max_tokens=4, stream_options={"include_usage": True})
    *chunks, last, done = [event.data for event in found]
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


def test_each_prompt_has_its_choices(api: Site) -> None:
    prompts = [[1, 2], [3, 4, 5]]
    reply = api.ask(PATH, prompt=prompts, n=2, max_tokens=6, temperature=0, return_token_ids=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [c["token_ids"] for c in reply["choices"]] == [expected(p, 6) for p in prompts for _ in range(2)]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (5, 24)


def test_seed_may_be_negative(api: Site) -> None:
    wanted = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1, "n": 2}
    of_minus_one, of_zero, of_the_last = (api.ask(PATH, **wanted, seed=seed) for seed in (-1, 0, 2**63 - 1))
    assert of_minus_one["choices"] == of_the_last["choices"]
    assert of_minus_one["choices"][1]["text"] == of_zero["choices"][0]["text"]


def test_choices_differ_and_a_seed_repeats_them(api: Site) -> None:
    wanted = {"prompt": PROMPT, "n": 3, "max_tokens": 12, "temperature": 1, "seed": 7}
    first, second = (api.ask(PATH, **wanted)["choices"] for _ in range(2))
    assert first == second
    assert len({choice["text"] for choice in first}) == 3
    found = stream(api.http, PATH, **wanted)
    assert [text_of(found, index) for index in range(3)] == [choice["text"] for choice in first]


def test_best_of_returns_n_of_its_candidates(api: Site) -> None:
    reply = api.ask(PATH, prompt=PROMPT, n=2, best_of=4, max_tokens=5, seed=1)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 20


def test_likeliest_candidate_is_returned(demo: Site) -> None:
    wanted = {"prompt": "<|user|>What does len do?<|end|><|assistant|>", "max_tokens": 8, "seed": 3, "logprobs": 0}
    every = demo.ask(PATH, **wanted, n=4)["choices"]
    [best] = demo.ask(PATH, **wanted, best_of=4)["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in every]
    assert best["text"] == every[means.index(max(means))]["text"]


@pytest.mark.parametrize("prompt", ["echo me", [70, 71, 72]], ids=["text", "ids"])
def test_echo_prepends_the_prompt(api: Site, prompt: str | list[int]) -> None:
    text = prompt if isinstance(prompt, str) else api.gateway.words.decode(prompt)
    plain = api.ask(PATH, prompt=prompt, max_tokens=5, temperature=0)["choices"][0]["text"]
    wanted = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": True}
    assert api.ask(PATH, **wanted)["choices"][0]["text"] == text + plain
    assert text_of(stream(api.http, PATH, **wanted)) == text + plain


def test_logprobs_are_columns_of_equal_length(demo: Site) -> None:
    wanted = {"prompt": "<|user|>What does len do?<|end|><|assistant|>", "max_tokens": 6, "temperature": 0}
    [choice] = demo.ask(PATH, **wanted, logprobs=2)["choices"]
    columns = choice["logprobs"]
    assert "".join(columns["tokens"]) == choice["text"]
    assert columns["text_offset"] == [len("".join(columns["tokens"][:i])) for i in range(6)]
    for token, logprob, top in zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True):
        assert top[token] == pytest.approx(logprob) == pytest.approx(max(top.values()))  # greedy: the likeliest
    streamed = [e.data["choices"][0]["logprobs"] for e in stream(demo.http, PATH, **wanted, logprobs=2)[:-2]]
    assert [t for part in streamed for t in part["tokens"]] == columns["tokens"]
    assert [o for part in streamed for o in part["text_offset"]] == columns["text_offset"]


def test_text_ends_before_a_stop_string(demo: Site) -> None:
    wanted = {"prompt": "<|user|>What does len do?<|end|><|assistant|>", "max_tokens": 20, "temperature": 0}
    [choice] = demo.ask(PATH, **wanted, stop=[" of"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Return the number", "stop")
    [choice] = demo.ask(PATH, **wanted, stop=" of", include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "Return the number of"


def test_logit_bias_changes_the_chosen_token(demo: Site) -> None:
    wanted = {"prompt": "<|user|>What does len do?<|end|><|assistant|>", "max_tokens": 3, "temperature": 0}
    token_id = demo.gateway.words.encode("z", add_special_tokens=False)[0]
    assert demo.ask(PATH, **wanted, logit_bias={str(token_id): 100})["choices"][0]["text"] == "zzz"


def test_repeated_prompt_is_found_in_the_cache(api: Site) -> None:
    prompt = list(range(1, 100))
    api.ask(PATH, prompt=prompt, max_tokens=1)
    usage = api.ask(PATH, prompt=prompt, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 80
    usage = api.ask(PATH, prompt=prompt, max_tokens=1, cache_salt="another")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_ledger_is_part_of_the_usage(api: Site) -> None:
    [ledger] = api.ask(PATH, prompt=PROMPT, max_tokens=5)["usage"]["triptych"]["ledgers"]
    assert sum(ledger["stages_ms"].values()) == pytest.approx(ledger["wall_ms"], rel=0.02)


def test_prompt_can_be_truncated_on_the_left(api: Site) -> None:
    wanted = {"prompt": list(range(1, 11)), "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    [choice] = api.ask(PATH, **wanted, truncate_prompt_tokens=4)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8, 9, 10], expected([7, 8, 9, 10], 3))


def test_tokens_are_merged_up_to_the_stream_interval(api: Site) -> None:
    assert api.driver is not None
    from tests.launch.gateway.conftest import site

    with site(api.driver.run_dir, stream_interval=10) as merging:
        found = stream(merging.http, PATH, prompt=PROMPT, max_tokens=64, temperature=0, return_token_ids=True)
    sizes = [len(e.data["choices"][0].get("token_ids", ())) for e in found[:-2]]
    assert sum(sizes) == 64
    assert all(size >= 10 for size in sizes[1:-1])
