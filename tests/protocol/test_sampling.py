"""Sampling parameters are checked when they are made, and only values that differ from the defaults are sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.protocol.codec import pack, unpack
from triptych.protocol.errors import InvalidRequest
from triptych.protocol.sampling import SamplingParams, bias_of_json

IDS = st.integers(0, 2**31 - 1)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.none() | st.integers(1000, 2**31 - 1),
        "min_tokens": st.integers(0, 256),
        "temperature": st.floats(0, 100),
        "top_k": st.none() | st.integers(-1, 2**31 - 1),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "seed": st.none() | st.integers(0, 2**63 - 1),
        "stop": st.text(min_size=1, max_size=256) | st.lists(st.text(min_size=1, max_size=20), max_size=16),
        "stop_token_ids": st.lists(IDS, max_size=64),
        "ignore_eos": st.booleans(),
        "include_stop_str": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logprobs": st.none() | st.integers(0, 20),
        "logit_bias": st.dictionaries(IDS, st.floats(-100, 100) | st.integers(-100, 100), max_size=20),
    },
)
NUMBERS: list[tuple[str, Any, Any]] = [  # name, lowest, highest
    ("max_tokens", 0, 2**31 - 1),
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31 - 1),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", 0, 2**63 - 1),
    ("logprobs", 0, 20),
    ("best_of", 1, 64),
    ("length_penalty", -10.0, 10.0),
]
INSIDE = [(name, value) for name, low, high in NUMBERS for value in (low, high)]
OUTSIDE = [
    (name, value)
    for name, low, high in [*NUMBERS, ("min_tokens", 0, 2**31 - 1)]
    for value in ((low - 1, high + 1, 10**400) if isinstance(low, int) else (low - 0.01, high + 0.01, 10**400))
]
FLOATS = [name for name, low, _ in NUMBERS if isinstance(low, float)]
INTEGERS = [*(name for name, low, _ in NUMBERS if isinstance(low, int)), "min_tokens"]


def refusal(**options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**options)
    return caught.value


@settings(deadline=None)
@given(PARAMS)
def test_parameters_survive_the_wire(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert SamplingParams.from_wire(unpack(pack(params.to_wire()))) == params


def test_defaults_are_encoded_in_no_bytes() -> None:
    assert SamplingParams().to_wire() == {}


def test_only_differences_from_the_defaults_are_encoded() -> None:
    assert SamplingParams(temperature=0.5, stop=("x",)).to_wire() == {"temperature": 0.5, "stop": ["x"]}


def test_max_tokens_none_is_encoded() -> None:
    assert SamplingParams(max_tokens=None).to_wire() == {"max_tokens": None}


@pytest.mark.parametrize(("name", "value"), INSIDE)
def test_value_at_its_limit_is_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=lambda value: str(value)[:24])
def test_value_beyond_its_limit_is_refused_with_the_limits(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert f"{name} is {value}, the limits are " in error.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", FLOATS)
def test_nan_and_infinity_are_refused(name: str, value: float) -> None:
    assert refusal(**{name: value}).param == name


@pytest.mark.parametrize("value", ["1", True, [1], {}, b"1"], ids=repr)
@pytest.mark.parametrize("name", FLOATS)
def test_value_that_is_not_a_number_is_refused(name: str, value: Any) -> None:
    assert refusal(**{name: value}).message.startswith(f"{name} must be a number, got ")


@pytest.mark.parametrize("value", ["1", True, 1.0, [1], b"1"], ids=repr)
@pytest.mark.parametrize("name", INTEGERS)
def test_value_that_is_not_an_integer_is_refused(name: str, value: Any) -> None:
    assert refusal(**{name: value}).message.startswith(f"{name} must be an integer, got ")


@pytest.mark.parametrize("name", [*FLOATS, "min_tokens"])
def test_none_is_refused_where_the_default_is_a_number(name: str) -> None:
    assert refusal(**{name: None}).param == name


@pytest.mark.parametrize("value", [1, 0, None, "true"], ids=repr)
@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str", "skip_special_tokens"])
def test_switch_must_be_true_or_false(name: str, value: Any) -> None:
    assert refusal(**{name: value}).message == f"{name} must be true or false, got {value!r}"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("stop", 5, "stop must be a string or a list of strings"),
        ("stop", None, "stop must be a string or a list of strings"),
        ("stop", [b"x"], "stop must be a string or a list of strings"),
        ("stop", {"x": 1}, "stop must be a string or a list of strings"),
        ("stop", ["x"] * 17, "stop has 17 strings, the limit is 16"),
        ("stop", "", "a stop string has 0 characters, the limits are 1 and 256"),
        ("stop", ["x" * 257], "a stop string has 257 characters, the limits are 1 and 256"),
        ("stop_token_ids", 5, "stop_token_ids must be a list of integers"),
        ("stop_token_ids", [1.0], "stop_token_ids must be a list of integers"),
        ("stop_token_ids", [True], "stop_token_ids must be a list of integers"),
        ("stop_token_ids", [1] * 65, "stop_token_ids has 65 ids, the limit is 64"),
        ("stop_token_ids", [-1], "stop_token_ids holds -1, the limits are 0 and 2147483647"),
        ("stop_token_ids", [2**31], "stop_token_ids holds 2147483648, the limits are 0 and 2147483647"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("logit_bias", dict.fromkeys(range(513), 1.0), "logit_bias has 513 entries, the limit is 512"),
        ("logit_bias", {"5": 1.0}, "logit_bias has the key '5', keys are token ids"),
        ("logit_bias", {True: 1.0}, "logit_bias has the key True, keys are token ids"),
        ("logit_bias", {-1: 1.0}, "logit_bias has the key -1, keys are token ids"),
        ("logit_bias", {2**31: 1.0}, "logit_bias has the key 2147483648, keys are token ids"),
        ("logit_bias", {5: 100.1}, "logit_bias of token 5 is 100.1, the limits are -100 and 100"),
        ("logit_bias", {5: float("nan")}, "logit_bias of token 5 is nan, the limits are -100 and 100"),
        ("logit_bias", {5: True}, "logit_bias of token 5 is True, the limits are -100 and 100"),
        ("logit_bias", {5: None}, "logit_bias of token 5 is None, the limits are -100 and 100"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_lists_and_maps_are_limited(name: str, value: Any, reason: str) -> None:
    error = refusal(**{name: value})
    assert (error.message.startswith(reason), error.param) == (True, name)


@pytest.mark.parametrize("key", ["", "a", "-1", "1.0", "٣", "²", "1" * 5000], ids=lambda key: key[:5])
def test_only_plain_numbers_of_json_are_ids(key: str) -> None:
    assert bias_of_json({"7": 1.5, key: 1}) == {7: 1.5, key: 1}


def test_maximum_counts_are_accepted() -> None:
    most: dict[str, Any] = {"stop": ["x" * 256] * 16, "stop_token_ids": [2**31 - 1] * 64}
    most["logit_bias"] = dict.fromkeys(range(512), -100)
    assert len(SamplingParams(**most).stop) == 16


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    error = refusal(min_tokens=6, max_tokens=5)
    assert (error.message, error.param) == ("min_tokens is 6, the limit is max_tokens, 5", "min_tokens")


def test_min_tokens_is_unlimited_when_max_tokens_is_none() -> None:
    assert SamplingParams(min_tokens=2**31 - 1, max_tokens=None).min_tokens == 2**31 - 1


@pytest.mark.parametrize("name", ["x", 5, None, "max_token" * 10])
def test_unknown_field_is_refused_with_its_name(name: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_wire({name: 1})
    assert (caught.value.message, caught.value.param) == (f"unknown field {name!r:.80}", str(name)[:80])


@pytest.mark.parametrize(("name", "meant"), [("temprature", "temperature"), ("dimension", "dimensions")])
def test_refusal_of_an_unknown_field_says_what_was_probably_meant(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown field '{name}'; did you mean {meant}\\?"):
        SamplingParams.from_wire({name: 1}, others=["dimensions"])


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (1e-9, False), (1, False)])
def test_temperature_zero_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_parameters_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


GROUPS: dict[str, tuple[dict[str, Any], str, str]] = {
    "too many samples": ({"n": 65}, "n", "n is 65, the limits are 1 and 64"),
    "too many beams": ({"num_beams": 17}, "num_beams", "num_beams is 17, the limits are 1 and 16"),
    "half a sample": ({"n": 1.5}, "n", "n must be an integer, got 1.5"),
    "best of fewer": ({"n": 3, "best_of": 2}, "best_of", "best_of is 2, the least is n, 3"),
    "more than the beams": ({"n": 3, "num_beams": 2}, "n", "n is 3, the limit is num_beams, 2"),
    "a warm beam": ({"num_beams": 2, "temperature": 0.5}, "temperature", "a beam search takes no temperature"),
    "best of beams": ({"num_beams": 2, "best_of": 2}, "best_of", "a beam search takes no best_of"),
    "beams that stop at a string": ({"num_beams": 2, "stop": "x"}, "stop", "a beam search takes no stop"),
    "an unknown end": ({"early_stopping": "soon"}, "early_stopping", "true, false or 'never', got 'soon'"),
    "an end in numbers": ({"early_stopping": 1}, "early_stopping", "true, false or 'never', got 1"),
}


@pytest.mark.parametrize(("options", "param", "text"), GROUPS.values(), ids=GROUPS)
def test_invalid_group_is_refused_with_its_field(options: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**options)
    assert caught.value.param == param
    assert text in caught.value.message


def test_all_beams_may_be_answers() -> None:
    assert SamplingParams(n=4, num_beams=4).group_size == 4


def test_group_has_a_sequence_for_each_candidate() -> None:
    sizes = {(1, None, 1): 1, (3, None, 1): 3, (2, 5, 1): 5, (2, None, 4): 4}
    for (n, best_of, num_beams), size in sizes.items():
        params = SamplingParams(n=n, best_of=best_of, num_beams=num_beams)
        assert params.group_size == size
        assert params.is_ranked == (size > n)
