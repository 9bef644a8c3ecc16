"""Answers clients in place of a worker that was given up, so that none of them waits in vain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..protocol import messages as m
from ..protocol.board import Board
from ..protocol.channels import Bell, Poller, Router, Transport
from ..protocol.codec import decode_public
from ..protocol.config import ServiceConfig
from ..protocol.curve import start_gatekeeper
from ..protocol.errors import BadFrame, PipelineFailed, TriptychError
from ..protocol.run_dir import follow_endpoint, submit_endpoint
from ..protocol.service import curve_server, service_info
from ..protocol.threads import start_thread

logger = logging.getLogger(__name__)

EPOCH = 0  # not a worker
PUBLIC_ROLES = ("prepare", "summarize")  # those that clients talk to


class StandIn:
    """Serves the public socket of a worker that the driver gave up on, in a separate thread, until closed.

    In place of prepare it refuses requests, in place of summarize it ends followed requests with an error; it knows
    nothing of a request but its id.
    """

    def __init__(self, role: str, run_dir: Path, service: ServiceConfig, board: Board) -> None:
        self._run_dir, self._service, self._board = run_dir, service, board
        if role == "prepare":
            self._endpoint, self._public = submit_endpoint(run_dir, service), service.submit
            self._answers = self._refusals
        else:
            self._endpoint, self._public = follow_endpoint(run_dir, service), service.follow
            self._answers = self._ends
        self._bell = Bell()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"triptych-stand-in-{role}", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        self._closing = True
        self._bell.ring()
        self._thread.join()
        self._bell.close()

    def _run(self) -> None:
        context, gatekeeper = Transport().context(), None
        try:
            server = curve_server(self._run_dir, self._service, self._public)
            if server is not None:
                gatekeeper = start_gatekeeper(context, server)
            limit = self._service.max_frame_bytes
            router = Router(context, self._endpoint, epoch=EPOCH, max_frame_bytes=limit, public=server)
            poller = Poller(router.socket, self._bell.file)
            while not self._closing:
                poller.wait(3600.0)
                while not self._closing and (received := router.recv()) is not None:
                    self._answer(router, *received)
        except (TriptychError, OSError):
            logger.exception("cannot serve %s", self._endpoint)
        finally:
            if gatekeeper is not None:
                gatekeeper.stop()
            context.destroy()

    def _answer(self, router: Router, peer: bytes, frame: bytes) -> None:
        try:
            message = decode_public(frame, max_bytes=self._service.max_frame_bytes).message
        except BadFrame:
            return
        for answer in self._answers(message):
            router.send(peer, answer)

    def _refusals(self, message: Any) -> Iterator[Any]:
        match message:
            case m.Submit():
                error = PipelineFailed()
                yield m.Rejected(message.request_id[: m.MAX_REFUSED_ID_CHARS], error.code, error.message, error.param)
            case m.GetInfo():  # clients ask for the frame limit before they send a large request
                yield m.Info(service_info(self._run_dir, self._service))

    def _ends(self, message: Any) -> Iterator[Any]:
        match message:
            case m.Follow():
                error = PipelineFailed()
                for request_id, num_tokens, _ in message.entries:
                    yield m.Failed(request_id, num_tokens, 0, b"", "", None, error.code, error.message, {})
            case m.GetStats():
                yield m.Stats(self._board.stats())
            case m.GetStatus():
                yield m.Status(message.request_id, "unknown", 0, 0, 0)
            case m.GetRequests():
                yield m.Requests(message.limit, [], 0, time.monotonic_ns(), [])
