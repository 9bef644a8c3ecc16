"""Who was in the hands of a worker that died: the driver's part of the journal, and what the workers make of it.

A word holds ``generation << 32 | steps << 16 | deaths``, the steps being those that the worker had done and not written
down at the last death. The worker answers with the number of deaths after which a run of the request alone did no harm;
only what is above that is held against it.
"""

from __future__ import annotations

import numpy as np

from .layout import FREE, Journal, split_word, word

POISONED = 0xFFFF  # as a number of deaths: named, and not run any more
MAX_AHEAD = 0xFFFF  # steps
_DEATHS = {"execute": "deaths_word", "summarize": "summarize_deaths_word"}
_SURVIVED = {"execute": "survived_word", "summarize": "summarize_survived_word"}


class DeathWriter:
    """One a journal, in the driver."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def add(self, role: str, key: int, *, is_alone: bool, num_ahead: int = 0) -> int | None:
        """Count one death against the request ``key`` (``slot << 32 | generation``); its deaths, or None if it is gone.

        A suspect that was alone is ``POISONED``. ``num_ahead``: see ``Intent.begin``.
        """
        slot, generation = split_word(key)
        if slot >= self._journal.num_records:
            return None
        current, state = split_word(self._journal.prepare_words[slot])
        if current != generation or state == FREE:
            return None
        entry = self._journal.records[slot]
        deaths = _value(entry[_DEATHS[role]], generation)
        is_suspect = deaths > _value(entry[_SURVIVED[role]], generation)
        deaths = POISONED if is_suspect and is_alone else min(deaths + 1, POISONED - 1)
        entry[_DEATHS[role]] = word(generation, min(num_ahead, MAX_AHEAD) << 16 | deaths)
        return deaths


def num_deaths(journal: Journal, role: str, slot: int, generation: int) -> int:
    """Deaths that this request was ever suspected of, or ``POISONED``."""
    return _value(journal.records[_DEATHS[role]][slot], generation)


def num_ahead(journal: Journal, role: str, slot: int, generation: int) -> int:
    """Steps that the worker may have been ahead of the journal when it last died with this request in its hands."""
    return _word_of(journal.records[_DEATHS[role]][slot], generation) >> 16


def held_against(journal: Journal, role: str, slot: int, generation: int) -> int:
    """0, the deaths that this request is suspected of, or ``POISONED``."""
    deaths = num_deaths(journal, role, slot, generation)
    return deaths if deaths > _value(journal.records[_SURVIVED[role]][slot], generation) else 0


def note_survival(journal: Journal, role: str, slot: int, generation: int) -> None:
    """The request was run alone and did no harm. For the worker of that role."""
    journal.records[_SURVIVED[role]][slot] = word(
        generation, _word_of(journal.records[_DEATHS[role]][slot], generation)
    )


def suspects(journal: Journal, role: str) -> list[int]:
    """Slots of live requests that something is held against."""
    deaths, survived = journal.records[_DEATHS[role]], journal.records[_SURVIVED[role]]
    generations = journal.generations()
    is_current = (deaths >> np.uint64(32) == generations) & (journal.states() != FREE)
    return [int(slot) for slot in np.flatnonzero(is_current & (deaths != survived))]


def _value(stored: int, generation: int) -> int:
    return _word_of(stored, generation) & POISONED


def _word_of(stored: int, generation: int) -> int:
    current, value = split_word(stored)
    return value if current == generation else 0
