"""A writer may be killed before any of its stores: the incomplete write is ignored, and the next writer continues."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.protocol.crashing import Died, MortalJournal, StoreCounter
from tests.protocol.factories import TIMES, accept, make_journal, make_record
from triptych.protocol.errors import JournalError
from triptych.protocol.journal.layout import ACCEPTED, DISPATCHED, Journal
from triptych.protocol.journal.releases import ReleaseWriter, read_release
from triptych.protocol.journal.requests import RequestView, RequestWriter, read_request
from triptych.protocol.journal.tokens import FEW, TokenWriter, read_finish, read_times, read_tokens
from triptych.protocol.record import mark_of

NEW = make_record("new", num_prompt_tokens=5, token_capacity=4, logprobs=1)
NUM_ACCEPT_STORES = 21
SLOTS = np.array([0])


def used_journal(folder: Path) -> Journal:
    """One free record in which an earlier request has left something in every field."""
    journal = make_journal(folder, num_records=1)
    writer = RequestWriter(journal)
    record = make_record("old", num_prompt_tokens=40, token_capacity=30, digest=3)
    view = accept(writer, journal, replace(record, owner=5))
    writer.dispatch(view.slot, view.generation, 5)
    tokens = TokenWriter(journal)
    tokens.adopt(view)
    tokens.add_times(view.slot, scheduled_ns=77, preempted_ns=78, num_cached_tokens=79)
    tokens.note_lost_early(view.slot)
    tokens.begin_loss(view.slot, "recovered_ns", 80)
    tokens.publish(SLOTS, SLOTS, np.array([9], np.int32), 4_500_000)
    tokens.finish(view.slot, view.generation, "error", "old error")
    releases = ReleaseWriter(journal)
    releases.release(view.slot, view.generation, num_tokens=1, reason="error")
    releases.forget(view.slot, view.generation)
    writer.recycle(view.slot, view.generation)
    return journal


def dies_before(store: int, journal: Journal, act: Any) -> None:
    with pytest.raises(Died):
        act(MortalJournal(journal, StoreCounter(end=store)))


def loses(store: int, journal: Journal, act: Any) -> None:
    """Drops one store while the others arrive, as another process may see it on a weakly ordered machine."""
    act(MortalJournal(journal, StoreCounter(lost=store)))


def count_stores(journal: Journal, act: Any) -> int:
    counter = StoreCounter()
    act(MortalJournal(journal, counter))
    return counter.num_stores


def trusted_request(journal: Journal) -> RequestView | None:
    try:
        return read_request(journal, 0)
    except JournalError:
        return None


def accept_new(journal: Journal) -> None:
    RequestWriter(journal).accept(NEW, TIMES)


def test_every_store_of_an_accept_is_covered(tmp_path: Path) -> None:
    assert count_stores(used_journal(tmp_path), accept_new) == NUM_ACCEPT_STORES


@pytest.mark.parametrize("store", range(NUM_ACCEPT_STORES))
def test_half_written_request_was_never_accepted(tmp_path: Path, store: int) -> None:
    journal = used_journal(tmp_path)
    dies_before(store, journal, accept_new)
    assert read_request(journal, 0) is None


@pytest.mark.parametrize("store", range(NUM_ACCEPT_STORES))
def test_restarted_prepare_reuses_the_record(tmp_path: Path, store: int) -> None:
    journal = used_journal(tmp_path)
    dies_before(store, journal, accept_new)
    again = Journal.open(journal.path)
    assert accept(RequestWriter(again), again, NEW).record == NEW


@pytest.mark.parametrize("store", range(NUM_ACCEPT_STORES))
def test_id_that_was_never_accepted_does_not_count_as_answered(tmp_path: Path, store: int) -> None:
    """Its client submits it again, and must get an answer instead of the reply that it already had one."""
    journal = used_journal(tmp_path)
    dies_before(store, journal, accept_new)
    assert RequestWriter(journal).past_ids() in ([("old", mark_of(3, 5))], [])


@pytest.mark.parametrize("store", range(NUM_ACCEPT_STORES - 1))
def test_reader_that_sees_the_word_first_trusts_the_complete_request_or_nothing(tmp_path: Path, store: int) -> None:
    journal = used_journal(tmp_path)
    loses(store, journal, accept_new)
    seen = trusted_request(journal)
    assert seen is None or (seen.record, seen.accepted_ns, seen.arrival) == (NEW, TIMES.accepted_ns, 0)


def live_request(folder: Path) -> tuple[Journal, RequestView]:
    journal = used_journal(folder)
    return journal, accept(RequestWriter(journal), journal, NEW)


@pytest.mark.parametrize("store", range(8))
def test_half_done_adoption_exposes_nothing_of_the_earlier_request(tmp_path: Path, store: int) -> None:
    journal, view = live_request(tmp_path)
    dies_before(store, journal, lambda mortal: TokenWriter(mortal).adopt(view))
    assert TokenWriter(journal).adopt(view).tolist() == []
    assert read_times(journal, view, 0)[1:] == (0, 0, 0, 0, 0, 0, 0, 0)


def test_before_adoption_nothing_of_the_earlier_request_is_visible(tmp_path: Path) -> None:
    journal, view = live_request(tmp_path)
    assert read_tokens(journal, view) is None
    assert read_times(journal, view, 0)[1:] == (0, 0, 0, 0, 0, 0, 0, 0)
    assert read_finish(journal, view.slot, view.generation) is None
    assert read_release(journal, view.slot, view.generation) is None


@pytest.mark.parametrize(("store", "state"), [(0, ACCEPTED), (1, ACCEPTED), (2, DISPATCHED)])
def test_dispatched_request_has_the_time_of_its_dispatch(tmp_path: Path, store: int, state: int) -> None:
    """A driver that finds it without its state tells by that time what the state was."""
    journal, view = live_request(tmp_path)
    mortal = MortalJournal(journal, StoreCounter(end=store))
    with suppress(Died):
        RequestWriter(mortal).dispatch(view.slot, view.generation, 7)
    assert journal.state(view.slot) == state
    assert state == ACCEPTED or journal.records["dispatched_ns"][view.slot] == 7


def publish(view: RequestView, index: int, token: int) -> Any:
    def act(journal: Journal) -> None:
        writer = TokenWriter(journal)
        writer.adopt(view)
        writer.publish_logprobs(view, index, np.array([1, 2, 3], np.uint32))
        writer.publish(SLOTS, np.array([index]), np.array([token], np.int32), TIMES.accepted_ns + 50_000)

    return act


@pytest.mark.parametrize("store", range(4))
def test_half_written_token_does_not_count(tmp_path: Path, store: int) -> None:
    journal, view = live_request(tmp_path)
    publish(view, 0, 5)(journal)
    dies_before(store, journal, publish(view, 1, 6))
    assert TokenWriter(journal).adopt(view).tolist() == [5]


def test_token_with_its_word_counts(tmp_path: Path) -> None:
    journal, view = live_request(tmp_path)
    publish(view, 0, 5)(journal)
    assert count_stores(journal, publish(view, 1, 6)) == 4
    assert TokenWriter(journal).adopt(view).tolist() == [5, 6]


@pytest.mark.parametrize("store", [0, 1], ids=["logprobs", "token"])
def test_reader_that_sees_the_word_before_the_token_trusts_neither(tmp_path: Path, store: int) -> None:
    journal, view = live_request(tmp_path)
    publish(view, 0, 5)(journal)
    loses(store, journal, publish(view, 1, 6))
    assert read_tokens(journal, view) is None


def test_reader_that_sees_the_token_before_the_word_has_one_less(tmp_path: Path) -> None:
    journal, view = live_request(tmp_path)
    publish(view, 0, 5)(journal)
    loses(3, journal, publish(view, 1, 6))
    tokens = read_tokens(journal, view)
    assert tokens is not None
    assert tokens.tolist() == [5]


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("store", range(4))
def test_step_of_many_rows_counts_with_its_last_store(tmp_path: Path, store: int, num_steps: int) -> None:
    journal = make_journal(tmp_path, num_records=FEW + 1)
    requests = RequestWriter(journal)
    views = [accept(requests, journal) for _ in range(FEW + 1)]
    mortal = MortalJournal(journal, counter := StoreCounter())
    writer = TokenWriter(mortal)
    for view in views:
        writer.adopt(view)
    counter.num_stores, counter.end = 0, store
    slots, tokens = np.arange(FEW + 1), np.ones((num_steps, FEW + 1), np.int32)
    with suppress(Died):
        writer.publish_steps(slots, np.zeros(FEW + 1, np.int64), tokens, np.arange(num_steps) + 8_000_000)
    found = [read_tokens(journal, view) for view in views]
    expected = [1] * num_steps if store == 3 else []
    assert [tokens is not None and tokens.tolist() for tokens in found] == [expected] * len(views)


@pytest.mark.parametrize("store", range(5))
def test_hypothesis_appears_with_its_score_and_times(tmp_path: Path, store: int) -> None:
    journal = used_journal(tmp_path)
    view = accept(RequestWriter(journal), journal)
    mortal = MortalJournal(journal, counter := StoreCounter())
    writer = TokenWriter(mortal)
    writer.adopt(view)
    counter.num_stores, counter.end = 0, store
    with suppress(Died):
        writer.publish_all(view, [4, 5], [5_000_000, 6_000_000], score=-1.5)
    tokens = read_tokens(journal, view)
    assert tokens is not None
    assert tokens.tolist() == ([4, 5] if store == 4 else [])
    assert store < 4 or journal.records["score"][view.slot] == -1.5
    assert store < 4 or read_times(journal, view, 2).tokens_ns.tolist() == [5_000_000, 6_000_000]


@pytest.mark.parametrize("store", range(3))
def test_loss_is_never_counted_twice(tmp_path: Path, store: int) -> None:
    """The stages of a ledger would be longer than the request took."""
    journal, view = live_request(tmp_path)
    writer = TokenWriter(journal)
    writer.adopt(view)
    writer.begin_loss(view.slot, "recovered_ns", 1_000)
    with suppress(Died):
        TokenWriter(MortalJournal(journal, StoreCounter(end=store))).end_loss(view.slot, "recovered_ns", 500)
    lost_ns = read_times(journal, view, 0).until(1_500).recovered_ns
    assert lost_ns <= 500
    assert store == 1 or lost_ns == 500  # between the two stores it is not counted


@pytest.mark.parametrize("store", range(2))
def test_half_written_finish_does_not_count(tmp_path: Path, store: int) -> None:
    journal, view = live_request(tmp_path)
    key = view.slot, view.generation
    dies_before(store, journal, lambda mortal: TokenWriter(mortal).finish(*key, "error", "new error"))
    assert read_finish(journal, *key) is None
    TokenWriter(journal).finish(*key, "length")
    assert read_finish(journal, *key) == ("length", "")


def test_reader_that_sees_the_end_before_the_last_token_waits_for_it(tmp_path: Path) -> None:
    """Otherwise it would take the answer, without its last token, as complete."""
    journal, view = live_request(tmp_path)
    key = view.slot, view.generation
    publish(view, 0, 5)(journal)
    before = int(journal.tokens_words[view.slot])
    publish(view, 1, 6)(journal)
    after = int(journal.tokens_words[view.slot])
    TokenWriter(journal).finish(*key, "length")
    journal.tokens_words[view.slot] = before
    assert read_finish(journal, *key) is None
    journal.tokens_words[view.slot] = after
    assert read_finish(journal, *key) == ("length", "")


def test_reader_that_sees_the_end_before_its_error_waits_for_it(tmp_path: Path) -> None:
    journal, view = live_request(tmp_path)
    loses(0, journal, lambda mortal: TokenWriter(mortal).finish(view.slot, view.generation, "error", "new error"))
    assert read_finish(journal, view.slot, view.generation) is None


@pytest.mark.parametrize("store", range(3))
def test_half_written_release_does_not_count(tmp_path: Path, store: int) -> None:
    journal, view = live_request(tmp_path)
    key = view.slot, view.generation
    dies_before(store, journal, lambda mortal: ReleaseWriter(mortal).release(*key, num_tokens=3, reason="stop"))
    assert read_release(journal, *key) is None
    ReleaseWriter(journal).release(*key, num_tokens=4, reason="length")
    assert read_release(journal, *key) == (4, "length")


def test_unfinished_forgetting_keeps_the_record(tmp_path: Path) -> None:
    journal, view = live_request(tmp_path)
    dies_before(0, journal, lambda mortal: ReleaseWriter(mortal).forget(view.slot, view.generation))
    assert not RequestWriter(journal).recycle(view.slot, view.generation)
