"""Which requests a worker was processing when it died: the driver's part of the journal, and the workers' answer.

A word holds ``generation << 32 | steps << 16 | deaths``, the steps being those that the worker had completed but not
recorded at the last death. The worker answers with the number of deaths after which the request ran alone without harm;
only deaths beyond that are held against it.
"""

from __future__ import annotations

import numpy as np

from ..cgroups import memory_ran_out
from ..errors import Poisoned
from ..record_key import Key
from .layout import FREE, Journal, split_word, word

# As numbers of deaths: identified as the cause, and not run any more; by the second one the kernel ended the worker
# because memory ran out.
POISONED, OUT_OF_MEMORY = 0xFFFF, 0xFFFE
MAX_AHEAD = 0xFFFF  # steps
_DEATHS = {"execute": "deaths_word", "summarize": "summarize_deaths_word"}
_SURVIVED = {"execute": "survived_word", "summarize": "summarize_survived_word"}


class DeathWriter:
    """One per journal, in the driver."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def add(self, role: str, key: Key, *, is_alone: bool, num_ahead: int = 0, verdict: int = POISONED) -> int | None:
        """Count a death against the request ``key``; its deaths, or None if it is gone.

        ``verdict``: what a suspect that ran alone becomes. ``num_ahead``: see ``Intent.begin``.
        """
        slot, generation = key
        if slot >= self._journal.num_records:
            return None
        current, state = split_word(self._journal.prepare_words[slot])
        if current != generation or state == FREE:
            return None
        entry = self._journal.records[slot]
        deaths = _value(entry[_DEATHS[role]], generation)
        is_suspect = deaths > _value(entry[_SURVIVED[role]], generation)
        deaths = verdict if is_suspect and is_alone else min(deaths + 1, OUT_OF_MEMORY - 1)
        entry[_DEATHS[role]] = word(generation, min(num_ahead, MAX_AHEAD) << 16 | deaths)
        return deaths


def poisoned(deaths: int, text: str) -> Poisoned | None:
    """The error of a request with that many deaths held against it, if it is identified as the cause. ``text`` is its
    message, unless memory ran out.
    """
    if deaths == OUT_OF_MEMORY:
        return Poisoned(f"each time it ran alone, {memory_ran_out()}")
    return Poisoned(text) if deaths == POISONED else None


def num_deaths(journal: Journal, role: str, slot: int, generation: int) -> int:
    """Deaths this request was ever suspected of causing, or the verdict."""
    return _value(journal.records[_DEATHS[role]][slot], generation)


def num_ahead(journal: Journal, role: str, slot: int, generation: int) -> int:
    """Steps that the worker may have been ahead of the journal when it last died while processing this request."""
    return _word_of(journal.records[_DEATHS[role]][slot], generation) >> 16


def held_against(journal: Journal, role: str, slot: int, generation: int) -> int:
    """0, the number of deaths this request is suspected of causing, or the verdict."""
    deaths = num_deaths(journal, role, slot, generation)
    return deaths if deaths > _value(journal.records[_SURVIVED[role]][slot], generation) else 0


def note_survival(journal: Journal, role: str, slot: int, generation: int) -> None:
    """The request ran alone and did no harm. Called by the worker of that role."""
    journal.records[_SURVIVED[role]][slot] = word(
        generation, _word_of(journal.records[_DEATHS[role]][slot], generation)
    )


def suspects(journal: Journal, role: str) -> list[int]:
    """Slots of live requests with a death held against them."""
    deaths, survived = journal.records[_DEATHS[role]], journal.records[_SURVIVED[role]]
    generations = journal.generations()
    is_current = (deaths >> np.uint64(32) == generations) & (journal.states() != FREE)
    return [int(slot) for slot in np.flatnonzero(is_current & (deaths != survived))]


def _value(stored: int, generation: int) -> int:
    return _word_of(stored, generation) & 0xFFFF


def _word_of(stored: int, generation: int) -> int:
    current, value = split_word(stored)
    return value if current == generation else 0
