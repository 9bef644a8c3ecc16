"""Dataclasses from JSON, every name and type checked: a damaged file gives an error that says what is wrong."""

from __future__ import annotations

import functools
import json
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

T = TypeVar("T")
_UNIONS = (Union, types.UnionType)

_evaluated = functools.cache(get_type_hints)


def type_hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass' fields; evaluated once, because one setting after the other asks for them."""
    return _evaluated(kind)


def load_map(text: str, what: str) -> dict[str, Any]:
    """The JSON object in ``text``.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not JSON: {type(error).__name__}") from None
    if type(value) is not dict:
        raise ConfigError(f"{what} must be a map, got {type(value).__name__}")
    return value


def make(kind: type[T], values: Any, what: str) -> T:
    """An instance of a dataclass.

    Raises:
        ConfigError: a field is unknown, missing or of the wrong type.
    """
    if type(values) is not dict:
        raise ConfigError(f"{what} must be a map, got {type(values).__name__}")
    hints = type_hints(kind)
    for name in values:
        if name not in hints:
            raise ConfigError(f"{what} has the unknown field {name!r:.100}")
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{what} has no {item.name}")
    return kind(**{name: checked(value, hints[name], f"{what}.{name}") for name, value in values.items()})


def checked(value: Any, hint: Any, what: str) -> Any:
    """The value, if it is the JSON form of this type; a list becomes the tuple it stands for.

    Raises:
        ConfigError: it is of another type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        kinds = [argument for argument in arguments if _fits(value, argument)]
        return checked(value, kinds[0], what) if kinds else _refuse(value, hint, what)
    if not _fits(value, hint):
        _refuse(value, hint, what)
    if origin is tuple:
        return tuple(checked(item, arguments[0], what) for item in value)
    if origin is dict:
        return {checked(k, arguments[0], what): checked(v, arguments[1], what) for k, v in value.items()}
    return make(hint, value, what) if isinstance(hint, type) and is_dataclass(hint) else value


def _fits(value: Any, hint: Any) -> bool:
    origin = dict if is_dataclass(hint) else get_origin(hint) or hint
    kinds = {float: (int, float), tuple: (list,)}.get(origin, (origin,))
    return type(value) in kinds


def _refuse(value: Any, hint: Any, what: str) -> Any:
    # From Python 3.14 on, all unions have the same name.
    name = str(hint) if get_origin(hint) in _UNIONS else getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{what} must be {name}, got {value!r:.80}", param=what)
