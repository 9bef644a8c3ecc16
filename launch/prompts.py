"""Prompts from arguments, files and pipes: plain lines, or lines that are JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import InvalidRequest
from ..protocol.sampling import FIELD_NAMES

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_FIELDS = FIELD_NAMES | {*PROMPT_FIELDS, "request_id", "truncation", "lease_s"}


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer, or why it cannot be: a bad line is a row of the output and stops no other."""

    index: int  # from 0, in the order of the input
    request: dict[str, Any]  # arguments of ``Client.submit``
    error: InvalidRequest | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The part of the request that an output row repeats."""
        return {name: self.request[name] for name in PROMPT_FIELDS if name in self.request}


def jobs_from_texts(prompts: Iterable[str]) -> list[Job]:
    return [Job(index, {"prompt": prompt}) for index, prompt in enumerate(prompts)]


def jobs_from_lines(lines: Iterable[bytes]) -> list[Job]:
    """A job for each line that is not blank. A line that begins with ``{"`` is JSON, every other one is a prompt."""
    jobs: list[Job] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            jobs.append(Job(len(jobs), _request(line)))
        except InvalidRequest as error:
            reason = InvalidRequest(f"line {number}: {error.message}", param=error.param)
            jobs.append(Job(len(jobs), {"prompt": line.decode(errors="replace").rstrip("\r\n")}, reason))
    return jobs


def as_chat(request: dict[str, Any]) -> dict[str, Any]:
    """The request with its text as the one message of a user; one without a text stays as it is."""
    if not isinstance(request.get("prompt"), str):
        return request
    rest = {name: value for name, value in request.items() if name != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": request["prompt"]}]}


def _request(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8: {error.reason} at byte {error.start}", param="prompt") from error
    return _checked(text) if text.lstrip().startswith('{"') else {"prompt": text}


def _checked(text: str) -> dict[str, Any]:
    """What ``Client.submit`` cannot be called with is refused here; everything else is for prepare to judge."""
    try:
        row: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    for name in row.keys() - _FIELDS:
        raise InvalidRequest(f"unknown field {name!r}", param=name)
    if "prompt" in row and not isinstance(row["prompt"], (str, list)):
        raise InvalidRequest(f"prompt must be a string or token ids, got {row['prompt']!r:.80}", param="prompt")
    messages = row.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest(f"messages must be a list of maps, got {messages!r:.80}", param="messages")
    if isinstance(row.get("logit_bias"), dict):  # JSON has no keys but strings
        row["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in row["logit_bias"].items()}
    return row
