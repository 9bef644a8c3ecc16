"""Routes that load and unload LoRA adapters, with vLLM's names. They are open where ``lora_root`` says from where."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from ...driver.control import ask
from ...protocol.errors import ConfigError
from .errors import ApiError
from .schemas.other import LoadAdapterRequest, UnloadAdapterRequest
from .state import Gateway


def adapter_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.post("/v1/load_lora_adapter", summary="serve one more adapter", response_class=PlainTextResponse)
    async def post_load(body: LoadAdapterRequest) -> Response:
        name, folder = body.lora_name, _folder(gateway, body.lora_path)
        if name in gateway.model_names:
            raise ApiError(f"lora_name is {name!r}, which is the model", param="lora_name")
        await _tell_driver(gateway, "load_adapter", name=name, path=str(folder))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", summary="forget an adapter", response_class=PlainTextResponse)
    async def post_unload(body: UnloadAdapterRequest) -> Response:
        name = body.lora_name
        _root(gateway)
        if name not in gateway.adapters:
            raise ApiError(f"the adapter {name!r:.200} is not loaded", status=404, code="model_not_found")
        await _tell_driver(gateway, "unload_adapter", name=name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router


def _root(gateway: Gateway) -> Path:
    """
    Raises:
        ApiError: 403, nobody has said from where adapters may come.
    """
    gateway.check_ready()
    if (root := gateway.config.lora_root) is None:
        text = "adapters are loaded from below --lora-root only, which was not given"
        raise ApiError(text, status=403, code="not_allowed")
    return Path(root)


def _folder(gateway: Gateway, path: str) -> Path:
    """
    Raises:
        ApiError: it is no folder below the root, links followed.
    """
    root = _root(gateway).resolve()
    try:
        folder = (root / path).resolve(strict=True)
        is_below = root in folder.parents
    except (OSError, ValueError, RuntimeError):  # nothing is there, a NUL, links in a circle
        is_below = False
    if not is_below:
        raise ApiError(f"lora_path is {path!r:.200}, which is not a folder below --lora-root", param="lora_path")
    return folder


async def _tell_driver(gateway: Gateway, what: str, **fields: Any) -> None:
    """
    Raises:
        ApiError: it refuses.
    """
    try:
        await asyncio.to_thread(ask, gateway.run_dir.absolute(), what, **fields)
    except ConfigError as error:
        raise ApiError(error.message) from error
