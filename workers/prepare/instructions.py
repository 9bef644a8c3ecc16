"""System messages where a chat template has no place for them.

Agents write several at the beginning, or one in the middle of a conversation. Some templates refuse these, and others
leave them out without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tool_turns import Turn

_ROLES = ("system", "developer")


def later_instructions(turns: Sequence[Turn]) -> list[str]:
    """The texts of all system messages except one at the very beginning."""
    return [turn["content"] for turn in turns[1:] if turn["role"] in _ROLES]


def gathered(turns: Sequence[Turn]) -> list[Turn]:
    """The chat with one system message at the beginning, if there is any. Each of those in the middle is a part of the
    user's turn there, or such a turn.

    In the middle it keeps its place: a conversation has to begin with the prompts of its earlier turns, which are
    cached.
    """
    num_first = next((index for index, turn in enumerate(turns) if turn["role"] not in _ROLES), len(turns))
    told = [{**turns[0], "content": _joined(turn["content"] for turn in turns[:num_first])}] if num_first else []
    waiting = ""  # for the next turn that is not a tool's: nothing may come between a call and its results
    for turn in turns[num_first:]:
        role, text = turn["role"], turn["content"]
        if role in _ROLES:
            if not waiting and told and told[-1]["role"] == "user":
                told[-1] = {**told[-1], "content": _joined((told[-1]["content"], text))}
            else:
                waiting = _joined((waiting, text))
        elif role == "tool" or not waiting:
            told.append(turn)
        else:
            joined = {**turn, "content": _joined((waiting, text))}
            told += [joined] if role == "user" else [_of_user(waiting), turn]
            waiting = ""
    return [*told, _of_user(waiting)] if waiting else told


def _of_user(text: str) -> Turn:
    return {"role": "user", "content": text}


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text.strip())
