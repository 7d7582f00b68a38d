"""The paths of the page: what people read. What they change is in `actions`."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import Response

from checks.reasons import REASONS
from healthd.aggregator.api import MOST_ID, ApiRoute, Parts, parts_of
from healthd.aggregator.identity.tokens import AuthError
from healthd.aggregator.page import actions, gate_view, job_view, node_view, overview, rendering
from healthd.aggregator.page.actions import PageRoute, feed_of
from healthd.aggregator.page.events import FLEET, Feed, live
from healthd.aggregator.page.rendering import WORST_FIRST
from healthd.aggregator.page.session import MAX_TOKEN_LENGTH, review, visitor_of
from healthd.aggregator.policy import HISTORY_DAYS
from healthd.core.asked import nodes_asked, terms_of
from healthd.core.errors import NotFoundError
from healthd.core.evidence import speeds_note
from healthd.core.model import OrderKind
from healthd.core.wire import encode

# What one page may show; what is more is counted, or on the next page.
MOST_EVENTS = 8
MOST_STATES = 200


def add_to(app: FastAPI, parts: Parts) -> None:
    """Give the application what the paths of the page need."""
    app.state.feed = Feed(parts.fleet, parts.engine, parts.stopping.is_set)


router = APIRouter(route_class=PageRoute, include_in_schema=False)
programs = APIRouter(route_class=ApiRoute, tags=["service"], include_in_schema=False)
ROUTERS = (overview.router, router, actions.router, programs)


@programs.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The description of the API (OpenAPI 3.1)."""
    await review(request)
    visitor_of(request)
    # Beside the loop: the first time it takes as long as some hundred syncs.
    found: dict[str, Any] = await asyncio.to_thread(request.app.openapi)
    return Response(encode(found), media_type="application/json", headers=rendering.HEADERS)


@router.get("/nodes/{node}")
async def node(
    request: Request,
    node: str,
    before: Annotated[int | None, Query(ge=1, le=MOST_ID)] = None,
    done: Annotated[str | None, Query(pattern="^(quarantined|released)$")] = None,
) -> Response:
    """One node: why it is as it is, since when, and what to do."""
    visitor = visitor_of(request)
    parts, feed = parts_of(request), feed_of(request)
    topic = f"node:{node}"
    view = parts.fleet.view(node)
    if view is None:
        raise NotFoundError(f"no node {node[:80]!r} has ever reported")
    after = feed.begin(topic)
    state = view.node.current()
    if state is not None:
        feed.samples.take(state, time.time())
    events = await parts.engine.history(node, limit=MOST_EVENTS + 1, before=before, days=HISTORY_DAYS)
    record = parts.engine.remembered(node)
    feed.board.begin()
    rows = node_view.rows(state, feed.samples) if state else []
    return rendering.page(
        "node.html",
        visitor=visitor,
        after=after,
        topic=topic,
        node=view.node,
        state=state,
        health=view.health,
        cell=feed.board.cell(node),
        whys=node_view.whys(view.reasons, record),
        record=record,
        quarantine=view.node.quarantine,
        accused=parts.accusations.of(node),
        removed=None if parts.drain is None else parts.drain.out().get(node),
        repairs=[one for one in parts.engine.repairs() if one.node == node],
        own_quarantine=None if state is None or view.node.quarantine else state.quarantine,
        speeds_note=speeds_note(state.results) if state else None,
        tiles=node_view.tiles(state) if state else [],
        measured=node_view.measured(rows),
        rows=rows,
        grants=[row for row in parts.engine.leases() if row.node == node],
        orders=[order for order in view.orders or () if order.kind != OrderKind.LEASE],
        events=events[:MOST_EVENTS],
        older=events[MOST_EVENTS - 1].id if len(events) > MOST_EVENTS else None,
        before=before,
        done=done,
    )


@router.get("/gates/{gate}")
async def gate(request: Request, gate: str) -> Response:
    """One gate: how far it is or what it decided, on what evidence, and the validation as it ran."""
    visitor = visitor_of(request)
    parts, feed = parts_of(request), feed_of(request)
    topic = f"gate:{gate}"
    after = feed.begin(topic)
    told = await parts.engine.explain(gate)
    found = told.gate
    decision = parts.engine.answer(found)
    return rendering.page(
        "gate.html",
        visitor=visitor,
        after=after,
        topic=topic,
        gate=found,
        decision=decision,
        asked_for=nodes_asked(found.as_asked),
        terms=terms_of(decision),
        steps=gate_view.steps_of(found),
        pictures=gate_view.pictures(found),
        left_out=gate_view.left_out(decision),
        told_above={reason.node for reason in decision.reasons},
        states=sorted(told.states, key=lambda state: WORST_FIRST.index(state.health))[:MOST_STATES],
        more_states=max(0, len(told.states) - MOST_STATES),
        most_nodes=MOST_STATES,
        leases=told.leases[:MOST_STATES],
        outcome=told.outcome,
        died=await parts.postmortems.find(gate) is not None,
        open_api=parts.guard.open,
    )


@router.get("/jobs/{gate}")
async def job_end(request: Request, gate: str) -> Response:
    """Why the job of a gate died: the verdict, what shows it, what was measured, and what to do."""
    visitor = visitor_of(request)
    parts = parts_of(request)
    record = await parts.postmortems.wait(gate, None, 0.0)
    told = sorted(record.told.items(), key=lambda item: (rendering.natural(item[1].node), item[1].rank or 0))
    return rendering.page(
        "job.html",
        visitor=visitor,
        record=record,
        end=job_view.job_end(record),
        missing=record.missing,
        measured=[] if record.verdict is None else record.verdict.measurement.split("; "),
        told=told[:MOST_STATES],
        more_told=max(0, len(told) - MOST_STATES),
        most_nodes=MOST_STATES,
        outcome=(await parts.engine.explain(gate)).outcome,
    )


@router.get("/reasons")
async def reasons(request: Request) -> Response:
    """The catalogue of reasons."""
    return rendering.page("reasons.html", visitor=visitor_of(request), reasons=list(REASONS.values()))


@router.get("/events")
async def events(
    request: Request,
    topic: Annotated[str, Query(max_length=300)] = FLEET,
    after: Annotated[str | None, Query(max_length=40)] = None,
) -> Response:
    """The stream of what changes on the pages of a topic; it ends when the visitor's token is no longer good."""
    visitor_of(request)

    def still() -> bool:
        try:
            visitor_of(request)
        except AuthError:
            return False
        return True

    return live(feed_of(request).stream(topic, request.headers.get("last-event-id") or after, still))


@router.get("/static/{name}")
async def static(name: str) -> Response:
    """A static file; they need no token, for the log-in has to look like something."""
    found = rendering.static(name)
    if found is None:
        raise NotFoundError(f"no file {name[:80]!r}")
    return found


@router.get("/log-in", name="log_in")
async def log_in(request: Request, next: Annotated[str | None, Query(max_length=600)] = None) -> Response:  # noqa: A002  the name in the URL
    """The form for a token."""
    opened = parts_of(request).guard.open
    return rendering.page(
        "log_in.html", visitor=None, next=next or "/", opened=opened, said="", longest=MAX_TOKEN_LENGTH
    )
