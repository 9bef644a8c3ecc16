"""``Driver`` for asyncio: it never blocks the event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..protocol.config import PipelineConfig
from ..protocol.errors import PipelineClosed
from .async_client import AsyncClient
from .async_requests import AsyncRequests
from .async_stream import Mailbox, running_loop
from .driver import Driver
from .health import Health
from .parts import Stop
from .session import Session


class AsyncDriver(AsyncRequests):
    """Three worker processes and their asyncio client; use it with ``async with``. ``driver`` is its ``Driver``.

    >>> async with AsyncDriver("demo") as driver:                               # doctest: +SKIP
    ...     async for delta in driver.submit(messages=[{"role": "user", "content": "What is len?"}]):
    ...         print(delta.text, end="")
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        run_dir: str | Path | None = None,
        config: PipelineConfig | None = None,
        **options: Any,
    ) -> None:
        self.driver = Driver(model, run_dir=run_dir, config=config, **options)
        self._client: AsyncClient | None = None

    def __repr__(self) -> str:
        return f"<Async{repr(self.driver)[1:]}"

    async def __aenter__(self) -> AsyncDriver:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.stop(mode="abort" if kind else "drain")
        except BaseException:  # the wait for answers was cancelled
            await asyncio.shield(asyncio.create_task(asyncio.to_thread(self.driver.abandon)))
            raise

    async def start(self) -> AsyncDriver:
        """Start the workers and wait until all are ready; see ``Driver.start``. If cancelled, it stops them again."""
        running_loop()
        if not self._is_started:
            self._client = None  # of an earlier start: ended by ``driver`` itself, or by a ``stop`` that was cancelled
        is_cancelled = threading.Event()
        starting = asyncio.create_task(asyncio.to_thread(self._start, is_cancelled))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            if self._client is None:  # otherwise it was already running
                is_cancelled.set()
                await asyncio.shield(asyncio.create_task(self._stop_after(starting)))
            raise
        self._client = self._client or AsyncClient(client=self.driver.client)
        return self

    @property
    def _is_started(self) -> bool:
        with suppress(PipelineClosed):
            return bool(self.driver.run_dir)
        return False

    def _start(self, is_cancelled: threading.Event) -> None:
        """Runs in a separate thread, which can only end itself."""

        def look(_: Driver) -> None:
            if is_cancelled.is_set():
                raise PipelineClosed("the start was cancelled")

        self.driver.start(progress=look)

    async def _stop_after(self, starting: asyncio.Task[None]) -> None:
        await asyncio.gather(starting, return_exceptions=True)
        # The start may have completed just before it was cancelled.
        await asyncio.to_thread(self.driver.abandon)

    async def stop(self, *, mode: Stop = "drain", timeout: float = 30.0) -> None:
        """Stop the pipeline; see ``Driver.stop``. Goes on if cancelled."""
        await asyncio.to_thread(self.driver.stop, mode=mode, timeout=timeout)
        self._client = None

    async def drain(self, timeout: float = 30.0) -> bool:
        """Refuse new requests and wait for the accepted ones. Returns whether all were answered in time."""
        return await asyncio.to_thread(self.driver.drain, timeout)

    @property
    def client(self) -> AsyncClient:
        """The driver's own connection to the pipeline."""
        if self._client is None:
            raise PipelineClosed("the driver is not started")
        return self._client

    @property
    def _session(self) -> Session:
        return self.client._session

    def _mailbox(self) -> Mailbox:
        return self.client._mailbox()

    async def stats(self, timeout: float = 10.0) -> dict[str, Any]:
        """Statistics of every stage, and its number of restarts; see ``Driver.stats``."""
        return await asyncio.to_thread(self.driver.stats, timeout)

    @property
    def run_dir(self) -> Path:
        """What a client in another process connects to; see ``Driver.run_dir``."""
        return self.driver.run_dir

    def health(self) -> Health:
        """The health of the pipeline; see ``Driver.health``."""
        return self.driver.health()

    async def replace(self, role: str, *, model: str | None = None, timeout: float = 300.0) -> float:
        """Replace one worker and wait until the new one is ready; see ``Driver.replace``. Goes on if cancelled."""
        return await asyncio.to_thread(self.driver.replace, role, model=model, timeout=timeout)

    async def load_adapter(self, name: str, path: str | Path, *, timeout: float = 300.0) -> float:
        """Serve a LoRA adapter from now on; see ``Driver.load_adapter``. Goes on if cancelled."""
        return await asyncio.to_thread(self.driver.load_adapter, name, path, timeout=timeout)

    async def unload_adapter(self, name: str, *, timeout: float = 300.0) -> float:
        """Unload an adapter; see ``Driver.unload_adapter``. Goes on if cancelled."""
        return await asyncio.to_thread(self.driver.unload_adapter, name, timeout=timeout)
