"""A clock that only the simulation advances, in place of ``time`` in every module of the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

READ_NS = 100  # two readings are never equal, as on a real machine


class Clock:
    """What the package's modules see as the module ``time``."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    @property
    def now(self) -> float:
        """Seconds."""
        return self.now_ns / 1e9

    def advance_to(self, now_ns: int) -> None:
        self.now_ns = max(self.now_ns, now_ns)

    def monotonic_ns(self) -> int:
        self.now_ns += READ_NS
        return self.now_ns

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9

    def sleep(self, _: float) -> None:
        raise AssertionError("a part of the pipeline that is simulated sleeps")


@contextmanager
def installed(clock: Clock, **modules: Any) -> Iterator[None]:
    """Replace ``time`` (or ``modules``, by name) in every module of the package that imported it."""
    fakes: dict[str, Any] = {"time": clock, **modules}
    places = _importers(tuple(fakes), len(sys.modules))
    for module, name in places:
        setattr(module, name, fakes[name])
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, sys.modules[name])


@lru_cache(maxsize=1)
def _importers(names: tuple[str, ...], num_modules: int) -> list[tuple[ModuleType, str]]:
    """Modules of the package that imported one of ``names``. Searched again when there are more modules."""
    return [
        (module, name)
        for module in [module for key, module in sys.modules.items() if key.startswith("triptych.")]
        for name in names
        if getattr(module, name, None) is sys.modules[name]
    ]
