"""The paths of validations by hand: collectives over nodes, with the search for who is at fault, and no lease."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from checks.contract import Tier
from healthd.aggregator.api.auth import Scope
from healthd.aggregator.api.handling import answer, body_of, needs, parts_of, wait_seconds
from healthd.aggregator.model import Gate
from healthd.core.errors import BadInputError, NotFoundError
from healthd.core.model import GateRequest, Mode

router = APIRouter(prefix="/v1/validations")
Wait = Annotated[float, Depends(wait_seconds)]


@dataclass(frozen=True, kw_only=True)
class ValidationBody:
    """Which nodes: `nodes`, or `pool` and `count`. `wait_seconds` None means the aggregator's policy."""

    nodes: tuple[str, ...] = ()
    pool: str | None = None
    count: int | None = None
    min_nodes: int | None = None
    tier: Tier | None = None
    wait_seconds: float | None = None


@router.post("", dependencies=[Depends(needs(Scope.GATE))])
async def start(request: Request, wait: Wait) -> Response:
    """Start one: 200 with what is known after `wait` seconds; follow it by its `id`."""
    parts = parts_of(request)
    body = await body_of(request, ValidationBody)
    wanted = len(body.nodes) or body.count or 0
    if (wanted if body.min_nodes is None else min(wanted, body.min_nodes)) < 2:
        # A gate may go on with one node, which has nobody to run collectives with; here that would be no answer.
        raise BadInputError("collectives are run by two nodes at least; name more, or set min_nodes to 2 or more")
    asked = GateRequest(
        job=f"validation-{secrets.token_hex(6)}",
        nodes=body.nodes,
        pool=body.pool,
        count=body.count,
        min_nodes=body.min_nodes,
        tier=body.tier,
        wait_seconds=body.wait_seconds,
        mode=Mode.ENFORCE,
        collective=True,
        lease=False,
    )
    gate = await parts.engine.ask(asked)
    await parts.engine.wait(gate.id, wait)
    found = await parts.engine.get(gate.id)
    return answer(_told(found, parts.engine.answer(found)), headers={"location": f"/v1/validations/{gate.id}"})


@router.get("/{gate}", dependencies=[Depends(needs(Scope.READ))])
async def follow(request: Request, gate: str, wait: Wait) -> Response:
    """The validations of a gate or of one started by hand, round by round; held back while it is open."""
    parts = parts_of(request)
    await parts.engine.wait(gate, wait)
    found = await parts.engine.get(gate)
    if not found.terms.collective:
        raise NotFoundError(f"gate {gate} runs no collectives over its nodes")
    return answer(_told(found, parts.engine.answer(found)))


def _told(gate: Gate, decision: object) -> Mapping[str, object]:
    about = {"id": gate.id, "job": gate.request.job, "phase": gate.phase, "decision": decision}
    return {**about, "validations": gate.validations}
