"""vLLM on a CPU, with its engine core in a separate process, the default."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import Request


class Engine:
    def __init__(self, form: str, folder: Path, threads: int) -> None:
        assert form == "bf16", f"format is {form!r}, only bf16 is known"
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        self.version = next(d.version for d in distributions() if d.metadata["Name"].lower().startswith("vllm"))
        self._loop = asyncio.new_event_loop()
        arguments = AsyncEngineArgs(model=str(folder), dtype="bfloat16", max_model_len=2048, max_num_seqs=64)

        async def make() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self._engine = self._loop.run_until_complete(make())
        self._params: Callable[[int, Any], Any] = lambda count, kind: SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=kind
        )
        self._kinds = RequestOutputKind
        self._count = 0

    def offline(self, requests: list[Request]) -> list[list[int]]:
        return self._run(requests, self._kinds.FINAL_ONLY)

    def online(self, requests: list[Request]) -> None:
        self._run(requests, self._kinds.DELTA)

    def _run(self, requests: list[Request], kind: Any) -> list[list[int]]:
        async def all_of_them() -> list[list[int]]:
            start = time.perf_counter()
            return await asyncio.gather(*(self._one(request, kind, start) for request in requests))

        return self._loop.run_until_complete(all_of_them())

    async def _one(self, request: Request, kind: Any, start: float) -> list[int]:
        await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - start)))
        self._count += 1
        tokens: list[int] = []
        outputs = self._engine.generate(
            {"prompt_token_ids": request.prompt}, self._params(request.max_tokens, kind), request_id=str(self._count)
        )
        async for output in outputs:
            new = output.outputs[0].token_ids
            request.token_times_s += [time.perf_counter() - start] * len(new)
            tokens += new
        return tokens

    def close(self) -> None:
        self._engine.shutdown()
