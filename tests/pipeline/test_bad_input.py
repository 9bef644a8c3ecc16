"""Whatever arrives at a public socket is answered or dropped; the next request is served."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from tests.pipeline.checks import assert_quiet, expected
from tests.pipeline.conftest import hash_driver
from tests.pipeline.raw import FOLLOW, GET_INFO, GET_STATS, INFO, REJECTED, STATS, SUBMIT, RawClient
from triptych import Driver
from triptych.protocol.errors import DuplicateId, Overloaded, RequestError

NUM_GARBAGE = 10_000


def random_frames(rng: random.Random, count: int) -> list[list[bytes]]:
    """Random bytes, well-formed MessagePack of the wrong kind, damaged messages, and multipart messages."""
    valid = msgpack.packb([SUBMIT, 1, 0, 0, "fuzz", {"prompt": "hi", "max_tokens": 1}])

    def one() -> list[bytes]:
        kind = rng.randrange(6)
        if kind == 0:
            return [rng.randbytes(rng.randrange(0, 200))]
        if kind == 1:
            return [msgpack.packb(rng.choice([None, 1, [], {}, [1], [1, 1, 0, 0], ["a"] * 5, [99, 1, 0, 0], 2.5]))]
        if kind == 2:
            return [
                msgpack.packb([rng.randrange(50), rng.randrange(3), 0, 0, *[rng.choice([1, "x", b"", [], {}])] * 3])
            ]
        if kind == 3:
            damaged = bytearray(valid)
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            return [bytes(damaged)]
        if kind == 4:
            return [b"a", b"b", rng.randbytes(3)]
        return [b"\x91" * rng.randrange(1, 2000)]

    return [one() for _ in range(count)]


@pytest.mark.parametrize("endpoint", ["submit", "follow"])
def test_service_still_answers_after_ten_thousand_random_messages(driver: Driver, endpoint: str) -> None:
    restarts = driver.stats()["restarts"]
    with RawClient(driver.run_dir, receive_limit=0) as client:
        for frames in random_frames(random.Random(endpoint), NUM_GARBAGE):
            client.send_bytes(endpoint, *frames)
        client.ask(endpoint, *((GET_INFO, INFO) if endpoint == "submit" else (GET_STATS, STATS)))
        assert any(f[0] == REJECTED and f[5] == "bad_frame" for f in client.received[endpoint])
    assert driver.generate([4, 5, 6], max_tokens=4).token_ids == expected([4, 5, 6], 4)
    assert driver.stats()["restarts"] == restarts


def test_message_at_the_wrong_socket_is_refused(driver: Driver) -> None:
    with RawClient(driver.run_dir) as client:
        client.send("follow", SUBMIT, "astray", {"prompt": "x"})
        refused = [REJECTED, "astray", "bad_frame", "Submit does not belong on the follow socket"]
        frame = client.receive("follow")
        assert [frame[0], *frame[4:7]] == refused
        client.send("submit", FOLLOW, [["a", 0, False]])
        assert client.receive("submit")[4:7] == ["", "bad_frame", "Follow does not belong on the submit socket"]


def test_oversized_frame_disconnects_only_its_sender(driver: Driver) -> None:
    limit = driver.info()["limits"]["max_frame_bytes"]
    with RawClient(driver.run_dir) as client:
        client.send_bytes("submit", b"\x00" * (limit + 10_000))
        assert driver.generate([9, 9], max_tokens=2).token_ids == expected([9, 9], 2)


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown field": ({"prompt": "a", "tempature": 1.0}, "tempature", "unknown field"),
    "no prompt": ({}, "prompt", "exactly one of"),
    "two prompts": ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt", "exactly one of"),
    "negative temperature": ({"prompt": "a", "temperature": -1}, "temperature", "-1"),
    "nan": ({"prompt": "a", "temperature": float("nan")}, "temperature", "nan"),
    "infinite penalty": ({"prompt": "a", "presence_penalty": float("inf")}, "presence_penalty", "inf"),
    "top_p above one": ({"prompt": "a", "top_p": 1.5}, "top_p", "1.5"),
    "text for a number": ({"prompt": "a", "max_tokens": "ten"}, "max_tokens", "ten"),
    "true for a number": ({"prompt": "a", "max_tokens": True}, "max_tokens", "True"),
    "too many logprobs": ({"prompt": "a", "logprobs": 21}, "logprobs", "21"),
    "too many stops": ({"prompt": "a", "stop": ["x"] * 17}, "stop", "17"),
    "empty stop": ({"prompt": "a", "stop": [""]}, "stop", "0 characters"),
    "id out of vocabulary": ({"prompt_token_ids": [1, 258]}, "prompt_token_ids", "258"),
    "negative id": ({"prompt_token_ids": [-1]}, "prompt_token_ids", "-1"),
    "empty prompt": ({"prompt": ""}, "prompt", "no tokens"),
    "empty ids": ({"prompt_token_ids": []}, "prompt_token_ids", "no tokens"),
    "bias of an unknown id": ({"prompt": "a", "logit_bias": {999: 1.0}}, "logit_bias", "999"),
    "unknown truncation": ({"prompt": "a", "truncation": "top"}, "truncation", "top"),
    "messages without content": ({"messages": [{"role": "user"}]}, "messages", "content"),
    "lease of zero": ({"prompt": "a", "lease_s": 0}, "lease_s", "0"),
    "min over max": ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "9"),
}


@pytest.mark.parametrize(("request_map", "param", "text"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_bad_request_is_refused_with_field_and_value(
    driver: Driver, request_map: dict[str, Any], param: str, text: str
) -> None:
    with RawClient(driver.run_dir) as client:
        client.send("submit", SUBMIT, "bad", request_map)
        tag, *_, request_id, code, message, named = client.receive("submit")
        assert (tag, request_id, named) == (REJECTED, "bad", param), message
        assert text in message
        assert code in ("invalid_request", "empty_prompt")


def test_megabytes_of_empty_maps_are_refused_before_they_are_decoded(driver: Driver) -> None:
    """Each byte becomes an object of 64 bytes; decoding took so long that prepare was killed as hung."""
    restarts = driver.stats()["restarts"]
    maps = {"prompt": "x", "structured": {"json_schema": {"a": [[{}] * 65536] * 100}}}
    with RawClient(driver.run_dir) as client:
        for index in range(3):
            client.send("submit", SUBMIT, f"maps {index}", maps)
        for index in range(3):
            frame = client.receive("submit", REJECTED)
            assert frame[4:6] == [f"maps {index}", "bad_frame"]
            assert "the limit is 400000" in frame[6]
    assert driver.stats()["restarts"] == restarts


def test_too_deeply_nested_request_is_refused_with_its_id(driver: Driver) -> None:
    content: Any = "hi"
    for _ in range(80):
        content = [content]
    with RawClient(driver.run_dir) as client:
        client.send("submit", SUBMIT, "deep", {"messages": content})
        assert client.receive("submit", REJECTED)[4:6] == ["deep", "bad_frame"]


@pytest.mark.parametrize("request_id", ["", "with space", "ü", "x" * 65, "x" * 150])
def test_bad_id_is_refused_with_the_complete_id(driver: Driver, request_id: str) -> None:
    """A truncated id would match no request, and its client would repeat it for ever."""
    with RawClient(driver.run_dir) as client:
        client.send("submit", SUBMIT, request_id, {"prompt": "a"})
        frame = client.receive("submit", REJECTED)
        assert (frame[4], frame[7]) == (request_id, "request_id")


def test_answered_request_is_not_run_again(driver: Driver) -> None:
    driver.generate("once", request_id="once-only", max_tokens=3)
    assert_quiet(driver)
    with pytest.raises(DuplicateId, match="already been answered"):
        driver.generate("once", request_id="once-only", max_tokens=3)
    assert driver.generate("another", request_id="once-only", max_tokens=3).finish_reason == "length"


def test_full_journal_answers_overloaded() -> None:
    with hash_driver(hash_step_ms=20.0, arena_bytes=1 << 16) as driver:
        streams = [driver.submit([i + 1], max_tokens=4000) for i in range(4)]
        errors = []
        for stream in streams:
            try:
                stream.accepted(10)
            except RequestError as error:
                errors.append(error)
            stream.abort()
        assert errors
        assert all(isinstance(e, Overloaded) and "journal" in e.message for e in errors)
        assert_quiet(driver)
        assert driver.generate([3], max_tokens=2).token_ids == expected([3], 2)
