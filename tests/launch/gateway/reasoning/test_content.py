"""Which tokens belong to an answer's content, and so have their logprobs returned with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.launch.gateway.reasoning.test_harmony import CALL, FINAL, THOUGHT
from triptych.launch.gateway.reasoning.content import ContentTokens, Reader
from triptych.launch.gateway.reasoning.harmony import HarmonyReader
from triptych.launch.gateway.reasoning.thoughts import ThoughtReader
from triptych.launch.gateway.requests.words import Words

THINK = "<think>Hm.</think>"


class Pieces:
    """A vocabulary in which a token is its index in this list."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def bytes_of(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def picked(reader: Reader | None, *pieces: str | bytes) -> list[list[str]]:
    """The tokens picked after each of these tokens, and at the end."""
    tokens = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    content = ContentTokens(cast(Words, Pieces(tokens)), reader)
    found: list[list[Any]] = [content.push([index], [piece]) for index, piece in enumerate(pieces)]
    return [*found, content.flush()]


def flat(found: list[list[str]]) -> list[str]:
    return [piece for pieces in found for piece in pieces]


def thinking() -> Reader:
    return ThoughtReader(is_open=False)


@pytest.mark.parametrize(
    ("make", "text", "content"),
    [
        (thinking, f"{THINK}\n\nSo <b>.", "So <b>."),
        (thinking, " Plain.", " Plain."),
        (thinking, "<think>Cut", ""),
        (thinking, "<thin", "<thin"),
        (lambda: ThoughtReader(is_open=True), "Hm.</think>So.", "So."),
        (HarmonyReader, f"{THOUGHT}{FINAL}<|return|>", "It is <b>."),
        (HarmonyReader, f"{THOUGHT}{CALL}{FINAL}", "It is <b>."),
        (HarmonyReader, f"{FINAL}<|end|>{THOUGHT}{FINAL}", "It is <b>.It is <b>."),
        (HarmonyReader, "No marks <|", "No marks <|"),
        (HarmonyReader, "<|channel|>final", ""),
        (lambda: None, f"{THINK}So.", f"{THINK}So."),
    ],
)
def test_content_tokens_are_picked(make: Callable[[], Reader | None], text: str, content: str) -> None:
    assert "".join(flat(picked(make(), *text))) == content


def test_token_is_picked_once_its_kind_is_known() -> None:
    marks = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "Hm",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
    ]
    found = picked(HarmonyReader(), *marks, "<|message|>", "It", " is", "<|", "b", "<|return|>")
    assert found == [*[[]] * 10, ["It"], [" is"], [], ["<|", "b"], [], []]


def test_token_that_is_partly_content_is_picked() -> None:
    assert flat(picked(thinking(), "<think>", "x</", "think>So", ".")) == ["think>So", "."]


def test_tokens_inside_a_character_are_picked_with_it() -> None:
    e, acute = "\u00e9".encode()[:1], "\u00e9".encode()[1:]
    assert flat(picked(thinking(), "<think>", e, acute, "</think>", e, acute, "!")) == [e, acute, "!"]


def test_half_a_character_at_the_end_is_content() -> None:
    assert flat(picked(thinking(), "So", b"\xc3")) == ["So", b"\xc3"]
