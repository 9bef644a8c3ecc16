"""Prompts from arguments, files and pipes: plain lines, or lines that are JSON objects."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import ConfigError, InvalidRequest, encodable
from ..protocol.sampling import bias_of_json
from .terminal.json_lines import why_not_json
from .terminal.not_utf8 import is_utf16, why_file_not_utf8, why_not_utf8

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_NOT_OF_A_REQUEST = {"params", "keep"}  # arguments of ``Client.submit`` that are not fields of a request


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer, or its error: an invalid line becomes a row of the output and does not affect others."""

    index: int  # from 0, in the order of the input
    request: dict[str, Any]  # arguments of ``Client.submit``
    error: InvalidRequest | None = None
    id: str | int | None = None  # given by the line; repeated in its output row

    @property
    def shown(self) -> dict[str, Any]:
        """The part of the request that an output row repeats."""
        return {name: self.request[name] for name in PROMPT_FIELDS if name in self.request}


def jobs_from_texts(prompts: Iterable[str]) -> list[Job]:
    """One job per prompt."""
    return [_job(index, prompt, "prompt", _plain) for index, prompt in enumerate(prompts)]


def jobs_from_lines(lines: Iterable[bytes]) -> list[Job]:
    """One job per non-blank line. A line that begins with ``{"`` is JSON, every other one is a prompt.

    Raises:
        ConfigError: the input is UTF-16, so no line can be read.
    """
    jobs: list[Job] = []
    for number, line in enumerate(lines, 1):
        if number == 1 and is_utf16(line):
            raise ConfigError(f"the prompts are {why_file_not_utf8(line)}", param="file")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        text = line.decode(errors="surrogateescape").rstrip("\r\n")
        if text.strip():
            parse = _parse if text.lstrip().startswith('{"') else _plain
            jobs.append(_job(len(jobs), text, f"line {number}", parse))
    return jobs


def as_chat(request: dict[str, Any]) -> dict[str, Any]:
    """The request with its text as a single user message; one without a text is returned unchanged."""
    if not isinstance(request.get("prompt"), str):
        return request
    rest = {name: value for name, value in request.items() if name != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": request["prompt"]}]}


def _job(index: int, text: str, origin: str, parse: Callable[[str], dict[str, Any]]) -> Job:
    try:
        request = parse(text)
        json.dumps(request, ensure_ascii=False).encode()  # raises for lone surrogates and bytes that were not UTF-8
        return Job(index, request, id=request.pop("id", None))
    except InvalidRequest as error:
        reason = InvalidRequest(f"{origin}: {error.message}", param=error.param)
    except UnicodeEncodeError:
        reason = InvalidRequest(f"{origin}: {why_not_utf8(text.encode(errors='surrogateescape'))}", param="prompt")
    return Job(index, {"prompt": text}, reason, id=_id_of(text))


def _id_of(text: str) -> str | int | None:
    """The id in a line that was refused for something else."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = row.get("id") if isinstance(row, dict) else None
    return found if type(found) in (str, int) and encodable(str(found)) == str(found) else None


def _plain(text: str) -> dict[str, Any]:
    return {"prompt": text}


def _parse(text: str) -> dict[str, Any]:
    """Refuses only what ``Client.submit`` cannot be called with; everything else is validated by prepare."""
    try:
        row: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(why_not_json(error)) from error
    # max_tokens has null as a value: until the context is full.
    row = {name: value for name, value in row.items() if value is not None or name == "max_tokens"}
    for name in row.keys() & _NOT_OF_A_REQUEST:
        raise InvalidRequest(f"unknown field {name!r}", param=name)
    if "prompt" in row and not isinstance(row["prompt"], (str, list)):
        raise InvalidRequest(f"prompt must be a string or token ids, got {row['prompt']!r:.80}", param="prompt")
    if type(row.get("id", "")) not in (str, int):
        raise InvalidRequest(f"id must be a string or an integer, got {row['id']!r:.80}", param="id")
    messages = row.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest(f"messages must be a list of maps, got {messages!r:.80}", param="messages")
    if isinstance(row.get("tools"), list):  # as in HTTP requests; the protocol has JSON text
        row["tools"] = json.dumps(row["tools"])
    if isinstance(row.get("logit_bias"), dict):
        row["logit_bias"] = bias_of_json(row["logit_bias"])
    return row
