"""Validation of requests, and the errors for invalid ones."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.protocol.errors import InvalidRequest
from triptych.protocol.sampling import SamplingParams
from triptych.protocol.service_config import MAX_LEASE_S, MIN_LEASE_S
from triptych.workers.prepare.request import MAX_MESSAGES, GenerationRequest

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, False),
        ({"thinking_token_budget": 0}, True),
        ({"structured": {"regex": "a"}, "thinking_token_budget": 0}, False),
        ({"structured": {"regex": "a", "after_reasoning": True}}, True),
    ],
    ids=str,
)
def test_reasoning_is_told_if_something_depends_on_it(more: dict[str, Any], expected: bool) -> None:
    assert GenerationRequest.from_wire({"prompt": "x", **more}).tells_reasoning is expected


def test_text_prompt_gets_every_default() -> None:
    request = GenerationRequest.from_wire({"prompt": "Once"})
    assert (request.prompt, request.truncation, request.lease_s) == ("Once", "none", None)
    assert request.sampling == SamplingParams()


def test_ids_as_a_list_and_as_bytes_are_the_same_prompt() -> None:
    listed = GenerationRequest.from_wire({"prompt_token_ids": [1, 2, 300]}).prompt_token_ids
    packed = GenerationRequest.from_wire({"prompt_token_ids": b"\1\0\0\0\2\0\0\0\x2c\1\0\0"}).prompt_token_ids
    assert listed is not None
    assert packed is not None
    assert listed.dtype == packed.dtype == np.int32
    assert listed.tolist() == packed.tolist() == [1, 2, 300]


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    request = GenerationRequest.from_wire({"messages": [{"role": "user", "content": parts}]})
    assert request.messages == (HELLO,)


def test_other_fields_become_sampling_parameters() -> None:
    wire = {"prompt": "x", "lease_s": 2, "truncation": "left", "temperature": 0.5, "stop": "\n"}
    request = GenerationRequest.from_wire(wire)
    assert request.sampling == SamplingParams(temperature=0.5, stop=("\n",))
    assert (request.lease_s, request.truncation) == (2.0, "left")


def test_scheduling_fields_are_passed_on() -> None:
    wire = {"prompt": "x", "priority": -3, "deadline_ms": 5, "max_queue_ms": 0.5, "cache_salt": "tenant"}
    request = GenerationRequest.from_wire(wire)
    assert (request.priority, request.deadline_ms, request.max_queue_ms, request.cache_salt) == (-3, 5.0, 0.5, "tenant")


def test_absent_field_may_be_sent_as_nil() -> None:
    assert GenerationRequest.from_wire({"prompt": "x", "messages": None, "lease_s": None}).messages is None


@pytest.mark.parametrize("lease_s", [MIN_LEASE_S, MAX_LEASE_S])
def test_lease_may_be_at_its_limits(lease_s: float) -> None:
    assert GenerationRequest.from_wire({"prompt": "x", "lease_s": lease_s}).lease_s == lease_s


def test_salt_may_be_as_long_as_its_limit() -> None:
    assert GenerationRequest.from_wire({"prompt": "x", "cache_salt": "a" * 256}).cache_salt == "a" * 256


def test_tools_are_kept_for_the_template() -> None:
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    assert GenerationRequest.from_wire({"messages": [HELLO], "tools": tools}).tools == tools


REFUSED: dict[str, tuple[dict[Any, Any], str, str]] = {
    "form without an end": (
        {"prompt": "x", "structured": {"regex": "a"}, "ignore_eos": True},
        "structured",
        "exclude each other",
    ),
    "no prompt": ({}, "prompt", "got none"),
    "two prompts": ({"prompt": "x", "messages": [HELLO]}, "prompt", "got prompt and messages"),
    "unknown field": ({"prompt": "x", "tempratur": 1}, "tempratur", "unknown field 'tempratur'"),
    "unknown field that is not a string": ({"prompt": "x", 7: 1}, "7", "unknown field 7"),
    "prompt of bytes": ({"prompt": b"x"}, "prompt", "must be a string, got b'x'"),
    "ids in a string": ({"prompt_token_ids": "12"}, "prompt_token_ids", "must be a list of integers"),
    "a bool for an id": ({"prompt_token_ids": [1, True]}, "prompt_token_ids", "[1] must be an integer, got True"),
    "an id beyond int32": ({"prompt_token_ids": [2**31]}, "prompt_token_ids", "[0] is 2147483648"),
    "half an id": ({"prompt_token_ids": b"123"}, "prompt_token_ids", "got 3 bytes"),
    "no messages": ({"messages": []}, "messages", "has 0 entries"),
    "too many messages": ({"messages": [HELLO] * (MAX_MESSAGES + 1)}, "messages", "has 1025 entries"),
    "messages in a map": ({"messages": HELLO}, "messages", "must be a list of maps"),
    "a message in a string": ({"messages": ["Hello"]}, "messages", "messages[0] must be a map"),
    "no content": ({"messages": [{"role": "user"}]}, "messages", "messages[0] has no content"),
    "a field too many": ({"messages": [{**HELLO, "mood": "x"}]}, "messages", "unknown field 'mood'"),
    "a role that is not a string": ({"messages": [{"role": 1, "content": ""}]}, "messages", "messages[0].role"),
    "no text content": ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content must be"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]},
        "messages",
        "messages[0].content[0].type must be 'text', got 'image'",
    ),
    "unknown truncation": ({"prompt": "x", "truncation": "auto"}, "truncation", "is 'auto', known are: none, left"),
    "a budget below 0": ({"prompt": "x", "thinking_token_budget": -1}, "thinking_token_budget", "limits are 0"),
    "a budget of a beam search": (
        {"prompt": "x", "thinking_token_budget": 5, "num_beams": 2},
        "thinking_token_budget",
        "num_beams is 2",
    ),
    "a lease of nan": ({"prompt": "x", "lease_s": math.nan}, "lease_s", "is nan"),
    "a lease of nothing": ({"prompt": "x", "lease_s": 0}, "lease_s", "limits are 0.05"),
    "a lease of years": (
        {"prompt": "x", "lease_s": 1e9},
        "lease_s",
        "is 1000000000.0, the limits are 0.05 and 86400.0",
    ),
    "a lease in a string": ({"prompt": "x", "lease_s": "1"}, "lease_s", "must be a number"),
    "a priority of a half": ({"prompt": "x", "priority": 0.5}, "priority", "must be an integer, got 0.5"),
    "too low a priority": ({"prompt": "x", "priority": 1001}, "priority", "is 1001, the limits are -1000 and 1000"),
    "a deadline before the receipt": ({"prompt": "x", "deadline_ms": -1}, "deadline_ms", "limits are above 0 and"),
    "a deadline at once": ({"prompt": "x", "deadline_ms": 0}, "deadline_ms", "is 0, the limits are above 0"),
    "a deadline of nan": ({"prompt": "x", "deadline_ms": math.nan}, "deadline_ms", "is nan"),
    "a queue in a string": ({"prompt": "x", "max_queue_ms": "5"}, "max_queue_ms", "must be a number, got '5'"),
    "an endless queue": ({"prompt": "x", "max_queue_ms": math.inf}, "max_queue_ms", "is inf"),
    "a salt of bytes": ({"prompt": "x", "cache_salt": b"a"}, "cache_salt", "must be a string"),
    "a long salt": ({"prompt": "x", "cache_salt": "a" * 257}, "cache_salt", "has 257 characters, the limit is 256"),
    "temperature of nan": ({"prompt": "x", "temperature": math.nan}, "temperature", "is nan"),
    "a turn to continue that is none": (
        {"prompt": "x", "continue_final_message": True},
        "continue_final_message",
        "it needs messages",
    ),
    "a turn to continue of the user": (
        {"messages": [HELLO], "continue_final_message": True},
        "continue_final_message",
        "must be the assistant's, got 'user'",
    ),
    "a turn to continue that ends with a call": (
        {
            "messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
            "continue_final_message": True,
        },
        "continue_final_message",
        "ends with a call",
    ),
    "a turn to continue by a number": (
        {"messages": [HELLO], "continue_final_message": 1},
        "continue_final_message",
        "true or false",
    ),
}


@pytest.mark.parametrize(("wire", "param", "reason"), REFUSED.values(), ids=REFUSED)
def test_bad_field_is_named_with_its_value(wire: dict[Any, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest.from_wire(wire)
    assert caught.value.param == param
    assert reason in caught.value.message


_text = st.text("role content text\0é", max_size=8)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _text | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)
_own_fields = [item.name for item in fields(GenerationRequest) if item.name != "sampling"]
_fields = st.sampled_from([*_own_fields, "stop", "seed", "other"])


@settings(deadline=None)
@given(st.dictionaries(_fields, _plain))
def test_any_map_makes_a_request_or_an_invalid_request(wire: dict[str, Any]) -> None:
    try:
        request = GenerationRequest.from_wire(wire)
    except InvalidRequest:
        return
    assert sum(x is not None for x in (request.prompt, request.prompt_token_ids, request.messages)) == 1
