"""When a large request is sent once more: only if an answer to it is overdue."""

from __future__ import annotations

from itertools import pairwise

from triptych.driver.copies import MAX_SEND_AGAIN_S, SEND_AGAIN_S, Copies


def sent_at(answers: list[float], *, epoch: int = 1) -> list[float]:
    """Those of these times, at which questions are answered, at which a copy is sent."""
    copies = Copies()
    return [now for now in answers if copies.is_due(epoch, now)]


def test_answers_to_questions_that_were_asked_before_a_copy_send_no_other() -> None:
    assert sent_at([0.0, 0.1, 0.2, 0.9]) == [0.0]


def test_first_answer_after_a_long_silence_leaves_time_for_that_to_the_request() -> None:
    assert sent_at([0.0, 33.0, 33.1, 34.0]) == [0.0]


def test_copy_that_stays_unanswered_is_followed_by_another() -> None:
    assert sent_at([0.0, SEND_AGAIN_S, SEND_AGAIN_S * 3]) == [0.0, SEND_AGAIN_S * 3]


def test_copies_become_rare_but_never_end() -> None:
    times = sent_at([0.5 * number for number in range(4000)])
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 2 * MAX_SEND_AGAIN_S


def test_service_that_was_restarted_is_sent_one_at_once() -> None:
    copies = Copies()
    assert [copies.is_due(epoch, now) for epoch, now in [(1, 0.0), (1, 0.1), (2, 0.2), (2, 0.3)]] == [
        True, False, True, False,
    ]  # fmt: skip
