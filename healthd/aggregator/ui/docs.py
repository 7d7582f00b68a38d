"""The API for those who write programs: its description as a file, and the same as a page."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from healthd.aggregator.ui import rendering
from healthd.aggregator.ui.actions import PageRoute
from healthd.aggregator.ui.docs_view import contents_of
from healthd.aggregator.ui.session import visitor_of
from healthd.core.wire import encode

programs = APIRouter()
router = APIRouter(route_class=PageRoute)


@programs.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The description of the API (OpenAPI 3.1)."""
    visitor_of(request)
    return Response(encode(await _described(request)), media_type="application/json", headers=rendering.HEADERS)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The same for people."""
    visitor = visitor_of(request)
    described = await _described(request)
    # Also beside the loop: it is by far the longest page.
    return await asyncio.to_thread(lambda: rendering.page("docs.html", visitor=visitor, docs=contents_of(described)))


async def _described(request: Request) -> dict[str, Any]:
    """Beside the loop: the first time it takes as long as some hundred syncs."""
    found: dict[str, Any] = await asyncio.to_thread(request.app.openapi)
    return found
