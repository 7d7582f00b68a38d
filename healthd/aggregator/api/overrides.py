"""The paths of overrides: a person admits a job by hand, whatever its nodes are."""

from __future__ import annotations

from fastapi import APIRouter, Request

from healthd.aggregator.api.handling import READ, Admin, Answer, ApiRoute, Body, Parts, parts_of
from healthd.aggregator.api.nodes import Word, checked, end_of, owner_of
from healthd.aggregator.api.records import OverrideEnded
from healthd.aggregator.model.claims import Override
from healthd.core.errors import BadInputError, NotFoundError

# An override of a year was a mistake.
MAX_OVERRIDE_SECONDS = 30 * 86400.0

router = APIRouter(prefix="/v1/overrides", route_class=ApiRoute, tags=["overrides"])


@router.get("/{job:path}", dependencies=[READ])
async def override(request: Request, job: str) -> Answer[Override]:
    """The override of a job that is in force."""
    return Answer(_override(parts_of(request), job))


@router.put("/{job:path}")
async def put_override(request: Request, job: str, caller: Admin, body: Body[Word]) -> Answer[Override]:
    """Admit a job by hand, whatever its nodes are, until a time that must be given."""
    word, now = checked(body), parts_of(request).engine.now()
    until = end_of(word, now)
    if until is None or until > now + MAX_OVERRIDE_SECONDS:
        raise BadInputError("override: 'until' or 'for_seconds' must give an end within 30 days")
    if not job or len(job) > 256 or not job.isprintable():
        raise BadInputError("override: the job's name has 1 to 256 printable characters")
    record = Override(job=job, reason=word.reason, owner=owner_of(word.owner, caller), since=now, until=until)
    await parts_of(request).engine.override(job, record)
    return Answer(record)


@router.delete("/{job:path}")
async def delete_override(request: Request, job: str, _caller: Admin) -> Answer[OverrideEnded]:
    """Take an override back."""
    parts = parts_of(request)
    _override(parts, job)
    await parts.engine.override(job, None)
    return Answer(OverrideEnded(job=job))


def _override(parts: Parts, job: str) -> Override:
    for record in parts.engine.overrides():
        if record.job == job:
            return record
    raise NotFoundError(f"no override of job {job[:80]!r} is in force")
