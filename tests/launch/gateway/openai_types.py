"""Replies read with the types of OpenAI's package, which takes half a second to import: only processes that do pay."""

from __future__ import annotations

import importlib
import json


def check(kind: str, reply: object) -> None:
    """``kind`` is such as ``chat.ChatCompletion``.

    Raises:
        pydantic.ValidationError: the reply is not of that type.
    """
    module, _, name = kind.rpartition(".")
    type_ = getattr(importlib.import_module(f"openai.types.{module}"), name)
    type_.model_validate_json(json.dumps(reply), strict=True)
