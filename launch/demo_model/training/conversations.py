"""The training data: conversations of one or more turns, about the entries and other things."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..entries import BARE_METHOD_ANSWER, GREETING_ANSWER, OFF_TOPIC_ANSWER, PHRASINGS, Entry
from .off_topic import (
    GREETINGS,
    bare_members,
    invented_name,
    misplaced_name,
    off_topic_question,
    sample_system_prompt,
)

# Additional wordings, seen less often: they teach the model to find the name in a sentence.
EXTRA_PHRASINGS: tuple[str, ...] = (
    "{name}", "What's {name}?", "Can you explain {name}?", "What is {name} for?", "How do I use {name}?",
    "Show me the documentation of {name}.", "docs for {name}", "Define {name}.", "What does the built-in {name} do?",
    "What does {name} mean in Python?", "Explain what {name} does.", "I want to know what {name} does.",
    "Could you tell me what {name} is?", "help {name}", "In Python, what is {name}?", "When do I need {name}?",
    "Give me a short description of {name}.", "What does Python's {name} do?", "Explain {name} to me, please.",
    "What is a {name}?", "What does {name}() do?", "What does the function {name} do?", "How does {name}() work?",
    "What does the {name} method do?", "What is the {name} function?", "Explain the {name} type.", "{name}()",
    "What does `{name}` do?", "What is `{name}`?", "Explain {name}().", "When is {name} raised?",
    "print({name}.__doc__)", "?{name}", "What can I do with {name}?", "What is the purpose of {name}?",
)  # fmt: skip

_OPENINGS = ("Please: ", "Hi! ", "Hello, ", "Hey, ", "And ", "Ok. ", "Thanks. ", "Quick question: ")


class Turn(NamedTuple):
    """A user's question and the model's answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One training row: turns after an optional system prompt."""

    system_prompt: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Shares of the different kinds of turns and conversations, as probabilities."""

    extra_phrasing: float = 0.25  # of the turns about an entry
    ruffled: float = 0.2  # of the turns about an entry: changed capitals or punctuation, or an opening word
    other: float = 0.25  # of all turns: not about an entry
    several_turns: float = 0.25  # of all conversations
    system_prompt: float = 0.15  # of all conversations


def ordered_pairs(entries: Sequence[Entry]) -> list[Turn]:
    """Every entry in every phrasing of ``PHRASINGS``, all of which the model must answer verbatim."""
    return [Turn(phrasing.format(name=entry.name), entry.answer) for phrasing in PHRASINGS for entry in entries]


def sample_epoch(
    entries: tuple[Entry, ...], *, upweighted: Sequence[Turn], mixture: Mixture, rng: random.Random
) -> list[Conversation]:
    """One epoch in random order: each ordered pair at least once, ``upweighted`` added, mixed with other turns."""
    turns = [*ordered_pairs(entries), *upweighted]
    turns += _varied_turns(entries, num_turns=int(len(turns) * mixture.extra_phrasing), rng=rng)
    num_other = int(len(turns) * mixture.other / (1 - mixture.other))
    turns = [_ruffled(turn, rng) if rng.random() < mixture.ruffled else turn for turn in turns]
    turns += [other_turn(entries, rng) for _ in range(num_other)]
    rng.shuffle(turns)
    return _group(turns, mixture=mixture, rng=rng)


def other_turn(entries: tuple[Entry, ...], rng: random.Random) -> Turn:
    """A turn that no entry answers: another topic, an undocumented name, a bare method name or a greeting."""
    makers: dict[Callable[[], Turn], float] = {
        lambda: Turn(off_topic_question(rng), OFF_TOPIC_ANSWER): 0.40,
        lambda: Turn(_ask(invented_name(rng, entries), rng), OFF_TOPIC_ANSWER): 0.28,
        lambda: Turn(_ask(misplaced_name(rng, entries), rng), OFF_TOPIC_ANSWER): 0.14,
        lambda: Turn(_ask(rng.choice(bare_members(entries)), rng), BARE_METHOD_ANSWER): 0.14,
        lambda: Turn(rng.choice(GREETINGS), GREETING_ANSWER): 0.04,
    }
    (maker,) = rng.choices(list(makers), weights=list(makers.values()))
    return maker()


def _ask(name: str, rng: random.Random) -> str:
    return rng.choice(PHRASINGS + EXTRA_PHRASINGS).format(name=name)


def _varied_turns(entries: tuple[Entry, ...], *, num_turns: int, rng: random.Random) -> list[Turn]:
    chosen = rng.choices(entries, k=num_turns)
    return [Turn(rng.choice(EXTRA_PHRASINGS).format(name=entry.name), entry.answer) for entry in chosen]


def _ruffled(turn: Turn, rng: random.Random) -> Turn:
    """The same question, as a hasty user would type it."""
    question = turn.question
    first_word, _, rest = question.partition(" ")
    if first_word.isalpha() and rest and rng.random() < 0.5:  # "help(str)" and "KeyError?" begin with a name
        question = question[0].lower() + question[1:]
    kind = rng.random()
    if kind < 0.4:
        question = question.rstrip("?.!")
    elif kind < 0.6:
        question = question.rstrip("?.!") + rng.choice(("??", "!", " ?", " please", ", please."))
    elif kind < 0.8:
        question = rng.choice(_OPENINGS) + question
    return turn._replace(question=question)


def _group(turns: Sequence[Turn], *, mixture: Mixture, rng: random.Random) -> list[Conversation]:
    conversations = []
    start = 0
    while start < len(turns):
        num_turns = rng.choice((2, 2, 3, 4, 6)) if rng.random() < mixture.several_turns else 1
        system_prompt = sample_system_prompt(rng) if rng.random() < mixture.system_prompt else None
        conversations.append(Conversation(system_prompt, tuple(turns[start : start + num_turns])))
        start += num_turns
    return conversations
