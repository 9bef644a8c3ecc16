"""/v1/rerank and /v1/score, compared with the probabilities given by the model itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch.gateway.conftest import Site
from tests.launch.gateway.test_decisions import logprob_by_completions
from triptych.launch.gateway.requests.option_scores import softmax
from triptych.launch.gateway.reranking import INSTRUCTION, SYSTEM

QUERY = "What does len do?"
TEXTS = ["len returns the number of items.", "abs returns the absolute value.", "zip iterates over several iterables."]


def relevance(
    api: Site, text: str, *, query: str = QUERY, instruction: str = INSTRUCTION, limit: int | None = None
) -> float:
    """By another route, from the tokens of the prompt in the model's own chat format, of which ``limit`` are kept."""
    question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    ids = api.ask("/tokenize", messages=messages)["tokens"]
    kept = ids if limit is None else [*ids[: limit // 2], *ids[-limit // 2 :]]
    prompt = api.gateway.words.decode(kept, skip_special_tokens=False)
    assert question in prompt or limit is not None
    return softmax([logprob_by_completions(api, prompt, option) for option in ("yes", "no")])[0]


def test_texts_are_sorted_by_the_probability_of_yes(demo: Site) -> None:
    reply = demo.ask("/v1/rerank", query=QUERY, documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]])
    found = {result["index"]: result["relevance_score"] for result in reply["results"]}
    assert found == pytest.approx({index: relevance(demo, text) for index, text in enumerate(TEXTS)}, rel=0.05)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert [result["document"] for result in reply["results"]] == [{"text": TEXTS[index]} for index in found]
    assert reply["id"].startswith("rerank-")
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 100


def test_only_the_best_are_returned(demo: Site) -> None:
    whole = demo.ask("/v1/rerank", query=QUERY, documents=TEXTS)["results"]
    [best] = demo.ask("/v1/rerank", query=QUERY, documents=TEXTS, top_n=1, return_documents=False)["results"]
    assert best == {"index": whole[0]["index"], "relevance_score": pytest.approx(whole[0]["relevance_score"], rel=0.05)}


@pytest.mark.parametrize(
    ("path", "same"), [("/rerank", "/v1/rerank"), ("/v2/rerank", "/v1/rerank"), ("/score", "/v1/score")]
)
def test_routes_have_the_paths_that_clients_of_others_use(demo: Site, path: str, same: str) -> None:
    pair = {"text_1": QUERY, "text_2": TEXTS[0]} if "score" in path else {"query": QUERY, "documents": TEXTS[:1]}
    assert demo.ask(path, **pair).keys() == demo.ask(same, **pair).keys()


def test_instruction_is_part_of_the_prompt(demo: Site) -> None:
    asked = {"text_1": QUERY, "text_2": TEXTS[0], "instruction": "Find what is about numbers"}
    [row] = demo.ask("/v1/score", **asked)["data"]
    assert row["score"] == pytest.approx(relevance(demo, TEXTS[0], instruction=asked["instruction"]), rel=0.05)


@pytest.mark.parametrize("limit", [-1, 300])
def test_middle_of_a_long_prompt_can_be_left_out(demo: Site, limit: int) -> None:
    """Its beginning has the query, and its end is where the model answers."""
    asked = {"query": QUERY, "documents": ["word " * 3000, "len"]}
    assert demo.refusal("/v1/rerank", **asked)[1]["code"] == "context_length_exceeded"
    reply = demo.ask("/v1/rerank", **asked, truncate_prompt_tokens=limit)
    assert {result["index"] for result in reply["results"]} == {0, 1}
    num_short = demo.ask("/v1/rerank", query=QUERY, documents=["len"])["usage"]["prompt_tokens"]
    num_long = reply["usage"]["prompt_tokens"] - num_short
    assert num_long == limit if limit > 0 else 1000 < num_long < 1024


def test_prompt_is_cut_in_its_middle(demo: Site) -> None:
    [row] = demo.ask("/v1/score", text_1=QUERY, text_2="word " * 900, truncate_prompt_tokens=200)["data"]
    assert row["score"] == pytest.approx(relevance(demo, "word " * 900, limit=200), rel=0.05)


@pytest.mark.parametrize(
    ("queries", "texts", "pairs"),
    [
        (QUERY, TEXTS[:2], [(QUERY, TEXTS[0]), (QUERY, TEXTS[1])]),
        ([QUERY, "What does abs do?"], TEXTS[:2], [(QUERY, TEXTS[0]), ("What does abs do?", TEXTS[1])]),
    ],
    ids=["one", "each"],
)
def test_pairs_are_scored_in_their_order(demo: Site, queries: Any, texts: Any, pairs: list[tuple[str, str]]) -> None:
    reply = demo.ask("/v1/score", text_1=queries, text_2=texts)
    expected = [relevance(demo, text, query=query) for query, text in pairs]
    assert [row["score"] for row in reply["data"]] == pytest.approx(expected, rel=0.05)
    assert [row["index"] for row in reply["data"]] == [0, 1]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 4}, "max_tokens_per_doc"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "another"}, "model"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    ids=["none", "many", "negative", "query", "unknown", "pairs", "empty", "model", "cut"],
)
def test_what_cannot_be_scored_is_refused_by_name(api: Site, route: str, body: dict[str, Any], param: str) -> None:
    _, error = api.refusal(route, **body)
    assert error["param"] == param
