"""``triptych top``: sample, draw, wait for a key, repeat."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live

from ...driver.client import Client
from ...protocol.errors import ConfigError, RequestTimeout
from ...protocol.messages import MAX_REQUEST_ROWS
from ...protocol.run_dir import CONFIG_FILE
from ..find import the_running_pipeline
from ..pipeline import connected
from ..terminal.report import say
from ..watch.watched import Sample
from .screen import frame
from .state import State

RATE_S = 0.25  # between the two samples of --once, from which rates are computed
ANSWER_S = 1.0  # a pipeline that does not respond within this time is shown as silent


def top(run_dir: Path | None, *, once: bool, interval_s: float) -> int:
    """Show the pipeline until q or Ctrl-C, or until it ends; ``once``: print one frame, 1 if a stage is not ready.

    Raises:
        ConfigError: no pipeline runs there, or several run and none was chosen.
    """
    if not 0.05 <= interval_s <= 3600:
        raise ConfigError(f"interval is {interval_s}, the limits are 0.05 and 3600", param="interval")
    run_dir = run_dir or the_running_pipeline()
    console = Console()
    with connected(run_dir) as client:
        info = client.info()
        state = State(run_dir, info["model"], info["limits"])
        look(client, state)
        if once:
            time.sleep(RATE_S)
            look(client, state)
            if state.sample is None:
                raise RequestTimeout(f"the pipeline in {run_dir} did not respond within {ANSWER_S:g} s")
            console.print(frame(state, width=console.width, height=None, now_s=time.monotonic()))
            return 1 if state.trouble else 0
        if not console.is_terminal or not sys.stdin.isatty():
            raise ConfigError("top needs a terminal; --once prints one frame", param="once")
        with _keyboard(), Live(console=console, screen=True, auto_refresh=False) as live:
            try:
                has_ended = _watch(client, state, live, interval_s)
            except KeyboardInterrupt:
                has_ended = False
    if has_ended:
        say(console, f"the pipeline in {run_dir} has ended", "none")
    return 0


def look(client: Client, state: State) -> None:
    """Take a sample, or note that there is none."""
    try:
        stats = client.stats(ANSWER_S)
        requests = client.requests(MAX_REQUEST_ROWS, ANSWER_S)
        state.see(Sample(time.monotonic(), stats, requests))
    except RequestTimeout:
        state.miss(time.monotonic())


def _watch(client: Client, state: State, live: Live, interval_s: float) -> bool:
    """True if the pipeline ended, False if the user quit."""
    next_look = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= next_look:
            next_look = now + interval_s
            if not state.is_paused:
                look(client, state)
            if not (state.run_dir / CONFIG_FILE).exists():
                return True
        size = live.console.size
        live.update(frame(state, width=size.width, height=size.height, now_s=time.monotonic()), refresh=True)
        for key in _keys(max(0.0, next_look - time.monotonic())):
            match key:
                case "q" | "Q":
                    return False
                case "p":
                    state.is_paused = not state.is_paused
                case "s":
                    state.next_order()


@contextmanager
def _keyboard() -> Iterator[None]:
    """Unbuffered keys without echo; the terminal is restored afterwards."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _keys(timeout_s: float) -> str:
    """What was typed: at once if there is any input, otherwise within the timeout."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    # Not sys.stdin.read: select does not see what that has buffered.
    return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""
