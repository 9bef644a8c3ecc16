"""Requests with several choices: one request of the pipeline, whose prompt is computed once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.launch.gateway.conftest import Site, site
from tests.launch.gateway.sse import Event, events, stream, text_of
from tests.pipeline.checks import assert_quiet
from tests.waiting import eventually
from triptych import Driver
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens

PATH = "/v1/completions"
PROMPT = list(range(1, 201))
SALTS = (f"salt {number}" for number in itertools.count())  # no test finds another test's prompt in the cache


def request_body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 20, "temperature": 1.0, "seed": 7, "cache_salt": next(SALTS), **more}


def expected_choice(index: int, num_tokens: int = 20) -> list[int]:
    return expected_tokens(PROMPT, num_tokens, VOCAB_SIZE, temperature=1.0, seed=7 + index)


def prefilled(api: Site) -> int:
    """Tokens of prompts that execute has computed, once the pipeline is idle."""
    assert api.driver is not None
    driver = api.driver
    assert_quiet(driver)
    counts: list[int] = []

    def is_published() -> bool:
        """Statistics are published a little after the work."""
        counts.append(int(driver.stats()["execute"]["prefill_tokens"]))
        return counts.count(counts[-1]) > 20

    eventually(is_published)
    return counts[-1]


def test_prompt_of_several_choices_is_computed_once(api: Site) -> None:
    before = prefilled(api)
    reply = api.ask(PATH, **request_body(n=4), return_token_ids=True)
    assert [choice["token_ids"] for choice in reply["choices"]] == [expected_choice(index) for index in range(4)]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 80)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "pages shared between choices are not cached tokens"
    assert prefilled(api) - before < 2 * 200


@pytest.mark.parametrize("body", [{"n": 2, "best_of": 5}, {"best_of": 3}], ids=["two of five", "one of three"])
def test_usage_counts_candidates_that_were_not_chosen(api: Site, body: dict[str, int]) -> None:
    before = prefilled(api)
    reply = api.ask(PATH, **request_body(**body))
    assert [choice["index"] for choice in reply["choices"]] == list(range(body.get("n", 1)))
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 20 * body["best_of"])
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert prefilled(api) - before < 2 * 200


def test_streamed_choices_have_their_logprobs_and_one_usage(api: Site) -> None:
    wanted = request_body(n=3, logprobs=2)
    whole = api.ask(PATH, **wanted)
    found = stream(api.http, PATH, **wanted, stream_options={"include_usage": True})
    for index, choice in enumerate(whole["choices"]):
        parts = [c["logprobs"] for e in found[:-2] for c in e.data["choices"] if c["index"] == index and c["logprobs"]]
        for column, values in choice["logprobs"].items():
            assert [value for part in parts for value in part[column]] == values
    usage = found[-2].data["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 60)
    assert len(usage["triptych"]["ledgers"]) == 3


def test_continuous_usage_counts_each_prompt_once(api: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(api.http, PATH, **request_body(prompt=[PROMPT, [1, 2, 3]], n=2), stream_options=options)
    assert {event.data["usage"]["prompt_tokens"] for event in found[:-1]} == {203}
    assert found[-2].data["usage"]["completion_tokens"] == 80


LONG = {"max_tokens": 120, "n": 3, "resumable": True, "stream": True}


def begin(api: Site, num_events: int, **body: Any) -> list[Event]:
    """The first events of a connection that is then closed."""
    with api.http.stream("POST", PATH, json={**request_body(**LONG), **body}) as reply:
        return [event for event, _ in zip(events(reply), range(num_events), strict=False)]


def rest(api: Site, request_id: str, **params: str) -> list[Event]:
    with api.http.stream("GET", f"/v1/requests/{request_id}", params=params) as reply:
        assert reply.status_code == 200, reply.read()
        return list(events(reply))


def test_every_choice_continues_where_it_stopped(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        first = begin(api, 40, request_id="a")
        request_id, known = first[0].data["id"], first[-1].id
        assert request_id == "cmpl.3-a"
        assert known is not None
        found = rest(api, request_id, offset=known)
        for index in range(3):
            text = text_of(first, index) + text_of(found, index)
            assert text == api.gateway.words.decode(expected_choice(index, 120))
        usage = found[-2].data["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 360)
        again = api.http.get(f"/v1/requests/{request_id}", params={"stream": False}).json()
        assert [choice["text"] for choice in again["choices"]] == [
            api.gateway.words.decode(expected_choice(index, 120)) for index in range(3)
        ]
        assert api.http.delete(f"/v1/requests/{request_id}").json()["deleted"] is True
        eventually(lambda: api.http.get(f"/v1/requests/{request_id}").status_code == 404)
        assert_quiet(slow)


def test_delete_aborts_every_choice_and_disconnects_the_readers_of_single_ones(slow: Driver) -> None:
    with (
        site(slow.run_dir) as api,
        api.http.stream("POST", PATH, json={**request_body(**LONG), "max_tokens": 3000}) as reply,
    ):
        reading = events(reply)
        request_id = next(reading).data["id"]
        assert api.http.delete(f"/v1/requests/{request_id}").status_code == 200
        assert [event.data for event in reading][-2]["error"]["code"] == "aborted"
        assert_quiet(slow)


@pytest.mark.parametrize("offset", ["5", "1,2", "1,2,3,4"])
def test_offset_has_a_number_for_each_choice(slow: Driver, offset: str) -> None:
    with site(slow.run_dir) as api:
        reply = api.http.get("/v1/requests/cmpl.3-x", params={"offset": offset})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "offset")


def test_group_is_aborted_with_its_connection(slow: Driver) -> None:
    with site(slow.run_dir) as api:
        begin(api, 3, resumable=False, max_tokens=3000)
        eventually(lambda: slow.stats()["summarize"]["live"] == 0, timeout=5)


# How a stream ends whose request was deleted through another gateway, which acknowledges the end: this one has seen
# the end before, or the request is unknown by now. Without any token it is resubmitted, and refused as already
# answered.
ENDS_ELSEWHERE = ("aborted", "unknown_id", "duplicate_id")


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_choices_that_cannot_be_resumed_are_deleted_by_their_id(slow: Driver, path: str) -> None:
    body = {**request_body(**LONG), "max_tokens": 3000, "resumable": False}
    if path != PATH:
        body["messages"] = [{"role": "user", "content": body.pop("prompt") and "hi"}]
    with site(slow.run_dir) as api, site(slow.run_dir) as other, api.http.stream("POST", path, json=body) as reply:
        reading = events(reply)
        request_id = next(reading).data["id"]
        assert other.http.delete(f"/v1/requests/{request_id}").status_code == 200
        assert [event.data for event in reading][-2]["error"]["code"] in ENDS_ELSEWHERE
        assert_quiet(slow)
