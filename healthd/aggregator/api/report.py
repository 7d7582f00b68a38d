"""The path of the figures on the gate itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from healthd.aggregator.api.handling import READ, Answer, ApiRoute, parts_of
from healthd.aggregator.calibration.report import Report, report_of
from healthd.aggregator.store.calibration_rows import read_counts

DEFAULT_DAYS = 28.0
"""Four weeks: every day of the week alike often, and as long as the history of nodes."""
MOST_DAYS = 366.0

router = APIRouter(prefix="/v1", route_class=ApiRoute, tags=["gates"])


@router.get("/report", dependencies=[READ])
async def report(request: Request, days: Annotated[float, Query(gt=0, le=MOST_DAYS)] = DEFAULT_DAYS) -> Answer[Report]:
    """How right the gate was over the last days: shares with their counts, and whether to go on to enforce."""
    parts = parts_of(request)
    since = parts.engine.now() - days * 86400.0
    counts = await parts.store.read(lambda connection: read_counts(connection, since))
    return Answer(report_of(counts, days=days, ungated=parts.ungated.figure))
