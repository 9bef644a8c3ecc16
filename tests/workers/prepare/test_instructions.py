"""Chats with system messages where a chat template expects none, as agents send them."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from triptych.workers.prepare.chat_template import ChatTemplate
from triptych.workers.prepare.tool_fields import Message

_TURN = "<{{ m.role }}>{{ m.content | trim }}"
FREE = "{% for m in messages %}" + _TURN + "{% endfor %}"
# Refuses, like Qwen 3.5's, any but a single system message at the beginning, and, like Gemma's, two turns of a user.
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be first') }}{% endif %}"
    "{% if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}" + _TURN + "{% endfor %}"
)
# Leaves all others out, like that of gpt-oss.
DEAF = (
    "{% for m in messages %}{% if loop.first or m.role not in ('system', 'developer') %}" + _TURN + "{% endif %}"
    "{% endfor %}"
)


def chat(*turns: str) -> list[Message]:
    """``"system:a"`` is a message with the text a."""
    return [{"role": role, "content": text} for role, text in (turn.split(":") for turn in turns)]


def render(source: str, *turns: str, **options: Any) -> str:
    return ChatTemplate(source, {}).render(chat(*turns), **options)


CASES = {
    "several first": (("system:a", "system:", "developer:b", "user:c"), "<system>a\n\nb<user>c"),
    "behind the user": (("system:a", "user:b", "system:c"), "<system>a<user>b\n\nc"),
    "before the user": (("user:a", "assistant:b", "system:c", "user:d"), "<user>a<assistant>b<user>c\n\nd"),
    "before the assistant": (("assistant:a", "system:b", "assistant:c"), "<assistant>a<user>b<assistant>c"),
    "between a call and its result": (
        ("user:a", "assistant:b", "system:c", "tool:d", "assistant:e"),
        "<user>a<assistant>b<tool>d<user>c<assistant>e",
    ),
    "last": (("user:a", "assistant:b", "tool:c", "system:d"), "<user>a<assistant>b<tool>c<user>d"),
}


@pytest.mark.parametrize(("turns", "expected"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("source", [STRICT, DEAF], ids=["refused", "left out"])
def test_instructions_reach_a_model_whose_template_has_no_place_for_them(
    source: str, turns: tuple[str, ...], expected: str
) -> None:
    turns = tuple(turn.replace("developer", "system") for turn in turns) if source is STRICT else turns
    assert render(source, *turns) == expected


@pytest.mark.parametrize("turns", [turns for turns, _ in CASES.values()], ids=CASES)
def test_template_that_has_a_place_for_them_decides(turns: tuple[str, ...]) -> None:
    assert render(FREE, *turns) == "".join(f"<{turn['role']}>{turn['content']}" for turn in chat(*turns))


def test_message_that_is_continued_stays_the_last() -> None:
    text = render(STRICT, "system:a", "system:b", "user:c", "assistant:d", continue_final_message=True)
    assert text == "<system>a\n\nb<user>c<assistant>d"


def test_refusal_for_another_reason_remains_one() -> None:
    with pytest.raises(jinja2.TemplateError, match="Roles must alternate"):
        render(STRICT, "system:a", "user:b", "user:c", "system:d")


def test_template_that_refuses_the_other_form_keeps_its_own() -> None:
    """What it leaves out is left out, as with transformers."""
    refusal = "{% if '\n' in m.content %}{{ raise_exception('x') }}{% endif %}"
    source = DEAF.replace("{% endfor %}", refusal + "{% endfor %}")
    assert render(source, "system:a", "user:b", "system:c") == "<system>a<user>b"
