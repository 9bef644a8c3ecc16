"""The body of docs/python.md: the calls available to a program that imports the package, and the errors to catch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from ...driver.async_client import AsyncClient
from ...driver.async_driver import AsyncDriver
from ...driver.async_requests import AsyncRequests
from ...driver.async_stream import AsyncStream
from ...driver.client import Client
from ...driver.driver import Driver
from ...driver.embedding import Embedding
from ...driver.health import Health
from ...driver.prompt_logprobs import PromptLogprob
from ...driver.requests import Requests
from ...driver.standing import RequestLine, RequestList, RequestStatus
from ...driver.stream import Completion, Delta, Listener, Stream
from ...driver.worker import WorkerHealth
from ...protocol.errors import TriptychError

CLASSES = (
    Requests, Driver, Client, Stream, Delta, Completion, PromptLogprob, Embedding, AsyncRequests, AsyncDriver,
    AsyncClient, AsyncStream,
    RequestStatus, RequestList, RequestLine, Health, WorkerHealth,
)  # fmt: skip
_FIELD = re.compile(r"^    (\w+): [^#\n]*(?:# (.*))?$", re.MULTILINE)  # a field, and the comment beside it


def api() -> str:
    """Markdown: one section per class, then the error hierarchy."""
    return "\n".join([*(line for owner in CLASSES for line in _class(owner)), *_errors()])


def _class(owner: Any) -> Iterator[str]:
    more = "".join(f" With all of `{base.__name__}`." for base in owner.__bases__ if base in CLASSES)
    yield from (f"## {owner.__name__}", "", f"`{owner.__module__}`. {about(owner)}{more}", "")
    if owner.__init__.__doc__ and owner.__init__.__doc__ != object.__init__.__doc__:
        yield f"* `{owner.__name__}{_arguments(owner.__init__)}`: {about(owner.__init__)}"
    if hasattr(owner, "__dataclass_fields__"):
        for name, text in _FIELD.findall(inspect.getsource(owner)):
            yield f"* `{name}`" + (f": {text}" if text else "")
    for name, member in _members(owner):
        if not name.startswith("_") and not hasattr(Listener, name) and callable(member):
            is_async = "await " if inspect.iscoroutinefunction(member) else ""
            yield _item(f"{is_async}{name}{_arguments(member)}", member)
        elif isinstance(member, property) and not name.startswith("_"):
            yield _item(name, member)
    yield ""


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    """Its own, and those of a base that has no section."""
    for each in (*(base for base in owner.__bases__ if base not in CLASSES), owner):
        if each is not object:
            yield from vars(each).items()


def _item(shown: str, member: Any) -> str:
    return f"* `{shown}`" + (f": {text}" if (text := about(member)) else "")


def about(member: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((member.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


def _arguments(function: Any) -> str:
    """``(prompt=None, *, timeout=None, **options)``: names and defaults, without types and ``self``."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(plain))


def _errors() -> Iterator[str]:
    yield from (
        "## Errors",
        "",
        "`triptych.protocol.errors`. Each error is a subclass of those it is indented under. It has its `code`, a"
        " `message`, in `param` the field that caused it, and, if it ended a request, in `partial` the"
        " `Completion` as far as it got.",
        "",
    )
    yield "| class | `code` | HTTP | |"
    yield "|---|---|---|---|"
    yield from _tree(TriptychError, 0)


def _tree(error: type[TriptychError], depth: int) -> Iterator[str]:
    yield f"| {'· ' * depth}`{error.__name__}` | `{error.code}` | {error.http_status} | {about(error)} |"
    for child in error.__subclasses__():
        if child.__module__ == TriptychError.__module__:
            yield from _tree(child, depth + 1)
