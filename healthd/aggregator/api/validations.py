"""The paths of validations by hand: collectives over nodes, with the search for who is at fault, and no lease."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from fastapi import APIRouter, Request

from checks.contract import Tier
from healthd.aggregator.api.handling import GATE, READ, Answer, ApiRoute, Body, Wait, parts_of
from healthd.aggregator.api.records import ValidationState
from healthd.aggregator.model.gates import Gate
from healthd.core.errors import BadInputError, NotFoundError
from healthd.core.model import Decision, GateRequest, Mode, ValidationKind

router = APIRouter(prefix="/v1/validations", route_class=ApiRoute, tags=["validations"])


@dataclass(frozen=True, kw_only=True)
class ValidationBody:
    """
    Which nodes: `nodes`, or `pool` and `count`. `kind`: what they run together. `wait_seconds` None means the
    aggregator's policy.
    """

    nodes: tuple[str, ...] = ()
    pool: str | None = None
    count: int | None = None
    min_nodes: int | None = None
    kind: ValidationKind = ValidationKind.COLLECTIVES
    tier: Tier | None = None
    wait_seconds: float | None = None


@router.post("", dependencies=[GATE])
async def start(request: Request, wait: Wait, body: Body[ValidationBody]) -> Answer[ValidationState]:
    """Start one: 200 with what is known after `wait` seconds; follow it by its `id`."""
    parts = parts_of(request)
    gate = await parts.engine.ask(request_of(body))
    await parts.engine.wait(gate.id, wait)
    found = await parts.engine.get(gate.id)
    return Answer(_told(found, parts.engine.answer(found)), {"location": f"/v1/validations/{gate.id}"})


@router.get("/{gate}", dependencies=[READ])
async def follow(request: Request, gate: str, wait: Wait) -> Answer[ValidationState]:
    """The validations of a gate or of one started by hand, round by round; held back while it is open."""
    parts = parts_of(request)
    await parts.engine.wait(gate, wait)
    found = await parts.engine.get(gate)
    if not found.terms.collective:
        raise NotFoundError(f"gate {gate} runs no collectives over its nodes")
    return Answer(_told(found, parts.engine.answer(found)))


def request_of(body: ValidationBody) -> GateRequest:
    """The gate that a validation by hand is: it admits nobody. BadInputError where no two nodes are asked for."""
    wanted = len(body.nodes) or body.count or 0
    if (wanted if body.min_nodes is None else min(wanted, body.min_nodes)) < 2:
        # A gate may go on with one node, which has nobody to run collectives with; here that would be no answer.
        raise BadInputError("collectives are run by two nodes at least; name more, or set min_nodes to 2 or more")
    return GateRequest(
        job=f"validation-{secrets.token_hex(6)}",
        nodes=body.nodes,
        pool=body.pool,
        count=body.count,
        min_nodes=body.min_nodes,
        kind=body.kind,
        tier=body.tier,
        wait_seconds=body.wait_seconds,
        mode=Mode.ENFORCE,
        collective=True,
        lease=False,
    )


def _told(gate: Gate, decision: Decision) -> ValidationState:
    return ValidationState(
        id=gate.id, job=gate.request.job, phase=gate.phase, decision=decision, validations=gate.validations
    )
