"""The error hierarchy. Every error has a stable ``code``, an HTTP status and, if a field caused it, its ``param``.

A request's error crosses processes as ``(code, message, param)``; ``from_wire`` reconstructs it on the other side.
"""

from __future__ import annotations

from typing import Any


class TriptychError(Exception):
    """Any error that this package raises deliberately."""

    code = "error"
    http_status = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the field of the request (or the flag) that caused it
        self.partial: Any = None  # in a client: the Completion as far as it got before the error


class ConfigError(TriptychError):
    """A setting cannot work. Raised before a process starts."""

    code = "config"


class JournalError(TriptychError):
    """The journal file is not one of ours, has another version, or is damaged beyond repair."""

    code = "journal"


class WorkerDied(TriptychError):
    """A worker died and the supervisor gave up restarting it.

    ``stderr`` holds the last lines the worker wrote; ``exit_code`` is negative for a signal; ``hint`` is the cause, if
    it is known.
    """

    code = "worker_died"
    http_status = 503

    def __init__(self, role: str, exit_code: int | None, stderr: str, *, hint: str = "") -> None:
        reason = "was stuck" if exit_code is None else f"ended with exit code {exit_code}"
        reason += f", {hint}" if hint else ""
        super().__init__(f"worker {role} {reason}; its last lines were:\n{stderr or '(nothing)'}")
        self.role = role
        self.exit_code = exit_code
        self.stderr = stderr
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.role, self.exit_code, self.stderr), vars(self)


class PipelineClosed(TriptychError):
    """The driver or the client was used before ``start`` or after ``stop``."""

    code = "closed"
    http_status = 503


class RequestError(TriptychError):
    """This request failed; the pipeline continues."""

    code = "request_failed"
    http_status = 500


class InvalidRequest(RequestError):
    """A field is missing, unknown, of the wrong type or outside its limits."""

    code = "invalid_request"
    http_status = 400


class EmptyPrompt(InvalidRequest):
    """The prompt has no tokens and the model has no token to begin with."""

    code = "empty_prompt"


class RequestTooLong(InvalidRequest):
    """The prompt does not fit into the context or the page pool."""

    code = "prompt_too_long"


class DuplicateId(InvalidRequest):
    """Another request with this id is live, or this very request has already been answered."""

    code = "duplicate_id"
    http_status = 409


class UnknownRequest(RequestError):
    """No request with this id is live or kept: it never existed, or its answer was acknowledged and forgotten."""

    code = "unknown_id"
    http_status = 404


class BadFrame(RequestError):
    """Bytes that are not a message of the protocol: too large, too deep, not MessagePack, unknown tag or version."""

    code = "bad_frame"
    http_status = 400


class Overloaded(RequestError):
    """A queue or the journal is full, or this client has reached its own limit. Try again later."""

    code = "overloaded"
    http_status = 429


class Draining(RequestError):
    """The pipeline is stopping and takes no new requests."""

    code = "draining"
    http_status = 503


class TokenizationFailed(RequestError):
    """The tokenizer or the chat template raised an error on this request's input, or took too long."""

    code = "tokenization_failed"
    http_status = 400


class ModelFailed(RequestError):
    """The model or the sampler failed on this request: NaN logits, or an exception in its step."""

    code = "model_failed"


class Poisoned(RequestError):
    """This request crashed the process that ran it, twice."""

    code = "poisoned"


class PipelineFailed(RequestError):
    """The pipeline gave up restarting a worker that kept crashing: nothing is served until an operator acts."""

    code = "pipeline_failed"
    http_status = 503

    def __init__(
        self, message: str = "a worker kept crashing and the pipeline gave up", *, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)


class DeadlineExceeded(RequestError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    http_status = 504


class RequestTimeout(TriptychError):
    """The caller's timeout passed before the answer was complete."""

    code = "timeout"
    http_status = 504


def encodable(text: str) -> str:
    """The text in a form any message can carry: text from a checkpoint's template may hold a lone surrogate."""
    return text.encode(errors="backslashreplace").decode()


def _codes(root: type[RequestError]) -> dict[str, type[RequestError]]:
    table = {root.code: root}
    for child in root.__subclasses__():
        table.update(_codes(child))
    return table


REQUEST_ERRORS = _codes(RequestError)  # code -> class


def from_wire(code: str, message: str, param: str | None = None) -> RequestError:
    """The error a peer reported, as the class its code names (``RequestError`` for an unknown, newer code)."""
    return REQUEST_ERRORS.get(code, RequestError)(message, param=param)
