"""The application: routes, the format of errors, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from ... import __version__
from ...protocol.errors import TriptychError
from .adapter_routes import adapter_routes
from .api_routes import api_routes
from .errors import ApiError, ClientGone, error_response, unreadable_body, validation_error
from .openapi import describe
from .page.routes import page_routes
from .server_routes import server_routes
from .serving.edge import CLIENT_CLOSED, HEAD_ROUTES, MAX_PATH_CHARS, Edge
from .serving.uploads import BodyRefused
from .state import Gateway

logger = logging.getLogger(__name__)

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
# For clients whose address lacks the /v1, or has it twice, and for those that look for another kind of server.
_WHAT_THERE_IS = (
    ". This server generates text: POST /v1/chat/completions, /v1/completions, /v1/responses, or /v1/messages;"
    " embeds it: POST /v1/embeddings; and ranks it: POST /v1/rerank. GET /openapi.json lists all routes"
)


def create_app(gateway: Gateway) -> ASGIApp:
    """The gateway as an ASGI application. It answers 503 until the pipeline is ready."""
    app = FastAPI(
        title="Triptych", version=__version__, lifespan=_lifespan(gateway), docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.include_router(server_routes(gateway))
    app.include_router(api_routes(gateway))
    app.include_router(page_routes(gateway))
    app.include_router(adapter_routes(gateway))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(TriptychError, _failed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(OSError, _out_of_files)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _broken)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    served: ASGIApp = Edge(app, gateway)
    if origins := gateway.config.allowed_origin:  # outermost: preflight requests come without the key
        served = CORSMiddleware(
            served,
            allow_origins=origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id", "retry-after"),
        )
    return served


def _lifespan(gateway: Gateway) -> Any:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.client.close()
        await asyncio.to_thread(gateway.tracer.close)

    return lifespan


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for it"
    return error_response(validation_error(list(error.errors())), path=request.url.path)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, TriptychError), "registered for it"
    # Its frames refer to what holds it, and to the request's body: a ring that is only found by a search for garbage.
    return error_response(error.with_traceback(None), path=request.url.path)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    if isinstance(error, BodyRefused):
        return error_response(error.error, path=request.url.path)
    if isinstance(error.__cause__, (ValueError, RecursionError)):
        return error_response(unreadable_body(error.__cause__), path=request.url.path)
    codes = {404: "unknown_route", 405: "method_not_allowed"}
    what = f"{request.method} {request.url.path[:MAX_PATH_CHARS]}" if error.status_code in codes else str(error.detail)
    if error.status_code == 404 or request.url.path == "/":  # TGI's clients ask the bare address
        what += _WHAT_THERE_IS
    reply = error_response(
        ApiError(f"{error.detail}: {what}" if what != error.detail else what, status=error.status_code,
                 code=codes.get(error.status_code, "bad_request")),
        path=request.url.path,
    )  # fmt: skip
    reply.headers.update(error.headers or {})
    if error.status_code == 405:
        reply.headers["allow"] = ", ".join(_methods(request))
    return reply


def _methods(request: Request) -> list[str]:
    """Methods allowed at this path, which several routes may share."""

    def is_allowed(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    has_head = request.url.path in HEAD_ROUTES
    return [method for method in _METHODS if (method == "HEAD" and has_head) or is_allowed(method)]


async def _out_of_files(request: Request, error: Exception) -> Response:
    """All descriptors are taken, by connections for the most part: for the moment.

    Raises:
        OSError: it is another one.
    """
    assert isinstance(error, OSError), "registered for it"
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        raise error
    told = f"no file can be opened: {error.strerror}; try again when some connections are closed"
    logger.warning("%s %s: no file can be opened: %s", request.method, request.url.path, error.strerror)
    return error_response(ApiError(told, status=503, code="out_of_files"), path=request.url.path)


async def _broken(request: Request, error: Exception) -> Response:
    """A bug of ours; the server logs it."""
    told = ApiError(f"internal error: {type(error).__name__}", status=500, code="internal_error")
    return error_response(told, path=request.url.path)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)  # nobody reads it
