"""An operator who loads and unloads LoRA adapters all the time, while clients select them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

from benchmarks.chaos.service import Service
from triptych.driver.control import ask
from triptych.protocol.errors import ConfigError

NUM_ADAPTERS = 4
PAUSE_S = 1.0  # between two operations, on average


class Operator:
    """The last loaded adapter is unloaded first, so each keeps its number in the hash LM while it is loaded."""

    def __init__(self, service: Service, folder: Path, *, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.loaded: list[str] = []  # clients may select these; an adapter's number is its position, counted from 1
        self._service, self._rng = service, random.Random(f"operator {seed}")
        self._folders = [_make_adapter(folder / f"adapter{number}", number) for number in range(NUM_ADAPTERS)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop with the current adapters."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._rng.uniform(0, 2 * PAUSE_S)):
            count = len(self.loaded)
            try:
                if count < NUM_ADAPTERS and (not count or self._rng.random() < 0.6):
                    self._load(count)
                else:
                    self._unload(self.loaded.pop())
            except ConfigError as error:
                self.counts["interrupted"] += 1
                if not _is_of_a_kill(error):
                    self.wrong.append(error.message[:200])

    def _load(self, number: int) -> None:
        name, folder = f"a{number}", self._folders[number]
        try:
            ask(self._service.run_dir, "load_adapter", name=name, path=str(folder))
        except ConfigError as error:
            if "is already loaded" not in error.message:  # by a question whose answer was lost with the driver
                raise
        self.loaded.append(name)
        self.counts["loaded"] += 1

    def _unload(self, name: str) -> None:
        try:
            ask(self._service.run_dir, "unload_adapter", name=name)
        except ConfigError as error:
            if "is not loaded" not in error.message:
                self.loaded.append(name)
                raise
        self.counts["unloaded"] += 1


def _make_adapter(folder: Path, number: int) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes([number]))
    return folder


def _is_of_a_kill(error: ConfigError) -> bool:
    """The driver was killed, or the new execute before it was ready: the next question shows the state."""
    return any(text in error.message for text in ("no driver responds", "the new execute", "being stopped"))
