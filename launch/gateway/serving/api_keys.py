"""The keys that clients may come with, while their file may be replaced."""

from __future__ import annotations

import logging

from ....protocol.errors import ConfigError
from ..config import GatewayConfig
from .file_version import version_of

logger = logging.getLogger(__name__)


class ApiKeys:
    """The keys of a config. A changed file counts from the next request on: keys come and go without a stop.

    One that cannot be used changes nothing, so that no mistake in it opens the server, or shuts it to everybody.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """
        Raises:
            ConfigError: see ``GatewayConfig.api_keys``.
        """
        self._config = config
        self._version = version_of(config.api_key_file)  # before it is read: what changes meanwhile is then read again
        self._keys = config.api_keys()

    def read(self) -> tuple[str, ...]:
        """Every key that is accepted now; empty: no key is required."""
        if (version := version_of(self._config.api_key_file)) != self._version:
            self._version = version
            try:
                self._keys = self._config.api_keys()
                logger.info("the keys of %s have changed", self._config.api_key_file)
            except ConfigError as error:
                logger.warning("%s; the keys read before are still accepted", error)
        return self._keys
