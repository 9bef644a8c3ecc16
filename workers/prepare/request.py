"""The request as sent by a client: a decoded MessagePack map, validated field by field."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from ...protocol.arrays import Int32
from ...protocol.errors import InvalidRequest
from ...protocol.sampling import SamplingParams
from ...protocol.service_config import MAX_LEASE_S, MIN_LEASE_S
from .structured import Structured, checked_structured, refusal
from .tool_fields import CALL_FIELDS, Message, add_calls, checked_template_kwargs, checked_tools

Truncation = Literal["none", "left", "right", "middle"]

MAX_MESSAGES = 1024
MAX_CONTENT_PARTS = 1024
MAX_ROLE_CHARS = 64
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000
MAX_LIMIT_MS = 1e9
MAX_SALT_CHARS = 256
_TRUNCATIONS: tuple[Truncation, ...] = ("none", "left", "right", "middle")
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """What one client asks for. Invariant: exactly one of ``prompt``, ``prompt_token_ids`` and ``messages`` is set."""

    prompt: str | None = None
    prompt_token_ids: Int32 | None = None  # on the wire a list of integers, or int32 little-endian bytes
    messages: tuple[Message, ...] | None = None  # a chat, which the template ends with a prompt for the answer
    continue_final_message: bool = False  # instead, the model continues the last message, a turn of the assistant
    truncation: Truncation = "none"  # where a prompt that is too long is cut; "none" refuses it
    lease_s: float | None = None  # None: the service's default
    priority: int = 0  # lowest first, with the policy "priority"
    deadline_ms: float | None = None  # from receipt to the end; then it fails, keeping what was produced
    max_queue_ms: float | None = None  # from receipt to its first step
    cache_salt: str = ""  # prefixes are shared only among requests with the same salt
    lora: str = ""  # the adapter that answers; empty: the base model
    tools: str | None = None  # for the chat template: JSON text, as a schema may be nested deeply
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # more variables for the chat template
    max_prompt_tokens: int | None = None  # a longer prompt is cut or refused, like one that does not fit
    return_prompt: bool = False  # the summary includes the prompt's token ids
    embedding: bool = False  # instead of an answer, the summary includes the prompt's embedding
    prompt_name: str | None = None  # of the instruction before a text to embed; empty: none; None: the model's default
    dimensions: int | None = None  # of the embedding: its first values, scaled like all of them; None: all
    structured: Structured | None = None  # the form the answer must have
    thinking_token_budget: int | None = None  # tokens of reasoning, at most; None: as many as the model likes
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if self.embedding:
            self._check_embedding()
            object.__setattr__(self, "sampling", SamplingParams(max_tokens=0))
        else:
            self._check_answer()
        for name in ("structured", "thinking_token_budget"):
            if getattr(self, name) is not None and self.sampling.is_beam_search:
                raise InvalidRequest(
                    f"num_beams is {self.sampling.num_beams}: a beam search takes no {name}", param=name
                )
        if self.structured is not None and self.sampling.ignore_eos:
            raise refusal("and ignore_eos exclude each other: such an answer ends with the end of sequence")
        if self.continue_final_message:
            self._check_final_message()

    def _check_answer(self) -> None:
        for name in ("prompt_name", "dimensions"):
            if (value := getattr(self, name)) is not None:
                raise InvalidRequest(f"{name} is {value!r:.80}: only an embedding has any", param=name)

    def _check_embedding(self) -> None:
        if self.prompt_name and self.prompt is None:
            raise InvalidRequest(
                f"prompt_name is {self.prompt_name!r:.80}: it needs a text (prompt)", param="prompt_name"
            )
        given = {name: getattr(self, name) for name in _NOT_WITH_EMBEDDING if getattr(self, name) is not None}
        given |= self.sampling.to_wire()
        if given.get("max_tokens") == 0:
            del given["max_tokens"]
        for name, value in given.items():
            raise InvalidRequest(f"{name} is {value!r:.80}: an embedding takes no {name}", param=name)

    def _check_final_message(self) -> None:
        name, last = "continue_final_message", self.messages[-1] if self.messages else None
        if last is None:
            raise InvalidRequest(f"{name} is true: it needs messages", param=name)
        if last["role"] != "assistant":
            raise InvalidRequest(
                f"{name} is true: the last message must be the assistant's, got {last['role']!r}", param=name
            )
        if last.get("tool_calls"):
            raise InvalidRequest(f"{name} is true: the last message ends with a call and cannot continue", param=name)

    @property
    def tells_reasoning(self) -> bool:
        """Whether the reasoning in its answer has to be told from the rest."""
        return self.thinking_token_budget is not None if self.structured is None else self.structured.after_reasoning

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> GenerationRequest:
        """The request in a decoded map. Fields not listed above belong to ``SamplingParams``.

        Raises:
            InvalidRequest: a field is unknown, missing, of the wrong type or outside its limits; ``param`` names it.
        """
        given = {name: wire[name] for name in _PROMPTS if wire.get(name) is not None}
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise InvalidRequest(f"exactly one of {', '.join(_PROMPTS)} is needed, got {names}", param="prompt")
        [(name, value)] = given.items()
        own: dict[str, Any] = {name: _PROMPTS[name](value)}
        return cls(
            **own,
            truncation=_checked_truncation(wire.get("truncation", "none")),
            lease_s=_checked_lease(wire.get("lease_s")),
            priority=_checked_priority(wire.get("priority", 0)),
            deadline_ms=_checked_limit_ms("deadline_ms", wire.get("deadline_ms")),
            max_queue_ms=_checked_limit_ms("max_queue_ms", wire.get("max_queue_ms")),
            cache_salt=_checked_salt(wire.get("cache_salt", "")),
            lora=_checked_text("lora", wire.get("lora", "")),
            tools=checked_tools(wire.get("tools")),
            chat_template_kwargs=checked_template_kwargs(wire.get("chat_template_kwargs")),
            max_prompt_tokens=_checked_count("max_prompt_tokens", wire.get("max_prompt_tokens"), low=1),
            continue_final_message=_checked_bool("continue_final_message", wire.get("continue_final_message", False)),
            return_prompt=_checked_bool("return_prompt", wire.get("return_prompt", False)),
            embedding=_checked_bool("embedding", wire.get("embedding", False)),
            prompt_name=_checked_prompt_name(wire.get("prompt_name")),
            dimensions=_checked_count("dimensions", wire.get("dimensions"), low=1),
            structured=checked_structured(wire.get("structured")),
            thinking_token_budget=_checked_count("thinking_token_budget", wire.get("thinking_token_budget"), low=0),
            sampling=SamplingParams.from_wire(
                {k: v for k, v in wire.items() if k not in _OWN_FIELDS}, others=_OWN_FIELDS
            ),
        )


def _checked_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {value!r:.80}", param=name)
    return value


def _checked_prompt(value: Any) -> str:
    return _checked_text("prompt", value)


def _checked_prompt_ids(value: Any) -> Int32:
    """int32 [num_tokens]. Does not check whether the model knows these ids."""
    if isinstance(value, bytes):
        if len(value) % 4:
            raise _bad_ids(f"bytes must be int32 values of 4 bytes each, got {len(value)} bytes")
        return np.frombuffer(value, dtype="<i4").astype(np.int32, copy=False)
    if not isinstance(value, list):
        raise _bad_ids(f"must be a list of integers or int32 bytes, got {value!r:.80}")
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise _bad_ids(f"[{index}] must be an integer, got {token_id!r:.80}")
        if not _INT32.min <= token_id <= _INT32.max:
            raise _bad_ids(f"[{index}] is {token_id}, which is not an int32")
    return np.array(value, dtype=np.int32)


def _bad_ids(reason: str) -> InvalidRequest:
    glue = "" if reason.startswith("[") else " "
    return InvalidRequest(f"prompt_token_ids{glue}{reason}", param="prompt_token_ids")


def _checked_messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"messages must be a list of maps, got {value!r:.80}", param="messages")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"messages has {len(value)} entries, the limits are 1 and {MAX_MESSAGES}", param="messages"
        )
    return tuple(_checked_message(f"messages[{index}]", message) for index, message in enumerate(value))


def _checked_message(name: str, value: Any) -> Message:
    _require_keys(name, value, {"role", "content"}, optional=CALL_FIELDS)
    role = value["role"]
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise InvalidRequest(
            f"{name}.role must be a string of 1 to {MAX_ROLE_CHARS} characters, got {role!r:.80}", param="messages"
        )
    message: Message = {"role": role, "content": _checked_content(f"{name}.content", value["content"])}
    return add_calls(message, name, value)


def _checked_content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a string or a list of text parts, got {value!r:.80}", param="messages")
    if len(value) > MAX_CONTENT_PARTS:
        raise InvalidRequest(f"{name} has {len(value)} parts, the limit is {MAX_CONTENT_PARTS}", param="messages")
    return "".join(_checked_part(f"{name}[{index}]", part) for index, part in enumerate(value))


def _checked_part(name: str, value: Any) -> str:
    _require_keys(name, value, {"type", "text"})
    if value["type"] != "text":
        raise InvalidRequest(f"{name}.type must be 'text', got {value['type']!r:.80}", param="messages")
    text = value["text"]
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}.text must be a string, got {text!r:.80}", param="messages")
    return text


def _require_keys(name: str, value: Any, keys: set[str], *, optional: Set[str] = frozenset()) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a map, got {value!r:.80}", param="messages")
    for key in keys - value.keys():
        raise InvalidRequest(f"{name} has no {key}", param="messages")
    for key in value.keys() - keys - optional:
        raise InvalidRequest(f"{name} has the unknown field {key!r:.80}", param="messages")


def _checked_truncation(value: Any) -> Truncation:
    for known in _TRUNCATIONS:
        if value == known:
            return known
    raise InvalidRequest(f"truncation is {value!r:.80}, known are: {', '.join(_TRUNCATIONS)}", param="truncation")


def _checked_lease(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float):
        raise InvalidRequest(f"lease_s must be a number, got {value!r:.80}", param="lease_s")
    if not MIN_LEASE_S <= value <= MAX_LEASE_S:  # true for NaN as well
        raise InvalidRequest(f"lease_s is {value}, the limits are {MIN_LEASE_S} and {MAX_LEASE_S}", param="lease_s")
    return float(value)


def _checked_priority(value: Any) -> int:
    if type(value) is not int:
        raise InvalidRequest(f"priority must be an integer, got {value!r:.80}", param="priority")
    if not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidRequest(f"priority is {value}, the limits are {MIN_PRIORITY} and {MAX_PRIORITY}", param="priority")
    return value


def _checked_limit_ms(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float):
        raise InvalidRequest(f"{name} must be a number, got {value!r:.80}", param=name)
    if not 0 < value <= MAX_LIMIT_MS:  # true for NaN as well
        raise InvalidRequest(f"{name} is {value}, the limits are above 0 and {MAX_LIMIT_MS}", param=name)
    return float(value)


def _checked_salt(value: Any) -> str:
    salt = _checked_text("cache_salt", value)
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters, the limit is {MAX_SALT_CHARS}", param="cache_salt"
        )
    return salt


def _checked_prompt_name(value: Any) -> str | None:
    return None if value is None else _checked_text("prompt_name", value)


def digest_of_adapter(name: str, known: Mapping[str, str]) -> str:
    """The digest of an adapter in ``known``; empty for the base model.

    Raises:
        InvalidRequest: no adapter with this name is offered.
    """
    if name and name not in known:
        raise InvalidRequest(f"lora is {name!r:.200}, known are: {', '.join(known) or 'none'}", param="lora")
    return known.get(name, "")


def _checked_count(name: str, value: Any, *, low: int) -> int | None:
    if value is not None and (type(value) is not int or not low <= value <= _INT32.max):
        raise InvalidRequest(f"{name} is {value!r:.80}, the limits are {low} and {_INT32.max}", param=name)
    return value


def _checked_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r:.80}", param=name)
    return value


_PROMPTS = {"prompt": _checked_prompt, "prompt_token_ids": _checked_prompt_ids, "messages": _checked_messages}
_NOT_WITH_EMBEDDING = ("messages", "tools", "structured", "thinking_token_budget")
_OWN_FIELDS = frozenset(item.name for item in fields(GenerationRequest)) - {"sampling"}
