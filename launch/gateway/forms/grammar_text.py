"""What is written into a grammar: a schema of JSON, or text as it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ....protocol.grammar import JSON_WHITESPACE
from ..requests.chat_messages import json_text


def json_rule(schema: Mapping[str, Any], param: str) -> str:
    """JSON of this schema; within a grammar it does not get the defaults of the pipeline.

    Raises:
        ApiError: ``param`` is nested too deeply.
    """
    own = schema.get("x-guidance", {})
    if isinstance(own, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, **own}}
    return f"%json {json_text(schema, param)}"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
