"""OpenVINO GenAI's continuous batching with its prefix cache. Formats: bf16; int8 and int4 for weights only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.workloads import Request


class Engine:
    def __init__(self, form: str, folder: Path, threads: int) -> None:
        self.version = genai.__version__
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 3  # GiB
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        folder = folder.with_name(f"{folder.name}.openvino-{'fp16' if form == 'bf16' else form}")
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._count = 0

    def offline(self, requests: list[Request]) -> list[list[int]]:
        prompts = [_tensor(request) for request in requests]
        results = self._pipeline.generate(prompts, [_config(request) for request in requests])
        return [list(result.m_generation_ids[0]) for result in results]

    def online(self, requests: list[Request]) -> None:
        start = time.perf_counter()
        waiting, handles = list(requests), dict[int, tuple[Request, Any]]()
        while waiting or self._pipeline.has_non_finished_requests():
            while waiting and waiting[0].arrival_s <= time.perf_counter() - start:
                request = waiting.pop(0)
                self._count += 1
                handle = self._pipeline.add_request(self._count, _tensor(request), _config(request))
                handles[self._count] = (request, handle)
            if not self._pipeline.has_non_finished_requests():
                time.sleep(min(0.002, max(0.0, waiting[0].arrival_s - (time.perf_counter() - start))))
                continue
            self._pipeline.step()
            now = time.perf_counter() - start
            for request, handle in handles.values():
                while handle.can_read():
                    request.token_times_s += [now] * sum(len(o.generated_ids) for o in handle.read().values())

    def close(self) -> None: ...


def _tensor(request: Request) -> Any:
    return openvino.Tensor(np.array([request.prompt], dtype=np.int64))


def _config(request: Request) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = request.max_tokens, True
    config.do_sample = config.apply_chat_template = False
    return config
