from __future__ import annotations

import pytest

from tests.workers.execute.factories import make_beams, make_group, make_sequences
from triptych.protocol.config import POLICIES, SchedulerConfig
from triptych.workers.execute.scheduling.groups import Group
from triptych.workers.execute.scheduling.policy import Fifo, make_policy, make_preemption


@pytest.mark.parametrize("name", POLICIES)
def test_every_named_policy_exists(name: str) -> None:
    assert make_policy(SchedulerConfig(policy=name))


def test_fifo_ranks_preempted_before_new_and_both_by_arrival() -> None:
    sequences = make_sequences(4)
    sequences[3].num_preemptions = 2
    sequences[2].num_preemptions = 1
    ranked = sorted(sequences, key=Fifo(SchedulerConfig()).rank)
    assert [sequence.arrival for sequence in ranked] == [2, 3, 0, 1]


def test_what_would_be_recomputed_more_than_once_or_in_several_chunks_is_swapped() -> None:
    is_swapped = make_preemption(SchedulerConfig(prefill_chunk=16))
    short, long = make_sequences(2)
    short.num_computed_tokens, long.num_computed_tokens = 16, 17
    last, *others = make_group(2, 3)
    last.group = Group({last.key: last})  # the other samples have ended
    for other in others:
        other.group = Group({each.key: each for each in others})
    [beam, _] = make_beams(5, 2)
    assert [is_swapped(each) for each in (short, long, last, *others, beam)] == [False, True, False, True, True, True]
