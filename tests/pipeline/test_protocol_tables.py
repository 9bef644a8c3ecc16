"""The tables of docs/protocol.md match the code."""

from __future__ import annotations

import json
import re
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from triptych.protocol import codec, errors, grammar, sampling, service_config
from triptych.protocol.config import ServiceConfig
from triptych.protocol.messages import FINISH_REASONS, LEDGER_STAGES, MAX_REFUSED_ID_CHARS
from triptych.workers.prepare import request, structured

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
FIRST_PRIVATE_TAG = 40
WIRE_TYPES = {str: "str", int: "int", bytes: "bin", dict: "map", list: "array", type(None): "nil"}
PUBLIC = {tag: message for tag, message in codec.TAGS.items() if tag < FIRST_PRIVATE_TAG}
PARAMS = {item.name: item for item in fields(sampling.SamplingParams)}


def rows_after(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its header row; empty if the section has none."""
    section = re.split(r"\n#+ ", PAGE.split(f"\n{heading}\n", 1)[1], maxsplit=1)[0]
    table = re.search(r"((?:^\|.*\|\n)+)", section, re.MULTILINE)
    lines = table[1].splitlines()[2:] if table else []
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def wire_type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(wire_type(part) for part in typing.get_args(hint))
    return WIRE_TYPES[typing.get_origin(hint) or hint]


def heading_of(tag: int) -> str:
    return f"### {tag} {re.sub('(?<=[a-z])(?=[A-Z])', '_', PUBLIC[tag].__name__).upper()}"


def test_every_public_message_has_a_section_and_there_are_no_others() -> None:
    assert re.findall(r"^### \d+ .*$", PAGE, re.MULTILINE) == [heading_of(tag) for tag in PUBLIC]


@pytest.mark.parametrize("tag", PUBLIC, ids=lambda tag: PUBLIC[tag].__name__)
def test_fields_of_a_message_match_the_code(tag: int) -> None:
    hints = typing.get_type_hints(PUBLIC[tag])
    expected = [[item.name, wire_type(hints[item.name])] for item in fields(PUBLIC[tag])]
    assert [row[:2] for row in rows_after(heading_of(tag))] == expected


def test_fields_of_a_request_match_the_code() -> None:
    own = [item.name for item in fields(request.GenerationRequest) if item.name != "sampling"]
    assert [row[0] for row in rows_after("## Requests")] == [*own, *PARAMS]


@pytest.mark.parametrize("name", PARAMS)
def test_default_and_limits_of_a_field_match_the_code(name: str) -> None:
    [row] = [row for row in rows_after("## Requests") if row[0] == name]
    default = json.dumps(getattr(sampling.SamplingParams(), name))
    assert row[2] == {"null": "nil"}.get(default, default)
    if "low" in PARAMS[name].metadata:
        limits = PARAMS[name].metadata
        assert row[3].startswith(f"{limits['low']} to {limits['high']}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stop", f"{sampling.MAX_STOP_STRINGS} strings of 1 to {sampling.MAX_STOP_CHARS} characters"),
        ("stop_token_ids", f"{sampling.MAX_STOP_TOKEN_IDS} ids"),
        ("logit_bias", f"{sampling.MAX_LOGIT_BIASES} token ids"),
        ("lease_s", f"{service_config.MIN_LEASE_S} to {service_config.MAX_LEASE_S}"),
        ("priority", f"{request.MIN_PRIORITY} to {request.MAX_PRIORITY}"),
        ("deadline_ms", f"above 0, to {request.MAX_LIMIT_MS}"),
        ("max_queue_ms", f"above 0, to {request.MAX_LIMIT_MS}"),
        ("cache_salt", f"0 to {request.MAX_SALT_CHARS} characters"),
        ("messages", f"1 to {request.MAX_MESSAGES} maps of `role` (1 to {request.MAX_ROLE_CHARS} characters)"),
        ("prompt_token_ids", f"at most {codec.MAX_ITEMS} ints"),
    ],
)
def test_other_limits_match_the_code(name: str, text: str) -> None:
    [row] = [row for row in rows_after("## Requests") if row[0] == name]
    assert text in row[3]


def test_forms_of_structured_match_the_code() -> None:
    rows = rows_after("### Structured answers")
    assert [row[0] for row in rows] == list(structured.FORMS)
    assert rows[-1][2].endswith(
        f"1 to {structured.MAX_CHOICES} strings of 1 to {structured.MAX_CHOICE_CHARS} characters"
    )
    assert f"at most {grammar.MAX_SOURCE_BYTES} bytes of UTF-8" in PAGE
    assert f"`grammar_timeout_s` ({ServiceConfig().grammar_timeout_s} s unless configured)" in PAGE


def test_error_codes_match_the_code() -> None:
    expected = {code: error.http_status for code, error in errors.REQUEST_ERRORS.items()}
    assert {row[0]: int(row[1]) for row in rows_after("## Errors")} == expected


def test_limits_and_names_in_the_prose_match_the_code() -> None:
    service = ServiceConfig()
    assert f"Protocol version: **{codec.VERSION}**" in PAGE
    assert f"`max_frame_bytes`, {service.max_frame_bytes} unless configured" in PAGE
    assert f"| entries of one array | {codec.MAX_ITEMS} " in PAGE
    assert f"| entries of one map | {codec.MAX_FIELDS} |" in PAGE
    assert f"| arrays, maps and their entries, in all of a frame | {codec.MAX_VALUES} |" in PAGE
    assert f"in the fields of SUBMIT and FOLLOW | {codec.MAX_DEPTH} |" in PAGE
    assert f"cut to {MAX_REFUSED_ID_CHARS} characters" in PAGE
    assert f"`window_tokens` (INFO; {service.window_tokens} unless configured)" in PAGE
    assert all(f"`{name}`" in PAGE for name in (*LEDGER_STAGES, *FINISH_REASONS[1:-1]))
