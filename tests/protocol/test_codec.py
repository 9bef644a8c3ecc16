"""A frame decodes to exactly the message it was made of, or raises a ``BadFrame`` that says why."""

from __future__ import annotations

import itertools
import random
import typing
from dataclasses import fields
from typing import Any, cast

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.factories import PLAIN_VALUES, values_of
from triptych.protocol import messages as m
from triptych.protocol.codec import (
    MAX_DEPTH,
    MAX_FIELDS,
    MAX_ITEMS,
    MAX_VALUES,
    TAGS,
    VERSION,
    content_key,
    decode,
    decode_public,
    encode,
    pack,
    peek_request_id,
    unpack,
)
from triptych.protocol.errors import BadFrame

# A tag that was once given to a message is never given to another one: existing clients rely on it.
GOLDEN_TAGS = {
    1: "Submit",
    2: "GetInfo",
    3: "Accepted",
    4: "Rejected",
    5: "Info",
    10: "Follow",
    11: "Abort",
    12: "Acknowledge",
    13: "GetStatus",
    14: "GetStats",
    15: "GetRequests",
    20: "Text",
    21: "Finished",
    22: "Failed",
    23: "Status",
    24: "Stats",
    25: "Requests",
    40: "Prepared",
    41: "StepDone",
    42: "Release",
    43: "Forgotten",
}
COUNTS = st.integers(0, 2**64 - 1)
SUBMIT = m.Submit("a", {"prompt": "hello", "max_tokens": 3})
PUBLIC_BYTES = 1 << 16


def frame(*values: Any) -> bytes:
    return pack(list(values))


def submit_frame(request: Any) -> bytes:
    return frame(1, VERSION, 0, 0, "a", request)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def messages_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, *(values_of(hints[field.name]) for field in fields(kind)))


def test_tags_are_never_reused() -> None:
    assert {tag: kind.__name__ for tag, kind in TAGS.items()} == GOLDEN_TAGS


def test_every_message_has_one_tag() -> None:
    kinds = [kind for kind in vars(m).values() if isinstance(kind, type) and kind.__module__ == m.__name__]
    assert sorted(kind.__name__ for kind in kinds) == sorted(kind.__name__ for kind in TAGS.values())


@pytest.mark.parametrize("kind", TAGS.values(), ids=lambda kind: str(kind.__name__))
@settings(max_examples=30, deadline=None)
@given(data=st.data(), epoch=COUNTS, seq=COUNTS)
def test_every_message_survives_encoding(kind: type[Any], data: st.DataObject, epoch: int, seq: int) -> None:
    message = data.draw(messages_of(kind))
    assert decode(encode(message, epoch=epoch, seq=seq)) == (message, epoch, seq)


@settings(deadline=None)
@given(PLAIN_VALUES)
def test_plain_values_survive_packing(value: Any) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([99, VERSION, 0, 0], "unknown tag 99"),
        ([0, VERSION, 0, 0], "unknown tag 0"),
        ([1, VERSION + 1, 0, 0, "a", {}], "protocol version 2 is not supported, this service uses 1"),
        ([1, 0, 0, 0, "a", {}], "protocol version 0 is not supported, this service uses 1"),
        ([1, VERSION, 0, 0, "a"], "Submit has 1 fields, expected 2: request_id, request"),
        ([1, VERSION, 0, 0, "a", {}, 1], "Submit has 3 fields, expected 2: request_id, request"),
        ([2, VERSION, 0, 0, 1], "GetInfo has 1 fields, expected none"),
    ],
)
def test_unknown_tag_version_or_field_count_is_refused(values: list[Any], reason: str) -> None:
    with pytest.raises(BadFrame) as caught:
        decode(frame(*values))
    assert caught.value.message == reason


@pytest.mark.parametrize(
    ("values", "param", "reason"),
    [
        ([1, VERSION, 0, 0, 5, {}], "request_id", "Submit.request_id must be str, got int"),
        ([1, VERSION, 0, 0, b"a", {}], "request_id", "Submit.request_id must be str, got bytes"),
        ([1, VERSION, 0, 0, "a", []], "request", "Submit.request must be dict, got list"),
        ([1, VERSION, 0, 0, "a", None], "request", "Submit.request must be dict, got NoneType"),
        ([3, VERSION, 0, 0, "a", True, 0, 0], "num_prompt_tokens", "Accepted.num_prompt_tokens must be int, got bool"),
        ([3, VERSION, 0, 0, "a", 1.0, 0, 0], "num_prompt_tokens", "Accepted.num_prompt_tokens must be int, got float"),
        ([4, VERSION, 0, 0, "a", "c", "m", 1], "param", "Rejected.param must be str or NoneType, got int"),
    ],
)
def test_field_of_the_wrong_type_is_refused_with_its_name(values: list[Any], param: str, reason: str) -> None:
    with pytest.raises(BadFrame) as caught:
        decode(frame(*values))
    assert (caught.value.message, caught.value.param) == (reason, param)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (m.Follow([["a", 0, True]] * 1025), "a FOLLOW has 1025 entries, the limit is 1024"),
        (m.Follow([["a", 0, True], ["b", -1, True]]), "a FOLLOW entry for b has -1 tokens, the least is 0"),
        (m.Follow([["a", 0]]), "a FOLLOW entry is [request id, tokens, again], got ['a', 0]"),
        (m.Follow([["a", 0, 1]]), "a FOLLOW entry is [request id, tokens, again], got ['a', 0, 1]"),
        (m.Follow([["a", 0.0, True]]), "a FOLLOW entry is [request id, tokens, again], got ['a', 0.0, True]"),
        (m.Follow(cast(Any, ["a"])), "a FOLLOW entry is [request id, tokens, again], got 'a'"),
        (m.Acknowledge(cast(Any, ["a", 5])), "Acknowledge.request_ids must be str, got int"),
        (m.Acknowledge(cast(Any, [["a"]])), "Acknowledge.request_ids must be str, got list"),
    ],
)
def test_contents_of_client_messages_are_checked(message: Any, reason: str) -> None:
    with pytest.raises(BadFrame) as caught:
        decode_public(encode(message), max_bytes=1 << 20)
    assert caught.value.message == reason


@pytest.mark.parametrize(
    "value",
    [[], [1, VERSION, 0], {}, {1: 2}, 5, None, "text", b"bytes", [[1], VERSION, 0, 0, "a", {}], ["1", VERSION, 0, 0]],
    ids=repr,
)
def test_frame_without_an_array_and_header_is_refused(value: Any) -> None:
    with pytest.raises(BadFrame, match="a frame is an array"):
        decode(pack(value))


@pytest.mark.parametrize("wrong", [-1, -(2**63), True, 1.0, "0", None], ids=repr)
@pytest.mark.parametrize("place", range(4), ids=["tag", "version", "epoch", "seq"])
def test_header_fields_must_be_counts(place: int, wrong: Any) -> None:
    header: list[Any] = [2, VERSION, 0, 0]
    header[place] = wrong
    with pytest.raises(BadFrame, match="a frame is an array"):
        decode(frame(*header))


NOT_MESSAGES = {
    "empty": b"",
    **{f"{cut} bytes cut": encode(SUBMIT)[:-cut] for cut in (1, 5, 10)},
    "a byte more": encode(SUBMIT) + b"\0",
    "two messages": encode(SUBMIT) * 2,
    "unused code behind it": encode(SUBMIT) + b"\xc1",
    "unhashable map key": b"\x81\x90\x01",  # {[]: 1}
    "announced size": b"\xdd\xff\xff\xff\xff",  # an array of four billion items, none of which follows
    "invalid UTF-8": b"\x96\x01\x01\x00\x00\xa2\xc3\x28\x80",
    **{
        f"extension type {code} of {size} bytes": b"\x95\x02\x01\x00\x00\xc7" + bytes([size, code]) + bytes(size)
        for code, size in itertools.product((0, 5, 127, 255), (0, 1, 4, 8, 12))
    },
}


@pytest.mark.parametrize("raw", NOT_MESSAGES.values(), ids=NOT_MESSAGES.keys())
def test_frame_that_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(BadFrame, match="not a message"):
        decode(raw)


def test_oversized_frame_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BadFrame) as caught:
        decode(b"\xc1" * 101, max_bytes=100)
    assert caught.value.message == "the frame has 101 bytes, the limit is 100"


def test_frame_of_the_maximum_size_is_read() -> None:
    raw = encode(SUBMIT)
    assert decode(raw, max_bytes=len(raw)).message == SUBMIT


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ([0] * MAX_ITEMS, True),
        ([0] * (MAX_ITEMS + 1), False),
        (dict.fromkeys(range(MAX_FIELDS)), True),
        (dict.fromkeys(range(MAX_FIELDS + 1)), False),
    ],
    ids=["largest array", "array too large", "largest map", "map too large"],
)
def test_sizes_of_arrays_and_maps_are_limited(value: Any, fits: bool) -> None:
    if fits:
        assert unpack(pack(value)) == value
    else:
        with pytest.raises(BadFrame, match="not a message"):
            unpack(pack(value))


@pytest.mark.parametrize("inside", [nested, lambda depth: {"x": nested(depth - 1)}], ids=["arrays", "maps"])
def test_nesting_of_client_messages_is_limited(inside: Any) -> None:
    decode_public(submit_frame({"x": inside(MAX_DEPTH - 1)}), max_bytes=PUBLIC_BYTES)
    with pytest.raises(BadFrame, match="nested more than 64 deep"):
        decode_public(submit_frame({"x": inside(MAX_DEPTH)}), max_bytes=PUBLIC_BYTES)


def test_entries_of_a_follow_are_checked_for_depth_too() -> None:
    with pytest.raises(BadFrame, match="nested more than 64 deep"):
        decode_public(frame(10, VERSION, 0, 0, nested(MAX_DEPTH + 1)), max_bytes=PUBLIC_BYTES)


@pytest.mark.parametrize(
    "item", [b"\x80", b"\x90", b"\x01", b"\x81\x01\x01"], ids=["maps", "arrays", "ints", "entries"]
)
def test_number_of_values_in_a_client_message_is_limited(item: bytes) -> None:
    """Eight megabytes of empty maps would take half a gigabyte in Python, and block all clients for seconds."""
    column = b"\xdc\xff\xff" + item * 0xFFFF
    bad = b"\x96\x01\x01\x00\x00\xa1a\x81\xa1x\xdc\x00\x40" + column * 64
    with pytest.raises(BadFrame, match=rf"a frame has \d+ arrays, maps and entries or more, the limit is {MAX_VALUES}"):
        decode_public(bad, max_bytes=len(bad))


def test_largest_array_of_rows_is_within_the_limit_of_values() -> None:
    submit = encode(m.Submit("a", {"rows": [["a", 0, False]] * MAX_ITEMS}))
    assert len(decode_public(submit, max_bytes=len(submit)).message.request["rows"]) == MAX_ITEMS


def test_repetitions_have_the_same_content_digest() -> None:
    keys = {content_key(encode(SUBMIT, seq=seq)) for seq in (0, 7, 300, 1 << 40)}
    assert len(keys) == 1
    assert content_key(encode(m.Submit("b", SUBMIT.request))) not in keys


@pytest.mark.parametrize(
    "bad", [b"", b"\xc1", b"\x96\x01", b"\x94" + b"\x90" * 9], ids=["empty", "no tag", "cut", "odd"]
)
def test_invalid_bytes_have_a_content_digest_too(bad: bytes) -> None:
    assert content_key(bad) == content_key(bytes(bad))


@pytest.mark.parametrize("depth", [500, 1100, 30_000])
def test_deeply_nested_arrays_are_refused(depth: int) -> None:
    tower = b"\x96\x01\x01\x00\x00\xa1a\x81\xa1x" + b"\x91" * depth + b"\x01"
    with pytest.raises(BadFrame):
        decode_public(tower, max_bytes=PUBLIC_BYTES)


def test_nan_is_decoded_and_left_to_the_receiver() -> None:
    value = decode(submit_frame({"temperature": float("nan")})).message.request["temperature"]
    assert value != value


def test_reasons_are_short_for_any_frame() -> None:
    with pytest.raises(BadFrame) as caught:
        unpack(b"\xa5" + b"\xff" * 10_000)
    assert len(caught.value.message) <= 200


@pytest.mark.parametrize(
    "bad",
    [
        submit_frame({"stop": nested(20)}),
        submit_frame(dict.fromkeys(range(MAX_FIELDS + 1))),
        submit_frame([]),
        submit_frame({"prompt": "x" * 100_000}),
        frame(1, VERSION + 1, 0, 0, "a", {}),
        frame(1, VERSION, 0, 0, "a"),
        submit_frame({})[:-1],
    ],
    ids=["deep", "large map", "wrong type", "large", "newer version", "field missing", "cut"],
)
def test_invalid_submit_still_names_its_request(bad: bytes) -> None:
    assert peek_request_id(bad) == "a"


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        pack(5),
        pack({}),
        frame(1, 1, 0),
        frame(1, 1, 0, 0, 5, {}),
        encode(m.Abort("a")),
        frame(99, 1, 0, 0, "a"),
    ],
    ids=["empty", "garbage", "number", "map", "short", "number for id", "another message", "unknown tag"],
)
def test_other_frames_name_no_request(bad: bytes) -> None:
    assert peek_request_id(bad) == ""


def test_fifty_thousand_mutated_frames_raise_only_bad_frame() -> None:
    rng = random.Random(0)
    originals = [encode(message) for message in some_messages()]
    num_refused = 0
    for _ in range(50_000):
        frame = mutated(rng, rng.choice(originals))
        assert isinstance(peek_request_id(frame), str)
        try:
            decode_public(frame, max_bytes=PUBLIC_BYTES)
        except BadFrame:
            num_refused += 1
    assert 30_000 < num_refused < 50_000, "some mutations only change text, so not every frame is bad"


def some_messages() -> list[Any]:
    row = ["a", 0, 0, b"\1\0\0\0", "text", [[-0.5, [[1, -0.5]]]], 12.5]
    return [
        m.Submit("a", {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {5: 1.0}, "stop": ["x"]}),
        m.Submit("b", {"prompt_token_ids": bytes(40), "seed": 2**63 - 1, "logprobs": None}),
        m.Rejected("a", "overloaded", "1024 requests wait", None),
        m.Follow([["a", 0, True], ["b", 17, False]]),
        m.Acknowledge(["a", "b"]),
        m.Text([row, row]),
        m.Finished("a", 3, 4, bytes(8), "text", None, "stop", {"usage": {"prompt_tokens": 3}}),
        m.StepDone(bytes(8), bytes(8), bytes(8), bytes(8), bytes(2)),
    ]


def mutated(rng: random.Random, original: bytes) -> bytes:
    data = bytearray(original)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data)) if data else 0
        match rng.randrange(5):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[place:]
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 8))
            case 3:
                data[place : place + 1] = msgpack.packb(rng.choice([None, -1, [], {}, 2**64 - 1, 1.5, "x" * 40, b"y"]))
            case 4:
                del data[place : place + rng.randint(1, 8)]
    return bytes(data)
