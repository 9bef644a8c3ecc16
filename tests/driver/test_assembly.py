"""Rows may be repeated, overlap and begin anywhere: each token and each character is taken once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.driver.fake_service import finished, packed
from triptych.driver.stream import Assembly, Delta
from triptych.protocol.errors import InvalidRequest

TOKENS = [11, 12, 13, 14, 15, 16]
PIECES = ["a", "", "bc", "d", "", "ef"]  # text that becomes final with each token
LOGPROBS = [[-float(i), [[i, -float(i)]]] for i in range(len(TOKENS))]
NUM = len(TOKENS)
ROWS = st.tuples(st.integers(0, NUM), st.integers(0, NUM)).map(sorted)


def add(assembly: Assembly, start: int, stop: int, *, with_logprobs: bool = False) -> Delta | None:
    text_offset = sum(map(len, PIECES[:start]))
    logprobs = LOGPROBS[start:stop] if with_logprobs else None
    return assembly.add(start, text_offset, packed(*TOKENS[start:stop]), "".join(PIECES[start:stop]), logprobs, 5.0)


def contents(assembly: Assembly) -> tuple[list[int], str]:
    completion = assembly.completion(finished("a"))
    return completion.token_ids, completion.text


def test_row_becomes_a_delta() -> None:
    delta = add(Assembly("a"), 0, 3, with_logprobs=True)
    assert delta == Delta("abc", [11, 12, 13], 3, 5.0, LOGPROBS[:3], num_chars=3)


def test_only_new_tokens_become_a_delta() -> None:
    assembly = Assembly("a")
    add(assembly, 0, 3)
    assert add(assembly, 1, 5, with_logprobs=True) == Delta("d", [14, 15], 5, 5.0, LOGPROBS[3:5], num_chars=4)


def test_repeated_row_gives_no_delta() -> None:
    assembly = Assembly("a")
    add(assembly, 0, 3)
    assert [add(assembly, 0, 3), add(assembly, 1, 2), add(assembly, 3, 3)] == [None, None, None]


def test_text_may_come_without_a_token() -> None:
    assembly = Assembly("a")
    assembly.add(0, 0, packed(11), "", None)
    assert assembly.add(1, 0, b"", "tail", None) == Delta("tail", [], 1, num_chars=4)


@pytest.mark.parametrize(("offset", "text_offset"), [(4, 0), (0, 9), (4, 9)], ids=["token", "character", "both"])
def test_gap_is_an_error_and_changes_nothing(offset: int, text_offset: int) -> None:
    assembly = Assembly("a")
    add(assembly, 0, 3)
    with pytest.raises(LookupError, match="a: a row begins at"):
        assembly.add(offset, text_offset, packed(99), "x", None)
    assert contents(assembly) == (TOKENS[:3], "abc")


@settings(deadline=None)
@given(st.lists(ROWS, max_size=30))
def test_rows_in_any_order_give_a_prefix_and_no_token_twice(rows: list[list[int]]) -> None:
    assembly = Assembly("a")
    deltas, num = [], 0
    for start, stop in rows:
        if start > num:
            with pytest.raises(LookupError):
                add(assembly, start, stop)
            continue
        deltas.append(add(assembly, start, stop, with_logprobs=True))
        num = max(num, stop)
    completion = assembly.completion(finished("a"))
    assert (completion.token_ids, completion.text) == (TOKENS[:num], "".join(PIECES[:num]))
    assert completion.logprobs == (LOGPROBS[:num] or None)
    assert [token for delta in deltas if delta for token in delta.token_ids] == TOKENS[:num]
    assert assembly.num_tokens == num


@settings(deadline=None)
@given(st.integers(0, NUM), st.lists(ROWS, max_size=20))
def test_resumed_answer_contains_only_the_rest(begin: int, rows: list[list[int]]) -> None:
    assembly = Assembly("a", num_tokens=begin, num_chars=sum(map(len, PIECES[:begin])))
    num = begin
    for start, stop in rows:
        if start <= num:
            add(assembly, start, stop)
            num = max(num, stop)
    assert contents(assembly) == (TOKENS[begin:num], "".join(PIECES[begin:num]))


@pytest.mark.parametrize("num_chars", [2, 4], ids=["few", "many"])
def test_resuming_with_a_wrong_number_of_characters_is_an_error(num_chars: int) -> None:
    """With too many characters, the following text would begin too late, unnoticed."""
    assembly = Assembly("a", num_tokens=3, num_chars=num_chars)
    with pytest.raises(InvalidRequest, match=f"the first 3 tokens have 3 characters, not {num_chars}"):
        add(assembly, 3, 6)


def test_answer_without_logprobs_has_none() -> None:
    assembly = Assembly("a")
    add(assembly, 0, 3)
    assert assembly.completion(finished("a")).logprobs is None
