"""One gateway process: a socket that is already listening, an event loop, and a heartbeat for the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn

from ....protocol.board import KEEP, STOP
from ....protocol.errors import ConfigError, TriptychError
from ....protocol.lifeline import raise_file_limit, show_stacks_at_the_end
from ...terminal.logs import flush_log, set_up_stream_logging
from ..app import create_app
from ..config import GatewayConfig
from ..errors import gone, stopped
from ..settings import Settings
from ..state import Gateway
from .patience import impatient
from .tls import Certificate
from .tracing import make_tracer

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
GONE_S = 10.0  # for which the pipeline is gone before a gateway ends: a machine that stood still looks like that too
GRACE_S = 5.0  # for open connections to finish on a stop
CUT_S = 0.5  # before that time is over, connections that are still open are cut
# New objects between two searches for garbage. A step of 256 streams creates thousands: with the default of 700, the
# searches take an eighth of this process's time.
GC_THRESHOLD = 20_000
LAST_ENDS_S = 1.0  # for ends of requests to arrive that workers sent before they stopped


def run_supervised(settings: Settings) -> None:
    """Serve until SIGTERM."""
    show_stacks_at_the_end()
    set_up_stream_logging(settings.log_level, settings.config.log_format, process=f"gateway {settings.index}")
    with socket.socket(fileno=settings.listen_fd) as listener:
        gateway = make_gateway(settings.config, settings.run_dir, index=settings.index)
        serve(gateway, listener, heartbeat_fd=settings.heartbeat_fd)


def make_gateway(config: GatewayConfig, run_dir: Path, *, index: int = 0) -> Gateway:
    """
    Raises:
        ConfigError: no pipeline was started in ``run_dir``, or a setting is invalid.
    """
    gateway = Gateway(config, run_dir, index, make_tracer(config.otlp_traces_endpoint))
    try:
        _ = gateway.pipeline, gateway.board, gateway.api_keys
    except OSError as error:
        raise ConfigError(
            f"no pipeline runs in {run_dir}: {error.filename}: {error.strerror}", param="run_dir"
        ) from error
    return gateway


def serve(gateway: Gateway, listener: socket.socket, *, heartbeat_fd: int | None = None) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM; open requests then get a few seconds to finish.

    The process exits with 1 if it cannot serve, or, where no one supervises it, if its pipeline is gone for good.
    """
    raise_file_limit()
    server = make_server(gateway, heartbeat_fd=heartbeat_fd)
    gc.freeze()  # 70,000 objects that stay: a full collection that visits them delays every stream by 40 ms
    gc.enable()
    gc.set_threshold(GC_THRESHOLD)
    server.run(sockets=[listener])
    gateway.board.close()
    if not server.started or server.has_lost_pipeline:
        sys.exit(1)


def make_server(gateway: Gateway, *, heartbeat_fd: int | None = None) -> _Server:
    """The HTTP server; call ``run`` with its sockets. ``should_exit`` ends it.

    Raises:
        ConfigError: the certificate for HTTPS cannot be used.
    """
    config = uvicorn.Config(
        create_app(gateway),
        http=impatient(gateway.config.body_timeout_s),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(gateway.config.keep_alive_s),
        timeout_graceful_shutdown=int(GRACE_S),
    )
    certificate = Certificate(gateway.config) if gateway.config.is_tls else None
    if certificate is not None:
        config.load()
        config.ssl = certificate.context
    return _Server(config, gateway, heartbeat_fd, certificate)


class _Server(uvicorn.Server):
    """Adds a heartbeat: one byte to the supervisor twice a second, as long as the event loop runs."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, heartbeat_fd: int | None, certificate: Certificate | None
    ) -> None:
        super().__init__(config)
        self._gateway, self._certificate = gateway, certificate
        self._heartbeat_fd = heartbeat_fd
        self.has_lost_pipeline = False  # and ends, as no one supervises it

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._pulse = asyncio.create_task(self._beat())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.counters.publish()
        self._gateway.feed.close()
        self._gateway.uploads.stop()
        ending = asyncio.create_task(self._end_the_rest())
        await super().shutdown(sockets)
        ending.cancel()
        self._pulse.cancel()
        if self._heartbeat_fd is None:  # unsupervised, so it is not restarted
            self._gateway.counters.forget()
        flush_log()  # uvicorn ends the process by the signal that stopped it

    async def _end_the_rest(self) -> None:
        """End the remaining requests with an error, and then cut connections whose clients do not read even that.

        Otherwise uvicorn would cancel the tasks that write to them, and log each as an error of ours.
        """
        has_stopped = self._gateway.board.mode in (STOP, KEEP)
        wait_s = LAST_ENDS_S if has_stopped else GRACE_S - LAST_ENDS_S
        await asyncio.sleep(wait_s)
        self._gateway.client.fail(stopped())
        await asyncio.sleep(GRACE_S - CUT_S - wait_s)
        unread = [connection.transport for connection in self.server_state.connections]
        if unread:
            logger.warning("cutting %d connections whose replies have not been read", len(unread))
        for transport in unread:
            transport.abort()

    async def _beat(self) -> None:
        gone_s = 0.0  # beats, not the clock: see ``GONE_S``
        while True:
            if self._heartbeat_fd is not None:
                with contextlib.suppress(OSError):  # the supervisor is gone, or the pipe is full
                    os.write(self._heartbeat_fd, b".")
            else:
                gone_s = gone_s + HEARTBEAT_S if self._gateway.is_gone else 0.0
                if gone_s > GONE_S and not self.should_exit:
                    logger.error("%s", gone(self._gateway.run_dir).message)
                    self.has_lost_pipeline = self.should_exit = True
            self._gateway.counters.publish()
            if self._certificate is not None:
                self._certificate.renew()
            with contextlib.suppress(OSError, TriptychError):  # all files are taken, or one is damaged
                self._gateway.get_ready()
            await asyncio.sleep(HEARTBEAT_S)
