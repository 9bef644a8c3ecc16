"""The order in which accepted requests get credits."""

from __future__ import annotations

from triptych.workers.prepare.queue import CreditQueue


def test_the_order_is_that_of_arrival_without_priorities() -> None:
    queue = make_queue(0, [5, -5, 0])
    assert [queue.pop().slot for _ in range(len(queue))] == [0, 1, 2]


def test_a_level_of_priority_outweighs_so_many_later_arrivals() -> None:
    queue = make_queue(2, [1, 1, 0, 0, 0, 0])
    assert [queue.pop().slot for _ in range(len(queue))] == [0, 2, 1, 3, 4, 5]


def test_nobody_waits_for_more_than_the_arrivals_that_outweigh_it() -> None:
    queue = make_queue(4, [3])
    for index in range(1, 100):
        queue.push(index, 1, b"", arrival=index, priority=0)
        if queue.pop().slot == 0:
            break
    assert index <= 13


def test_one_that_left_is_not_popped() -> None:
    queue = make_queue(0, [0] * 40)
    assert queue.remove(3, 9) is False
    assert all(queue.remove(slot, 1) for slot in range(30))
    assert len(queue) == 10
    assert [queue.pop().slot for _ in range(len(queue))] == list(range(30, 40))


def test_a_slot_that_is_used_again_waits_by_its_new_arrival() -> None:
    queue = make_queue(0, [0, 0, 0])
    assert queue.remove(0, 1)
    queue.push(0, 2, b"new", arrival=3, priority=0)
    assert [(entry.slot, entry.generation) for entry in (queue.pop(), queue.pop(), queue.pop())] == [
        (1, 1),
        (2, 1),
        (0, 2),
    ]


def make_queue(ageing: int, priorities: list[int]) -> CreditQueue:
    queue = CreditQueue(ageing)
    for arrival, priority in enumerate(priorities):
        queue.push(arrival, 1, b"", arrival=arrival, priority=priority)
    return queue
