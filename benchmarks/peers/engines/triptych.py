"""Triptych: its three processes, with a ZeroMQ client."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import Request
from triptych import Driver
from triptych.driver.stream import Completion, Delta
from triptych.driver.submitting import request_map
from triptych.protocol.messages import Accepted


class _Watch:
    """Records the tokens of one answer and their arrival times."""

    def __init__(self, request: Request, start: float) -> None:
        self._request, self._start = request, start
        self.token_ids: list[int] = []
        self.error: Any = None
        self.done = threading.Event()

    def on_accepted(self, accepted: Accepted) -> None: ...

    def on_delta(self, delta: Delta) -> None:
        now = time.perf_counter() - self._start
        self._request.token_times_s += [now] * len(delta.token_ids)
        self.token_ids += delta.token_ids

    def on_end(self, completion: Completion, error: Any) -> None:
        self.error = error
        self.done.set()


class Engine:
    def __init__(self, form: str, folder: Path, threads: int) -> None:
        backend = "transformers" if form == "transformers" else "auto"
        self._driver = Driver(
            str(folder),
            dtype="bfloat16",
            backend=backend,
            quantization=form if form in ("int8", "int4") else "none",
            threads=threads,
            max_model_len=2048,
            max_kv_bytes=2 << 30,
        ).start()
        self.version = self._driver.info()["model"]["backend"]

    def offline(self, requests: list[Request]) -> list[list[int]]:
        start = time.perf_counter()
        return _outputs([self._submit(request, start) for request in requests])

    def online(self, requests: list[Request]) -> None:
        start = time.perf_counter()
        watches = []
        for request in requests:
            time.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
            watches.append(self._submit(request, start))
        _outputs(watches)

    def _submit(self, request: Request, start: float) -> _Watch:
        watch = _Watch(request, start)
        options = {"max_tokens": request.max_tokens, "ignore_eos": True}
        self._driver.client.session.submit(uuid.uuid4().hex, request_map(request.prompt, None, None, options), watch)
        return watch

    def close(self) -> None:
        self._driver.stop()


def _outputs(watches: list[_Watch]) -> list[list[int]]:
    for watch in watches:
        watch.done.wait()
        if watch.error is not None:
            raise watch.error
    return [watch.token_ids for watch in watches]
