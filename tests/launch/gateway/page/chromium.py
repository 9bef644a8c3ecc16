"""A headless Chromium, controlled through its DevTools pipe: what the page shows and does in a real browser."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--remote-debugging-pipe",
)  # fmt: skip
ANSWER_S = 30.0
# DevTools use the descriptors 3 and 4, so no port has to be chosen or found.
LAUNCHER = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, number in zip(high, (3, 4)):
    os.dup2(fd, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []  # messages of the console, page errors and network errors

    def open(self, url: str, *, width: int = 1280, height: int = 900, **media: str) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.resize(width, height)
        self.prefer(**media)
        self.ask("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        metrics = {"deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, **metrics)

    def prefer(self, **media: str) -> None:
        """Set media features, such as ``prefers_color_scheme="dark"``."""
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, *, timeout: float = 30.0) -> Any:
        return eventually(lambda: self.run(expression), timeout=timeout, interval=0.05)

    def press(self, key: str, *, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; messages that arrive meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._record(answer.get("method", ""), answer.get("params", {}))

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read_fd], [], [], deadline - time.monotonic())
            assert ready, f"the browser did not respond for {ANSWER_S} s"
            piece = os.read(self._read_fd, 1 << 20)
            assert piece, "the browser exited"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _record(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url')}")


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with its own profile in ``folder``; it and all its processes end with the block."""
    path = find_chromium()
    assert path is not None, "Chromium is not installed"
    to_browser, write_fd = os.pipe()
    read_fd, from_browser = os.pipe()
    launcher = (sys.executable, "-c", LAUNCHER, str(to_browser), str(from_browser))
    process = subprocess.Popen(
        [*launcher, path, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        pass_fds=(to_browser, from_browser),
        env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for fd in (to_browser, from_browser):
        os.close(fd)
    try:
        yield Browser(write_fd, read_fd)
    finally:
        for fd in (write_fd, read_fd):
            os.close(fd)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
