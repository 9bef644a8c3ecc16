"""One poller for all viewers of a gateway process; it reads from the pipeline only while there are any."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ....driver.standing import RequestList
from ....protocol.errors import TriptychError
from ...watch.watched import Sample, Watched
from ..errors import ApiError
from ..serving.streaming import event
from .frame import frame

if TYPE_CHECKING:
    from ..state import Gateway

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
ANSWER_S = 1.0  # a pipeline that does not respond within this time is shown as silent
MAX_VIEWERS = 64
MAX_ROWS = 128  # of the list of requests, which summarize builds for each poll
NOBODY = RequestList([], 0, 0, [])


class Feed:
    """The latest frame, and the viewers waiting for the next one. For use in the event loop only."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._num_viewers = 0
        self._is_closed = False
        self._poller: asyncio.Task[None] | None = None
        self._latest = b""
        self._next: asyncio.Future[None] | None = None  # done when there is a newer frame

    def join(self) -> None:
        """
        Raises:
            ApiError: 503, too many viewers.
        """
        if self._num_viewers >= MAX_VIEWERS:
            raise ApiError(f"{MAX_VIEWERS} viewers are connected, the limit", status=503, code="too_many_viewers")
        self._num_viewers += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())

    def leave(self) -> None:
        self._num_viewers -= 1
        if not self._num_viewers and self._poller is not None:
            self._poller.cancel()
            self._poller, self._latest = None, b""

    async def frames(self) -> AsyncIterator[bytes]:
        """The latest frame and each one after it, as events; a slow viewer skips some. Ends with the gateway."""
        sent = b""
        while not self._is_closed:
            if self._latest and self._latest is not sent:
                sent = self._latest
                yield sent
                continue
            await self._newer()

    def close(self) -> None:
        """The gateway is stopping: end all viewers' streams."""
        self._is_closed = True
        self._wake()

    async def _newer(self) -> None:
        """Wait for the next frame; raises the poller's error."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        assert self._poller is not None, "joining starts the poller"
        await asyncio.wait((self._next, self._poller), return_when=asyncio.FIRST_COMPLETED)
        if self._poller is not None and self._poller.done():
            self._poller.result()

    def _wake(self) -> None:
        following, self._next = self._next, None
        if following is not None and not following.done():
            following.set_result(None)

    async def _poll(self) -> None:
        watched = Watched(self._gateway.run_dir, {}, {"max_queue": self._gateway.pipeline.service.max_queue})
        began_ns = time.monotonic_ns()  # what execute shows may be from the last viewer, of an hour ago
        while True:
            await self._look(watched, began_ns)
            self._wake()
            await asyncio.sleep(INTERVAL_S)

    async def _look(self, watched: Watched, began_ns: int) -> None:
        gateway = self._gateway
        requests = NOBODY
        if gateway.is_loaded:
            watched.card = watched.card or gateway.card.to_wire()
            requests = await self._requests(watched)
        stats = gateway.board.stats()
        sample = Sample(time.monotonic(), stats, requests)
        silent_since_s = watched.silent_since_s  # the board is readable even if summarize does not respond
        watched.see(sample)
        watched.silent_since_s = silent_since_s
        found = gateway.health()
        shown = gateway.board.view.look(began_ns)
        self._latest = event(frame(watched, shown, found, now_s=time.monotonic()))

    async def _requests(self, watched: Watched) -> RequestList:
        """The list of requests; the previous one if summarize does not respond."""
        with suppress(TriptychError):
            requests = await self._gateway.client.requests(MAX_ROWS, ANSWER_S)
            watched.silent_since_s = None
            return requests
        watched.miss(time.monotonic())
        return watched.sample.requests if watched.sample else NOBODY
