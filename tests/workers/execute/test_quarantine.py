"""Which suspects of a crash run alone, in which order, and when they are cleared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.protocol.factories import TIMES, accept, make_journal, make_record, read
from triptych.protocol.journal.deaths import DeathWriter, held_against
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestView, RequestWriter
from triptych.workers.execute.quarantine import Quarantine
from triptych.workers.execute.scheduling.progress import Progress
from triptych.workers.execute.scheduling.sequence import Key


def suspect(journal: Journal, *views: RequestView) -> list[Key]:
    for view in views:
        DeathWriter(journal).add("execute", view.key, is_alone=False)
    return [view.key for view in views]


def plan_of(*sampled: Key) -> Any:
    return cast(Any, SimpleNamespace(sampled=list(sampled)))


@pytest.mark.parametrize("column", ["finished", "failed", "expired"])
def test_suspect_that_ends_is_cleared(tmp_path: Path, column: str) -> None:
    """In whatever way: the others would wait for ever for a step that it does not take."""
    journal = make_journal(tmp_path)
    [key] = suspect(journal, accept(RequestWriter(journal), journal))
    quarantine = Quarantine(journal, num_steps=3)
    assert quarantine.next_unit() == [key]
    quarantine.enter(key)
    assert [quarantine.blocks(each) for each in (key, (3, 1))] == [False, True]
    assert quarantine.observe(plan_of(key), Progress()) == []
    getattr(progress := Progress(), column)[key] = "why"
    assert quarantine.observe(plan_of(), progress) == [key]
    assert (quarantine.is_on, held_against(journal, "execute", *key)) == (False, 0)


def test_suspects_run_one_by_one_in_order_of_arrival(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    first, *_, earlier = [accept(writer, journal) for _ in range(3)]
    ReleaseWriter(journal).forget(*first.key)
    assert writer.recycle(*first.key)
    _, later = accept(writer, journal), accept(writer, journal, make_record("b"))
    assert later.slot < earlier.slot
    keys = suspect(journal, earlier, later)
    quarantine = Quarantine(journal, num_steps=1)
    for num_left, key in zip((2, 1), keys, strict=True):
        assert (len(quarantine), quarantine.next_unit()) == (num_left, [key])
        quarantine.enter(key)
        assert (quarantine.has_next, quarantine.next_unit()) == (False, [])
        assert quarantine.observe(plan_of(key), Progress()) == [key]
    assert not quarantine.is_on


def test_steps_that_compute_the_prompt_of_a_suspect_do_not_count(tmp_path: Path) -> None:
    """It crashed the process in a later one."""
    journal = make_journal(tmp_path)
    [key] = suspect(journal, accept(RequestWriter(journal), journal))
    quarantine = Quarantine(journal, num_steps=1)
    quarantine.next_unit()
    quarantine.enter(key)
    assert [quarantine.observe(plan_of(*sampled), Progress()) for sampled in ((), (), (key,))] == [[], [], [key]]


def test_suspected_search_runs_to_its_end(tmp_path: Path) -> None:
    """It starts over, and how far it had come is unknown."""
    journal = make_journal(tmp_path)
    records = [replace(make_record(f"a {index}", num_beams=2), index=index) for index in range(2)]
    views = [read(journal, key) for key in RequestWriter(journal).accept_all(records, TIMES)]
    keys = suspect(journal, *views)
    quarantine = Quarantine(journal, num_steps=1)
    assert quarantine.next_unit() == keys
    for key in keys:
        quarantine.enter(key)
    assert [quarantine.observe(plan_of(*keys), Progress()) for _ in range(5)] == [[]] * 5
    assert sorted(quarantine.observe(plan_of(*keys), Progress(finished={keys[0]: "length"}))) == keys
