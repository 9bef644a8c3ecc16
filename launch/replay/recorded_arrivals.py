"""The requests of a trace with their answers, for simulating them with other settings."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...protocol.errors import ConfigError
from ...workers.execute.scheduling.recording import unpack_tokens
from .trace_file import malformed, read_json_lines
from .workload import Arrival


@dataclass(slots=True)
class _Recorded:
    add: dict[str, Any]
    tokens: array[int]  # prompt, then output
    num_prompt_tokens: int

    @property
    def is_beam(self) -> bool:
        return "num_beams" in self.add


def arrivals_of_trace(path: Path) -> list[Arrival]:
    """The requests of a trace with their answers; those without any token are left out.

    A request that was recovered after a restart counts once. Each sample of a request counts as one, and so does each
    beam of a search, with as many tokens as the search took steps.
    """
    recorded: dict[tuple[int, ...], _Recorded] = {}
    by_slot: dict[int, _Recorded] = {}
    for number, line in read_json_lines(path):
        try:
            if "add" in line:
                _note_add(line, recorded, by_slot)
            elif "tokens" in line:
                _note_tokens(line, by_slot)
        except (KeyError, TypeError, ValueError) as error:
            raise malformed(path, number, error) from error
    answered = [request for request in recorded.values() if len(request.tokens) > request.num_prompt_tokens]
    if not answered:
        raise ConfigError(f"{path} has no request that got a token", param="file")
    first_ns = min(request.add["accepted_ns"] for request in answered)
    return sorted((_arrival(request, first_ns) for request in answered), key=lambda arrival: arrival.at_s)


def _note_add(line: dict[str, Any], recorded: dict[tuple[int, ...], _Recorded], by_slot: dict[int, _Recorded]) -> None:
    slot, generation = line["add"]
    tokens = array("i", unpack_tokens(line["tokens"]).tolist())
    request = recorded.setdefault(
        (slot, generation, line["accepted_ns"]), _Recorded(line, tokens, line["num_prompt_tokens"])
    )
    # A restarted process may hash with another key: tokens from here on match no known prefix.
    request.tokens += tokens[len(request.tokens) :]
    by_slot[slot] = request


def _note_tokens(line: dict[str, Any], by_slot: dict[int, _Recorded]) -> None:
    ends = {slot: start + num_tokens for slot, start, num_tokens in line.get("prefills", ())}
    sampled = line.get("decodes", []) + [slot for slot, end in ends.items() if _samples(by_slot[slot], end)]
    for slot, token_id in zip(sampled, unpack_tokens(line["tokens"]).tolist(), strict=True):
        if not by_slot[slot].is_beam:
            by_slot[slot].tokens.append(token_id)
    for search, choice in line.get("choices", {}).items():
        _note_choice(choice, [by_slot[slot] for slot in by_slot if _is_of(by_slot[slot], int(search))], by_slot, ends)


def _samples(request: _Recorded, end: int) -> bool:
    """Whether a chunk that ends at ``end`` is the last one; for a beam, the search may have started over."""
    return end >= request.num_prompt_tokens if request.is_beam else end == len(request.tokens)


def _is_of(request: _Recorded, search: int) -> bool:
    return request.is_beam and request.add.get("group", request.add["add"])[0] == search


def _note_choice(
    choice: dict[str, Any], members: list[_Recorded], by_slot: dict[int, _Recorded], ends: dict[int, int]
) -> None:
    """The beams continue, each from its parent; or each sequence gets one more token and the search is over."""
    num_tokens = max(ends.get(member.add["add"][0], 0) for member in members)  # the same for all
    if "ends" in choice:
        for member in members:
            member.tokens = member.tokens[:num_tokens] + array("i", [0])
        return
    said = [by_slot[parent].tokens[:num_tokens] + array("i", [token]) for _, parent, token in choice["beams"]]
    for (slot, _, _), tokens in zip(choice["beams"], said, strict=True):
        by_slot[slot].tokens = tokens


def _arrival(request: _Recorded, first_ns: int) -> Arrival:
    add = request.add
    at_ns = add["accepted_ns"]
    return Arrival(
        at_s=(at_ns - first_ns) / 1e9,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=len(request.tokens) - request.num_prompt_tokens,
        tokens=np.array(request.tokens, np.int32),
        cache_salt=add.get("cache_salt", ""),
        priority=add.get("priority", 0),
        deadline_ms=_limit_ms(add.get("deadline_at", 0), at_ns),
        max_queue_ms=_limit_ms(add.get("queue_deadline_at", 0), at_ns),
    )


def _limit_ms(limit_ns: int, at_ns: int) -> float | None:
    return (limit_ns - at_ns) / 1e6 if limit_ns else None
