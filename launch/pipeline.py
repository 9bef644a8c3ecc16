"""The pipeline a verb talks to: one that it starts and stops, or one that is already running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..driver.client import Client
from ..driver.driver import Driver
from ..driver.run_dir import has_driver
from ..protocol.config import PipelineConfig
from ..protocol.errors import ConfigError, RequestTimeout
from ..protocol.run_dir import CONFIG_FILE
from ..protocol.tokenizer_files import load_facts
from .signals import signals_ignored
from .terminal.report import say
from .terminal.startup import start

if TYPE_CHECKING:
    from rich.console import Console

ANSWER_S = 5.0  # for a running pipeline to answer a first question
SILENT_S = 0.5  # after this, check whether a driver is running at all


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A client, and what is only known on the same machine."""

    client: Client
    run_dir: Path
    driver: Driver | None = None  # None: it was started by another process

    @property
    def has_chat_template(self) -> bool:
        facts = load_facts(self.run_dir)
        return facts is not None and facts.chat_template is not None

    def check(self) -> None:
        """
        Raises:
            WorkerDied: the driver gave up, so no further answers will come.
        """
        if self.driver is not None:
            self.driver.client  # noqa: B018


@contextmanager
def open_pipeline(
    config: PipelineConfig, *, run_dir: Path | None, connect: Path | None, console: Console
) -> Iterator[Pipeline]:
    """The pipeline that runs in ``connect``, or one of our own; requests still running at the end are aborted.

    Raises:
        ConfigError: no pipeline runs in ``connect``, or one cannot be started with this config.
        WorkerDied: a worker failed to start.
    """
    if connect is not None:
        with connected(connect) as client:
            yield Pipeline(client, connect)
        return
    driver = Driver(run_dir=run_dir, config=config)
    try:
        startup = start(driver, console)
        if console.is_terminal:
            say(console, startup.last())
        yield Pipeline(driver.client, driver.run_dir, driver)
    finally:
        with signals_ignored():
            driver.stop(mode="abort")


@contextmanager
def connected(run_dir: Path) -> Iterator[Client]:
    """A client of the pipeline that runs in ``run_dir``.

    Raises:
        ConfigError: there is none.
    """
    try:
        (run_dir / CONFIG_FILE).stat()
    except OSError as error:
        raise ConfigError(
            f"no pipeline runs in {run_dir}: {error.filename}: {error.strerror}", param="connect"
        ) from error
    run_dir = run_dir.absolute()
    with Client(run_dir) as client:
        _await_answer(client, run_dir)
        yield client


def _await_answer(client: Client, run_dir: Path) -> None:
    with suppress(RequestTimeout):
        client.info(SILENT_S)
        return
    if not has_driver(run_dir):
        advice = f"its driver is gone; triptych serve --run-dir {run_dir} continues it"
        raise ConfigError(f"no pipeline runs in {run_dir}: {advice}", param="connect")
    try:
        client.info(ANSWER_S)
    except RequestTimeout as error:
        raise ConfigError(f"the pipeline in {run_dir} did not respond within {ANSWER_S} s", param="connect") from error
