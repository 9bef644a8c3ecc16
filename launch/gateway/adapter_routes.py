"""Routes that load and unload LoRA adapters, named as in vLLM. Available if ``lora_root`` is set."""

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
    turn = asyncio.Lock()

    @router.post("/v1/load_lora_adapter", summary="serve one more adapter", response_class=PlainTextResponse)
    async def post_load(body: LoadAdapterRequest) -> Response:
        name, folder = body.lora_name, _folder(gateway, body.lora_path)
        if name in gateway.model_names:
            raise ApiError(f"lora_name is {name!r}, which is the model", param="lora_name")
        await _tell_driver(gateway, turn, "load_adapter", name=name, path=str(folder))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", summary="unload an adapter", response_class=PlainTextResponse)
    async def post_unload(body: UnloadAdapterRequest) -> Response:
        name = body.lora_name
        _root(gateway)
        if name not in gateway.adapters:
            raise ApiError(f"the adapter {name!r:.200} is not loaded", status=404, code="model_not_found")
        await _tell_driver(gateway, turn, "unload_adapter", name=name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router


def _root(gateway: Gateway) -> Path:
    """
    Raises:
        ApiError: 403, no folder for adapters is configured.
    """
    gateway.check_ready()
    if (root := gateway.config.lora_root) is None:
        text = "adapters can only be loaded from below --lora-root, which is not set"
        raise ApiError(text, status=403, code="not_allowed")
    return Path(root)


def _folder(gateway: Gateway, path: str) -> Path:
    """
    Raises:
        ApiError: it is not a folder below the root, with links resolved.
    """
    root = _root(gateway).resolve()
    try:
        folder = (root / path).resolve(strict=True)
        is_below = root in folder.parents
    except (OSError, ValueError, RuntimeError):  # it does not exist, contains NUL, or links form a loop
        is_below = False
    if not is_below:
        raise ApiError(f"lora_path is {path!r:.200}, which is not a folder below --lora-root", param="lora_path")
    return folder


async def _tell_driver(gateway: Gateway, turn: asyncio.Lock, what: str, **fields: Any) -> None:
    """Change one adapter at a time, as the driver does: each change may take a thread for minutes, and the few threads
    of the event loop have other work.

    Raises:
        ApiError: the driver refused.
    """
    try:
        async with turn:
            await asyncio.to_thread(ask, gateway.run_dir.absolute(), what, **fields)
    except ConfigError as error:
        raise ApiError(error.message) from error
