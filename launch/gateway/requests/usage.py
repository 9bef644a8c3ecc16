"""Token usage in the formats of the APIs, extended by the ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....driver.stream import Completion


def usage(completions: Sequence[Completion], *, num_choices: int = 1, num_reasoning: int = 0) -> dict[str, Any]:
    """The usage of all choices. A prompt counts once for its ``num_choices`` choices, which are adjacent.
    ``num_reasoning``: tokens of reasoning.

    ``triptych.ledgers`` has the milliseconds of every stage for each choice.
    """
    uses = [completion.summary["usage"] for completion in completions]
    prompts = [uses[start : start + num_choices] for start in range(0, len(uses), num_choices)]
    num_prompt = sum(choices[0]["prompt_tokens"] for choices in prompts)
    num_output = sum(map(_num_output_tokens, prompts))
    # One choice computed the prompt and the others shared its pages: those do not count as cached.
    num_cached = sum(min(use["cached_tokens"] for use in choices) for choices in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
        "triptych": extra(completions, num_choices=num_choices),
    }


def _num_output_tokens(choices: Sequence[dict[str, int]]) -> int:
    """For a prompt's choices, or for all candidates sampled for them."""
    of_candidates = choices[0].get("candidate_tokens")
    return sum(use["completion_tokens"] for use in choices) if of_candidates is None else of_candidates


def response_usage(completions: Sequence[Completion], *, num_reasoning: int = 0) -> dict[str, Any]:
    """The same in the format of /v1/responses and /v1/decisions."""
    whole = usage(completions, num_reasoning=num_reasoning)
    return {
        "input_tokens": whole["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": whole["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": whole["completion_tokens"],
        "output_tokens_details": whole["completion_tokens_details"],
        "total_tokens": whole["total_tokens"],
        "triptych": whole["triptych"],
    }


def message_usage(completion: Completion, *, num_reasoning: int) -> dict[str, Any]:
    """The same in the format of /v1/messages, where cached tokens are not part of the input."""
    use = completion.summary["usage"]
    return {
        "input_tokens": use["prompt_tokens"] - use["cached_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": use["cached_tokens"],
        "output_tokens": use["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": num_reasoning},
        "triptych": extra([completion]),
    }


def embedding_usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """The usage of embeddings, with one ledger for all: the times of two thousand are longer than short embeddings."""
    whole = usage(completions)
    ledgers = whole["triptych"]["ledgers"]
    added = {
        "wall_ms": sum(ledger["wall_ms"] for ledger in ledgers),
        "stages_ms": {
            stage: sum(ledger["stages_ms"][stage] for ledger in ledgers) for stage in ledgers[0]["stages_ms"]
        },
    }
    return {
        **{name: whole[name] for name in ("prompt_tokens", "total_tokens", "prompt_tokens_details")},
        "triptych": {"ledgers": [added], "truncated_tokens": whole["triptych"]["truncated_tokens"]},
    }


def extra(completions: Sequence[Completion], *, num_choices: int = 1) -> dict[str, Any]:
    """What OpenAI's format has no field for."""
    prompts = completions[::num_choices]
    return {
        "ledgers": [completion.summary["ledger"] for completion in completions],
        "truncated_tokens": sum(completion.summary["usage"]["truncated_tokens"] for completion in prompts),
        "matched": [completion.summary.get("matched") for completion in completions],
    }
