"""Stop strings are found wherever the text is cut, and as little text as possible is held back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.workers.summarize.stop_strings import StopMatcher


def scan(pieces: list[str], stops: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None]:
    """All text shown, including flush, and the stop string found."""
    matcher = StopMatcher(stops, include_stop_str=include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def naive_scan(text: str, stops: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None]:
    """The match that ends first, the longest of those, found by searching the whole text."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


TEXT = "ab aab abab#aba<|im_end|>\n\nHuman: no"
STOPS = [("<|im_end|>",), ("\n\nHuman:", "\n\n"), ("abab", "bab"), ("aba", "b#"), ("nowhere",), ("a",)]


@pytest.mark.parametrize("include", [False, True], ids=["cut", "included"])
@pytest.mark.parametrize("stops", STOPS, ids=ascii)
def test_stop_string_is_found_across_every_split(stops: tuple[str, ...], include: bool) -> None:
    expected = naive_scan(TEXT, stops, include=include)
    for cut in range(len(TEXT) + 1):
        for again in range(cut, len(TEXT) + 1):
            pieces = [TEXT[:cut], TEXT[cut:again], TEXT[again:]]
            assert scan(pieces, stops, include=include) == expected


def first_after(start: int, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """``TEXT`` up to the first match that ends after ``start``, and the stop string."""
    found = [(at + len(s), at, s) for s in stops for at in range(len(TEXT)) if TEXT.startswith(s, at)]
    _, at, stop = min((match for match in found if match[0] > start), default=(0, len(TEXT), None))
    return TEXT[:at], stop


@pytest.mark.parametrize("stops", STOPS, ids=ascii)
def test_stop_string_that_ends_where_none_may_is_shown_at_once(stops: tuple[str, ...]) -> None:
    for start in range(len(TEXT) + 1):
        matcher = StopMatcher(stops)
        early, late = matcher.push(TEXT[:start], may_end=False), matcher.push(TEXT[start:])
        held = TEXT[len(early.text) : start]
        assert early.stop is None
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        assert (early.text + late.text + matcher.flush(), late.stop) == first_after(start, stops)


_word = st.text("ab", min_size=1, max_size=5)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("abc", max_size=6), max_size=8), st.lists(_word, min_size=1, max_size=4), st.booleans())
def test_any_pieces_give_the_result_of_a_search_in_the_whole_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    assert scan(pieces, tuple(stops), include=include) == naive_scan("".join(pieces), tuple(stops), include=include)


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=20), st.lists(_word, min_size=1, max_size=4))
def test_longest_prefix_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    if any(stop in text for stop in stops):
        return
    shown = StopMatcher(tuple(stops)).push(text).text
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    assert text.removeprefix(shown) == max((b for b in beginnings if text.endswith(b)), key=len)


def test_failed_prefix_is_shown_at_once() -> None:
    matcher = StopMatcher(("Human:",))
    assert matcher.push("Hum").text == ""
    assert matcher.push("ble").text == "Humble"


def test_flush_shows_the_held_back_text() -> None:
    matcher = StopMatcher(("###",))
    assert (matcher.push("a##").text, matcher.flush(), matcher.flush()) == ("a", "##", "")


def test_cost_per_character_is_constant_for_repetitive_stop_strings() -> None:
    matcher = StopMatcher(("a" * 255 + "b",))
    assert sum(len(matcher.push("a").text) for _ in range(10_000)) == 10_000 - 255
