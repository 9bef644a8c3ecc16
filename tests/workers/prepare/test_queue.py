"""The order in which accepted requests get credits."""

from __future__ import annotations

from triptych.workers.prepare.queue import CreditQueue, Waiting


def make_queue(ageing: int, priorities: list[int]) -> CreditQueue:
    """Requests of one sequence, one per priority, in slots 0, 1, 2, ..."""
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


def test_without_priorities_the_order_is_that_of_arrival() -> None:
    assert slots_of(make_queue(0, [5, -5, 0])) == [0, 1, 2]


def test_level_of_priority_outweighs_a_number_of_later_arrivals() -> None:
    assert slots_of(make_queue(2, [1, 1, 0, 0, 0, 0])) == [0, 2, 1, 3, 4, 5]


def test_wait_is_limited_to_the_arrivals_that_outweigh_a_request() -> None:
    queue = make_queue(4, [3])
    for index in range(1, 100):
        push(queue, index, arrival=index)
        if queue.pop(1)[0].slot == 0:
            break
    assert index <= 13


def test_removed_request_is_not_popped() -> None:
    queue = make_queue(0, [0] * 40)
    assert queue.remove(3, 9) is False
    assert all(queue.remove(slot, 1) for slot in range(30))
    assert len(queue) == 10
    assert slots_of(queue) == list(range(30, 40))


def test_reused_slot_is_ordered_by_its_new_arrival() -> None:
    queue = make_queue(0, [0, 0, 0])
    assert queue.remove(0, 1)
    queue.push("0", Waiting(0, 2, b"new"), arrival=3, priority=0)
    popped = [queue.pop(1)[0] for _ in range(3)]
    assert [(waiting.slot, waiting.generation) for waiting in popped] == [(1, 1), (2, 1), (0, 2)]


def test_all_sequences_of_a_request_are_popped_together() -> None:
    queue = make_queue(0, [0])
    group = push(queue, 3, 1, 2, request_id="group", arrival=5)
    assert len(queue) == 2
    assert [waiting.slot for waiting in queue.pop(3)] == [0]
    assert queue.pop(3) == group
    assert queue.pop(3) == []


def test_request_that_does_not_fit_is_only_overtaken_by_more_urgent_ones() -> None:
    queue = CreditQueue(100)
    group = push(queue, 0, 1, 2, request_id="group")
    single = push(queue, 3, arrival=5)
    assert [queue.pop(count) for count in (0, 1, 2)] == [[], [], []]
    urgent = push(queue, 4, arrival=6, priority=-1)
    assert queue.pop(1) == urgent
    assert queue.pop(3) == group
    assert queue.pop(1) == single


def test_ended_sequence_needs_no_credit() -> None:
    queue = CreditQueue(0)
    sequences = push(queue, 0, 1, request_id="a")
    assert not queue.remove(7, 1)
    assert queue.remove(0, 1)
    assert not queue.remove(0, 1)
    assert queue.pop(1) == sequences[1:]


def test_completely_ended_request_does_not_block_the_queue() -> None:
    queue = CreditQueue(0)
    push(queue, 0, 1, request_id="a")
    later = push(queue, 2, request_id="b", arrival=3)
    assert all(queue.remove(slot, 1) for slot in (0, 1))
    assert len(queue) == 1
    assert queue.pop(1) == later


def test_request_with_more_sequences_than_credits_is_popped_once_no_other_has_one() -> None:
    """It was accepted with another configuration. Otherwise later requests would wait for ever."""
    queue = make_queue(0, [])
    large, small = push(queue, 1, 2, 3), push(queue, 4, arrival=9)
    assert queue.pop(2) == []
    assert queue.pop(2, is_idle=True) == large
    assert queue.pop(2) == small
