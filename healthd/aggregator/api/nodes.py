"""
The paths of the fleet and its nodes, and of what people decide about them: quarantine, leases, forget, rekey.

Also here:

- the paths of time in the verdict: what happened on a node, and the breaker of the rules;
- the repairs that healthd advises;
- screening in idle hours.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from healthd.aggregator.api.handling import (
    READ,
    Admin,
    ApiRoute,
    BreakersReset,
    FleetSummary,
    Forgotten,
    History,
    NodeDetail,
    NodeList,
    NodeRow,
    OpenBreakers,
    Parts,
    Recovered,
    Rekeyed,
    Released,
    RepairList,
    ScreeningList,
    Unquarantined,
    parts_of,
    problems,
)
from healthd.aggregator.fleet import NodeView
from healthd.aggregator.gate import eligibility
from healthd.aggregator.identity.tokens import Caller
from healthd.aggregator.policy import HISTORY_DAYS
from healthd.aggregator.quarantine.repair_records import RepairDecision
from healthd.core.errors import BadInputError, ConflictError, NotFoundError
from healthd.core.model import Health, Quarantine
from healthd.core.node_name import check_name
from healthd.core.wire import FROM_OUTSIDE

MOST_LISTED = 1000
MOST_REASONS = 8
MOST_EVENTS = 100
MAX_REASON_LENGTH = 500

router = APIRouter(prefix="/v1", route_class=ApiRoute)

RULES_MOST_EVENTS = 1000
MOST_ID = 2**63 - 1
"""Of an event: what the databases count with."""

MOST_REPAIRS = 1000


@dataclass(frozen=True, kw_only=True)
class PersonDecision:
    """What a person says of a node or job: why, who, and until when: `until` or `for_seconds`."""

    __pydantic_config__ = FROM_OUTSIDE

    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON_LENGTH)]
    """One line that people read."""
    owner: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Who says so. None: the name of the caller's token."""
    until: float | None = None
    """When it ends, in seconds since the epoch."""
    for_seconds: float | None = None
    """How long from now it lasts."""


@router.get("/fleet", dependencies=[READ], tags=["fleet"])
async def fleet(request: Request) -> FleetSummary:
    """The fleet in numbers, and what prevents admissions."""
    parts = parts_of(request)
    healths: Counter[Health] = Counter()
    quarantined = 0
    for health, _, quarantine, _ in parts.fleet.survey():
        healths[health] += 1
        quarantined += quarantine is not None
    return FleetSummary(
        issuer=parts.fleet.issuer,
        nodes=len(parts.fleet),
        health={health: healths[health] for health in Health},
        pools=parts.fleet.pools(),
        quarantined=quarantined,
        accused=len(parts.accusations.all()),
        leased=len({row.node for row in parts.engine.leases()}),
        gates_holding=len(parts.engine.open_gates()),
        overrides=parts.engine.overrides(),
        recovering=parts.engine.recovering(),
        breakers=parts.engine.breakers(),
    )


@router.get("/nodes", dependencies=[READ], tags=["nodes"])
async def nodes(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
    after: Annotated[str | None, Query(max_length=253)] = None,
    health: Health | None = None,
    pool: str | None = None,
    label: Annotated[str | None, Query(description="name=value")] = None,
) -> NodeList:
    """Nodes by name; `next` is the `after` of the next page, null on the last."""
    registry = parts_of(request).fleet
    key, separator, value = (label or "").partition("=")
    if label is not None and not (key and separator):
        raise BadInputError(f"label={label[:80]!r} must have the form name=value")
    names = registry.names() if pool is None else registry.pool(pool)
    found: list[NodeView] = []
    more = False
    for name in names[bisect.bisect_right(names, after) if after is not None else 0 :]:
        if health is not None and registry.health_of(name) is not health:
            continue
        if label is not None and registry.label_of(name, key) != value:
            continue
        if len(found) == limit:
            more = True
            break
        view = registry.view(name)
        if view is not None:
            found.append(view)
    parts = parts_of(request)
    rows = tuple(NodeRow(**_row(parts, view)) for view in found)
    return NodeList(nodes=rows, next=found[-1].node.node if more else None)


@router.get("/nodes/{node}", dependencies=[READ], tags=["nodes"], responses=problems(409))
async def node(request: Request, node: str) -> NodeDetail:
    """The state of one node, by any of its names, with current ages and the aggregator's verdict."""
    parts = parts_of(request)
    view = _meant(parts, node)
    node = view.node.node
    state = view.node.current()
    if state is not None:
        state = dataclasses.replace(
            state, health=view.health, reasons=view.reasons, quarantine=view.node.quarantine or state.quarantine
        )
    events = await parts.engine.history(node, limit=MOST_EVENTS)
    return NodeDetail(
        **{**_row(parts, view), "reasons": view.reasons},
        state=state,
        orders=view.orders,
        reports=view.node.orders,
        grants=tuple(row for row in parts.engine.leases() if row.node == node),
        events=events,
        rules=parts.engine.remembered(node),
    )


@router.put("/nodes/{node}/quarantine", tags=["nodes"])
async def quarantine(
    request: Request, node: str, caller: Admin, body: PersonDecision, unseen: bool = False
) -> Quarantine:
    """Exclude a node from admissions; with `unseen` also one that has never reported, before it joins."""
    check_name(node)
    word, now = checked(body), parts_of(request).engine.now()
    record = Quarantine(
        reason=word.reason, owner=owner_of(word.owner, caller), owner_kind="person", since=now, until=end_of(word, now)
    )
    if not unseen:
        _known(parts_of(request), node, "; to quarantine a node that has not reported yet, use ?unseen=true (--unseen)")
    return await parts_of(request).engine.quarantine(node, record) or record


@router.delete("/nodes/{node}/quarantine", tags=["nodes"], responses=problems(409))
async def unquarantine(
    request: Request,
    node: str,
    caller: Admin,
    reason: Annotated[str | None, Query(min_length=1, max_length=MAX_REASON_LENGTH)] = None,
) -> Unquarantined:
    """Release a node, by any of its names; clears the state of the quarantine rules for it. Safe to repeat."""
    parts = parts_of(request)
    view = _meant(parts, node)
    node = view.node.node
    if view.node.quarantine is not None or parts.engine.remembered(node) is not None:
        await parts.engine.quarantine(node, None, why=f"by {caller.name}" + (f": {reason}" if reason else ""))
    parts.accusations.clear(node)
    if parts.drain is not None:
        await parts.drain.release(node, f"by {caller.name}" + (f": {reason}" if reason else ""))
    return Unquarantined(node=node, by=caller.name)


@router.delete("/nodes/{node}", tags=["nodes"], responses=problems(409))
async def forget(request: Request, node: str, caller: Admin) -> Forgotten:
    """
    Remove a node that is gone, with its key; its next sync is a first one. The answer lists what else was removed.

    409 while a job uses it, and while it is quarantined and still syncs.
    """
    parts = parts_of(request)
    _known(parts, node)
    gone = await parts.engine.forget(node, caller.name)
    accused = parts.accusations.of(node)
    parts.accusations.clear(node)
    return Forgotten(node=node, quarantine=gone.quarantine, rules=gone.rules, accused=accused, leases=gone.leases)


@router.delete("/nodes/{node}/leases", tags=["nodes"], responses=problems(409))
async def release_leases(request: Request, node: str, caller: Admin) -> Released:
    """End every lease on a node, whichever gate granted it; its job is not touched. Safe to repeat."""
    parts = parts_of(request)
    node = _meant(parts, node).node.node
    return Released(node=node, released=await parts.engine.release_node(node, caller.name))


@router.post("/nodes/{node}/rekey", tags=["nodes"], responses=problems(409))
async def rekey(request: Request, node: str, caller: Admin) -> Rekeyed:
    """Accept the most recently refused key as the node's: for a machine that was replaced and kept its name."""
    parts = parts_of(request)
    _known(parts, node)
    await parts.engine.rekey(node, caller.name)
    return Rekeyed(node=node)


@router.post("/fleet/recover", tags=["fleet"])
async def recover(request: Request, caller: Admin) -> Recovered:
    """
    Confirm that the fleet is known again after the loss of the database. `recovered` is false if nothing was lost.
    """
    return Recovered(recovered=await parts_of(request).engine.recover(caller.name))


def checked(word: PersonDecision) -> PersonDecision:
    """The same; BadInputError for what cannot be shown to people in one line."""
    if not word.reason.strip() or not word.reason.isprintable():
        raise BadInputError(f"'reason' must be one line of 1 to {MAX_REASON_LENGTH} characters")
    return word


def end_of(word: PersonDecision, now: float) -> float | None:
    """When it ends, in seconds since the epoch; None when nobody said. `now` by the clock that will compare them."""
    if word.until is not None and word.for_seconds is not None:
        raise BadInputError("give either 'until' or 'for_seconds'")
    until = now + word.for_seconds if word.for_seconds is not None else word.until
    if until is not None and until <= now:
        raise BadInputError("the given end is in the past")
    return until


def owner_of(owner: str | None, caller: Caller) -> str:
    """Who says so: a name that somebody gave is shown with the token that gave it. BadInputError for none in a line."""
    if owner is None or owner == caller.name:
        return caller.name
    if not owner.isprintable():
        raise BadInputError("'owner' must be a name of 1 to 64 printable characters")
    return owner if caller.name == "loopback" else f"{owner} (token {caller.name})"


@router.get("/nodes/{node}/history", dependencies=[READ], tags=["nodes"])
async def history(
    request: Request,
    node: str,
    limit: Annotated[int, Query(ge=1, le=RULES_MOST_EVENTS)] = 100,
    before: Annotated[int | None, Query(ge=1, le=MOST_ID)] = None,
) -> History:
    """Events of a node, newest first; `next` is the `before` of the next page, null on the last."""
    check_name(node)
    parts = parts_of(request)
    found = await parts.engine.history(node, limit=limit + 1, before=before, days=HISTORY_DAYS)
    if not found and parts.fleet.view(node) is None:
        raise NotFoundError(f"no node {node[:80]!r} has ever reported; 'healthd fleet status' lists all")
    page = found[:limit]
    return History(node=node, events=tuple(page), next=page[-1].id if len(found) > limit else None)


@router.get("/fleet/breaker", dependencies=[READ], tags=["fleet"])
async def breaker(request: Request) -> OpenBreakers:
    """Open breakers of the quarantine rules, by pool; the empty name stands for nodes without a pool."""
    return OpenBreakers(open=parts_of(request).engine.breakers())


@router.post("/fleet/breaker/reset", tags=["fleet"])
async def reset_breaker(request: Request, caller: Admin, pool: str | None = None) -> BreakersReset:
    """Let the rules quarantine again, everywhere or in one pool. Safe to repeat."""
    return BreakersReset(reset=await parts_of(request).engine.reset_breaker(caller.name, pool))


@dataclass(frozen=True, kw_only=True)
class RepairWord:
    """What a person decides about the repairs of a node, or of one of its devices."""

    __pydantic_config__ = FROM_OUTSIDE

    decision: RepairDecision
    """`accept`: it will be made. `reject`: it will not. `done`: it was made; the node has to pass the deep tier."""
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON_LENGTH)]
    """One line that people read."""
    device: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The device, or `node`, as the list names it. None: every open repair of the node."""
    owner: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Who decides. None: the name of the caller's token."""


@router.get("/fleet/repairs", dependencies=[READ], tags=["fleet"])
async def repairs(
    request: Request, closed: Annotated[int, Query(ge=0, le=MOST_REPAIRS, description="Closed repairs to list.")] = 0
) -> RepairList:
    """List the repairs that healthd advises and what people decided about them."""
    engine = parts_of(request).engine
    return RepairList(repairs=(*engine.repairs(), *(await engine.closed_repairs(limit=closed) if closed else ())))


@router.put("/nodes/{node}/repairs", tags=["nodes"], responses=problems(409))
async def decide_repair(request: Request, node: str, caller: Admin, body: RepairWord) -> RepairList:
    """
    Accept or reject the repairs of a node, or mark them as done. The answer lists the open ones. Safe to repeat.

    A node whose repair is done stays quarantined until it has passed the deep tier. 409 for a repair that is done.
    """
    if not body.reason.strip() or not body.reason.isprintable():
        raise BadInputError(f"'reason' must be one line of 1 to {MAX_REASON_LENGTH} characters")
    parts = parts_of(request)
    name = _meant(parts, node).node.node
    found = await parts.engine.decide_repair(
        name, body.decision, device=body.device, by=owner_of(body.owner, caller), why=body.reason
    )
    return RepairList(repairs=found)


@router.get("/fleet/screening", dependencies=[READ], tags=["fleet"])
async def screening(
    request: Request, pool: str | None = None, limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100
) -> ScreeningList:
    """List the nodes that are screened in idle hours by risk, with the terms of each risk."""
    found = parts_of(request).screening
    if found is None:
        return ScreeningList(tier=None, nodes=(), more=0)
    listed = found.listed(pool)
    return ScreeningList(tier=found.settings.tier, nodes=listed[:limit], more=max(0, len(listed) - limit))


def _known(parts: Parts, node: str, more: str = "; 'healthd fleet status' lists all") -> NodeView:
    view = parts.fleet.view(node)
    if view is None:
        raise NotFoundError(f"no node {node[:80]!r} has ever reported{parts.fleet.near(node).rstrip('?')}{more}")
    return view


def _meant(parts: Parts, name: str) -> NodeView:
    """The node of this name, or the only one that is also known by it. NotFoundError; ConflictError names several."""
    called = parts.fleet.called(name)
    if len(called) > 1:
        raise ConflictError(eligibility.ambiguous_text(name[:80], called))
    return _known(parts, called[0] if called else name)


def _row(parts: Parts, view: NodeView) -> dict[str, Any]:
    """The members of a NodeRow, which are also some of a NodeDetail."""
    state = view.node.state
    return {
        "node": view.node.node,
        "health": view.health,
        "reasons": view.reasons[:MOST_REASONS],
        "heard_seconds": view.node.heard_seconds,
        "confirmed": view.node.confirmed,
        "duplicate": view.node.duplicate,
        "quarantine": view.node.quarantine or (state.quarantine if state else None),
        "accused": parts.accusations.of(view.node.node),
        "removed": None if parts.drain is None else parts.drain.out().get(view.node.node),
        "pool": state.labels.get("pool") if state else None,
        "labels": state.labels if state else {},
        "instance_type": state.instance_type if state else None,
        "address": state.address if state else None,
        "allocated": state.allocated if state else (),
        # Of a node that was not heard since the start: what the database says that it holds.
        "leases": state.leases if state else parts.engine.leases_on(view.node.node),
        "faults": state.faults if state else (),
        "running": state.running if state else None,
        "maintenance": state.maintenance if state else None,
    }
