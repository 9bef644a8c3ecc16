"""What a process leaves in its pages, as the next one finds it, whenever the first is killed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.workers.execute.factories import make_scheduler, make_sequence
from triptych.workers.execute.scheduling.page_records import Columns, PageRecord, PageRecords, num_bytes_of
from triptych.workers.execute.scheduling.prefix import PageNode, root_key
from triptych.workers.execute.scheduling.scheduler import Scheduler

NUM_PAGES, PAGE_SIZE = 8, 4
ROOT = root_key("salt")
NUM_STORES = 5  # stamp, the page before it, its stamp or the root, tokens, check


def make_columns() -> Columns:
    return Columns.of(np.zeros(num_bytes_of(NUM_PAGES, PAGE_SIZE), np.uint8), NUM_PAGES, PAGE_SIZE)


def make_chain(*pages: int, root: PageNode | None = None) -> list[PageNode]:
    """Nodes on these pages, each after the one before it."""
    nodes, parent = [], root or PageNode(None, ROOT, 0)
    for page in pages:
        tokens = np.full(PAGE_SIZE, page, np.int32).tobytes()
        parent = parent.children[tokens] = PageNode(parent, tokens, parent.depth + 1, page)
        nodes.append(parent)
    return nodes


def note_all(columns: Columns, nodes: list[PageNode]) -> PageRecords:
    records = PageRecords(columns)
    for node in nodes:
        records.note(node)
    return records


def found(columns: Columns) -> list[PageRecord]:
    return list(PageRecords(columns).read())


def restored(columns: Columns) -> Scheduler:
    """The scheduler of the next process."""
    scheduler = make_scheduler(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, prefix_cache=True, page_records=PageRecords(columns)
    )
    scheduler.cache.check([])
    return scheduler


def cached_pages(columns: Columns) -> list[int]:
    """In the order of their eviction."""
    return restored(columns).cache.pool.idle_pages()


def test_records_are_read_in_the_order_of_writing() -> None:
    columns = make_columns()
    first, second = make_chain(5, 2)
    note_all(columns, [first, second])
    assert found(columns) == [PageRecord(5, 1, ROOT, first.tokens), PageRecord(2, 2, (5, 1), second.tokens)]


def test_what_is_noted_after_a_restart_is_later() -> None:
    columns = make_columns()
    first, second = make_chain(5, 2)
    note_all(columns, [first])
    records = PageRecords(columns)
    assert len(list(records.read())) == 1
    records.note(second)
    assert [record.page for record in found(columns)] == [5, 2]


def test_forgotten_page_is_not_found_nor_what_follows_it() -> None:
    columns = make_columns()
    records = note_all(columns, make_chain(1, 2, 3))
    records.forget(2)
    assert cached_pages(columns) == [1]
    assert [record.page for record in found(columns)] == [1], "an orphan is forgotten for good"


def test_page_that_follows_an_earlier_content_of_another_is_not_found() -> None:
    """As if it had been missed when that other page was given away."""
    columns = make_columns()
    records = note_all(columns, make_chain(1, 2))
    records.forget(1)
    records.note(make_chain(1)[0])
    assert cached_pages(columns) == [1]


@pytest.mark.parametrize("column", range(len(Columns._fields)), ids=Columns._fields)
def test_damaged_record_is_forgotten(column: int) -> None:
    columns = make_columns()
    note_all(columns, make_chain(1, 2))
    columns[column][2] += 1
    assert cached_pages(columns) == [1]
    assert len(found(columns)) == 1


def test_last_pages_of_what_was_used_least_recently_are_evicted_first() -> None:
    columns = make_columns()
    root = PageNode(None, ROOT, 0)
    older, newer = make_chain(1, 2, root=root), make_chain(3, 4, root=root)
    note_all(columns, [older[0], newer[0], newer[1], older[1]])
    assert cached_pages(columns) == [4, 3, 2, 1]


def test_prompt_with_another_salt_does_not_find_it() -> None:
    columns = make_columns()
    sequence = make_sequence(num_tokens=2 * PAGE_SIZE + 1)
    node = PageNode(PageNode(None, ROOT, 0), sequence.tokens[:PAGE_SIZE].tobytes(), 1, 3)
    note_all(columns, [node])
    cache = restored(columns).cache
    assert cache.find(sequence).nodes == []
    sequence.cache_salt = "salt"
    assert [node.page for node in cache.find(sequence).nodes] == [3]


class Died(Exception):
    pass


class Stores(NamedTuple):
    """An array whose owner dies at one of its stores."""

    values: Any
    left: list[int]  # stores before its death, of all arrays

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.left[0]:
            raise Died
        self.left[0] -= 1
        self.values[key] = value


def dying(columns: Columns, num_stores: int) -> PageRecords:
    """Records whose owner dies at the next store after so many."""
    left = [num_stores]
    return PageRecords(Columns(*(Stores(column, left) for column in columns)))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_stores", range(NUM_STORES))
def test_death_at_any_store_leaves_no_half_of_a_record(num_stores: int) -> None:
    columns = make_columns()
    first, second = make_chain(1, 2)
    records = dying(columns, NUM_STORES + num_stores)
    records.note(first)
    with pytest.raises(Died):
        records.note(second)
    assert cached_pages(columns) == [1]


def test_first_store_makes_a_page_unknown() -> None:
    columns = make_columns()
    note_all(columns, make_chain(1))
    with pytest.raises(Died):
        dying(columns, 0).forget(1)
    assert cached_pages(columns) == [1]
    dying(columns, 1).forget(1)
    assert cached_pages(columns) == []


# -- with sequences


def advance_to_end(scheduler: Scheduler) -> None:
    while scheduler.live:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, [1] * len(plan.sampled))


def make_recorded(columns: Columns) -> Scheduler:
    scheduler = restored(columns)
    scheduler.add(make_sequence(1, num_tokens=3 * PAGE_SIZE, max_tokens=PAGE_SIZE + 1))
    advance_to_end(scheduler)
    scheduler.release((1, 0))
    return scheduler


def test_output_is_found_too() -> None:
    """All full pages of prompt and answer; the last token was never computed."""
    columns = make_columns()
    make_recorded(columns)
    assert len(cached_pages(columns)) == 4


def test_page_is_forgotten_before_the_step_that_writes_to_it() -> None:
    columns = make_columns()
    scheduler = make_recorded(columns)
    scheduler.add(make_sequence(2, num_tokens=NUM_PAGES * PAGE_SIZE - 1, max_tokens=1))
    plan = scheduler.plan()  # and killed before the step is over
    assert plan is not None
    while sum(chunk.num_tokens for chunk in plan.chunks) and len(scheduler.running[2, 0].block_table) < NUM_PAGES:
        scheduler.apply(plan, [1] * len(plan.sampled))
        plan = scheduler.plan()
        assert plan is not None
        table = scheduler.running[2, 0].block_table
        num_full = scheduler.running[2, 0].num_computed_tokens // PAGE_SIZE
        assert not {record.page for record in found(columns)} & set(table[num_full:])


def test_pages_of_a_failed_sequence_are_forgotten() -> None:
    columns = make_columns()
    scheduler = restored(columns)
    scheduler.add(make_sequence(1, num_tokens=3 * PAGE_SIZE, max_tokens=9))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, [1] * len(plan.sampled))
    assert found(columns)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, [1] * len(plan.sampled), failed={(1, 0): "NaN"})
    assert not found(columns)


def test_what_is_still_being_computed_is_not_found() -> None:
    columns = make_columns()
    scheduler = restored(columns)
    scheduler.add(make_sequence(1, num_tokens=3 * PAGE_SIZE, max_tokens=9))
    assert scheduler.plan() is not None
    assert not found(columns)
