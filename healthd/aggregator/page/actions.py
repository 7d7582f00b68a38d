"""
What people change by the page: log in and out, quarantine, release, repairs. Each by a form of ours alone.

Also here:

- what every path of the page does alike: its feed, and errors as pages for people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import RedirectResponse, Response

from healthd.aggregator.api import MAX_REASON_LENGTH, check_origin, check_request, parts_of, problem_of
from healthd.aggregator.gate.records import Override
from healthd.aggregator.identity.tokens import AuthError, Scope
from healthd.aggregator.page import rendering
from healthd.aggregator.page.events import Feed, FullError
from healthd.aggregator.page.session import (
    MAX_TOKEN_LENGTH,
    Visitor,
    check_token,
    check_word,
    forget,
    form_of,
    keep,
    local_path,
    review,
    visitor_of,
)
from healthd.aggregator.quarantine.repair_records import RepairDecision
from healthd.core.errors import BadInputError, HealthdError, NotFoundError
from healthd.core.model import Quarantine
from healthd.core.node_name import check_name

# What the form offers; None: until somebody releases it.
ENDS: dict[str, float | None] = {"1h": 3600.0, "8h": 28800.0, "1d": 86400.0, "7d": 604800.0, "open": None}


def feed_of(request: Request) -> Feed:
    feed: Feed = request.app.state.feed
    return feed


class PageRoute(APIRoute):
    """A path whose errors are for people: a page that says what was wrong, or the log-in."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers, with its errors as pages."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                check_request(request, self.dependant)
                if request.scope["path"] != "/log-in" and not request.scope["path"].startswith("/static/"):
                    await review(request)
                return await answer(request)
            except HealthdError as error:
                return error_page(request, error)
            except RequestValidationError as error:
                first = error.errors()[0]
                place = " ".join(str(part) for part in first["loc"])
                return error_page(request, BadInputError(f"{place}: {first['msg']}"))

        return handler


def error_page(request: Request, error: HealthdError) -> Response:
    """Say it to a person; who is not known is sent to the log-in and comes back afterwards."""
    path, query = request.scope["path"], request.scope["query_string"].decode("latin-1")
    if isinstance(error, AuthError) and error.status == 401 and path != "/log-in":
        if request.method != "GET" or path == "/events":
            return rendering.page("error.html", status=401, visitor=None, status_code=401, said=str(error))
        asked = urlencode({"next": quote(path) + (f"?{query}" if query else "")})
        return RedirectResponse(f"/log-in?{asked}", status_code=303, headers=rendering.HEADERS)
    if isinstance(error, FullError):
        status, headers = 503, {"retry-after": "30"}
    else:
        problem, headers = problem_of(error)
        status = problem.status
    headers.pop("www-authenticate", None)
    return rendering.page(
        "error.html", status=status, headers=headers, visitor=None, status_code=status, said=str(error)
    )


router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.post("/log-in")
async def log_in(request: Request) -> Response:
    """Keep the token in the browser's cookie, when it may read."""
    fields = await form_of(request, {"token": MAX_TOKEN_LENGTH, "next": 600})
    target = local_path(fields.get("next"))
    parts = parts_of(request)
    if parts.guard.open:
        return to(target)
    token = fields.get("token", "")
    try:
        await check_token(parts, token)
    except AuthError as error:
        # Never what was typed in: it may be a token with one letter wrong.
        return rendering.page(
            "log_in.html",
            status=403,
            visitor=None,
            next=target,
            opened=False,
            said=str(error),
            longest=MAX_TOKEN_LENGTH,
        )
    response = to(target)
    keep(request, response, token)
    return response


@router.post("/log-out")
async def log_out(request: Request) -> Response:
    """Drop the cookie."""
    check_origin(request)
    response = to("/log-in")
    forget(request, response)
    return response


@router.post("/nodes/{node}/quarantine")
async def quarantine(request: Request, node: str) -> Response:
    """Keep the node out of admissions."""
    visitor = visitor_of(request, Scope.ADMIN)
    fields = await form_of(request, {"word": 64, "reason": MAX_REASON_LENGTH, "end": 8})
    check_word(visitor, fields.get("word", ""))
    known_node(request, node)
    await keep_out(request, visitor, [node], fields)
    return to(f"/nodes/{quote(node, safe='')}?done=quarantined")


@router.post("/nodes/{node}/release")
async def release(request: Request, node: str) -> Response:
    """Let the node in again; what the rules hold against it is taken back, too."""
    visitor = visitor_of(request, Scope.ADMIN)
    fields = await form_of(request, {"word": 64, "reason": MAX_REASON_LENGTH})
    check_word(visitor, fields.get("word", ""))
    known_node(request, node)
    await let_in(request, visitor, [node], fields)
    return to(f"/nodes/{quote(node, safe='')}?done=released")


@router.post("/nodes/{node}/repairs")
async def decide_repair(request: Request, node: str) -> Response:
    """Accept or reject the repair of a device, or mark it as done."""
    visitor = visitor_of(request, Scope.ADMIN)
    fields = await form_of(request, {"word": 64, "reason": MAX_REASON_LENGTH, "device": 128, "decision": 8})
    check_word(visitor, fields.get("word", ""))
    known_node(request, node)
    try:
        decision = RepairDecision(fields.get("decision", ""))
    except ValueError:
        raise BadInputError(f"choose a decision: {', '.join(one.value for one in RepairDecision)}") from None
    why, device = reason_of(fields.get("reason", "")), fields.get("device") or None
    await parts_of(request).engine.decide_repair(node, decision, device=device, by=visitor.caller.name, why=why)
    return to(f"/repairs?done={decision.value}")


@router.post("/gates/{gate}/override")
async def override(request: Request, gate: str) -> Response:
    """Admit the job of a gate by hand, whatever its nodes are, for a while."""
    visitor = visitor_of(request, Scope.ADMIN)
    fields = await form_of(request, {"word": 64, "reason": MAX_REASON_LENGTH, "end": 8})
    check_word(visitor, fields.get("word", ""))
    engine = parts_of(request).engine
    job = (await engine.get(gate)).request.job
    reason = reason_of(fields.get("reason", ""))
    seconds, now = end_of(fields.get("end", "")), engine.now()
    if seconds is None:
        raise BadInputError("an override needs an end")
    record = Override(job=job, reason=reason, owner=visitor.caller.name, since=now, until=now + seconds)
    await engine.override(job, record)
    return to(f"/gates/{quote(gate, safe='')}")


async def keep_out(request: Request, visitor: Visitor, nodes: Sequence[str], fields: Mapping[str, str]) -> None:
    """Quarantine these nodes, for as long as the form says."""
    reason, seconds = reason_of(fields.get("reason", "")), end_of(fields.get("end", ""))
    engine = parts_of(request).engine
    now = engine.now()
    record = Quarantine(
        reason=reason,
        owner=visitor.caller.name,
        owner_kind="person",
        since=now,
        until=None if seconds is None else now + seconds,
    )
    await asyncio.gather(*(engine.quarantine(node, record) for node in nodes))


async def let_in(request: Request, visitor: Visitor, nodes: Sequence[str], fields: Mapping[str, str]) -> None:
    """Let these nodes in again; what the rules hold against them is taken back, too."""
    parts, why = parts_of(request), f"by {visitor.caller.name}: {reason_of(fields.get('reason', ''))}"
    await asyncio.gather(*(parts.engine.quarantine(node, None, why=why) for node in nodes))
    for node in nodes:
        parts.accusations.clear(node)
        if parts.drain is not None:
            await parts.drain.release(node, why)


def end_of(text: str) -> float | None:
    """How many seconds from now, None: until somebody ends it; BadInputError for what the form does not offer."""
    if text not in ENDS:
        raise BadInputError(f"choose an end: {', '.join(ENDS)}")
    return ENDS[text]


def known_node(request: Request, node: str) -> None:
    """NotFoundError for a node that was never heard of."""
    check_name(node)
    if parts_of(request).fleet.view(node) is None:
        raise NotFoundError(f"no node {node[:80]!r} has ever reported")


def reason_of(text: str) -> str:
    """Why, as it is kept; BadInputError for nothing, and for what is no line."""
    if not text or not text.isprintable():
        raise BadInputError(f"give a reason, in one line of 1 to {MAX_REASON_LENGTH} characters")
    return text


def to(target: str) -> Response:
    """Send the browser on."""
    return RedirectResponse(target, status_code=303, headers=rendering.HEADERS)
