"""llama.cpp's server over HTTP, prompts as token ids. Formats: bf16, q8_0, q4_0."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import Request

SLOTS, CONTEXT = 32, 1280  # of a slot
START_S = 120.0


class Engine:
    def __init__(self, form: str, folder: Path, threads: int) -> None:
        server = os.environ["LLAMA_SERVER"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        model = folder.with_name(f"{folder.name}.{form}.gguf")
        flags = f"--host 127.0.0.1 --port {self._port} --no-webui -t {threads} -tb {threads}"
        slots = f"-np {SLOTS} -c {SLOTS * CONTEXT}"
        command = [server, "-m", str(model), *flags.split(), *slots.split()]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not start: {self._server.poll()}")
            time.sleep(0.1)
        version = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
        self.version = (version.stderr + version.stdout).split("\n")[0]

    def _is_ready(self) -> bool:
        try:
            return b"200 OK" in asyncio.run(self._ask("GET", "/health", b"", lambda line: None))
        except OSError:
            return False

    async def _ask(self, verb: str, path: str, body: bytes, each: Callable[[Any], None]) -> bytes:
        """The head of the reply; ``each`` is called with every event of its stream."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        head = f"{verb} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readline()
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                each(json.loads(line[6:]))
        writer.close()
        return answer

    async def _one(self, request: Request, start: float) -> list[int]:
        await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
        tokens: list[int] = []

        def take(event: Any) -> None:
            new = event.get("tokens", [])
            if event.get("stop"):  # tokens that end inside a character were not sent
                new = [0] * (event["tokens_predicted"] - len(tokens))
            request.token_times_s.extend([time.perf_counter() - start] * len(new))
            tokens.extend(new)

        options = {"n_predict": request.max_tokens, "temperature": 0.0, "top_k": 1, "ignore_eos": True, "stream": True}
        body = {"prompt": request.prompt, **options, "return_tokens": True, "cache_prompt": True}
        await self._ask("POST", "/completion", json.dumps(body).encode(), take)
        return tokens

    def offline(self, requests: list[Request]) -> list[list[int]]:
        async def all_of_them() -> list[list[int]]:
            start = time.perf_counter()
            return await asyncio.gather(*(self._one(request, start) for request in requests))

        return asyncio.run(all_of_them())

    def online(self, requests: list[Request]) -> None:
        self.offline(requests)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()
