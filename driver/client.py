"""The ZeroMQ client: where it connects, and when it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..protocol.config import ServiceConfig
from ..protocol.connection import Address, Connection
from ..protocol.errors import ConfigError, TriptychError
from ..protocol.keys import ClientKeys, own_keys
from ..protocol.run_dir import CONFIG_FILE, follow_endpoint, submit_endpoint
from .requests import Requests
from .session import Session


class Client(Requests):
    """A connection to a running pipeline, in this process, on this machine, or anywhere its endpoints reach.

    Use it as a context manager, or ``close`` it. Requests outlive the client until their lease ends; ``resume`` follows
    one again by its id.

    >>> with Client("/run/triptych") as client:                                 # doctest: +SKIP
    ...     print(client.generate("What does len do?", max_tokens=100).text)
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        submit: str | None = None,
        follow: str | None = None,
        keys: ClientKeys | str | Path | None = None,
    ) -> None:
        """Connect to the pipeline in ``run_dir``, or to its two endpoints.

        ``keys``: this client's keys or their file, required for ``tcp://``; a run directory contains its own.
            The client may be there before the driver: it finds out where and with which keys to connect.

        Raises:
            ConfigError: an endpoint is missing or malformed, or the keys are missing or accessible to others.
        """
        if isinstance(keys, (str, Path)):
            keys = ClientKeys.read(keys)
        look_up: Callable[[], Address] | None = None
        self._where = f"{submit}, {follow}" if run_dir is None else str(run_dir)
        if run_dir is not None:
            look_up = partial(_address_in, Path(run_dir).expanduser().absolute(), submit, follow, keys)
            address = look_up()
        elif submit is None or follow is None:
            raise ConfigError("a client needs a run directory, or a submit and a follow endpoint")
        else:
            address = _checked(Address(submit, follow, keys))
        self.session = Session(Connection(address, look_up=look_up)).start()

    def __repr__(self) -> str:
        return f"<Client of {self._where}{', closed' if self.session.is_closed else ''}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; open streams raise ``PipelineClosed``. Accepted requests go on for their lease."""
        self.session.close()

    def fail(self, error: TriptychError) -> None:
        """End every open request with this error: for callers that know the pipeline will not come back."""
        self.session.fail(error)

    @property
    def _session(self) -> Session:
        return self.session


def _address_in(run_dir: Path, submit: str | None, follow: str | None, keys: ClientKeys | None) -> Address:
    """The address of the pipeline in ``run_dir``, except for what is given.

    Raises:
        ConfigError: its keys cannot be read, or are missing.
    """
    service = _service_in(run_dir)
    return _checked(
        Address(
            submit or submit_endpoint(run_dir, service),
            follow or follow_endpoint(run_dir, service),
            keys or own_keys(run_dir),
        )
    )


def _checked(address: Address) -> Address:
    """
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
