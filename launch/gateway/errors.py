"""Every failure in the format of OpenAI's clients: ``{"error": {message, type, param, code}}`` and its HTTP status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from starlette.responses import Response

from ...protocol.errors import Overloaded, TriptychError

T = TypeVar("T")
RETRY_AFTER_S = 1
# Codes that clients check for, where ours differ.
_OPENAI_CODES = {
    "prompt_too_long": "context_length_exceeded",
    "overloaded": "rate_limit_exceeded",
    "invalid_request": "invalid_value",
}
# Routers that fall back to a model with a longer context recognize the case by these words, not by the code.
_BEFORE = {"prompt_too_long": "This model's maximum context length is exceeded: "}
_BEFORE_IN_MESSAGES = {"prompt_too_long": "prompt is too long: "}  # on these words agents shorten the conversation
MESSAGES = "/v1/messages"  # prefix of Anthropic's routes
_MESSAGE_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
# On these details, agents that ask the server to keep the conversation go on by sending all of it each time.
_MESSAGE_DETAILS = {("unsupported_value", "thread"): {"error_code": "thread_unsupported_request"}}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(TriptychError):
    """A refusal by the gateway itself."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.http_status = status
        self.code = code or "invalid_value"


class ClientGone(Exception):
    """The client closed the connection."""


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(message, code="unsupported_value", param=param)


def required(value: T | None, param: str) -> T:
    """
    Raises:
        ApiError: the field ``param``, which other fields make necessary, is not given.
    """
    if value is None:
        raise ApiError(f"{param} is required", code="missing_required_parameter", param=param)
    return value


def aborted(what: str = "the request was aborted by the service") -> ApiError:
    """The pipeline ended a request that its client did not abort."""
    return ApiError(what, status=503, code="aborted")


def stopped() -> ApiError:
    """The service stops before the request ends; the next start may continue it, for those routes that can resume."""
    way_on = "a request sent as resumable may continue after a restart: resume it by its id; send others again"
    return ApiError(f"the service stopped before the answer was complete; {way_on}", status=503, code="stopped")


def gone(run_dir: Path) -> ApiError:
    """No request will be answered again, unless a gateway is started for another pipeline."""
    return ApiError(f"the pipeline is gone: its run directory {run_dir} was deleted", status=503, code="gone")


def error_map(error: TriptychError) -> dict[str, Any]:
    """The body of an error reply, and of an error event in a stream."""
    status = error.http_status
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = _OPENAI_CODES.get(error.code, error.code)
    message = _BEFORE.get(error.code, "") + error.message
    param = None if isinstance(error, Overloaded) else error.param  # the gateway's field, not its client's
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def message_error_map(error: TriptychError) -> dict[str, Any]:
    """The same in the format of Anthropic's clients, with our param and code."""
    status = error.http_status
    kind = _MESSAGE_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = _BEFORE_IN_MESSAGES.get(error.code, "") + error.message
    told = {**error_map(error)["error"], "type": kind, "message": message}
    if (details := _MESSAGE_DETAILS.get((error.code, error.param or ""))) is not None:
        told["details"] = details
    return {"type": "error", "error": told}


def error_response(error: TriptychError, *, path: str = "") -> Response:
    """``path`` of the request determines the format."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.http_status in (429, 503) else {}
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    content = message_error_map(error) if path.startswith(MESSAGES) else error_map(error)
    return json_response(content, status=error.http_status, headers=headers)


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(content), status, headers, media_type="application/json")


def json_bytes(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def unreadable_body(error: ValueError | RecursionError) -> ApiError:
    """Why a body, which may be correct JSON, could not be parsed."""
    if isinstance(error, RecursionError):
        return ApiError("the body is nested too deep to be read", code="bad_frame")
    if not isinstance(error, UnicodeDecodeError):
        reason = str(error).partition(";")[0]  # too long an integer; the rest is advice for us
        return ApiError(f"the body cannot be read: {reason}", code="bad_request")
    byte = error.object[error.start]
    told = f"the body cannot be read as {error.encoding}: byte 0x{byte:02x} at offset {error.start}"
    return ApiError(told, code="bad_request")


def validation_error(errors: list[Any]) -> ApiError:
    """The first problem of a body, with the name of its field."""
    # For a field with alternatives pydantic reports an error for each: the deepest is for the one that was meant.
    first = min(errors, key=lambda error: (error["type"] != "unknown", -len(error["loc"])))
    if first["loc"] == ("body",) and isinstance(first.get("input"), bytes):
        return ApiError("the body is not read as JSON: send it with the header content-type: application/json")
    path = list(first["loc"])
    if path[0] in ("body", "query", "path", "header"):
        del path[0]
    param = _dotted(path) or None
    if first["type"] == "unknown":
        name = first["ctx"]["param"]  # empty: a reply cannot contain it
        param = ".".join(filter(None, (_dotted(path), name))) if name else None
        return ApiError(first["msg"], code="unknown_parameter", param=param)
    if first["type"] == "missing":
        return ApiError(f"{param or 'the body'} is required", code="missing_required_parameter", param=param)
    if first["type"] == "json_invalid":
        told, offset = first["ctx"]["error"], first["loc"][-1]
        return ApiError(f"the body is not JSON: {told}, at character {offset}", code="invalid_json")
    if first["type"] == "unsupported":
        return unsupported(_dotted([*path, first["ctx"]["param"]]), first["msg"])
    if first["type"] == "half":
        param = _dotted([*path, first["ctx"]["param"]])
        return ApiError(f"{param}: {first['msg']}", param=param)
    if first["type"] == "too_many":
        return ApiError(f"{param}: {first['msg']}", param=param)
    return ApiError(f"{param or 'the body'}: {first['msg']}, got {first.get('input')!r:.80}", param=param)


def _dotted(path: list[str | int]) -> str:
    """``messages[0].content``, without the names of the alternatives tried by pydantic."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in ("str", "int", "float", "bool", "list"):
            text += f".{part}" if text else part
    return text
