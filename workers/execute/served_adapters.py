"""The adapters that execute serves, and how they change while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...protocol.config import ModelConfig
from ...protocol.errors import ConfigError
from ...protocol.model_card import ModelCard
from ...protocol.run_dir import ADAPT_FILE, read_config
from ...protocol.threads import start_thread
from .step import Places, Runner

logger = logging.getLogger(__name__)


class ServedAdapters:
    """The adapters of the model card, and their numbers in steps.

    To change them, the driver writes the new settings, as for a restart, and then the file ``ADAPT_FILE``. The file is
    removed here: once the new adapters are in use and on the card, or as soon as it is clear that this takes a restart.
    """

    def __init__(self, card: ModelCard, runner: Runner, run_dir: Path) -> None:
        self.numbers = {name: number for number, name in enumerate(card.adapters, 1)}  # of a sequence; 0 is none
        self._card, self._runner, self._run_dir = card, runner, run_dir
        # Of all names so far: keys and values in the cache belong to a name, and only a restart forgets them.
        self._digests = dict(card.adapters)
        self._file = run_dir / ADAPT_FILE
        self._loading: _Loading | None = None
        self._answer()  # the settings that it refers to are those of this start

    def digest_of(self, name: str) -> str:
        """Empty if it is not served."""
        return self._card.adapters.get(name, "")

    def change_if_told(self, *, may_change: bool) -> None:
        """Load what the driver wants, and put it to use when that is done. Called between steps."""
        if self._loading is None:
            if self._file.exists() and not (may_change and self._begin()):
                self._answer()
        elif not self._loading.is_alive():
            loading, self._loading = self._loading, None
            if loading.use is not None and may_change and self._file.exists():
                loading.use()
                self._name(loading)
            self._answer()

    def _begin(self) -> bool:
        """Whether adapters are being loaded now; otherwise a restart has to do it."""
        try:
            model = read_config(self._run_dir).model
            places = self._places([module.name for module in model.adapters])
            loading = _Loading(self._runner, model, places, served=self._card.adapters, former=self._digests)
            start_thread(loading)
        except (OSError, ConfigError) as error:
            logger.warning("cannot load adapters: %s", error)
            return False
        self._loading = loading
        return True

    def _places(self, names: list[str]) -> Places:
        """The adapters by number. Those that stay keep theirs, as running sequences refer to them by it."""
        kept = {number: name for name, number in self.numbers.items() if name in names}
        places: list[str | None] = [kept.get(number) for number in range(1, max(kept, default=0) + 1)]
        for name in names:
            if name not in self.numbers:
                if None not in places:
                    places.append(None)
                places[places.index(None)] = name
        return places

    def _name(self, loaded: _Loading) -> None:
        self._digests |= loaded.digests
        self.numbers.clear()  # it is shared
        self.numbers.update((name, number) for number, name in enumerate(loaded.places, 1) if name is not None)
        self._card = replace(self._card, adapters=loaded.digests)
        with suppress(OSError):  # no space: the driver does not find them there, and restarts execute
            self._card.publish(self._run_dir)
        logger.info("serving these adapters from now on: %s", ", ".join(loaded.digests) or "(none)")

    def _answer(self) -> None:
        with suppress(OSError):  # no file can be changed there any more
            self._file.unlink(missing_ok=True)


class _Loading(threading.Thread):
    """Loads adapters while steps run."""

    def __init__(
        self,
        runner: Runner,
        model: ModelConfig,
        places: Places,
        *,
        served: Mapping[str, str],
        former: Mapping[str, str],
    ) -> None:
        """``served`` and ``former`` are digests of adapters by name: of those in use, and of all since the start."""
        super().__init__(name="triptych-adapters", daemon=True)
        self._runner, self._model, self._served, self._former = runner, model, served, former
        self.places = places
        self.digests: dict[str, str] = {}
        self.use: Callable[[], None] | None = None  # to be called between steps; None: a restart has to do it

    def run(self) -> None:
        try:
            for module in self._model.adapters:
                self.digests[module.name] = self._served.get(module.name) or module.digest()
            if all(self._former.get(name, digest) == digest for name, digest in self.digests.items()):
                self.use = self._runner.load_adapters(self._model, self.places)
        except ConfigError as error:
            logger.warning("cannot load adapters: %s", error)
