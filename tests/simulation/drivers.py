"""Drivers whose operator loads and unloads adapters. They run the real code, from the settings to the model card.

A driver is a simulated process like the workers: it can be killed before any of its acts, and others run in between.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.simulation.device import BROKEN, Device, added_by
from tests.simulation.folder import Disk, Folder, write_private
from tests.simulation.processes import BUILDERS, RUN_DIR, Died, Process, Worker
from tests.simulation.strand import Strand
from triptych.driver import adapters, preparing, replacing
from triptych.driver.adapters import LoadedAdapters
from triptych.driver.driver import Driver
from triptych.driver.journal_keeper import JournalKeeper
from triptych.driver.preparing import prepare_run_dir
from triptych.driver.replacing import Running
from triptych.protocol import model_card
from triptych.protocol.config import CacheConfig, ModelConfig, PipelineConfig, SchedulerConfig
from triptych.protocol.errors import ConfigError, TriptychError
from triptych.protocol.lora import LoraModule
from triptych.protocol.model_card import CARD_FILE, OFFERED_FILE, LatestCard, ModelCard, Offer
from triptych.protocol.run_dir import CONFIG_FILE
from triptych.workers.execute import loading, served_adapters
from triptych.workers.execute.process import Execute
from triptych.workers.process import WorkerContext

if TYPE_CHECKING:
    from tests.simulation.world import World

FOLDERS = {"a": ("1", "2"), "b": ("2", "3"), "c": ("3", "4")}  # of an adapter: what the hash model adds
ACT_NS = (10_000, 2_000_000)  # duration of an act of the driver
ORDER_NS = (1, 5_000_000)  # delay until the supervisor's thread executes a command
LOAD_NS = (1, 20_000_000)
STALL_NS = (1, 150_000_000)  # time without a processor for a worker that has just read a file
STALL_CHANCES = (0.0, 0.05, 0.3)
WAIT_NS = 20_000_000  # until a worker that waits for the card looks again
DOOM_CHANCE = 0.3  # probability for each of the first drivers to be killed before one of its acts
NUM_DOOMED = 3
TIMEOUTS_S = (5.0, 5.0, 5.0, 0.01, 0.1)
NEVER_NS = 10**18

_read_config = lru_cache(maxsize=64)(PipelineConfig.from_json)
_read_card = lru_cache(maxsize=64)(ModelCard.from_json)


def module(name: str, folder: str) -> str:
    """The adapter in the settings' syntax."""
    return f"{name}=/{folder}"


def digest_of(folder: str) -> str:
    return f"digest of {folder}"


class _Supervisor:
    """The part of the supervisor that replaces workers."""

    def __init__(self, process: DriverProcess) -> None:
        self._process = process

    @property
    def error(self) -> TriptychError | None:
        return ConfigError("given up") if self._process.world.has_given_up else None

    def restart(self, role: str) -> None:
        self._process.act("order")
        world = self._process.world

        def kill() -> None:
            if self._process.is_alive and role in world.workers:
                world.kill(world.workers[role])

        world.call(world.clock.now_ns + self._process.drivers.dice.randrange(*ORDER_NS), kill)

    def last_log_lines(self, role: str) -> str:
        return f"the last of {role}"


class _Keeper(JournalKeeper):
    def __init__(self, world: World, path: Any) -> None:
        self.journal, self.path = world.journal, path


class _Driver(Driver):
    def __init__(self, process: DriverProcess, settings: PipelineConfig) -> None:
        self.config = settings
        self._loaded = LoadedAdapters(settings)
        self._replacing: Any = nullcontext()  # it gets one command after the other
        run_dir: Any = SimpleNamespace(path=process.folder, what_helps=lambda _: "")
        supervisor: Any = _Supervisor(process)
        self._simulated = Running(
            supervisor, process.world.board, run_dir, _Keeper(process.world, process.folder / "journal")
        )

    def _replaceable(self) -> Running:
        self._simulated.check()
        return self._simulated

    def begin(self) -> None:
        """What a driver does in the run directory before it starts workers."""
        keeper, folder = self._simulated.keeper, self._simulated.run_dir.path
        self.config = self._loaded.restore(keeper.path, self.config)
        prepare_run_dir(folder, self.config, keeper)


class DriverProcess(Process):
    """One driver."""

    def __init__(self, world: World, drivers: Drivers) -> None:
        super().__init__(world, f"driver.{world.num_drivers}")
        self.drivers = drivers
        self.folder: Any = Folder(drivers.disk, str(RUN_DIR), self)
        self.driver = _Driver(self, drivers.settings)
        self._orders: deque[Callable[[Driver], object]] = deque()
        self._strand: Strand | None = None
        self._num_acts_left = -1
        self.next_ns = NEVER_NS
        try:
            self.driver.begin()
        except ConfigError as error:
            world.require(False, f"{self.name} does not start: {error.message}")
        if world.num_drivers <= NUM_DOOMED and drivers.dice.random() < DOOM_CHANCE:
            self._num_acts_left = drivers.dice.randrange(1, 50)

    @property
    def is_busy(self) -> bool:
        return bool(self._orders) or self._strand is not None

    def do(self, order: Callable[[Driver], object]) -> None:
        self._orders.append(order)
        if self._strand is None:
            self.wake(self.world.clock.now_ns)

    def end(self) -> None:
        """Abandon the current command."""
        self.is_alive = False
        while self._strand is not None and not self._strand.has_ended:
            self._strand.resume()

    def step(self) -> None:
        self.next_ns = NEVER_NS
        if self._strand is None and self._orders:
            order = self._orders.popleft()
            self._strand = Strand(lambda: self._obey(order))
        if self._strand is None:
            return
        self.drivers.turning = self
        self._strand.resume()
        if not self._strand.has_ended:
            return
        error, self._strand = self._strand.error, None
        if self.death is not None:
            self.death = None
            self.world.end_driver()
        elif error is not None:
            raise error
        elif self._orders:
            self.next_ns = self.world.clock.now_ns

    def _obey(self, order: Callable[[Driver], object]) -> None:
        try:
            order(self.driver)
            self.world.note(self, "done")
        except TriptychError as error:
            self.world.note(self, f"failed: {error.message}")

    def act(self, what: str, half: Callable[[], None] | None = None) -> None:
        if self._strand is None:
            return  # starting: no other process runs
        self._pause(self.drivers.dice.randrange(*ACT_NS))
        self._num_acts_left -= 1
        if self._num_acts_left == 0:
            self.die(f"a {what}", is_internal=False)

    def sleep(self, seconds: float) -> None:
        self._pause(int(seconds * 1e9))

    def _pause(self, duration_ns: int) -> None:
        assert self._strand is not None, "a command runs"
        if self.is_alive and self.death is None:
            self.next_ns = self.world.clock.now_ns + duration_ns
            self._strand.pause()
        if not self.is_alive or self.death is not None:
            raise Died


class Drivers:
    """One driver after the other, and the run directory that the next one finds."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world, self.dice = world, dice
        self.settings = world.config
        self._stall_chance = dice.choice(STALL_CHANCES)
        self.disk = Disk(self._note_offer)
        self.current: DriverProcess
        self.turning: DriverProcess
        self._gone_ns = dict.fromkeys(FOLDERS, 0)  # when each was last unavailable
        self._offered: frozenset[str] = frozenset()

    def begin(self) -> None:
        self.current = DriverProcess(self.world, self)

    @property
    def has_card(self) -> bool:
        return f"{RUN_DIR}/{CARD_FILE}" in self.disk.files

    def was_gone(self, name: str, *, since_ns: int) -> bool:
        """Whether an adapter was unavailable at some moment since then."""
        return name not in self._offered or self._gone_ns[name] >= since_ns

    def _note_offer(self) -> None:
        before, self._offered = self._offered, self._read_offered()
        for name in FOLDERS:
            if name not in before & self._offered:
                self._gone_ns[name] = self.world.clock.now_ns

    def _read_offered(self) -> frozenset[str]:
        """Names of the adapters that a client can select now."""
        card, offer = (self.disk.read(f"{RUN_DIR}/{name}") for name in (CARD_FILE, OFFERED_FILE))
        if card is None or offer is None:
            return frozenset()
        return frozenset(_read_card(card).adapters).intersection(Offer.from_json(offer).names)

    # -- commands

    def operate(self) -> None:
        loaded = [module.name for module in self.current.driver.config.model.adapters]
        name, timeout_s = self.dice.choice(tuple(FOLDERS)), self.dice.choice(TIMEOUTS_S)
        if name in loaded:
            self.world.note(self.current, f"shall unload {name} in {timeout_s} s")
            self.current.do(lambda driver: driver.unload_adapter(name, timeout=timeout_s))
        else:
            folder = BROKEN if self.dice.random() < 0.1 else self.dice.choice(FOLDERS[name])
            self.world.note(self.current, f"shall load {name} from {folder} in {timeout_s} s")
            self.current.do(lambda driver: driver.load_adapter(name, f"/{folder}", timeout=timeout_s))

    # -- their workers

    def stall(self, worker: Worker) -> None:
        if self.dice.random() < self._stall_chance:
            worker.stay(self.dice.randrange(*STALL_NS))

    def find(self, worker: Worker) -> tuple[Any, PipelineConfig]:
        """The run directory and the settings, for a starting worker."""
        folder = Folder(self.disk, str(RUN_DIR), worker)
        return folder, _read_config((folder / CONFIG_FILE).read_text(encoding="utf-8"))

    def build(self, worker: Worker, context: WorkerContext) -> Any:
        """The worker's body; None while there is no model card."""
        context.page.set_phase(worker.epoch, "loading")
        if worker.role == "execute":
            body = self._load(worker, context)
        elif (card := ModelCard.read(context.run_dir)) is not None:
            body = BUILDERS[worker.role](context, card)
        else:
            worker.next_ns = self.world.clock.now_ns + WAIT_NS
            return None
        context.page.set_phase(worker.epoch, "ready")
        return body

    def _load(self, worker: Worker, context: WorkerContext) -> Execute:
        try:
            runner, card, _ = loading.load_runner(context)
        except ConfigError as error:
            context.page.set_phase(worker.epoch, "failed")
            worker.die(f"settings: {error.message}", is_internal=True)
        return Execute(context, runner, card, step_s=0.001)

    def _build_runner(
        self, model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, *, run_dir: Any, kv_file: None
    ) -> tuple[Device, ModelCard]:
        worker, card = run_dir.owner, self.world.card
        worker.stay(self.dice.randrange(*LOAD_NS))
        added = added_by(model, [module.name for module in model.adapters])
        device = Device(worker, card, num_host_pages=cache.host_pages)
        device.what_adapters_add = added
        return device, card

    def check_at_rest(self) -> None:
        """What the driver has loaded is what is served, and what the next driver will load."""
        config = self.current.driver.config
        known = {module.name: module.digest() for module in config.model.adapters}
        served = LatestCard(self.current.folder).offered()
        self.world.require(served == known, f"{served} are served at rest, loaded are {known}")
        again = _Driver(self.current, self.settings)
        again.begin()
        self.world.require(again.config == config, f"the next driver begins with {again.config}, this has {config}")

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for place in (model_card, adapters, replacing, preparing):
            patch.setattr(place, "write_private", write_private)
        patch.setattr(LoraModule, "digest", lambda self: digest_of(self.folder.name))
        patch.setattr(loading, "build_hash_runner", self._build_runner)
        patch.setattr(loading, "check_speculation", lambda *_: None)
        patch.setattr(loading, "_kv_file", lambda *_: None)  # the device finds it
        clock = self.world.clock
        times = SimpleNamespace(
            monotonic=clock.monotonic, monotonic_ns=clock.monotonic_ns, sleep=lambda s: self.turning.sleep(s)
        )
        patch.setattr(replacing, "time", times)
        patch.setattr(served_adapters, "start_thread", lambda thread: thread.run())
