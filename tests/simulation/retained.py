"""Pages that outlive execute: what one process has written there is what the next one finds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tests.simulation.journal import watched
from tests.simulation.plan import FAULTS_END_NS, Plan, PlannedDeath, submitting
from tests.simulation.requests import make_request
from triptych.driver.deaths import Death
from triptych.protocol.arrays import Bytes
from triptych.protocol.model_card import ModelCard
from triptych.workers.execute.scheduling.page_records import Columns, PageRecords, num_bytes_of

if TYPE_CHECKING:
    from tests.simulation.processes import Process

GARBAGE = 12345678901


def retain_pages(plan: Plan, dice: random.Random) -> None:
    """Prefixes are shared, nothing is on the host, execute is killed again and again, and prompts return."""
    cache = replace(plan.config.cache, host_pages=0, prefix_cache=True)
    plan.config, plan.retains_pages = replace(plan.config, cache=cache), True
    for request in plan.requests[:]:
        if request.is_valid and request.reason in ("stop", "length") and not (request.sequences or request.by_adapter):
            again = make_request(f"{request.request_id}-again", dict(request.wire), request.journaled)
            plan.requests.append(again)
            plan.actions.append((dice.randrange(FAULTS_END_NS), submitting(dice.randrange(plan.num_clients), again)))
    for life in range(1, dice.randrange(3, 9)):
        plan.planned_deaths["execute", life] = PlannedDeath("store", dice.randrange(120))


class LastingMemory:
    """What ``ExecuteMemory`` and ``KvFile`` are to driver and execute. Each store into the records is an act."""

    def __init__(self, card: ModelCard) -> None:
        self._num_pages, self._page_size = card.num_pages, card.page_size
        self.is_new = True  # nothing of an earlier process is in it
        self._process: Process | None = None  # that has it now
        self.discard()

    def discard(self) -> None:
        memory = np.zeros(num_bytes_of(self._num_pages, self._page_size), np.uint8)
        self._columns: Columns = Columns.of(memory, self._num_pages, self._page_size)
        self._cells: Bytes | None = None

    def note_death(self, death: Death) -> None:
        """As the driver's ``ExecuteMemory`` does."""
        if death.role == "execute" and death.is_internal:
            self.discard()

    def open(self, process: Process) -> LastingMemory:
        self._process, self.is_new = process, self._cells is None
        return self

    def arena(self, num_bytes: int, **_: object) -> LastingMemory:
        return self

    def take(self, num_bytes: int) -> Bytes:
        """The cells. Those of pages of unknown content are garbage: a step may have died in the middle."""
        if self._cells is None:
            self._cells = np.zeros(num_bytes, np.uint8)
        unknown = self._columns.checks == 0
        self._cells.view(np.int64).reshape(self._num_pages + 1, -1)[unknown] = GARBAGE
        return self._cells

    @property
    def records(self) -> PageRecords:
        assert self._process is not None, "a process has opened it"
        return PageRecords(Columns(*(watched(column, self._process) for column in self._columns)))
