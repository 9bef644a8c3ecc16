"""Routes about the server: its health, its models, its settings."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from ... import __version__
from .errors import ApiError, json_response
from .metrics import CONTENT_TYPE, render
from .state import Gateway

_SECRET = ("api_key",)


def server_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get("/ping", include_in_schema=False)  # as load balancers of hosted containers ask, and vLLM answers
    @router.get("/health", summary="200 if all three stages make progress, otherwise 503")
    async def get_health() -> Response:
        found = gateway.health()
        return json_response(found, status=200 if found["status"] == "ok" else 503)

    @router.get("/ready", summary="200 if new requests are accepted, otherwise 503")
    async def get_ready() -> Response:
        gateway.check_ready()
        found = gateway.health()
        return json_response(
            {"ready": found["status"] == "ok", **found}, status=200 if found["status"] == "ok" else 503
        )

    @router.get(
        "/metrics", summary="Prometheus metrics, named as in vLLM if they mean the same",
        response_class=PlainTextResponse,
    )  # fmt: skip
    async def get_metrics() -> Response:
        return Response(render(gateway), media_type=CONTENT_TYPE)

    @router.get("/version")
    async def get_version() -> Response:
        return json_response({"version": __version__})

    @router.get("/server_info", summary="the model, limits, settings, and statistics of every stage")
    async def get_server_info() -> Response:
        return json_response(_server_info(gateway))

    @router.get("/v1/models", summary="the served models")
    async def get_models() -> Response:
        names = (*gateway.model_names, *gateway.adapters)
        return json_response({"object": "list", "data": [_model(gateway, name) for name in names]})

    @router.get("/v1/models/{model_id:path}", summary="one model")
    async def get_model(model_id: str) -> Response:
        return json_response(_model(gateway, gateway.check_model(model_id)))

    return router


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": gateway.created, "owned_by": "triptych"}
    if not gateway.is_loaded:
        return model
    origin = {"root": gateway.card.model, "parent": None}
    if gateway.adapter_option(name) and (folder := gateway.folder_of(name)) is not None:
        origin = {"root": str(folder), "parent": gateway.model_names[0]}
    return {**model, **origin, "max_model_len": gateway.card.max_model_len}


def _server_info(gateway: Gateway) -> dict[str, Any]:
    if not gateway.is_loaded:
        raise ApiError("the model is being loaded, try again later", status=503, code="loading")
    settings = dataclasses.asdict(gateway.pipeline)
    settings["gateway"] = {k: v for k, v in dataclasses.asdict(gateway.config).items() if k not in _SECRET}
    return {
        "version": __version__,
        "python": platform.python_version(),
        "model": gateway.card.to_wire(),
        "served_model_names": list(gateway.model_names),
        "tool_parser": gateway.tool_parser,
        "reasoning_parser": gateway.reasoning_parser,
        "settings": settings,
        "stages": gateway.board.stats(),
    }
