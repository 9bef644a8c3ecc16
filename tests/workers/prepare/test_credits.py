"""Who goes to execute next, and when."""

from __future__ import annotations

from triptych.workers.prepare.credits import CreditQueue, WaitingRecord


def push(queue: CreditQueue, request_id: str, *slots: int) -> list[WaitingRecord]:
    records = [WaitingRecord(slot, 1, b"") for slot in slots]
    for record in records:
        queue.push(request_id, record)
    return records


def test_all_sequences_of_a_request_leave_at_once_and_in_order() -> None:
    queue = CreditQueue()
    first, second = push(queue, "a", 0), push(queue, "b", 3, 1, 2)
    assert len(queue) == 2
    assert queue.pop(3) == first
    assert queue.pop(3) == second
    assert queue.pop(3) == []
    assert len(queue) == 0


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    queue = CreditQueue()
    group, single = push(queue, "group", 0, 1, 2), push(queue, "single", 3)
    assert [queue.pop(count) for count in (0, 1, 2)] == [[], [], []]
    assert queue.pop(3) == group
    assert queue.pop(1) == single


def test_a_sequence_that_ended_needs_no_credit() -> None:
    queue = CreditQueue()
    records = push(queue, "a", 0, 1)
    assert not queue.remove(0, 2), "of another generation"
    assert not queue.remove(7, 1)
    assert queue.remove(0, 1)
    assert not queue.remove(0, 1)
    assert queue.pop(1) == records[1:]


def test_a_request_of_which_all_ended_is_not_in_the_way() -> None:
    queue = CreditQueue()
    push(queue, "a", 0, 1)
    later = push(queue, "b", 2)
    assert queue.remove(0, 1)
    assert queue.remove(1, 1)
    assert len(queue) == 1
    assert queue.pop(1) == later
