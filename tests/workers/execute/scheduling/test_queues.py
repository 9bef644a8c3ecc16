from __future__ import annotations

import pytest

from tests.workers.execute.factories import make_sequence
from triptych.workers.execute.scheduling.queues import WaitingQueue


def make_queue(*arrivals: int) -> WaitingQueue:
    queue = WaitingQueue(lambda sequence: (sequence.arrival,))
    for arrival in arrivals:
        queue.push(make_sequence(arrival))
    return queue


def drain(queue: WaitingQueue) -> list[int]:
    arrivals = []
    while (head := queue.head) is not None:
        arrivals.append(head.arrival)
        queue.remove(head.key)
    return arrivals


def test_lowest_rank_comes_first_in_any_order_of_arrival() -> None:
    assert drain(make_queue(2, 0, 3, 1)) == [0, 1, 2, 3]


def test_head_stays_until_it_is_removed() -> None:
    queue = make_queue(0, 1)
    assert queue.head is queue.head
    assert len(queue) == 2


def test_removed_sequence_is_skipped() -> None:
    queue = make_queue(0, 1, 2, 3)
    queue.remove((0, 0))
    queue.remove((2, 0))
    assert drain(queue) == [1, 3]


@pytest.mark.parametrize(("step", "order"), [(-10, [1, 0, 2]), (10, [0, 2, 1])], ids=["sooner", "later"])
def test_sequence_may_return_with_another_rank(step: int, order: list[int]) -> None:
    queue = WaitingQueue(lambda sequence: (sequence.arrival + step * sequence.num_preemptions,))
    sequences = [make_sequence(0), make_sequence(1), make_sequence(2)]
    for sequence in sequences:
        queue.push(sequence)
    queue.remove((1, 0))
    sequences[1].num_preemptions = 1
    queue.push(sequences[1])
    assert drain(queue) == order


def test_removing_from_the_middle_keeps_no_stale_entries() -> None:
    queue = make_queue(*range(1000))
    for arrival in range(1, 1000):
        queue.remove((arrival, 0))
    assert len(queue._heap) < 20
    assert drain(queue) == [0]
