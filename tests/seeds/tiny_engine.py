"""A real model in this process: our engine with a paged cache, and transformers on the same weights as its oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from tests.tiny import build_tiny_model, make_tiny_model
from tests.workers.execute.factories import make_scheduler, run
from triptych.protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from triptych.workers.execute.engine import Engine
from triptych.workers.execute.model.build import build_runner
from triptych.workers.execute.model.modules.runner import TorchRunner
from triptych.workers.execute.sampling.draw import Filters, draw
from triptych.workers.execute.scheduling.sequence import Sequence

EOS_TOKEN_IDS = [2, 7]
PAGE_SIZE, NUM_PAGES = 8, 64


def drawn_tokens(
    logits: torch.Tensor,
    uniforms: list[float],
    *,
    top_k: int,
    top_p: float = 1.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
) -> list[int]:
    """Our sampler's tokens for one row of logits [V], one for each of these random numbers."""
    shape = (len(uniforms), 1)
    filters = Filters(
        temperature=torch.full(shape, temperature),
        top_k=torch.full(shape, top_k),
        top_p=torch.full(shape, top_p, dtype=torch.float64),
        min_p=torch.full(shape, min_p),
    )
    numbers = torch.tensor(uniforms, dtype=torch.float64)[:, None]
    tokens: list[int] = draw(logits.repeat(shape), filters, numbers).tolist()
    return tokens


class TinyEngine:
    """Sequences run on one paged runner; ``greedy`` gives the tokens of transformers."""

    def __init__(self, folder: Path) -> None:
        checkpoint = make_tiny_model("llama", folder / "checkpoint", eos_token_id=EOS_TOKEN_IDS)
        self.folder = checkpoint
        self.model = build_tiny_model("llama", eos_token_id=EOS_TOKEN_IDS)
        runner, self.card = build_runner(
            ModelConfig(model=str(checkpoint), device="cpu", backend="transformers", threads=1),
            CacheConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE),
            SchedulerConfig(max_num_seqs=4, prefill_chunk=16),
            model_dir=checkpoint,
            run_dir=folder,
        )
        assert isinstance(runner, TorchRunner)
        self.runner = runner

    @property
    def pages(self) -> list[torch.Tensor]:
        """Keys and values of every layer, the trash page first."""
        return [pages for cache in self.runner._forward.layers.caches.values() for pages in (cache.keys, cache.values)]

    def engine(self, *sequences: Sequence, num_pages: int = NUM_PAGES, **options: Any) -> Engine:
        scheduler = make_scheduler(
            *sequences, num_pages=num_pages, page_size=PAGE_SIZE, max_model_len=self.card.max_model_len, **options
        )
        return Engine(scheduler, self.runner)

    def run(self, *sequences: Sequence, **options: Any) -> list[list[int]]:
        """The output tokens of each sequence, all in one engine."""
        outputs = run(self.engine(*sequences, **options))
        return [outputs[sequence.key] for sequence in sequences]

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int, *processors: Any) -> list[int]:
        """Tokens of transformers, recomputed from the first token at every step, after its own logits processors."""
        ids = torch.tensor([prompt])
        for _ in range(num_tokens):
            process: Any = LogitsProcessorList(processors)
            logits = process(ids, self.logits(ids[0].tolist())[None])
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        tokens: list[int] = ids[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Of the following token, float32 [V]."""
        logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0, -1].float()
        return logits
