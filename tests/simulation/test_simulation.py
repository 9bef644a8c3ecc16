"""Whole runs of the pipeline in one thread, a seed each. See ``world.py``; ``plan.py`` has what can go wrong in one."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

import pytest

from tests.simulation.adapter_mutations import ADAPTER_MUTATIONS
from tests.simulation.checks import Violation
from tests.simulation.loading_mutations import LOADING_MUTATIONS
from tests.simulation.mutations import MUTATIONS
from tests.simulation.overlap_mutations import OVERLAP_MUTATIONS
from tests.simulation.owner_mutations import OWNER_MUTATIONS
from tests.simulation.proposal_mutations import PROPOSAL_MUTATIONS
from tests.simulation.world import World

NUM_SEEDS, SEEDS_A_TEST = 1000, 100
SEEDS_TO_FIND_A_MUTATION = 400
FOUND_BY = {  # any of the seeds will do; that which found a mistake last is tried first, for each takes some 50 ms
    "no_deduplication": 71,
    "count_before_token": 130,
    "state_before_record": 19,
    "records_are_reused_while_execute_still_writes": 41,
    "what_has_ended_goes_on_in_a_new_life": 24,
    "new_connections_are_not_noticed": 62,
    "kills_from_outside_blame": 82,
    "suspects_are_acquitted_by_tokens_that_were_known_before_the_death": 23,
    "choices_are_taken_from_those_who_were_found": 12,
    "only_a_beam_that_fails_now_ends_its_search": 146,
    "unknown_is_unknown": 23,
    "pages_are_handed_out_under_a_step_in_flight": 38,
    "tokens_are_dealt_to_those_who_still_run": 30,
    "tokens_are_carried_from_those_who_still_run": 27,
    "the_intent_ends_with_the_first_of_two_steps": 160,
    "suspects_are_acquitted_after_one_token": 23,
    "an_id_is_enough": 1,
    "adapters_share_their_prefixes": 18,
    "whatever_is_loaded_is_offered": 21,
    "what_is_accepted_is_not_waited_for": 2,
    "who_is_about_to_accept_is_not_waited_for": 149,
}
REGRESSIONS = {  # seeds that once failed, and why
    479: "a request that was named as poison is taken once more when its client sends it again, and kills twice more",
    855: "a client whose ACCEPTED was lost, with prepare away for longer than its lease, is told that its id is taken",
    1008: "a client that is told late that it was accepted finds its request gone",
    3306: "a drain hides that the driver gave up, and who waits is never told",
    1845: "who asks while a driver leaves is told that it drains",
    40: "with overlap a suspect is acquitted by the token before the one that kills, and kills thrice",
    2620: "who is alone in a step behind one that failed fails with the other one's error",
    1549: "so it does if it could not be launched any more",
}
GROUP_REGRESSIONS = {
    1079: "summarize dies while it forgets the beams of a search, and who follows it, too, waits for ever",
    3661: "so he does if the search has failed",
}

OWNER_REGRESSIONS = {
    19: "what has ended prepare twice for one key ends it twice more for another",
}
PROPOSAL_REGRESSIONS = {
    52: "a suspect is acquitted by a token before the one that kills, which was computed behind a guess",
}
LOADING_REGRESSIONS = {
    149: "a request that prepare is about to accept is not waited for, and its adapter is unloaded",
    21: "what is accepted for an adapter whose loading fails at last is lost",
    55: "a driver that is killed while it loads an adapter leaves a journal on which the next one does not start",
}

NOTHING = {"groups": False, "proposals": False, "adapters": False, "owners": False, "loading": False}


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_whatever_dies_every_request_gets_its_one_right_answer(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        World(seed).run()


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_once_failed_does_not_fail_again(overlaps: bool) -> None:
    for seed in REGRESSIONS:
        World(seed, overlaps=overlaps, **NOTHING).run()  # as they were found
    for seed in GROUP_REGRESSIONS:
        World(seed, overlaps=overlaps, **NOTHING | {"groups": True}).run()
    for seed in PROPOSAL_REGRESSIONS:
        World(seed, overlaps=overlaps, **NOTHING | {"proposals": True}).run()
    for seed in OWNER_REGRESSIONS:
        World(seed, overlaps=overlaps, **NOTHING | {"owners": True}).run()
    for seed in LOADING_REGRESSIONS:  # which found it without regard to what else they have
        World(seed, overlaps=overlaps, adapters=True, loading=True).run()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    assert any(violates(seed, groups=True) for seed in seeds_to_find(name))


@pytest.mark.parametrize("name", OVERLAP_MUTATIONS)
def test_a_planted_mistake_with_a_step_in_flight_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OVERLAP_MUTATIONS[name](monkeypatch)
    assert any(violates(seed, overlaps=True) for seed in seeds_to_find(name))


def seeds_to_find(name: str) -> list[int]:
    return sorted(range(SEEDS_TO_FIND_A_MUTATION), key=lambda seed: seed != FOUND_BY.get(name))


@pytest.mark.parametrize("name", PROPOSAL_MUTATIONS)
def test_a_planted_mistake_with_guesses_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PROPOSAL_MUTATIONS[name](monkeypatch)
    assert any(violates(seed, proposals=True) for seed in range(SEEDS_TO_FIND_A_MUTATION))


@pytest.mark.parametrize("name", ADAPTER_MUTATIONS)
def test_a_planted_mistake_with_adapters_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ADAPTER_MUTATIONS[name](monkeypatch)
    assert any(violates(seed, adapters=True) for seed in seeds_to_find(name))


@pytest.mark.parametrize("name", LOADING_MUTATIONS)
def test_a_planted_mistake_with_adapters_that_come_and_go_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LOADING_MUTATIONS[name](monkeypatch)
    assert any(violates(seed, adapters=True, loading=True) for seed in seeds_to_find(name))


@pytest.mark.parametrize("name", OWNER_MUTATIONS)
def test_a_planted_mistake_with_keys_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OWNER_MUTATIONS[name](monkeypatch)
    assert any(violates(seed, owners=True) for seed in seeds_to_find(name))


def violates(seed: int, **kinds: bool) -> bool:
    try:
        World(seed, **{"adapters": False, "owners": False, "loading": False} | kinds).run()
    except Violation:
        return True
    return False


DIGEST = "import sys, zlib; from tests.simulation.test_simulation import digest; print(digest(3))"


def digest(seed: int) -> int:
    world = World(seed)
    world.run()
    return zlib.crc32("\n".join(world.log).encode())


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run(
        [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert int(other.stdout) == digest(3)
