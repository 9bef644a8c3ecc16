"""What must be true of a pipeline that is idle."""

from __future__ import annotations

import random
from typing import Any

from tests.waiting import eventually
from triptych import Driver
from triptych.workers.execute.hash_build import VOCAB_SIZE
from triptych.workers.execute.hash_lm import expected_tokens


def busy_figures(driver: Driver) -> dict[str, Any]:
    """All statistics that are nonzero although no request is live: empty once the pipeline is quiet."""
    stats = driver.stats()
    execute = stats["execute"]
    figures = {
        "prepare.waiting": stats["prepare"]["waiting"],
        "prepare.live": stats["prepare"]["live"],
        "prepare.records_used": stats["prepare"]["records_used"],
        "prepare.pending_bytes": stats["prepare"]["pending_bytes"],
        "execute.held": execute["held"],
        "execute.waiting": execute["waiting"],
        "execute.decoding": execute["decoding"],
        "execute.pages_limbo": execute["pages_limbo"],
        "execute.pages_held": execute["pages_held"],
        "execute.pages_lost": execute["pages_lost"],
        "execute.pages_unavailable": execute["pages"] - execute["pages_free"] - execute["pages_cached"],
        "summarize.live": stats["summarize"]["live"],
        "summarize.unread": stats["summarize"]["unread"],
    }
    return {name: value for name, value in figures.items() if value}


def assert_quiet(driver: Driver, *, timeout: float = 20.0) -> None:
    """Wait until no process holds anything of any request, and all pages are available."""
    try:
        eventually(lambda: not busy_figures(driver), timeout=timeout)
    except AssertionError:
        raise AssertionError(f"still busy: {busy_figures(driver)}") from None


def random_prompt(rng: random.Random, low: int = 3, high: int = 200) -> list[int]:
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(low, high))]


def expected(prompt: list[int], num_tokens: int, *, adapter: int = 0) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE, adapter=adapter)
