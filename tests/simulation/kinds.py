"""What a run has besides plain requests and faults: drawn for each seed, and planned."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.simulation.adapters import give_adapters, let_adapters_change
from tests.simulation.embeddings import ask_for_embeddings
from tests.simulation.handovers import hand_over
from tests.simulation.limits import set_limits
from tests.simulation.mishaps import allow_mishaps
from tests.simulation.owners import give_keys
from tests.simulation.plan import Plan, make_plan
from tests.simulation.power import let_power_fail
from tests.simulation.proposals import allow_proposals
from tests.simulation.retained import retain_pages
from tests.simulation.rules import set_rules
from tests.simulation.scores import ask_for_logprobs
from tests.simulation.states import keep_states

CHANGES: dict[str, Callable[[Plan, random.Random], None]] = {  # of a plan that is otherwise complete, in this order
    "retains": retain_pages,
    "limits": set_limits,
    "rules": set_rules,
    "scores": ask_for_logprobs,
    "embeddings": ask_for_embeddings,
    "owners": give_keys,
    "handovers": hand_over,
    "mishaps": allow_mishaps,
    "outages": let_power_fail,
}


class Kind(NamedTuple):
    """Of runs: each seed has some of them."""

    chance: float
    what: str


KINDS = {
    "overlaps": Kind(0.5, "whether steps do"),
    "groups": Kind(0.3, "whether some requests have several sequences"),
    "proposals": Kind(0.2, "whether tokens are guessed"),
    "adapters": Kind(0.3, "whether some requests ask for one"),
    "owners": Kind(0.3, "whether clients have keys"),
    "loading": Kind(0.25, "whether adapters come and go, in a run with adapters"),
    "states": Kind(0.3, "whether the model has recurrent layers, in a run without overlaps and proposals"),
    "scores": Kind(0.3, "whether requests ask for logprobs"),
    "embeddings": Kind(0.1, "whether some requests ask for one"),
    "mishaps": Kind(0.2, "whether steps raise by chance"),
    "rules": Kind(0.2, "whether requests restrict their tokens"),
    "handovers": Kind(0.2, "whether requests change hands"),
    "outages": Kind(0.2, "whether the power fails, in a run without loading and mishaps"),
    "retains": Kind(0.3, "whether pages outlive execute, in a run without recurrent layers"),
    "limits": Kind(0.2, "whether steps have other limits, and are reported sooner or later"),
}


def draw_kinds(seed: int, wanted: Mapping[str, bool | None]) -> tuple[dict[str, random.Random], dict[str, bool]]:
    """The random numbers of each kind, and whether the run has it; ``wanted`` overrules the seed.

    The numbers are independent of all others: a run without a kind is the run that it would be.
    """
    dice = {name: random.Random(f"{name} {seed}") for name in KINDS}
    has = {name: _drawn(dice[name], KINDS[name].chance, wanted.get(name)) for name in KINDS}
    has["loading"] &= has["adapters"] or bool(wanted.get("loading"))
    has["outages"] &= not (has["loading"] or has["mishaps"])  # what failed must fail again
    has["states"] &= not (has["overlaps"] or has["proposals"])  # which it does not support
    has["retains"] &= not has["states"]
    return dice, has


def _drawn(dice: random.Random, chance: float, wanted: bool | None) -> bool:
    is_drawn = dice.random() < chance
    return is_drawn if wanted is None else wanted


def plan_with(has: Mapping[str, bool], rng: random.Random, dice: Mapping[str, random.Random]) -> Plan:
    """The plan of a run that has these kinds."""
    plan = make_plan(rng, overlaps=has["overlaps"], groups=dice["groups"] if has["groups"] else None)
    if has["proposals"]:
        allow_proposals(plan, dice["proposals"])
    if has["states"]:
        keep_states(plan, dice["states"])
    if has["loading"]:
        let_adapters_change(plan, dice["adapters"])
    elif has["adapters"]:
        give_adapters(plan, dice["adapters"])
    for name, change in CHANGES.items():
        if has[name]:
            change(plan, dice[name])
    return plan
