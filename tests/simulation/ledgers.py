"""The ledger of every answer: no stage is negative, and together they do not exceed the time that the client saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.driver.stream import Completion
from triptych.protocol.request_ids import SEPARATOR

if TYPE_CHECKING:
    from tests.simulation.users import Reader

ROUNDING_MS = 1e-6


def check_ledger(reader: Reader, completion: Completion) -> None:
    world, name = reader.client.world, reader.request.request_id
    if reader.choices or "ledger" not in completion.summary or world.disk.num_failures:  # times have no checksum
        return
    ledger = completion.ledger
    stages, wall_ms = ledger["stages_ms"], ledger["wall_ms"]
    elapsed_ms = (world.clock.now_ns - world.submitted_ns[name.partition(SEPARATOR)[0]]) / 1e6
    world.require(min(stages.values()) >= 0, f"{name}: a stage is negative: {stages}")
    world.require(abs(sum(stages.values()) - wall_ms) < ROUNDING_MS, f"{name}: {stages} do not add up to {wall_ms} ms")
    world.require(wall_ms <= elapsed_ms + ROUNDING_MS, f"{name}: {wall_ms} ms in its ledger, {elapsed_ms} ms passed")
    world.require(world.num_deaths > 0 or not stages["recovered"], f"{name}: no one died, and yet {stages}")
    was_preempted = ledger["num_preemptions"] > 0 or world.num_deaths > 0
    world.require(was_preempted or not stages["preempted"], f"{name}: it was not preempted, and yet {stages}")
    if (ttft_ms := ledger["ttft_ms"]) is not None:
        world.require(0 < ttft_ms <= wall_ms, f"{name}: its first token came after {ttft_ms} of {wall_ms} ms")
