from __future__ import annotations

import pytest

from tests.workers.execute.factories import make_sequence, make_sequences
from triptych.protocol.config import POLICIES, SchedulerConfig
from triptych.workers.execute.scheduling.policy import Fifo, Phase, Skips, make_policy


@pytest.mark.parametrize("name", POLICIES)
def test_every_named_policy_exists(name: str) -> None:
    assert make_policy(SchedulerConfig(policy=name))


def test_fifo_ranks_preempted_before_new_and_both_by_arrival() -> None:
    sequences = make_sequences(4)
    sequences[3].num_preemptions = 2
    sequences[2].num_preemptions = 1
    ranked = sorted(sequences, key=Fifo(SchedulerConfig()).rank)
    assert [sequence.arrival for sequence in ranked] == [2, 3, 0, 1]


def test_fifo_preempts_the_latest_arrival() -> None:
    assert Fifo(SchedulerConfig()).victim([make_sequence(1), make_sequence(5), make_sequence(3)]).arrival == 5


def test_fifo_lets_prompts_go_first_after_too_many_skips() -> None:
    policy = Fifo(SchedulerConfig(max_prefill_skip=3))
    firsts = [policy.phases(1.0, Skips(prefills=skips))[0] for skips in (0, 2, 3)]
    assert firsts == [Phase.DECODES, Phase.DECODES, Phase.PROMPTS]
