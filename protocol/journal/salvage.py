"""Recovers what can be trusted from a journal that a reboot or a bad disk may have damaged, record by record."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from ..errors import JournalError
from ..record_key import Key
from .layout import ACCEPTED, DISPATCHED, FREE, Journal, split_word, word
from .releases import has_sound_end, is_forgotten, is_released, read_release
from .requests import RequestView, drop, read_request
from .tokens import read_finish, read_tokens

_BROKEN = ("abort", "error")  # ends of a search without hypotheses


def salvage(journal: Journal) -> list[str]:
    """Free every record that cannot be trusted; returns a line with the reason for each.

    Called by the driver while no worker runs: it changes fields that belong to them. A request dropped this way, with
    all its records if it has several, becomes unknown to its client; all others go on.
    """
    lines = _restore_lost(journal)
    views: list[RequestView] = []
    for slot in journal.slots_in_use().tolist():
        try:
            view = _read(journal, slot)
        except JournalError as error:
            drop(journal, slot)
            lines.append(f"record {slot} is given up: {error.message}")
            continue
        _reset_impossible_ends(journal, slot, lines)
        views.append(view)
    lines += _free_overlapping(journal, views)
    lines += _free_incomplete(journal, _not_free(journal, views))
    return lines + _reset_ends_without_tokens(journal, _not_free(journal, views))


def _restore_lost(journal: Journal) -> list[str]:
    """Records that are free although their requests are not forgotten: no process frees one before that, and ``drop``
    erases ``id_generation``. What is left of such a record is checked like any other.
    """
    lines: list[str] = []
    generations, was_dispatched = journal.generations(), journal.records["dispatched_ns"] != 0
    is_whole = (generations != 0) & (journal.records["id_generation"] == generations)
    for slot in np.flatnonzero((journal.states() == FREE) & is_whole).tolist():
        generation = int(generations[slot])
        if not is_forgotten(journal, slot, generation):
            state = DISPATCHED if was_dispatched[slot] else ACCEPTED
            journal.records[slot]["prepare_word"] = word(generation, state)
            lines.append(f"record {slot}: it was free, although its request was not forgotten; it is taken as in use")
    return lines


def _not_free(journal: Journal, views: list[RequestView]) -> list[RequestView]:
    states = journal.states()
    return [view for view in views if states[view.slot] != FREE]


def _read(journal: Journal, slot: int) -> RequestView:
    if (state := journal.state(slot)) > DISPATCHED:
        raise JournalError(f"its state is {state}, the greatest is {DISPATCHED}")
    view = read_request(journal, slot)
    if view is None:
        raise JournalError("the last record of its request was never published")
    if view.extent.end > journal.arena_bytes:
        raise JournalError(f"it ends at byte {view.extent.end} of the arena, which has {journal.arena_bytes}")
    return view


def _reset_impossible_ends(journal: Journal, slot: int, lines: list[str]) -> None:
    """A word with a value that no process writes counts as not written: the request goes on."""
    generation = journal.generation(slot)
    entry = journal.records[slot]
    if split_word(entry["finish_word"])[0] == generation and read_finish(journal, slot, generation) is None:
        entry["finish_word"] = 0
        lines.append(f"record {slot}: finish_word does not match its tokens and error; it is taken as not written")
    if split_word(entry["release_word"])[0] == generation and not has_sound_end(journal, slot):
        entry["release_word"] = 0
        lines.append(f"record {slot}: release_word does not match how its answer ended; it is taken as not written")


def _free_overlapping(journal: Journal, views: list[RequestView]) -> list[str]:
    """Of two records that share bytes the later one was written last: the earlier one's bytes cannot be intact."""
    lines: list[str] = []
    end, owner = 0, None
    for view in sorted(views, key=lambda view: view.extent.payload_offset):
        if owner is not None and view.extent.payload_offset < end:
            loser = min(owner, view, key=lambda view: view.arrival)
            drop(journal, loser.slot)
            lines.append(f"record {loser.slot} is given up: it shares bytes with another one")
            if loser is view:
                continue
        end, owner = view.extent.end, view
    return lines


def _free_incomplete(journal: Journal, views: list[RequestView]) -> list[str]:
    """A request with several records needs all of them until it is released for good: a missing one would be awaited
    forever. No damage is one that has ended: summarize may have been killed while it released its records.
    """
    lines: list[str] = []
    num_found = Counter(view.group for view in views)
    is_open = {view.group for view in views if not is_released(journal, *view.key)}
    for view in views:
        is_whole = num_found[view.group] == view.record.params.group_size
        if not is_whole and not is_forgotten(journal, *view.key):
            drop(journal, view.slot)
            if view.group in is_open:
                lines.append(f"record {view.slot} is given up: its request has lost another record")
    return lines


def _reset_ends_without_tokens(journal: Journal, views: list[RequestView]) -> list[str]:
    """An end whose tokens did not reach the disk: the answer is computed again from its beginning, once it has a
    credit. The same goes for all beams of its search, which continue together or not at all, and for those of a search
    of which only some hypotheses reached the disk.
    """
    lines: list[str] = []
    lost = [view for view in views if _has_lost_tokens(journal, view)]
    slots, searches = {view.slot for view in lost}, {view.group for view in lost if view.record.params.is_beam_search}
    searches |= _torn_searches(journal, views)
    for view in views:
        if view.slot in slots or (view.group in searches and not is_forgotten(journal, *view.key)):
            entry = journal.records[view.slot]
            entry["prepare_word"] = word(view.generation, ACCEPTED)
            entry["finish_word"] = entry["release_word"] = entry["tokens_word"] = 0
            lines.append(f"record {view.slot}: the tokens of its answer are lost; it is taken as not ended")
    return lines


def _torn_searches(journal: Journal, views: list[RequestView]) -> set[Key]:
    """The beam searches of which some hypotheses are written and others are not, in an order that no process writes:
    the last record's hypothesis is written last, and all ends after it.
    """
    beams: dict[Key, list[RequestView]] = defaultdict(list)
    for view in views:
        if view.record.params.is_beam_search and not is_forgotten(journal, *view.key):
            beams[view.group].append(view)
    return {group for group, members in beams.items() if _is_torn(journal, members)}


def _is_torn(journal: Journal, beams: list[RequestView]) -> bool:
    ends = [_reason(journal, view.key) for view in beams]
    if any(end in _BROKEN for end in ends):
        return False  # summarize ends the others with it
    tokens = [read_tokens(journal, view) for view in beams]
    is_written = [end != "" or (ids is not None and len(ids) > 0) for end, ids in zip(ends, tokens, strict=True)]
    last = next((done for view, done in zip(beams, is_written, strict=True) if view.key == view.group), False)
    return (any(ends) or last) and not all(is_written)


def _reason(journal: Journal, key: Key) -> str:
    """Why this answer has ended; empty if it has not."""
    end = read_finish(journal, *key)
    if (release := read_release(journal, *key)) is not None:
        return release[1]
    return "" if end is None else end[0]


def _has_lost_tokens(journal: Journal, view: RequestView) -> bool:
    """Whether this answer has an end but not all of its tokens, their logprobs and the results of its prompt."""
    key = view.key
    if is_forgotten(journal, *key):
        return False
    tokens, finish, release = read_tokens(journal, view), read_finish(journal, *key), read_release(journal, *key)
    if release is not None and release[0] > (0 if tokens is None else len(tokens)):
        return True
    if finish is None or finish[0] not in ("stop", "length"):
        return False
    return tokens is None  # which stands for lost results of the prompt too: the check of the tokens covers them
