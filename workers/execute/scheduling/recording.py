"""Everything that enters a scheduler and everything it decides, as plain values: enough to replay it exactly.

A recording need not contain the true tokens. A scheduler only compares the beginnings of sequences and checks whether a
token ends its sequence, so any tokens with the same results do.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ....protocol.arrays import Int32
from ....protocol.config import SchedulerConfig
from ....protocol.sampling import SamplingParams
from .audit import Stats
from .beams import MakeSearch
from .plan import Plan
from .pooling import MEAN, Pooling
from .progress import Progress
from .scheduler import Scheduler
from .sequence import Key, Sequence

FORMAT = 1  # of a recording; changes whenever the meaning does
STOP = -1  # in a recording, the token that ended its sequence
_SEQUENCE_FIELDS = ("num_prompt_tokens", "arrival", "cache_salt", "deadline_at", "queue_deadline_at", "priority")
_STOPS = frozenset({STOP})
_PARAMS = SamplingParams(max_tokens=None)  # where an answer ends follows from its tokens and their capacity
_POOLED = Pooling(MEAN)  # stands for any pooling that needs the states of all tokens
_SCORED_PARAMS = SamplingParams(max_tokens=None, prompt_logprobs=0)


def describe_scheduler(scheduler: Scheduler) -> dict[str, Any]:
    """The input of ``rebuild_scheduler``."""
    cache, config = scheduler.cache, asdict(scheduler.config)
    del config["trace"]
    return {
        "format": FORMAT,
        "scheduler": config,
        "page_size": cache.pool.page_size,
        "num_pages": cache.num_pages,
        "max_model_len": scheduler.max_model_len,
        "prefix_cache": cache.shares_prefixes,
        "num_host_pages": cache.host.num_pages,
        "replays": scheduler.replays,
        "num_snapshots": None if cache.is_whole else cache.states.num_snapshots,
    }


def rebuild_scheduler(wire: Mapping[str, Any], make_search: MakeSearch) -> Scheduler:
    """An empty scheduler like the described one.

    Raises:
        KeyError, TypeError, ConfigError: this is not a description of a scheduler.
    """
    names = ("page_size", "num_pages", "max_model_len", "prefix_cache", "num_host_pages", "replays")
    options = {name: wire[name] for name in names} | {"num_snapshots": wire.get("num_snapshots")}
    return Scheduler(SchedulerConfig(**wire["scheduler"]), make_search=make_search, **options)


def describe_sequence(sequence: Sequence, tokens: Int32) -> dict[str, Any]:
    """A sequence before it was added, with ``tokens`` instead of its own. Default values are left out."""
    tokens = tokens.copy()
    if sequence.num_output_tokens and sequence.end_reason(len(sequence.tokens)) == "stop":
        tokens[-1] = STOP
    values = {name: value for name in _SEQUENCE_FIELDS if (value := getattr(sequence, name))}
    if sequence.chunk_ends:
        values["chunk_ends"] = list(sequence.chunk_ends)
    if sequence.group_key is not None:
        values["group"] = list(sequence.group_key)
    if sequence.is_beam:
        values["num_beams"] = sequence.params.num_beams
    if not sequence.is_scored:
        values["scores"] = True
    if not sequence.is_pooled:
        values["pools"] = True
    return {"tokens": pack_tokens(tokens), "max_tokens": sequence.max_tokens, **values}


def rebuild_sequence(key: Key, wire: Mapping[str, Any]) -> Sequence:
    """The sequence as it was added.

    Raises:
        KeyError, TypeError, ValueError: this is not a description of a sequence.
    """
    known = unpack_tokens(wire["tokens"])
    values = {name: wire[name] for name in _SEQUENCE_FIELDS if name in wire}
    if "chunk_ends" in wire:
        values["chunk_ends"] = [int(end) for end in wire["chunk_ends"]]
    if "group" in wire:
        values["group_key"] = (int(wire["group"][0]), int(wire["group"][1]))
    tokens = np.zeros(wire["num_prompt_tokens"] + wire["max_tokens"], np.int32)
    tokens[: len(known)] = known
    return Sequence(
        key=key,
        tokens=tokens,
        num_tokens=len(known),
        params=replace(_SCORED_PARAMS if wire.get("scores") else _PARAMS, num_beams=wire.get("num_beams", 1)),
        seed=0,
        stop_ids=_STOPS,
        embedding_size=int(bool(wire.get("pools"))),
        pooling=_POOLED,
        **{"arrival": 0, **values},
    )


def describe_plan(plan: Plan) -> dict[str, Any]:
    """What a step does. Sequences are identified by their slot; empty fields are left out."""
    happened = {
        "reads": plan.num_reads,
        "decodes": [chunk.key[0] for chunk in plan.chunks[: plan.num_decodes]],
        "prefills": [[chunk.key[0], chunk.start, chunk.num_tokens] for chunk in plan.chunks[plan.num_decodes :]],
        "starts": [[key[0], num_cached_tokens] for key, num_cached_tokens in plan.starts],
        "preempted": [key[0] for key in plan.preempted],
        "swap_out": [list(move) for move in plan.moves.swap_out],
        "copies": [list(move) for move in plan.moves.copies],
        "swap_in": [list(move) for move in plan.moves.swap_in],
    }
    return {"step": plan.step, **{name: value for name, value in happened.items() if value}}


def describe_progress(progress: Progress, stats: Stats) -> dict[str, Any]:
    """Which sequences ended in a step, and the state after it."""
    happened = {
        "finished": {str(key[0]): reason for key, reason in progress.finished.items()},
        "expired": {str(key[0]): why for key, why in progress.expired.items()},
        "failed": {str(key[0]): why for key, why in progress.failed.items()},
    }
    return {
        **{name: value for name, value in happened.items() if value},
        "waiting": stats.num_waiting,
        "running": stats.num_prefilling + stats.num_ready + stats.num_decoding,
        "pages_free": stats.num_free_pages,
        "pages_cached": stats.num_idle_pages,
    }


def pack_tokens(tokens: Int32) -> str:
    return base64.b64encode(tokens.astype("<i4").tobytes()).decode()


def unpack_tokens(text: str) -> Int32:
    """int32 [n].

    Raises:
        ValueError: this is not base64, or not a whole number of tokens.
    """
    return np.frombuffer(base64.b64decode(text, validate=True), "<i4").astype(np.int32)
