"""Common to all request bodies: strict types, no unknown fields, and null for "not given"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ....protocol.errors import encodable
from ....protocol.sampling import SamplingParams
from ....protocol.spelling import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self

Neutral = Mapping[str, tuple[Any, ...]]
_LIMITS = {item.name: item.metadata for item in fields(SamplingParams)}
T = TypeVar("T")
# Stops at the first error: a body of 8 MB may have millions, and reporting all of them takes a minute.
List = Annotated[list[T], Field(fail_fast=True)]
TokenBudget = Annotated[int, Field(ge=0, le=2**31 - 1)]  # of reasoning, see docs/protocol.md
MAX_MESSAGES = MAX_PARTS = 1024  # the pipeline's limits, checked before any of a million entries is validated
MAX_TOOLS = 1024  # the pipeline's limit
MAX_PARTS_IN_ALL = 8192  # of a conversation or of questions: each blocks the event loop for up to 30 us
# What to do instead of asking for what is not supported, behind the refusal.
_WAYS_OUT = {
    **dict.fromkeys(("previous_response_id", "conversation"), ": nothing is stored here, send the whole conversation"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"), ": use structured_outputs"
    ),
    "bad_words": ": use a logit_bias of -100 for words of one token",
    "allowed_token_ids": ": use structured_outputs, or a logit_bias of 100 for each of them",
    "chat_template": ": use chat_template_kwargs",
    "lora_path": ": use model, which may be an adapter's name",
    "functions": ": use tools",
    "function_call": ": use tool_choice",
}
# What other servers call a field, where the names are not alike.
_NAMES_HERE = {
    **dict.fromkeys(("enable_thinking", "thinking", "think"), "chat_template_kwargs"),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length"), "max_tokens"),
    **dict.fromkeys(("grammar", "guided_decoding_backend"), "structured_outputs"),
    **dict.fromkeys(("format", "json_schema"), "response_format"),
    "temp": "temperature",
    **dict.fromkeys(("inputs", "content"), "prompt"),
    "n_probs": "logprobs",
    "random_seed": "seed",
    "input_type": "prompt_name",
}
# Maps of settings in other servers' requests: TGI's, SGLang's, Ollama's, and the argument of the openai package.
_MAPS = ("parameters", "sampling_params", "options", "extra_body")
# Those that resemble fields with another meaning.
_ALONE = ("timings_per_token", "return_progress", "usage", "top_a")
_HALF = re.compile("[\ud800-\udfff]")
ANYTHING: tuple[Any, ...] = (...,)  # the field has no effect here, whatever its value


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return neutral is ANYTHING or any(type(value) is type(known) and value == known for known in neutral)


def _without_nulls(value: Any) -> Any:
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def _whole(value: Any) -> Any:
    """256.0 is an integer to JSON schemas, and so to our own document; languages with one type of number send it."""
    is_whole = type(value) is float and value.is_integer() and abs(value) < 2**63
    return int(value) if is_whole else value


def _neutral_schema(neutral: tuple[Any, ...]) -> dict[str, Any]:
    if neutral is ANYTHING:
        return {"description": "accepted and ignored"}
    return {"enum": [None, *neutral], "description": "accepted with values that have no effect"}


class ApiModel(BaseModel):
    """A map in a request.

    Routers and SDKs add fields that have no effect, so null means "not given" for every field, and ``NEUTRAL`` lists
    the values accepted for fields that are otherwise unsupported.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    NEUTRAL: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept: dict[str, Any] = {}
        for name, item in value.items():
            if not (name in cls.model_fields or name in cls.NEUTRAL or _is_alias(cls, name)):
                # Refused as unknown, regardless of the rest; but an object of another type has other fields.
                if fields_of_other := _if_of_other_type(cls, value):
                    return fields_of_other
                raise _unknown(cls, name)
            if item is None:
                continue
            item = _whole(item)
            if name not in cls.NEUTRAL:
                kept[name] = item
            elif not _is_neutral(_without_nulls(item), cls.NEUTRAL[name]):
                raise unsupported_value(name, item)
        return kept

    @model_validator(mode="after")
    def _refuse_halves(self) -> Self:
        for name, item in type(self).model_fields.items():
            if text := _why_unencodable(getattr(self, name)):
                raise PydanticCustomError("half", "{text}", {"param": item.alias or name, "text": text})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core_schema))
        properties = schema.setdefault("properties", {})
        for name, neutral in cls.NEUTRAL.items():
            properties[name] = _neutral_schema(neutral)
        return schema


def _why_unencodable(value: Any) -> str | None:
    """Why a reply could not contain this value, if so: a lone surrogate, or a number that JSON cannot express. Nested
    models check their own fields.
    """
    left = [value]  # no recursion: a field with arbitrary content may be nested as deeply as JSON can be
    while left:
        item = left.pop()
        if isinstance(item, str):
            if not item.isascii() and _HALF.search(item):
                return "a lone surrogate is not a character, and a reply cannot contain it"
        elif isinstance(item, float):
            if not math.isfinite(item):
                return f"{item} is not a JSON number, and a reply cannot contain it"
        elif isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list) and set(map(type, item)) != {int}:  # there may be a million token ids
            left += item
    return None


def _is_alias(model: type[BaseModel], name: str) -> bool:
    return any(item.alias == name for item in model.model_fields.values())


def _if_of_other_type(model: type[BaseModel], value: dict[str, Any]) -> dict[str, Any]:
    """The fields that the model knows, if it does not know the ``type`` of the value; otherwise empty."""
    field, given = model.model_fields.get("type"), value.get("type")
    if field is None or given is None:
        return {}
    known = [name for part in (field.annotation, *get_args(field.annotation)) for name in get_args(part)]
    return {} if given in known else {name: item for name, item in value.items() if name in model.model_fields}


def _unknown(model: type[BaseModel], name: str) -> PydanticCustomError:
    known = [item.alias or field for field, item in model.model_fields.items()]
    if name in _MAPS:
        meant = "; its entries belong into the request itself"
    elif (name_here := _NAMES_HERE.get(name)) in known:
        meant = f"; use {name_here}"
    else:
        meant = did_you_mean(name, known) if name not in _ALONE else ""
    text = f"unknown field {name!r:.80}{meant}"
    param = name[:80] if encodable(name) == name else ""
    return PydanticCustomError("unknown", "{text}", {"param": param, "text": text})


def unsupported_value(param: str, value: Any) -> PydanticCustomError:
    """The error that pydantic passes on to ``errors.validation_error``."""
    return PydanticCustomError("unsupported", "{text}", {"param": param, "text": unsupported_text(param, value)})


def unsupported_text(param: str, value: Any) -> str:
    return f"{param} is {value!r:.80}, which is not supported{_WAYS_OUT.get(param, '')}"


def limited(name: str, **more: Any) -> Any:
    """A field with the limits of ``name`` in ``SamplingParams``."""
    limits = _LIMITS[name]
    return Field(default=None, ge=limits["low"], le=limits["high"], **more)


def few(parts: str) -> Callable[[Any], Any]:
    """A check of nested lists that runs before pydantic validates each of their ``parts``."""

    def check(value: Any) -> Any:
        lists, num_parts = [value], 0
        while lists:
            part = lists.pop()
            if isinstance(part, dict):
                lists += [item for item in part.values() if isinstance(item, list)]
            elif isinstance(part, list):
                num_parts += len(part)
                if num_parts > MAX_PARTS_IN_ALL:
                    text = f"more than {MAX_PARTS_IN_ALL} {parts}, the limit"
                    raise PydanticCustomError("too_many", "{text}", {"text": text})
                lists += part
        return value

    return check


few_parts = few("messages, parts and calls")  # of a conversation


def few_entries(limit: int) -> Callable[[Any], Any]:
    """A limit for the entries of a list or a map, checked before pydantic validates each of them, which would take
    seconds for millions, and reports every error. A list of token ids is a single prompt.
    """

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > limit and not isinstance(next(iter(value)), int):
            raise PydanticCustomError("too_many", "{text}", {"text": f"{len(value)} entries, the limit is {limit}"})
        return value

    return check


def one_or_several(value: Any) -> list[Any]:
    """The texts or lists of token ids of a field that takes one of them, or several."""
    is_one = isinstance(value, str) or (value and isinstance(value[0], int))
    return [value] if is_one else value
