"""Where the pipeline of a run directory listens, which a client may ask before there is one."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path

from ..protocol.config import ServiceConfig
from ..protocol.connection import Address
from ..protocol.errors import ConfigError
from ..protocol.keys import ClientKeys, own_keys
from ..protocol.run_dir import CONFIG_FILE, follow_endpoint, submit_endpoint

logger = logging.getLogger(__name__)

WARN_S = 5.0  # requests wait for a driver that has never been there: perhaps the path is wrong


class Whereabouts:
    """The address of the pipeline in ``run_dir``, except for what is given. Called while requests wait for it."""

    def __init__(self, run_dir: Path, submit: str | None, follow: str | None, keys: ClientKeys | None) -> None:
        self._run_dir = run_dir
        self._submit = submit
        self._follow = follow
        self._keys = keys
        is_here = submit is None or follow is None  # otherwise the folder may only hold the keys
        self._warn_at = time.monotonic() + WARN_S if is_here else math.inf

    def __call__(self) -> Address:
        """
        Raises:
            ConfigError: its keys cannot be read, or are missing.
        """
        if time.monotonic() >= self._warn_at:
            self._warn_at = math.inf
            if not (self._run_dir / CONFIG_FILE).exists():
                logger.warning("no pipeline has started in %s so far: requests wait for one", self._run_dir)
        service = _service_in(self._run_dir)
        return checked(
            Address(
                self._submit or submit_endpoint(self._run_dir, service),
                self._follow or follow_endpoint(self._run_dir, service),
                self._keys or own_keys(self._run_dir),
            )
        )


def checked(address: Address) -> Address:
    """The address, unless it cannot be used.

    Raises:
        ConfigError: it is reached over the network, which requires keys.
    """
    if address.keys is None and any(where.startswith("tcp://") for where in (address.submit, address.follow)):
        raise ConfigError("a client needs keys for a tcp:// endpoint", param="keys")
    return address


def _service_in(run_dir: Path) -> ServiceConfig:
    """Where the pipeline in ``run_dir`` listens; the defaults if there was none yet.

    Nothing else is read: a pipeline of another version may have other settings, but speaks the same protocol.
    """
    try:
        found = json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["service"]
        return ServiceConfig(**{name: found.get(name) for name in ("submit", "follow", "curve_keys")})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return ServiceConfig()
