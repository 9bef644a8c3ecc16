"""execute's part: published tokens can be read back by whoever knows the record's generation, and by no one else."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.factories import TIMES, accept, make_journal, make_record
from triptych.protocol.journal.layout import MAX_ERROR_BYTES, TIME_UNIT_NS, Journal, split_word
from triptych.protocol.journal.prompt_results import read_embedding, read_scores
from triptych.protocol.journal.releases import ReleaseWriter
from triptych.protocol.journal.requests import RequestView, RequestWriter
from triptych.protocol.journal.tokens import (
    FEW,
    SHORT,
    TokenWriter,
    check_of,
    pack_logprobs,
    read_finish,
    read_logprobs,
    read_times,
    read_tokens,
    was_scheduled,
)
from triptych.protocol.scores import ScoreColumns

TOKEN_IDS = st.integers(-(2**31), 2**31 - 1)
WORDS = st.integers(0, 2**32 - 1)
CAPACITY = 12


def int32(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def hash_of(generation: int, tokens: list[int], rows: list[list[int]] | None = None) -> int:
    """The definition: h = (h + row) * M + token + 1, starting with the generation; row is the sum of w[j] * M**(j + 1)
    of the logprobs' words w, or 0.
    """
    value, multiplier = generation, 0x01000193
    for token, row in zip(tokens, rows or [[]] * len(tokens), strict=True):
        value += sum(one * multiplier ** (j + 1) for j, one in enumerate(row))
        value = (value * multiplier + token + 1) % 2**32
    return value


def adopted(
    folder: Path, *, num_requests: int = 1, num_prompt_tokens: int = 5, **sampling: Any
) -> tuple[Journal, list[RequestView], TokenWriter]:
    journal = make_journal(folder, num_records=max(4, num_requests))
    requests, tokens = RequestWriter(journal), TokenWriter(journal)
    record = make_record(num_prompt_tokens=num_prompt_tokens, token_capacity=CAPACITY, **sampling)
    views = [accept(requests, journal, record) for _ in range(num_requests)]
    for view in views:
        tokens.adopt(view)
    return journal, views, tokens


def publish(writer: TokenWriter, view: RequestView, *token_ids: int, start: int = 0) -> None:
    for index, token_id in enumerate(token_ids, start):
        now_ns = view.accepted_ns + (index + 1) * TIME_UNIT_NS
        writer.publish(np.array([view.slot]), np.array([index]), int32(token_id), now_ns)


def some_scores(start: int, num_rows: int) -> ScoreColumns:
    ranks = np.arange(start, start + num_rows, dtype=np.int32)
    return ScoreColumns(-ranks.astype(np.float32), ranks, ranks[:, None], -ranks[:, None].astype(np.float32))


def published(journal: Journal, view: RequestView) -> list[int] | None:
    tokens = read_tokens(journal, view)
    return None if tokens is None else tokens.tolist()


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(TOKEN_IDS, max_size=50))
def test_check_is_the_documented_hash(generation: int, tokens: list[int]) -> None:
    assert check_of(generation, int32(*tokens)) == hash_of(generation, tokens)


@pytest.mark.parametrize("size", [SHORT, SHORT + 1, 2 * SHORT])
def test_check_of_many_tokens_is_the_same_hash(size: int) -> None:
    tokens, rows = list(range(7, 7 + size)), [[index, 5] for index in range(size)]
    assert check_of(3, int32(*tokens)) == hash_of(3, tokens)
    assert check_of(3, int32(*tokens), np.array(rows, np.uint32)) == hash_of(3, tokens, rows)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(TOKEN_IDS, st.lists(WORDS, min_size=3, max_size=3)), min_size=1))
def test_check_with_logprobs_is_the_documented_hash(generation: int, answer: list[tuple[int, list[int]]]) -> None:
    tokens, rows = [token for token, _ in answer], [row for _, row in answer]
    assert check_of(generation, int32(*tokens), np.array(rows, np.uint32)) == hash_of(generation, tokens, rows)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_scores_are_complete_with_their_last_row(tmp_path: Path, size: int) -> None:
    """Whatever the steps in which they are computed; a process that dies before that begins anew."""
    journal, [view], writer = adopted(tmp_path, prompt_logprobs=1, logprobs=0)
    num_rows = len(view.record.prompt) // 4 - 1
    writer.publish_scores(view, 0, some_scores(9, 1))
    writer.adopt(view)
    for start in range(0, num_rows, size):
        assert read_scores(journal, view) is None
        for _ in range(2):  # a chunk that is computed again has the same
            writer.publish_scores(view, start, some_scores(start, min(size, num_rows - start)))
    for index in range(3):
        scores = read_scores(journal, view)
        assert scores is not None
        assert scores.ranks.tolist() == list(range(num_rows))
        writer.publish_logprobs(view, index, np.array([7], np.uint32))
        publish(writer, view, 5, start=index)
        assert published(journal, view) == [5] * (index + 1)
        writer.adopt(view)


def test_embedding_is_read_only_whole(tmp_path: Path) -> None:
    journal, [view], writer = adopted(tmp_path, embedding_size=4)
    assert read_embedding(journal, view) is None
    values = np.array([0.1, -0.2, 0.3, 0.4], np.float32)
    for _ in range(2):  # the second time by a process that does not know of the first
        writer.publish_embedding(view, values)
        np.testing.assert_array_equal(read_embedding(journal, view), values)
        writer.adopt(view)
    journal.words[view.extent.scores_at + 2] ^= 1
    assert read_embedding(journal, view) is None


@settings(deadline=None)
@given(st.lists(TOKEN_IDS, min_size=1, max_size=20), st.data())
def test_different_token_gives_a_different_check(tokens: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:index], data.draw(TOKEN_IDS.filter(lambda token: token != tokens[index])), *tokens[index + 1 :]]
    assert check_of(1, int32(*tokens)) != check_of(1, int32(*other))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 3), TOKEN_IDS, max_size=4), max_size=CAPACITY))
def test_steps_of_any_rows_are_read_as_if_written_one_by_one(steps: list[dict[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal, views, writer = adopted(Path(folder), num_requests=4)
        expected: list[list[int]] = [[], [], [], []]
        for step in steps:
            indices = np.array([len(expected[slot]) for slot in step], np.int64)
            writer.publish(np.array(list(step), np.int64), indices, int32(*step.values()), 10**9)
            for slot, token in step.items():
                expected[slot].append(token)
        assert [published(journal, view) for view in views] == expected
        words = [split_word(word) for word in journal.tokens_words]
        assert words == [(len(tokens), hash_of(1, tokens)) for tokens in expected]


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, CAPACITY - 1))
def test_several_steps_at_once_are_read_as_if_written_one_by_one(data: st.DataObject, n: int, k: int) -> None:
    token_ids = np.array(data.draw(st.lists(st.lists(TOKEN_IDS, min_size=n, max_size=n), min_size=k, max_size=k)))
    slots, starts = np.arange(n), np.arange(n) % 2  # some already have a token
    times_ns = TIMES.accepted_ns + TIME_UNIT_NS * np.arange(1, k + 1)
    read = []
    for is_at_once in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            journal, views, writer = adopted(Path(folder), num_requests=n)
            for view in views[1::2]:
                publish(writer, view, 7)
            if is_at_once:
                writer.publish_steps(slots, starts, token_ids.astype(np.int32), times_ns)
            else:
                for step, (row, now_ns) in enumerate(zip(token_ids.astype(np.int32), times_ns.tolist(), strict=True)):
                    writer.publish(slots, starts + step, row, now_ns)
            times = [read_times(journal, view, k + view.slot % 2).tokens_ns.tolist() for view in views]
            read.append(([published(journal, view) for view in views], times))
    assert read[0] == read[1]
    assert read[0][0] == [[*[7] * (slot % 2), *column] for slot, column in enumerate(token_ids.T.tolist())]


def test_rows_of_large_steps_may_change_with_every_step(tmp_path: Path) -> None:
    """From some number of rows on, a step is written at once, to places that are kept while the rows stay the same."""
    journal, views, writer = adopted(tmp_path, num_requests=FEW + 3)
    expected: list[list[int]] = [[] for _ in views]
    ascending, some = np.arange(FEW + 3), np.arange(FEW + 1)
    for step, slots in enumerate((ascending, ascending, ascending[::-1].copy(), some)):
        indices, token_ids = np.array([len(expected[slot]) for slot in slots]), 10 * step + slots.astype(np.int32)
        writer.publish(slots, indices, token_ids, TIMES.accepted_ns + (step + 1) * TIME_UNIT_NS)
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            expected[slot].append(token_id)
    assert [published(journal, view) for view in views] == expected
    for view, tokens in zip(views, expected, strict=True):
        times_ns = TIMES.accepted_ns + TIME_UNIT_NS * np.arange(1, len(tokens) + 1)
        np.testing.assert_array_equal(read_times(journal, view, len(tokens)).tokens_ns, times_ns)


def test_rows_of_large_steps_may_become_those_of_other_requests(tmp_path: Path) -> None:
    """Their places in the journal are looked up again, even for the array of the last step."""
    journal, views, writer = adopted(tmp_path, num_requests=FEW + 1)
    slots, starts, token_ids = np.arange(FEW + 1), np.zeros(FEW + 1, np.int64), int32(*range(FEW + 1))
    writer.publish(slots, starts, token_ids, TIMES.accepted_ns)
    requests = RequestWriter(journal)
    for view in views:
        writer.finish(view.slot, view.generation, "length")
        ReleaseWriter(journal).forget(view.slot, view.generation)
        assert requests.recycle(view.slot, view.generation)
    longer = make_record(num_prompt_tokens=50, token_capacity=CAPACITY)
    others = [accept(requests, journal, longer) for _ in views]
    for view in others:
        writer.adopt(view)
    writer.publish(slots, starts, token_ids, TIMES.accepted_ns)
    assert [published(journal, view) for view in others] == [[view.slot] for view in others]


def test_answer_that_is_cleared_begins_anew(tmp_path: Path) -> None:
    journal, [view], writer = adopted(tmp_path)
    publish(writer, view, 5, 6)
    writer.clear(view)
    assert published(journal, view) == []
    publish(writer, view, 7)
    assert published(journal, view) == [7]


def test_before_adoption_there_are_no_tokens(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    assert published(journal, accept(RequestWriter(journal), journal)) is None


def test_after_adoption_the_token_list_is_empty(tmp_path: Path) -> None:
    journal, [view], _ = adopted(tmp_path)
    assert published(journal, view) == []


def test_restarted_writer_continues_after_the_last_token(tmp_path: Path) -> None:
    journal, [view], writer = adopted(tmp_path)
    publish(writer, view, 5, 6)
    again = TokenWriter(Journal.open(journal.path))
    assert again.adopt(view).tolist() == [5, 6]
    publish(again, view, 7, start=2)
    assert published(journal, view) == [5, 6, 7]


def test_restarted_writer_keeps_the_earlier_times(tmp_path: Path) -> None:
    journal, [view], writer = adopted(tmp_path)
    publish(writer, view, 5)
    writer.add_times(view.slot, scheduled_ns=view.accepted_ns + 1, recovered_ns=3, num_preemptions=1)
    again = TokenWriter(journal)
    again.adopt(view)
    again.add_times(view.slot, recovered_ns=4)
    assert read_times(journal, view, 1)[1:] == (view.accepted_ns + 1, 0, 7, 0, 0, 1, 0, 0)


def test_full_capacity_can_be_used(tmp_path: Path) -> None:
    journal, views, writer = adopted(tmp_path, num_requests=2)
    for view in views:
        publish(writer, view, *range(CAPACITY))
    assert [published(journal, view) for view in views] == [list(range(CAPACITY))] * 2


def test_count_beyond_the_capacity_is_not_trusted(tmp_path: Path) -> None:
    journal, [view], _ = adopted(tmp_path)
    journal.tokens_words[view.slot] = (CAPACITY + 1) << 32
    assert published(journal, view) is None


@pytest.mark.parametrize("num_tokens", [0, 1, CAPACITY])
def test_tokens_of_an_earlier_request_are_ignored(tmp_path: Path, num_tokens: int) -> None:
    journal = make_journal(tmp_path, num_records=1)
    requests, tokens, releases = RequestWriter(journal), TokenWriter(journal), ReleaseWriter(journal)
    record = make_record(token_capacity=CAPACITY)
    first = accept(requests, journal, record)
    tokens.adopt(first)
    publish(tokens, first, *range(num_tokens))
    tokens.finish(first.slot, first.generation, "length")
    releases.forget(first.slot, first.generation)
    requests.recycle(first.slot, first.generation)
    second = accept(requests, journal, record)
    assert second.extent == first.extent
    assert (published(journal, second), read_finish(journal, 0, second.generation)) == (None, None)
    assert TokenWriter(journal).adopt(second).tolist() == []
    assert published(journal, first) is None


def test_each_token_has_its_time(tmp_path: Path) -> None:
    journal, [view], writer = adopted(tmp_path)
    publish(writer, view, 5, 6, 7)
    expected = [TIMES.accepted_ns + i * TIME_UNIT_NS for i in (1, 2, 3)]
    assert read_times(journal, view, 3).tokens_ns.tolist() == expected


HOUR_NS = 3600 * 10**9


def test_token_times_are_kept_for_requests_that_take_days(tmp_path: Path) -> None:
    """Even if the request lay in its journal meanwhile."""
    journal, [view], writer = adopted(tmp_path)
    writer.add_times(view.slot, scheduled_ns=view.accepted_ns + 60 * HOUR_NS)
    expected = [view.accepted_ns + hours * HOUR_NS for hours in (61, 61, 71, 82, 90)]
    for index, now_ns in enumerate(expected):
        writer.publish(np.array([view.slot]), np.array([index]), int32(5), now_ns)
    assert read_times(journal, view, len(expected)).tokens_ns.tolist() == expected


def test_times_are_summed_but_the_first_schedule_is_set(tmp_path: Path) -> None:
    journal, [view], writer = adopted(tmp_path)
    first, later = view.accepted_ns + 10, view.accepted_ns + 20
    writer.add_times(view.slot, scheduled_ns=first, preempted_ns=3, recovered_ns=4, num_cached_tokens=5)
    writer.add_times(view.slot, scheduled_ns=later, preempted_ns=3, num_preemptions=1)
    assert read_times(journal, view, 0)[1:] == (later, 6, 4, 0, 5, 1, 0, 0)


@pytest.mark.parametrize("field", ["preempted_ns", "recovered_ns"])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_loss_counts_while_it_lasts_and_once_when_it_has_ended(tmp_path: Path, field: str, num_tokens: int) -> None:
    journal, [view], writer = adopted(tmp_path)
    publish(writer, view, *range(num_tokens))
    writer.begin_loss(view.slot, field, 100)
    during = read_times(journal, view, num_tokens).until(130)
    assert (getattr(during, field), during.lost_early_ns) == (30, 0 if num_tokens else 30)
    writer.end_loss(view.slot, field, 40)
    after = read_times(journal, view, num_tokens).until(1000)
    assert (getattr(after, field), after.lost_early_ns) == (40, 0)


def test_request_was_scheduled_once_a_step_of_its_own_has_started(tmp_path: Path) -> None:
    journal, [view], writer = adopted(tmp_path)
    seen = []
    for scheduled_ns in (view.accepted_ns - 1, view.accepted_ns, view.accepted_ns + 1):  # the first: of an earlier one
        writer.add_times(view.slot, scheduled_ns=scheduled_ns)
        seen.append(was_scheduled(journal, view.slot, view.accepted_ns))
    assert seen == [False, True, True]


@pytest.mark.parametrize("reason", ["stop", "length", "error"])
def test_finish_is_read_back(tmp_path: Path, reason: str) -> None:
    journal, [view], writer = adopted(tmp_path)
    writer.finish(view.slot, view.generation, reason, "why")
    assert read_finish(journal, view.slot, view.generation) == (reason, "why")
    assert read_finish(journal, view.slot, view.generation + 1) is None


@pytest.mark.parametrize("error", ["x" * 500, "é" * 500, "x" + "é" * 500, "xx" + "€" * 500, "😀" * 500])
def test_long_error_is_cut_between_characters(tmp_path: Path, error: str) -> None:
    journal, [view], writer = adopted(tmp_path)
    writer.finish(view.slot, view.generation, "error", error)
    kept = read_finish(journal, view.slot, view.generation)
    assert kept is not None
    assert error.startswith(kept[1])
    assert MAX_ERROR_BYTES - 4 < len(kept[1].encode()) <= MAX_ERROR_BYTES


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-99, 0, width=32)), max_size=3), max_size=4))
def test_logprobs_are_read_back(rows: list[list[tuple[int, float]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal, views, writer = adopted(Path(folder), num_requests=2, logprobs=3)
        for index, alternatives in enumerate(rows):
            ids = int32(*(token_id for token_id, _ in alternatives))
            logprobs = np.array([logprob for _, logprob in alternatives], np.float32)
            writer.publish_logprobs(views[1], index, pack_logprobs(-0.5, ids, logprobs, 3))
        expected = [[-0.5, [list(pair) for pair in alternatives]] for alternatives in rows]
        assert read_logprobs(journal, views[1], 0, len(rows)) == expected
        assert read_logprobs(journal, views[1], 1, len(rows)) == expected[1:]


def test_missing_alternatives_are_left_out(tmp_path: Path) -> None:
    """Whatever the chosen token's logprob is."""
    journal, [view], writer = adopted(tmp_path, logprobs=2)
    writer.publish_logprobs(view, 0, pack_logprobs(0.0, int32(), np.empty(0, np.float32), 2))
    assert read_logprobs(journal, view, 0, 1) == [[0.0, []]]


def test_prompt_of_one_token_has_all_of_its_no_scores(tmp_path: Path) -> None:
    journal, [view], _ = adopted(tmp_path, num_prompt_tokens=1, prompt_logprobs=1)
    scores = read_scores(journal, view)
    assert scores is not None
    assert len(scores.logprobs) == 0


def test_excess_alternatives_are_cut() -> None:
    row = pack_logprobs(-0.5, int32(1, 2, 3), np.array([-1, -2, -3], np.float32), 2)
    assert len(row) == 5


def test_logprobs_do_not_overwrite_tokens_or_neighbours(tmp_path: Path) -> None:
    journal, views, writer = adopted(tmp_path, num_requests=3, logprobs=1)
    row = pack_logprobs(-0.5, int32(1), np.array([-1], np.float32), 1)
    for index in range(CAPACITY):
        for view in views:
            writer.publish_logprobs(view, index, row)
            publish(writer, view, index, start=index)
    assert [published(journal, view) for view in views] == [list(range(CAPACITY))] * 3
    assert read_times(journal, views[1], CAPACITY).tokens_ns.tolist()[-1] == TIMES.accepted_ns + CAPACITY * TIME_UNIT_NS
