"""``Client`` for asyncio: the same session thread, with its events delivered to the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ..protocol.errors import TriptychError
from ..protocol.keys import ClientKeys
from .async_requests import AsyncRequests
from .async_stream import Mailbox, running_loop
from .client import Client
from .session import Session


class AsyncClient(AsyncRequests):
    """A connection to a running pipeline for asyncio; use it with ``async with``. See ``Client``.

    >>> async with AsyncClient("/run/triptych") as client:                      # doctest: +SKIP
    ...     print((await client.generate(messages=[{"role": "user", "content": "What does len do?"}])).text)
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        submit: str | None = None,
        follow: str | None = None,
        keys: ClientKeys | str | Path | None = None,
        client: Client | None = None,
    ) -> None:
        """Connect like ``Client``, or share the connection of an existing ``client``."""
        self._client = client or Client(run_dir, submit=submit, follow=follow, keys=keys)
        self._latest: Mailbox | None = None  # that of an earlier loop has ended, together with its streams

    def __repr__(self) -> str:
        return f"<Async{repr(self._client)[1:]}"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; see ``Client.close``."""
        await asyncio.to_thread(self._client.close)

    def fail(self, error: TriptychError) -> None:
        """End every open stream with this error; accepted requests go on in the service."""
        self._session.fail(error)

    @property
    def _session(self) -> Session:
        return self._client.session

    def _mailbox(self) -> Mailbox:
        loop = running_loop()
        if self._latest is None or self._latest.loop is not loop:
            self._latest = Mailbox(loop)
        return self._latest
