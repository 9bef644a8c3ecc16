"""Triptych: an LLM inference driver in three processes that loses no request when one of them crashes.

>>> from triptych import Driver                                     # doctest: +SKIP
>>> with Driver(model="demo") as driver:                            # doctest: +SKIP
...     print(driver.generate(messages=[{"role": "user", "content": "What does getattr do?"}]).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .driver.async_client import AsyncClient as AsyncClient
    from .driver.async_driver import AsyncDriver as AsyncDriver
    from .driver.client import Client as Client
    from .driver.driver import Driver as Driver
    from .protocol.config import PipelineConfig as PipelineConfig
    from .protocol.errors import TriptychError as TriptychError
    from .protocol.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Driver": "driver.driver",
    "AsyncDriver": "driver.async_driver",
    "Client": "driver.client",
    "AsyncClient": "driver.async_client",
    "PipelineConfig": "protocol.config",
    "SamplingParams": "protocol.sampling",
    "TriptychError": "protocol.errors",
}
__all__ = ["AsyncClient", "AsyncDriver", "Client", "Driver", "PipelineConfig", "SamplingParams", "TriptychError"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    # Names are looked up on first use, so that importing the package costs next to nothing.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
