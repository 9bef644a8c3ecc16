"""transformers with the same weights and requests."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.gpu.models import peer_lengths
from benchmarks.gpu.runs import make_sequences
from benchmarks.gpu.setting import Notes, Setting, free_memory

ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")


def peers_small(setting: Setting, note: Notes) -> None:
    _peers(setting, note, "qwen3-0.6b", ATTENTION)


def peers_large(setting: Setting, note: Notes) -> None:
    _peers(setting, note, "qwen3-8b", ATTENTION[:1])


def _peers(setting: Setting, note: Notes, name: str, implementations: tuple[str, ...]) -> None:
    """Output tokens per second of continuous batching, our peer, and of ``generate`` on a static batch."""
    folder = setting.checkpoint(name)
    prompts = [s.tokens[: s.num_prompt_tokens].tolist() for s in make_sequences(peer_lengths(setting))]
    num_out = peer_lengths(setting)[0][1]
    config = GenerationConfig(
        max_new_tokens=num_out, min_new_tokens=num_out, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    for implementation in implementations:
        free_memory()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32 if setting.is_dry else torch.bfloat16, attn_implementation=implementation
            )
            model = model.to(setting.device)
        except Exception as error:  # a peer that is not installed is skipped
            note(f"{implementation}", f"{type(error).__name__}: {str(error)[:200]}")
            continue
        for kind, function in (("continuous_batching", _continuous), ("generate", _generate)):
            model.set_attn_implementation(implementation)  # the other one may have changed it
            note(f"{implementation} {kind}", _attempt(function, model, prompts, config))
        del model


def _attempt(function: Any, model: Any, prompts: list[list[int]], config: GenerationConfig) -> Any:
    try:
        function(model, prompts[:2], _few(config))
        done = function(model, prompts, config)
        return round(done.num_tokens / done.seconds, 1)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


class Done(NamedTuple):
    num_tokens: int  # tokens received
    seconds: float


def _few(config: GenerationConfig) -> GenerationConfig:
    short = GenerationConfig(**config.to_diff_dict())
    short.max_new_tokens = short.min_new_tokens = 2
    return short


def _generate(model: Any, prompts: list[list[int]], config: GenerationConfig) -> Done:
    """A static batch."""
    ids = torch.tensor(prompts, device=model.device)
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    num_tokens = output.shape[0] * (output.shape[1] - ids.shape[1])
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return Done(num_tokens, time.perf_counter() - start)


def _continuous(model: Any, prompts: list[list[int]], config: GenerationConfig) -> Done:
    """transformers' continuous batching, timed from the start of its first request: each call creates cache and graphs
    again, which our engine does once before.
    """
    if model.device.type == "cpu":
        raise NotImplementedError("on a CPU its default cache takes most of the memory")
    config = GenerationConfig(max_new_tokens=config.max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    wanted = len(prompts) * config.max_new_tokens
    if num_tokens < wanted:
        raise RuntimeError(f"{num_tokens} tokens came, {wanted} were asked for")
    starts, ends = zip(*(output.lifespan for output in outputs.values()), strict=True)
    return Done(num_tokens, max(ends) - min(starts))
