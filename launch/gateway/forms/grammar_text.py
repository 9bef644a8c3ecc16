"""What is written into a grammar: a schema of JSON, or text as it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ....protocol.grammar import JSON_WHITESPACE
from ....protocol.json_schema import closed
from ..errors import ApiError
from ..requests.chat_messages import json_text


def json_rule(schema: Mapping[str, Any], param: str) -> str:
    """JSON of this schema, which within a grammar does not get the defaults of the pipeline.

    Raises:
        ApiError: ``param`` is nested too deeply.
    """
    own = schema.get("x-guidance", {})
    if isinstance(own, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, **own}}
    try:
        return f"%json {json_text(closed(schema), param)}"
    except RecursionError as error:
        raise ApiError(f"{param} is nested too deep", param=param) from error


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
