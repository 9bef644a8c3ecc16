"""Lines of a batch, and which of them an earlier call has answered.

Source: the request and result objects of OpenAI's Batch API.
"""

from __future__ import annotations

import codecs
import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigError
from ..resume import read_output, replace_output
from ..terminal.json_lines import json_line, why_not_json
from ..terminal.not_utf8 import is_utf16, why_file_not_utf8, why_not_utf8

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply as HTTP would have returned it."""

    status: int
    request_id: str
    body: Any

    @property
    def is_answer(self) -> bool:
        return self.status == 200

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, in either format of the usage; of an embedding, which has none, those of its texts."""
        usage = (self.body.get("usage") if isinstance(self.body, dict) else None) or {}
        names = ("completion_tokens", "output_tokens", "prompt_tokens")
        return next((usage[name] for name in names if name in usage), 0)


def read_lines(lines: Iterable[bytes]) -> list[Line]:
    """All requests of a file; blank lines are skipped.

    Raises:
        ConfigError: a line is not a batch request, or repeats the id of another one.
    """
    found: dict[str, Line] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        if number == 1 and is_utf16(text):
            raise ConfigError(f"the requests are {why_file_not_utf8(text)}", param="file")
        line = _parse(text.removeprefix(codecs.BOM_UTF8) if number == 1 else text, f"line {number}")
        if line.custom_id in found:
            raise _wrong(f"line {number}", f"custom_id {line.custom_id!r:.200} is already used by another line")
        found[line.custom_id] = line
    if not found:
        raise ConfigError("nothing to answer: all lines are blank", param="file")
    return list(found.values())


def row_of(line: Line, reply: Reply) -> str:
    """The line of the output for this reply; if the request failed, its body is the error."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    row = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
    return json_line(row)


def left_to_answer(lines: list[Line], path: Path) -> list[Line]:
    """The lines without an answer in the file at ``path``, from which everything but answers is removed.

    Failures are dropped and retried, and so are lines left incomplete by a full disk or a kill.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    content = read_output(path)
    rows = {custom_id: row for row in content.splitlines(keepends=True) if (custom_id := _answered(row)) is not None}
    kept = b"".join(rows.values())
    if kept != content:
        replace_output(path, kept)
    return [line for line in lines if line.custom_id not in rows]


def _answered(row: bytes) -> str | None:
    """The id of the request that this line of the output answers; None if it is not an answer."""
    try:
        content = json.loads(row)
        custom_id, status = content["custom_id"], content["response"]["status_code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    is_whole = row.endswith(b"\n") and isinstance(custom_id, str) and status == 200
    return custom_id if is_whole else None


def _parse(text: bytes, origin: str) -> Line:
    try:
        row = json.loads(text.decode().rstrip())
    except UnicodeDecodeError as error:
        raise _wrong(origin, why_not_utf8(text)) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(origin, why_not_json(error)) from error
    if not isinstance(row, dict):
        raise _wrong(origin, f"a request is an object, got {row!r:.80}")
    if missing := sorted(_FIELDS - row.keys()):
        raise _wrong(origin, f"{', '.join(missing)} is required")
    if unknown := sorted(row.keys() - _FIELDS):
        raise _wrong(origin, f"unknown field {unknown[0]!r:.80}")
    if not isinstance(row["custom_id"], str) or not row["custom_id"]:
        raise _wrong(origin, f"custom_id must be a non-empty string, got {row['custom_id']!r:.80}")
    if row["method"] != "POST":
        raise _wrong(origin, f"method is {row['method']!r:.80}, must be 'POST'")
    if row["url"] not in ROUTES:
        raise _wrong(origin, f"url is {row['url']!r:.80}, known are: {', '.join(ROUTES)}")
    if not isinstance(row["body"], dict):
        raise _wrong(origin, f"body must be an object, got {row['body']!r:.80}")
    return Line(row["custom_id"], row["url"], row["body"])


def _wrong(origin: str, what: str) -> ConfigError:
    return ConfigError(f"{origin}: {what}", param="file")
