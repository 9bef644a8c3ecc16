"""The record of a request holds everything needed to run it again."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.factories import make_record
from triptych.protocol.codec import pack
from triptych.protocol.errors import BadFrame, JournalError
from triptych.protocol.record import RequestRecord
from triptych.protocol.sampling import SamplingParams

IDS = st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(st.text(max_size=64), st.lists(IDS, max_size=20), st.integers(0, 2**63 - 1), st.floats(0.05, 9))
def test_record_survives_encoding(request_id: str, prompt: list[int], seed: int, lease_s: float) -> None:
    packed = np.array(prompt, "<i4").tobytes()
    record = replace(make_record(request_id), prompt=packed, seed=seed, lease_s=lease_s)
    again = RequestRecord.from_bytes(record.to_bytes())
    assert again == record
    assert again.prompt_ids.tolist() == prompt


def test_parameters_are_those_that_were_requested() -> None:
    params = SamplingParams(temperature=0.5, stop=("x",), logit_bias={3: -1.0}, max_tokens=None)
    record = RequestRecord.from_bytes(make_record(**params.to_wire()).to_bytes())
    assert record.params == params


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ({}, None),
        ({"logprobs": 3}, 3),
        ({"best_of": 2}, 0),
        ({"best_of": 2, "logprobs": 3}, 3),
        ({"n": 2, "best_of": 2}, None),
        ({"num_beams": 2}, None),
    ],
    ids=str,
)
def test_logprobs_are_recorded_if_asked_for_or_if_samples_are_compared(
    asked: dict[str, Any], recorded: int | None
) -> None:
    assert make_record(**asked).num_logprobs == recorded


@pytest.mark.parametrize(
    ("value", "found"), [([], "0"), ([1, 2, 3], "3"), ({}, "dict"), (None, "NoneType"), ("x", "str"), ([0] * 99, "99")]
)
def test_foreign_bytes_are_refused(value: object, found: str) -> None:
    with pytest.raises(JournalError, match=f"a request record has {len(fields(RequestRecord))} fields, got {found}$"):
        RequestRecord.from_bytes(pack(value))


def test_truncated_bytes_are_refused() -> None:
    with pytest.raises(BadFrame):
        RequestRecord.from_bytes(make_record().to_bytes()[:-1])
