"""The path of a preflight's roll call, before its gate is asked."""

from __future__ import annotations

from fastapi import APIRouter, Request

from healthd.aggregator.api.handling import GATE, Answer, ApiRoute, Body, parts_of, problems
from healthd.aggregator.controller.roll_call import RollCallAnswer, RollCallBody

router = APIRouter(prefix="/v1/preflight", route_class=ApiRoute, tags=["preflight"])


@router.post("/ranks", dependencies=[GATE], responses=problems(409))
async def ranks(request: Request, body: Body[RollCallBody]) -> Answer[RollCallAnswer]:
    """A rank has come: whether all who have were started alike, and how long the gate will hold. Safe to repeat."""
    return Answer(parts_of(request).rollcall.answer(body))
