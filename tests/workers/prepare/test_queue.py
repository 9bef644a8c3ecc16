"""The order in which accepted requests get credits."""

from __future__ import annotations

from triptych.workers.prepare.queue import CreditQueue, Waiting


def make_queue(ageing: int, priorities: list[int]) -> CreditQueue:
    """A request of one sequence for each priority, in slots 0, 1, 2, ..."""
    queue = CreditQueue(ageing)
    for arrival, priority in enumerate(priorities):
        push(queue, arrival, arrival=arrival, priority=priority)
    return queue


def push(queue: CreditQueue, *slots: int, request_id: str = "", arrival: int = 0, priority: int = 0) -> list[Waiting]:
    sequences = [Waiting(slot, 1, b"") for slot in slots]
    for index, waiting in enumerate(sequences):
        queue.push(request_id or str(slots[0]), waiting, arrival=arrival + index, priority=priority)
    return sequences


def slots_of(queue: CreditQueue) -> list[int]:
    return [waiting.slot for _ in range(len(queue)) for waiting in queue.pop(1)]


def test_the_order_is_that_of_arrival_without_priorities() -> None:
    assert slots_of(make_queue(0, [5, -5, 0])) == [0, 1, 2]


def test_a_level_of_priority_outweighs_so_many_later_arrivals() -> None:
    assert slots_of(make_queue(2, [1, 1, 0, 0, 0, 0])) == [0, 2, 1, 3, 4, 5]


def test_nobody_waits_for_more_than_the_arrivals_that_outweigh_it() -> None:
    queue = make_queue(4, [3])
    for index in range(1, 100):
        push(queue, index, arrival=index)
        if queue.pop(1)[0].slot == 0:
            break
    assert index <= 13


def test_one_that_left_is_not_popped() -> None:
    queue = make_queue(0, [0] * 40)
    assert queue.remove(3, 9) is False
    assert all(queue.remove(slot, 1) for slot in range(30))
    assert len(queue) == 10
    assert slots_of(queue) == list(range(30, 40))


def test_a_slot_that_is_used_again_waits_by_its_new_arrival() -> None:
    queue = make_queue(0, [0, 0, 0])
    assert queue.remove(0, 1)
    queue.push("0", Waiting(0, 2, b"new"), arrival=3, priority=0)
    popped = [queue.pop(1)[0] for _ in range(3)]
    assert [(waiting.slot, waiting.generation) for waiting in popped] == [(1, 1), (2, 1), (0, 2)]


def test_all_sequences_of_a_request_leave_at_once() -> None:
    queue = make_queue(0, [0])
    group = push(queue, 3, 1, 2, request_id="group", arrival=5)
    assert len(queue) == 2
    assert [waiting.slot for waiting in queue.pop(3)] == [0]
    assert queue.pop(3) == group
    assert queue.pop(3) == []


def test_nobody_overtakes_a_request_that_does_not_fit_but_who_is_more_urgent() -> None:
    queue = CreditQueue(100)
    group = push(queue, 0, 1, 2, request_id="group")
    single = push(queue, 3, arrival=5)
    assert [queue.pop(count) for count in (0, 1, 2)] == [[], [], []]
    urgent = push(queue, 4, arrival=6, priority=-1)
    assert queue.pop(1) == urgent
    assert queue.pop(3) == group
    assert queue.pop(1) == single


def test_a_sequence_that_ended_needs_no_credit() -> None:
    queue = CreditQueue(0)
    sequences = push(queue, 0, 1, request_id="a")
    assert not queue.remove(7, 1)
    assert queue.remove(0, 1)
    assert not queue.remove(0, 1)
    assert queue.pop(1) == sequences[1:]


def test_a_request_of_which_all_ended_is_not_in_the_way() -> None:
    queue = CreditQueue(0)
    push(queue, 0, 1, request_id="a")
    later = push(queue, 2, request_id="b", arrival=3)
    assert all(queue.remove(slot, 1) for slot in (0, 1))
    assert len(queue) == 1
    assert queue.pop(1) == later


def test_a_request_of_more_sequences_than_there_are_credits_leaves_once_nobody_has_one() -> None:
    """It was accepted under another configuration. Whoever comes behind it would wait for ever."""
    queue = make_queue(0, [])
    large, small = push(queue, 1, 2, 3), push(queue, 4, arrival=9)
    assert queue.pop(2) == []
    assert queue.pop(2, is_idle=True) == large
    assert queue.pop(2) == small
