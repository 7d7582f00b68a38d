"""The API's description as a file, and FastAPI's documentation page of it."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, Response

from healthd.aggregator.api import ApiRoute
from healthd.aggregator.page import rendering
from healthd.aggregator.page.actions import PageRoute
from healthd.aggregator.page.session import review, visitor_of
from healthd.core.wire import encode

programs = APIRouter(route_class=ApiRoute, tags=["service"], include_in_schema=False)
router = APIRouter(route_class=PageRoute, include_in_schema=False)


@programs.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The description of the API (OpenAPI 3.1)."""
    await review(request)
    visitor_of(request)
    # Beside the loop: the first time it takes as long as some hundred syncs.
    found: dict[str, Any] = await asyncio.to_thread(request.app.openapi)
    return Response(encode(found), media_type="application/json", headers=rendering.HEADERS)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The same for people: Swagger UI, which needs script; its files are ours (`rendering.statics`)."""
    visitor_of(request)
    body, headers = await asyncio.to_thread(_swagger_ui)
    return HTMLResponse(body, headers=headers)


@functools.cache
def _swagger_ui() -> tuple[bytes, dict[str, str]]:
    """FastAPI's page; its Content-Security-Policy allows its one inline script by its hash, and its icons."""
    made = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="API · healthd",
        swagger_js_url=rendering.static_path("swagger-ui-bundle.js"),
        swagger_css_url=rendering.static_path("swagger-ui.css"),
        swagger_favicon_url=rendering.static_path("mark.svg"),
        # The default is a badge for which a service elsewhere fetches the description.
        swagger_ui_parameters={"validatorUrl": None},
    )
    body = bytes(made.body)
    script = body.rpartition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    # Its style sheet holds its icons, as data: URLs.
    policy = rendering.policy(scripts=f"'self' 'sha256-{digest}'", images="'self' data:")
    return body, {**rendering.HEADERS, "content-security-policy": policy}
