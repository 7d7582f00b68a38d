"""The path of a preflight's roll call, before its gate is asked."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from healthd.aggregator.api.auth import Scope
from healthd.aggregator.api.handling import answer, body_of, needs, parts_of
from healthd.aggregator.controller.roll_call import RollCallBody

router = APIRouter(prefix="/v1/preflight")


@router.post("/ranks", dependencies=[Depends(needs(Scope.GATE))])
async def ranks(request: Request) -> Response:
    """A rank has come: whether all who have were started alike, and how long the gate will hold. Safe to repeat."""
    return answer(parts_of(request).rollcall.answer(await body_of(request, RollCallBody)))
