"""The records of one request appear together or not at all, wherever prepare is killed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.protocol.crashing import Died, MortalJournal, StoreCounter
from tests.protocol.factories import TIMES, accept, make_journal, make_record
from triptych.protocol.errors import InvalidRequest
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestView, RequestWriter, read_request, slots_of_group
from triptych.protocol.request_ids import member_id, member_seed, request_of

SIZE = 3
GROUP = [
    replace(make_record(member_id("g", index, SIZE), num_prompt_tokens=5, digest=9), index=index)
    for index in range(SIZE)
]
NUM_STORES = 21 * SIZE


def visible_requests(journal: Journal) -> list[RequestView]:
    views = (read_request(journal, slot) for slot in range(journal.num_records))
    return [view for view in views if view is not None]


def half_written(folder: Path, num_stores: int) -> Journal:
    """A journal of four previously used records, and a prepare that died while it wrote a group."""
    journal = make_journal(folder)
    writer = RequestWriter(journal)
    views = [accept(writer, journal, make_record(f"old{index}", digest=index)) for index in range(4)]
    for view in views:
        ReleaseWriter(journal).forget(view.slot, view.generation)
        assert writer.recycle(view.slot, view.generation)
    mortal = MortalJournal(journal, StoreCounter(end=num_stores))
    try:
        RequestWriter(mortal).accept_all(GROUP, TIMES)
    except Died:
        assert num_stores < NUM_STORES
    return journal


@pytest.mark.parametrize("num_stores", range(NUM_STORES + 1))
def test_group_is_visible_as_a_whole_or_not_at_all(tmp_path: Path, num_stores: int) -> None:
    journal = half_written(tmp_path, num_stores)
    assert [view.record for view in visible_requests(journal)] == (GROUP if num_stores == NUM_STORES else [])


@pytest.mark.parametrize("num_stores", range(NUM_STORES))
def test_next_prepare_drops_half_a_group_and_accepts_it_when_it_is_sent_again(tmp_path: Path, num_stores: int) -> None:
    journal = half_written(tmp_path, num_stores)
    writer = RequestWriter(Journal.open(journal.path))
    assert writer.num_free == 4
    assert not {request_of(request_id) for request_id, _ in writer.past_ids()} & {"g"}
    assert not (journal.states() != 0).any()
    writer.accept_all(GROUP, TIMES)
    assert sorted(view.record.index for view in visible_requests(journal)) == [record.index for record in GROUP]
    assert len({view.group for view in visible_requests(journal)}) == 1


def test_member_stays_when_others_are_forgotten_first(tmp_path: Path) -> None:
    """Even if the last one goes first and its slot is reused: the group was complete once."""
    journal = make_journal(tmp_path, num_records=SIZE)
    writer = RequestWriter(journal)
    keys = writer.accept_all(GROUP, TIMES)
    for key in keys[:0:-1]:
        ReleaseWriter(journal).forget(*key)
        assert writer.recycle(*key)
    [left] = visible_requests(journal)
    assert (left.slot, left.generation) == keys[0]
    assert accept(writer, journal, make_record("other")).slot == keys[-1][0]
    assert {view.record.request_id for view in visible_requests(journal)} == {"g 0", "other"}
    assert ("g 1", 9) in RequestWriter(journal).past_ids()


def test_group_without_enough_space_takes_none(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, num_records=4, arena_bytes=1 << 16)
    writer = RequestWriter(journal)
    with pytest.raises(InvalidRequest, match="needs 6 records, the journal has 4"):
        writer.accept_all(GROUP * 2, TIMES)
    with pytest.raises(InvalidRequest, match="bytes of the journal"):
        writer.accept_all([make_record(token_capacity=3000)] * 3, TIMES)
    assert writer.num_free == 4
    writer.accept(make_record(token_capacity=8000), TIMES)


def test_single_request_is_its_own_group(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    view = accept(RequestWriter(journal), journal)
    assert view.group == (view.slot, view.generation)


def test_records_of_a_request_are_found_in_order_of_arrival(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    first, *_ = [accept(writer, journal) for _ in range(3)]
    ReleaseWriter(journal).forget(*first.key)
    assert writer.recycle(*first.key)
    keys = writer.accept_all(GROUP[:2], TIMES)
    assert [slot for slot, _ in keys] == slots_of_group(journal, keys[-1]) == [3, 0]


def test_ids_and_seeds_of_members_are_functions_of_the_request() -> None:
    assert [member_id("a", index, 1) for index in range(1)] == ["a"]
    members = [member_id("a", index, 12) for index in range(12)]
    assert len(set(members)) == 12
    assert {request_of(member) for member in members} == {"a"} == {request_of("a")}
    seeds = [member_seed(2**63 - 2, index) for index in range(4)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert all(a != b for a, b in itertools.pairwise(seeds))
    assert seeds[0] == 2**63 - 2
