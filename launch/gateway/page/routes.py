"""The page, which is public as it contains no data, and its events, which need a key like every other route."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..serving.streaming import EventStream
from ..state import Gateway
from .document import document


def page_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def get_page() -> Response:
        body, headers = document()
        return Response(body, headers=headers, media_type="text/html")

    @router.get("/ui/events", response_class=Response)
    async def get_events() -> Any:
        feed = gateway.feed
        feed.join()
        return EventStream(feed.frames(), on_close=feed.leave, timeout_s=None)

    return router
