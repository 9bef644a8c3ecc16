"""After a reboot or a disk error, intact records of the journal continue; damaged ones are given up and logged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.protocol.factories import TIMES, accept, filled, lose_tokens, make_journal, make_record, read
from triptych.protocol.journal.layout import (
    ACCEPTED,
    ACKNOWLEDGED,
    DISPATCHED,
    FORGOTTEN,
    FREE,
    RELEASED,
    UNREAD,
    Journal,
    word,
)
from triptych.protocol.journal.releases import ReleaseWriter, is_released, read_end_code
from triptych.protocol.journal.requests import RequestView, RequestWriter, read_request
from triptych.protocol.journal.salvage import salvage
from triptych.protocol.journal.tokens import TokenWriter, read_finish, read_tokens
from triptych.protocol.messages import FINISH_REASONS
from triptych.protocol.record import RequestRecord
from triptych.protocol.scores import ScoreColumns


def live_ids(journal: Journal) -> list[str]:
    views = [read_request(journal, slot) for slot in range(journal.num_records)]
    return [view.record.request_id for view in views if view is not None]


def free(journal: Journal, writer: RequestWriter, view: RequestView) -> None:
    ReleaseWriter(journal).forget(*view.key)
    assert writer.recycle(*view.key)


def test_sound_journal_is_left_unchanged(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    before = journal.records.tobytes()
    assert salvage(journal) == []
    assert journal.records.tobytes() == before


def test_torn_record_is_given_up_and_the_others_continue(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.arena[int(journal.records["payload_offset"][1]) + 3] ^= 0xFF
    (line,) = salvage(journal)
    assert line.startswith("record 1 is given up: ")
    assert live_ids(journal) == ["r0", "r2", "r3"]
    assert RequestWriter(journal).num_free == journal.num_records - 3


def test_record_with_an_impossible_state_is_given_up(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    generation = int(journal.generations()[2])
    journal.prepare_words[2] = word(generation, 3)
    assert salvage(journal) == ["record 2 is given up: its state is 3, the greatest is 2"]


def test_record_that_ends_outside_the_arena_is_given_up(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    size, journal.arena_bytes = journal.arena_bytes, 2 * journal.arena_bytes
    RequestWriter(journal).accept(make_record(token_capacity=size // 8), TIMES)
    journal.arena_bytes = size
    [line] = salvage(journal)
    assert line.endswith(f"of the arena, which has {size}")
    assert live_ids(journal) == []


@pytest.mark.parametrize("state", [ACCEPTED, DISPATCHED])
def test_record_that_lost_its_state_is_in_use_again(tmp_path: Path, state: int) -> None:
    """Its request would be gone without a word."""
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    keys = [writer.accept(make_record(request_id=f"r{index}"), TIMES) for index in range(3)]
    free(journal, writer, read(journal, keys[0]))
    if state == DISPATCHED:
        writer.dispatch(*keys[1], 5)
    journal.prepare_words[keys[1][0]] = word(keys[1][1], FREE)
    [line] = salvage(journal)
    assert line.startswith("record 1: it was free, although its request was not forgotten")
    assert live_ids(journal) == ["r1", "r2"]
    assert journal.state(keys[1][0]) == state
    assert salvage(journal) == []


def test_request_whose_last_record_is_missing_was_never_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Driver and prepare were killed while writing it. Its client submits it again: the id counts as never used."""
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    write, records = writer._write, [make_record("a 0", n=2), make_record("a 1", n=2)]
    monkeypatch.setattr(writer, "_write", lambda slot, *rest: write(slot, *rest) if slot == 0 else 1 // 0)
    with pytest.raises(ZeroDivisionError):
        writer.accept_all(records, TIMES)
    assert salvage(journal) == ["record 0 is given up: the last record of its request was never published"]
    assert RequestWriter(journal).past_ids() == []


def test_id_of_a_given_up_record_is_free_again(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.arena[int(journal.records["payload_offset"][1]) + 3] ^= 0xFF
    salvage(journal)
    assert RequestWriter(journal).past_ids() == []


@pytest.mark.parametrize(("name", "why"), [("finish_word", "does not match"), ("release_word", "does not match")])
def test_invalid_end_is_taken_back(tmp_path: Path, name: str, why: str) -> None:
    journal = filled(tmp_path)
    journal.records[name][0] = word(int(journal.generations()[0]), 99)
    (line,) = salvage(journal)
    assert f"{name} {why}" in line
    assert not journal.records[name][0]
    assert live_ids(journal) == ["r0", "r1", "r2", "r3"]
    assert not journal.release_states().any()


@pytest.mark.parametrize("number", [len(FINISH_REASONS), 2**32 - 1])
def test_end_with_an_unknown_reason_is_taken_back(tmp_path: Path, number: int) -> None:
    journal = filled(tmp_path)
    ReleaseWriter(journal).release(2, 1, num_tokens=0, reason="abort")
    journal.records["end_reason"][2] = number
    assert salvage(journal) == [
        "record 2: release_word does not match how its answer ended; it is taken as not written"
    ]
    assert not journal.records["release_word"][2]


def test_leftover_reason_of_an_earlier_end_is_no_damage(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.records["end_reason"][2] = 99
    assert salvage(journal) == []


def test_one_of_two_records_that_share_bytes_is_given_up(tmp_path: Path) -> None:
    """A record page never reached the disk: an old record reappears whose bytes belong to a new request."""
    journal = filled(tmp_path, 3)
    journal.records[3] = journal.records[0]
    lines = salvage(journal)
    assert len(lines) == 1
    assert "shares bytes" in lines[0]
    RequestWriter(journal)


def test_old_record_whose_bytes_were_given_to_two_is_given_up_once(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    old = accept(writer, journal, make_record("old", token_capacity=200))
    page, payload = journal.records[old.slot].copy(), journal.arena[: 4 * old.extent.tokens_at].copy()
    free(journal, writer, old)
    first, *_ = [accept(writer, journal, make_record(name)) for name in ("first", "a", "b")]
    free(journal, writer, first)
    journal.records[old.slot], journal.arena[: len(payload)] = page, payload
    assert salvage(journal) == [f"record {old.slot} is given up: it shares bytes with another one"]
    assert live_ids(journal) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("end_tokens", 2), ("end_reason", 2), ("end_code", b"over\xffoaded"), ("release_word", 1 << 32 | UNREAD)],
)
def test_damaged_end_is_taken_back(tmp_path: Path, name: str, value: object) -> None:
    """It would be an answer that is cut, or one that nobody gets."""
    journal = filled(tmp_path)
    ReleaseWriter(journal).release(1, 1, num_tokens=0, reason="error", code="overloaded")
    assert salvage(journal) == []
    journal.records[name][1] = value
    assert salvage(journal) == [
        "record 1: release_word does not match how its answer ended; it is taken as not written"
    ]
    assert not is_released(journal, 1, 1)


@pytest.mark.parametrize("state", [FORGOTTEN, UNREAD, ACKNOWLEDGED])
def test_damaged_state_of_an_end_is_taken_back(tmp_path: Path, state: int) -> None:
    """A bit of it would end a request whose answer nobody has read."""
    journal, [view] = with_answers(tmp_path, make_record())
    ReleaseWriter(journal).release(*view.key, num_tokens=2, reason="stop")
    journal.release_words[view.slot] ^= np.uint64(RELEASED ^ state)
    [line] = salvage(journal)
    assert line.startswith(f"record {view.slot}: release_word does not match")
    assert not is_released(journal, *view.key)


def test_damaged_code_of_an_end_can_be_read(tmp_path: Path) -> None:
    """Or summarize would end."""
    journal = filled(tmp_path)
    ReleaseWriter(journal).release(1, 1, num_tokens=0, reason="error", code="overloaded")
    journal.records["end_code"][1] = b"over\xffoaded"
    assert read_end_code(journal, 1, 1) == "over\ufffdoaded"


def with_a_group(tmp_path: Path) -> Journal:
    """A group of two between two single requests."""
    journal = make_journal(tmp_path)
    writer = RequestWriter(journal)
    writer.accept(make_record("before"), TIMES)
    writer.accept_all([make_record("a 0", n=2), make_record("a 1", n=2)], TIMES)
    writer.accept(make_record("behind"), TIMES)
    return journal


@pytest.mark.parametrize("slot", [1, 2], ids=["first", "last"])
def test_request_that_lost_one_record_is_given_up_completely(tmp_path: Path, slot: int) -> None:
    """Otherwise followers of the missing choice would wait for ever, or those of all choices, if these compete."""
    journal = with_a_group(tmp_path)
    journal.arena[int(journal.records["payload_offset"][slot]) + 3] ^= 0xFF
    lines = salvage(journal)
    assert len(lines) == 2
    assert "its request has lost another record" in lines[1]
    assert live_ids(journal) == ["before", "behind"]
    assert RequestWriter(journal).past_ids() == []


def test_leftovers_of_an_answered_request_are_not_damage(tmp_path: Path) -> None:
    journal = with_a_group(tmp_path)
    for slot in (1, 2):
        ReleaseWriter(journal).forget(slot, int(journal.generations()[slot]))
    TokenWriter(journal).finish(1, int(journal.generations()[1]), "abort")
    assert RequestWriter(journal).recycle(1, int(journal.generations()[1]))
    assert salvage(journal) == []
    assert live_ids(journal) == ["before", "a 1", "behind"]


def test_answered_request_that_is_half_forgotten_is_not_damage(tmp_path: Path) -> None:
    """summarize was killed while it forgot the request, whose first record is free by now."""
    journal = with_a_group(tmp_path)
    keys = [(slot, int(journal.generations()[slot])) for slot in (1, 2)]
    for key in keys:
        ReleaseWriter(journal).release(*key, num_tokens=0, reason="abort")
    ReleaseWriter(journal).forget(*keys[0])
    assert RequestWriter(journal).recycle(*keys[0])
    assert salvage(journal) == []
    assert live_ids(journal) == ["before", "behind"]
    assert RequestWriter(journal).past_ids() == [("a 0", 7)]


def with_answers(tmp_path: Path, *records: RequestRecord) -> tuple[Journal, list[RequestView]]:
    """One request, each sequence of which has produced two tokens and ended."""
    journal = make_journal(tmp_path)
    journal.prepare_words[:] = word(6, FREE)  # a generation that is no other number, either
    writer, tokens = RequestWriter(journal), TokenWriter(journal)
    keys = writer.accept_all(records, TIMES)
    views = [view for slot, _ in keys if (view := read_request(journal, slot)) is not None]
    for view, key in zip(views, keys, strict=True):
        writer.dispatch(*key, 5_000_000)
        tokens.adopt(view)
        if view.record.num_prompt_logprobs is not None:
            tokens.publish_scores(view, 0, scores_of(view))
        if size := view.record.embedding_size:
            tokens.publish_embedding(view, np.full(size, 0.5, np.float32))
        for index in range(2 * bool(view.record.token_capacity)):
            if view.record.num_logprobs is not None:
                tokens.publish_logprobs(view, index, np.array([1 + index], np.uint32))
            slot, token = np.array([view.slot]), np.array([5 + index], np.int32)
            tokens.publish(slot, np.array([index]), token, 6_000_000)
        tokens.finish(*key, "length")
    return journal, views


def scores_of(view: RequestView) -> ScoreColumns:
    n = len(view.record.prompt) // 4 - 1
    none = np.empty((n, 0))
    return ScoreColumns(
        np.full(n, -0.5, np.float32), np.ones(n, np.int32), none.astype(np.int32), none.astype(np.float32)
    )


def has_begun(journal: Journal, view: RequestView) -> bool:
    key = view.slot, view.generation
    has_tokens = read_tokens(journal, view) is not None
    return has_tokens or is_released(journal, *key) or read_finish(journal, *key) is not None


LOSSES = {
    "tokens": ("tokens_at", make_record()),
    "logprobs": ("logprobs_at", make_record(logprobs=0)),
    "scores of the prompt": ("scores_at", make_record(prompt_logprobs=0)),
    "scores alone": ("scores_at", make_record(prompt_logprobs=0, token_capacity=0)),
    "embedding": ("scores_at", make_record(embedding_size=4, token_capacity=0)),
}


@pytest.mark.parametrize(("column", "record"), LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("is_over", [False, True], ids=["finished", "released"])
def test_end_whose_tokens_are_lost_is_taken_back(
    tmp_path: Path, is_over: bool, column: str, record: RequestRecord
) -> None:
    """Otherwise execute would not run it again, and summarize would wait for its tokens for ever, or send an empty
    answer, or logprobs of 0.
    """
    journal, [view] = with_answers(tmp_path, record)
    if is_over:
        num_tokens = 2 * bool(record.token_capacity)
        ReleaseWriter(journal).release(view.slot, view.generation, num_tokens=num_tokens, reason="length")
    assert salvage(journal) == []
    lose_tokens(journal, view, column)
    assert salvage(journal) == ["record 0: the tokens of its answer are lost; it is taken as not ended"]
    assert live_ids(journal) == ["a"]
    assert not has_begun(journal, view)
    assert journal.states()[view.slot] == ACCEPTED  # its credit may belong to another request


def test_end_at_a_stop_string_whose_tokens_are_lost_is_taken_back(tmp_path: Path) -> None:
    """summarize ended it before execute knew."""
    journal, [view] = with_answers(tmp_path, make_record())
    journal.finish_words[view.slot] = 0
    ReleaseWriter(journal).release(*view.key, num_tokens=1, reason="stop")
    assert salvage(journal) == []
    lose_tokens(journal, view)
    assert salvage(journal) == ["record 0: the tokens of its answer are lost; it is taken as not ended"]


def test_failure_without_tokens_is_no_loss(tmp_path: Path) -> None:
    journal, [view] = with_answers(tmp_path, make_record())
    TokenWriter(journal).finish(*view.key, "error", "why")
    lose_tokens(journal, view)
    assert salvage(journal) == []
    assert read_finish(journal, *view.key) == ("error", "why")


def test_end_that_nobody_follows_any_more_needs_no_tokens(tmp_path: Path) -> None:
    journal, [view] = with_answers(tmp_path, make_record())
    ReleaseWriter(journal).release(view.slot, view.generation, num_tokens=2, reason="length")
    ReleaseWriter(journal).forget(view.slot, view.generation)
    lose_tokens(journal, view)
    assert salvage(journal) == []


def lose_record(journal: Journal, view: RequestView) -> None:
    """Its sector is on the disk as it was before the first token."""
    for name in ("tokens_word", "finish_word"):
        journal.records[name][view.slot] = 0


@pytest.mark.parametrize("is_over", [False, True], ids=["finished", "released"])
@pytest.mark.parametrize("lost", [0, 1, 2], ids=["the first", "the second", "the last"])
def test_search_of_which_one_hypothesis_did_not_reach_the_disk_is_computed_again(
    tmp_path: Path, lost: int, is_over: bool
) -> None:
    """Its beams would wait for each other for ever."""
    records = [replace(make_record(f"a {index}", num_beams=3), index=index) for index in range(3)]
    journal, views = with_answers(tmp_path, *records)
    for view in views:
        if is_over and view is not views[lost]:
            ReleaseWriter(journal).release(*view.key, num_tokens=2, reason="length")
    assert salvage(journal) == []
    lose_record(journal, views[lost])
    assert len(salvage(journal)) == 3
    assert not any(has_begun(journal, view) for view in views)
    assert set(journal.states()[[view.slot for view in views]].tolist()) == {ACCEPTED}


def test_search_whose_last_hypothesis_alone_reached_the_disk_is_computed_again(tmp_path: Path) -> None:
    """Written last, it says that all of them are there; the power failed before their ends were written."""
    records = [replace(make_record(f"a {index}", num_beams=2), index=index) for index in range(2)]
    journal, views = with_answers(tmp_path, *records)
    for view in views:
        journal.records["finish_word"][view.slot] = 0
    assert salvage(journal) == []
    lose_record(journal, views[0])
    assert len(salvage(journal)) == 2
    assert not any(has_begun(journal, view) for view in views)


@pytest.mark.parametrize("is_released", [False, True])
def test_search_that_is_over_without_hypotheses_stays_so(tmp_path: Path, is_released: bool) -> None:
    records = [replace(make_record(f"a {index}", num_beams=2), index=index) for index in range(2)]
    journal, [first, second] = with_answers(tmp_path, *records)
    lose_record(journal, second)
    if is_released:
        ReleaseWriter(journal).release(*first.key, num_tokens=0, reason="abort")
    else:
        TokenWriter(journal).finish(*first.key, "abort")
    assert salvage(journal) == []


@pytest.mark.parametrize("sampling", [{"n": 2}, {"num_beams": 2}], ids=["samples", "beams"])
def test_loss_of_one_hypothesis_recomputes_its_whole_search(tmp_path: Path, sampling: dict[str, int]) -> None:
    records = [replace(make_record(f"a {index}", **sampling), index=index) for index in range(2)]
    journal, views = with_answers(tmp_path, *records)
    lose_tokens(journal, views[0])
    salvage(journal)
    assert [has_begun(journal, view) for view in views] == [False, "n" in sampling]
