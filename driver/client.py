"""The ZeroMQ client: where it connects, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..protocol.connection import Address, Connection
from ..protocol.errors import ConfigError, TriptychError
from ..protocol.home import from_home
from ..protocol.keys import ClientKeys
from .requests import Requests
from .session import Session
from .whereabouts import Whereabouts, checked


class Client(Requests):
    """A connection to a running pipeline, in this process, on this machine, or anywhere its endpoints reach.

    Use it as a context manager, or ``close`` it. Requests outlive the client until their lease ends; ``resume`` follows
    one again by its id.

    >>> with Client("/run/triptych") as client:                                 # doctest: +SKIP
    ...     print(client.generate(messages=[{"role": "user", "content": "What does len do?"}]).text)
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

        The client may be there before the driver: it finds out in ``run_dir`` where and with which keys to connect. If
        requests wait and no driver has ever been there, a warning is logged after a few seconds. ``keys`` are this
        client's keys or their file, required for ``tcp://``; a run directory contains its own.

        Raises:
            ConfigError: an endpoint is missing or malformed, or the keys are missing or accessible to others.
        """
        if isinstance(keys, (str, Path)):
            keys = ClientKeys.read(keys)
        look_up: Callable[[], Address] | None = None
        self._where = f"{submit}, {follow}" if run_dir is None else str(run_dir)
        if run_dir is not None:
            look_up = Whereabouts(from_home(run_dir, param="run_dir").absolute(), submit, follow, keys)
            address = look_up()
        elif submit is None or follow is None:
            raise ConfigError("a client needs a run directory, or a submit and a follow endpoint")
        else:
            address = checked(Address(submit, follow, keys))
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
