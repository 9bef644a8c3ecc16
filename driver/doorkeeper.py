"""Refuses requests in prepare's place where there will be no prepare any more: nobody waits for an answer in vain."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from ..protocol import messages as m
from ..protocol.channels import Bell, Poller, Router, Transport
from ..protocol.codec import decode_public
from ..protocol.config import ServiceConfig
from ..protocol.curve import start_gatekeeper
from ..protocol.errors import BadFrame, PipelineFailed, TriptychError
from ..protocol.run_dir import submit_endpoint
from ..protocol.service import public_door, service_info

logger = logging.getLogger(__name__)

EPOCH = 0  # no life of prepare


class Doorkeeper:
    """Serves the submit socket, in a thread of its own, until closed. Only for a driver that gave up on prepare."""

    def __init__(self, run_dir: Path, service: ServiceConfig) -> None:
        self._run_dir, self._service = run_dir, service
        self._bell = Bell()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="triptych-doorkeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._bell.ring()
        self._thread.join()
        self._bell.close()

    def _run(self) -> None:
        context, gatekeeper = Transport().context(), None
        try:
            door = public_door(self._run_dir, self._service, self._service.submit)
            if door is not None:
                gatekeeper = start_gatekeeper(context, door)
            limit = self._service.max_frame_bytes
            endpoint = submit_endpoint(self._run_dir, self._service)
            router = Router(context, endpoint, epoch=EPOCH, max_frame_bytes=limit, public=door)
            poller = Poller(router.socket, self._bell.file)
            while not self._closing:
                poller.wait(3600.0)
                while not self._closing and (received := router.recv()) is not None:
                    self._answer(router, *received)
        except (TriptychError, OSError):
            logger.exception("nobody refuses requests")
        finally:
            if gatekeeper is not None:
                gatekeeper.stop()
            context.destroy()

    def _answer(self, router: Router, peer: bytes, frame: bytes) -> None:
        try:
            message = decode_public(frame, max_bytes=self._service.max_frame_bytes).message
        except BadFrame:
            return
        answer: Any = None
        match message:
            case m.Submit():
                error = PipelineFailed("a worker died again and again, and the pipeline gave up")
                answer = m.Rejected(
                    message.request_id[: m.MAX_REFUSED_ID_CHARS], error.code, error.message, error.param
                )
            case m.GetInfo():  # who has a large request asks before it is sent
                answer = m.Info(service_info(self._run_dir, self._service))
        if answer is not None:
            router.send(peer, answer)
