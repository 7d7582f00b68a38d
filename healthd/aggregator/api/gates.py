"""
The paths of gates: ask, follow, explain, release, report how the job ended; and the two-step end of a group's gate.

Also here:

- the paths of overrides: a person admits a job by hand, whatever its nodes are;
- the path by which a controller of jobs finds out what its jobs have, also after it was away;
- the path of a preflight's roll call, before its gate is asked;
- the paths of validations by hand: collectives over nodes, with the search for who is at fault, and no lease;
- the path of all jobs that ended badly;
- the path of the figures on the gate itself;
- what a caller may ask of gates whose credential speaks for some nodes alone, or for a pod of a job: whose nodes,
  whose jobs. A refusal (403) comes before anything is changed; what it may read does not depend on it.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from checks.contract import Tier
from healthd.aggregator.api.handling import (
    GATE,
    READ,
    Admin,
    ApiRoute,
    Evidence,
    GateCaller,
    GateList,
    GateReleased,
    GateRow,
    OutcomeKept,
    OverrideEnded,
    Parts,
    PostmortemList,
    Reader,
    ValidationState,
    Wait,
    parts_of,
    problems,
)
from healthd.aggregator.api.nodes import PersonDecision, checked, end_of, owner_of
from healthd.aggregator.backlog import ARRIVED
from healthd.aggregator.engine import Engine, GivenBack, Rights, RollCallAnswer, RollCallBody, less_than_policy
from healthd.aggregator.gate.records import Gate, LeaseRow, LeaseState, Override
from healthd.aggregator.identity.tokens import AuthError, Caller, Scope
from healthd.aggregator.jobs.calibration import Report, report_of
from healthd.aggregator.jobs.postmortem_records import PostmortemState, state_of
from healthd.core.errors import BadInputError, NotFoundError, StoreError
from healthd.core.model import (
    LARGEST_ATTEMPT,
    Claim,
    ClaimList,
    Decision,
    GateRequest,
    HandshakeAnswer,
    HandshakeBody,
    Health,
    Mode,
    ValidationKind,
    Verdict,
)
from healthd.core.wire import FROM_OUTSIDE, plain
from healthd.core.workload import LONGEST as LONGEST_WORKLOAD
from healthd.core.workload import pod_of, process_of
from healthd.postmortem.notes import MAX_PACKED_BYTES

MOST_LISTED = 500
HOLD_RETRY_SECONDS = 1
NO_NODES: list[str] = []
LEAST_SECONDS = 1.0
"""So long the database has to take a question, however little its asker wants to wait: a commit takes milliseconds."""

router = APIRouter(prefix="/v1/gates", route_class=ApiRoute, tags=["gates"])

# An override of a year was a mistake.
MAX_OVERRIDE_SECONDS = 30 * 86400.0

override_router = APIRouter(prefix="/v1/overrides", route_class=ApiRoute, tags=["overrides"])

claims_router = APIRouter(prefix="/v1/claims", route_class=ApiRoute, tags=["gates"])

preflight_router = APIRouter(prefix="/v1/preflight", route_class=ApiRoute, tags=["preflight"])

validation_router = APIRouter(prefix="/v1/validations", route_class=ApiRoute, tags=["validations"])

postmortem_router = APIRouter(prefix="/v1/postmortems", route_class=ApiRoute, tags=["gates"])

DEFAULT_DAYS = 28.0
"""Four weeks: every day of the week alike often, and as long as the history of nodes."""
MOST_DAYS = 366.0

report_router = APIRouter(prefix="/v1", route_class=ApiRoute, tags=["gates"])


@dataclass(frozen=True, kw_only=True)
class OutcomeBody:
    """How a job ended."""

    __pydantic_config__ = FROM_OUTSIDE

    status: Annotated[str, Field(min_length=1, max_length=64)]
    """
    ok, failed (the job's own fault) or infra (a device, link or host stopped it); any other word of the launcher's is
    kept and counts as none of them.
    """
    message: Annotated[str, Field(max_length=4096)] = ""
    """For people."""


@dataclass(frozen=True, kw_only=True)
class NotesBody:
    """What one `healthd run` knows of the bad end of its job."""

    __pydantic_config__ = FROM_OUTSIDE

    node: Annotated[str, Field(min_length=1, max_length=253)]
    """The node that it ran on, by one of its names in the fleet."""
    notes: Annotated[str, Field(max_length=4 * (MAX_PACKED_BYTES // 3 + 1))]
    """The notes of `healthd run`, as JSON compressed by zlib, in base64."""
    measures: bool = False
    """Whether it checks the devices of its node when it is asked to."""


@router.post("", responses=problems(409, 429))
async def ask(request: Request, response: Response, caller: GateCaller, wait: Wait, asked: GateRequest) -> Decision:
    """
    May this job start? 200 with the decision, whatever it is; a hold says when to ask again.

    Asking again for the same job and attempt returns the same gate, so a lost answer can be requested again; with
    `wait`, an admission is then repeated once its nodes have confirmed that they still hold its leases. A token of
    scope `gate` may ask for stricter terms than the aggregator's settings; weaker terms (mode, tier, max_age_seconds,
    collective, lease) need `gate.callers_may`, else the answer is 403.
    """
    parts = parts_of(request)
    began = ARRIVED.get() or time.perf_counter()
    asked = _of_caller(caller, asked)
    _check_floor(parts, caller, asked)
    _check_asked(parts, caller, asked)
    with _held(parts, caller, wait, None if asked.join is None else asked.join.node):
        with parts.fleet.backlog.urgent():  # until its first transaction is on disk
            gate = await _asked(parts, caller, asked, wait)
        if gate.decision is not None and wait > 0 and (held := await parts.engine.confirm(gate, wait)) is not None:
            response.headers["retry-after"] = str(HOLD_RETRY_SECONDS)
            return held
        if asked.join is not None:
            wait = min(wait, parts.engine.policy.tuning.member_seconds / 4)  # a member is heard only when it asks
        decision = await _decision(parts, gate.id, wait, response)
    granted = parts.metrics.granted(gate.id)
    if granted is not None and granted.stored > began:
        # What the aggregator itself took, up to the leases on disk: without the nodes' round trip. What is neither
        # computing nor the database was spent waiting for the event loop.
        spent = {
            "grant": granted.stored - began,
            "compute": granted.computed - granted.began,
            "store": granted.stored - granted.computed,
        }
        response.headers["server-timing"] = ", ".join(f"{name};dur={1e3 * s:.3f}" for name, s in spent.items())
    if decision.decision is not Verdict.REJECT:
        return decision
    return dataclasses.replace(decision, decided_seconds_ago=max(0.0, parts.engine.now() - decision.decided_at))


@router.get("")
async def listed(
    request: Request,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
    before: str | None = None,
    job: str | None = None,
) -> GateList:
    """Gates, newest first; `next` is the `before` of the next page."""
    parts = parts_of(request)
    wanted = None if job is None else _own_job(caller, job)
    gates = await parts.engine.gates(limit=limit, before=before, job=wanted)
    rows = tuple(_summary(parts, gate) for gate in gates)
    return GateList(gates=rows, next=gates[-1].id if len(gates) == limit else None)


# A job's name may hold slashes (torchrun's run id is free text), so what is a longer path comes first.
@router.get("/{gate:path}/postmortem", responses=problems(429))
async def postmortem(request: Request, caller: Reader, gate: str, wait: Wait) -> PostmortemState:
    """Why the job of a gate died, by its id or its job (then the newest). Waits until the verdict is final."""
    parts = parts_of(request)
    with _held(parts, caller, wait):
        return state_of(await parts.postmortems.wait(await _find(parts, caller, gate), None, wait))


@router.get("/{gate:path}/evidence")
async def evidence(request: Request, caller: Reader, gate: str) -> Evidence:
    """The stored gate, with the node states that its decision is based on, its leases and how the job ended."""
    parts = parts_of(request)
    told = await parts.engine.explain(await _find(parts, caller, gate))
    return Evidence(gate=plain(told.gate), states=told.states, leases=told.leases, outcome=told.outcome)


@router.get("/{gate:path}", responses=problems(429))
async def follow(request: Request, response: Response, caller: Reader, gate: str, wait: Wait) -> Decision:
    """The decision of a gate, by its id or its job (then the newest). Waits while the gate is open."""
    parts = parts_of(request)
    with _held(parts, caller, wait):
        return await _decision(parts, await _find(parts, caller, gate), wait, response)


@router.delete("/lease", responses=problems(404))
async def release_job(
    request: Request,
    caller: GateCaller,
    job: Annotated[str, Query(max_length=256)],
    attempt: Annotated[int, Query(ge=0, le=LARGEST_ATTEMPT)] = 0,
) -> GateReleased:
    """Release a gate by its job and attempt; also releases leases that were adopted after the loss of a database."""
    parts, job = parts_of(request), _own_job(caller, job)
    await _check_job(parts, caller, job, attempt)
    return _released(parts.engine, await parts.engine.release_job(job, attempt))


@router.delete("/{gate}/lease")
async def release(
    request: Request, caller: GateCaller, gate: str, node: Annotated[list[str], Query()] = NO_NODES
) -> GateReleased:
    """
    Withdraw an open gate, or return the nodes of an admitted one: its leases end, and so do those of the same job and
    attempt that were adopted after the loss of a database. With `node` (repeatable) only the leases on these nodes.

    Safe to repeat. 404 if there is nothing to return and nothing was returned before.
    """
    parts = parts_of(request)
    await _check_gate(parts, caller, gate)
    return _released(parts.engine, await parts.engine.release(gate, node))


@router.delete("/{gate}/members/{member:path}")
async def leave(request: Request, caller: GateCaller, gate: str, member: str) -> Decision:
    """A member of a group ends without starting the job, whatever it has acknowledged. Safe to repeat."""
    parts = parts_of(request)
    await _check_member(parts, caller, gate, member)
    left = await parts.engine.leave(gate, member)
    node = next((one.node for one in left.members if one.member == member), None)
    if left.decision is not None and node in {one.node for one in left.decision.nodes}:
        body = HandshakeBody(node=node, event="withdraw")  # or the others would start without it
        await parts.handshakes.step(left.id, left.request.nodes, left.decision, body, 0.0)
    return parts.engine.answer(left)


@router.post("/{gate}/outcome")
async def outcome(request: Request, caller: GateCaller, gate: str, body: OutcomeBody) -> OutcomeKept:
    """Report how the job ended."""
    parts = parts_of(request)
    await _check_gate(parts, caller, gate)
    ended = await parts.engine.outcome(gate, body.status, body.message)
    if ended is not None:
        parts.metrics.job_ended(ended)
    return OutcomeKept(gate=gate, status=body.status)


@router.post("/{gate}/notes", responses=problems(409, 429))
async def notes(request: Request, caller: GateCaller, gate: str, wait: Wait, body: NotesBody) -> PostmortemState:
    """
    A `healthd run` reports that its part of the job ended badly, with its notes. Safe to repeat.

    The answer waits until the notes of all nodes are judged, or until this node should check its devices: then its
    member is in `to_measure`, and it sends its notes again with the findings.
    """
    parts = parts_of(request)
    node = next(iter(_own_names(parts, (body.node,))))
    caller.check_speaks_for((node,))
    _check_namespace(caller, gate, ((await parts.engine.get(gate)).request.job,))
    try:
        packed = base64.b64decode(body.notes, validate=True)
    except ValueError:
        raise BadInputError("notes: no base64") from None
    with _held(parts, caller, wait, node):
        return await parts.postmortems.tell(gate, node, packed, measures=body.measures, wait=wait)


@router.post("/{gate}/handshake", responses=problems(429))
async def handshake(
    request: Request, caller: GateCaller, gate: str, wait: Wait, body: HandshakeBody
) -> HandshakeAnswer:
    """One step in the end of a gate of several hooks. Waits until there is an outcome, or the job is over."""
    parts = parts_of(request)
    found = await parts.engine.get(gate)
    caller.check_speaks_for((body.node,))
    _check_namespace(caller, gate, (found.request.job,))
    if found.decision is None:
        raise BadInputError(f"gate {gate} is not decided yet; ask for its decision first")
    came = parts.rollcall.nodes or None
    with _held(parts, caller, wait, body.node):
        return await parts.handshakes.step(found.id, found.request.nodes, found.decision, body, wait, came=came)


@override_router.get("/{job:path}", dependencies=[READ])
async def override(request: Request, job: str) -> Override:
    """The active override of a job."""
    return _override(parts_of(request), job)


@override_router.put("/{job:path}")
async def put_override(request: Request, job: str, caller: Admin, body: PersonDecision) -> Override:
    """Admit a job by hand, whatever the state of its nodes, until a time that must be given."""
    word, now = checked(body), parts_of(request).engine.now()
    until = end_of(word, now)
    if until is None or until > now + MAX_OVERRIDE_SECONDS:
        raise BadInputError("override: 'until' or 'for_seconds' must give an end within 30 days")
    if not job or len(job) > 256 or not job.isprintable():
        raise BadInputError("override: the job's name has 1 to 256 printable characters")
    record = Override(job=job, reason=word.reason, owner=owner_of(word.owner, caller), since=now, until=until)
    await parts_of(request).engine.override(job, record)
    return record


@override_router.delete("/{job:path}")
async def delete_override(request: Request, job: str, _caller: Admin) -> OverrideEnded:
    """Withdraw an override."""
    parts = parts_of(request)
    _override(parts, job)
    await parts.engine.override(job, None)
    return OverrideEnded(job=job)


@claims_router.get("", dependencies=[READ])
async def claims(
    request: Request, workload: Annotated[str, Query(min_length=1, max_length=LONGEST_WORKLOAD)]
) -> ClaimList:
    """Open gates and active leases of workloads whose names begin with `workload`."""
    parts = parts_of(request)
    now = parts.engine.now()
    found = {
        gate.id: Claim(
            gate=gate.id,
            job=gate.request.job,
            attempt=gate.request.attempt,
            workload=gate.request.workload,
            open=True,
            nodes=(),
            age_seconds=max(0.0, now - gate.created_at),
        )
        for gate in parts.engine.open_gates()
        if gate.request.workload is not None and gate.request.workload.startswith(workload)
    }
    for row in sorted(parts.engine.leases(), key=lambda row: (row.granted_at, row.node)):
        lease = row.lease
        if lease.workload is None or not lease.workload.startswith(workload) or row.state is LeaseState.ENDING:
            continue
        first = Claim(
            gate=lease.gate,
            job=lease.job,
            attempt=lease.attempt,
            workload=lease.workload,
            open=False,
            nodes=(),
            age_seconds=max(0.0, now - row.granted_at),
            pool=parts.engine.pool_of(row.node),
        )
        known = found.get(lease.gate, first)
        why = _why_bad(parts, row.node)
        unfit = {**known.unfit, row.node: why} if why else known.unfit
        found[lease.gate] = dataclasses.replace(known, nodes=(*known.nodes, row.node), unfit=unfit)
    return ClaimList(claims=tuple(found[gate] for gate in sorted(found)))


@preflight_router.post("/ranks", dependencies=[GATE], responses=problems(409))
async def ranks(request: Request, body: RollCallBody) -> RollCallAnswer:
    """
    A rank reports in: returns whether all ranks so far were started alike, and how long the gate will hold. Safe to
    repeat.
    """
    return parts_of(request).rollcall.answer(body)


@dataclass(frozen=True, kw_only=True)
class ValidationBody:
    """Which nodes: `nodes`, or `pool` and `count`. The members are those of a `GateRequest`."""

    __pydantic_config__ = FROM_OUTSIDE

    nodes: tuple[str, ...] = ()
    pool: str | None = None
    count: int | None = None
    min_nodes: int | None = None
    kind: ValidationKind = ValidationKind.COLLECTIVES
    tier: Tier | None = None
    wait_seconds: float | None = None


@validation_router.post("", responses=problems(429))
async def start(
    request: Request, response: Response, caller: GateCaller, wait: Wait, body: ValidationBody
) -> ValidationState:
    """Start a validation: 200 with its state after `wait` seconds; follow it by its `id`."""
    parts = parts_of(request)
    asked = request_of(body)
    _check_asked(parts, caller, asked)
    with _held(parts, caller, wait):
        gate = await parts.engine.ask(asked, asker=caller.limited_as)
        await parts.engine.wait(gate.id, wait)
    found = await parts.engine.get(gate.id)
    response.headers["location"] = f"/v1/validations/{gate.id}"
    return _told(found, parts.engine.answer(found))


@validation_router.get("/{gate}", responses=problems(429))
async def follow_validation(request: Request, caller: Reader, gate: str, wait: Wait) -> ValidationState:
    """The validations of a gate, or of one started by hand, round by round. Waits while it is open."""
    parts = parts_of(request)
    with _held(parts, caller, wait):
        await parts.engine.wait(gate, wait)
    found = await parts.engine.get(gate)
    if not found.terms.collective:
        raise NotFoundError(f"gate {gate} runs no collectives over its nodes")
    return _told(found, parts.engine.answer(found))


def request_of(body: ValidationBody) -> GateRequest:
    """The gate that a validation by hand is: it admits nobody. BadInputError where no two nodes are asked for."""
    wanted = len(body.nodes) or body.count or 0
    if (wanted if body.min_nodes is None else min(wanted, body.min_nodes)) < 2:
        # A gate may go on with one node, which has nobody to run collectives with; here that would be no answer.
        raise BadInputError("collectives need at least two nodes; name more, or set min_nodes to 2 or more")
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


@postmortem_router.get("")
async def postmortems(
    request: Request,
    caller: Reader,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
    before: str | None = None,
    job: str | None = None,
) -> PostmortemList:
    """Bad ends of jobs, newest gate first; `next` is the `before` of the next page."""
    wanted = None if job is None else _own_job(caller, job)
    found = await parts_of(request).postmortems.listed(limit=limit, before=before, job=wanted)
    return PostmortemList(
        postmortems=tuple(state_of(one) for one in found), next=found[-1].gate if len(found) == limit else None
    )


@report_router.get("/report", dependencies=[READ])
async def report(request: Request, days: Annotated[float, Query(gt=0, le=MOST_DAYS)] = DEFAULT_DAYS) -> Report:
    """Gate accuracy over the last days: shares with their counts, and whether to switch to enforce mode."""
    parts = parts_of(request)
    since = parts.engine.now() - days * 86400.0
    counts = await parts.engine.counts(since)
    return report_of(counts, days=days, ungated=parts.ungated.figure)


def _released(engine: Engine, done: GivenBack) -> GateReleased:
    decision = None if done.gate is None else engine.answer(done.gate)
    return GateReleased(decision=decision, released=done.leases, released_at=done.at)


def _check_floor(parts: Parts, caller: Caller, asked: GateRequest) -> None:
    """AuthError (403) where a caller who is no admin asks for less than the settings do, and may not."""
    if Scope.ADMIN in caller.scopes:
        return
    less = less_than_policy(asked, parts.engine.policy)
    if refused := {term: text for term, text in less.items() if term not in parts.callers_may}:
        opened = ", ".join(f'"{term}"' for term in (*sorted(parts.callers_may), *refused))
        raise AuthError(
            403,
            f"{caller} may not weaken the aggregator's settings: {', '.join(refused.values())}; leave that out, use "
            f"a token of scope admin, or have the aggregator's operator set [gate] callers_may = [{opened}]",
        )


def _held(parts: Parts, caller: Caller, wait: float, node: str | None = None) -> AbstractContextManager[None]:
    return parts.held.one(parts.engine.policy, caller, wait, node)


async def _asked(parts: Parts, caller: Caller, asked: GateRequest, wait: float) -> Gate:
    """The gate as it is on disk; StoreError when the database has not taken it before the asker's time is over."""
    seconds = max(LEAST_SECONDS, wait)
    try:
        async with asyncio.timeout(seconds if wait > 0 else None):
            return await parts.engine.ask(
                asked,
                rights=Rights(
                    may_end=lambda row: caller.may_end(row.node, row.lease.workload), may_close=caller.may_close
                ),
                asker=caller.limited_as,
            )
    except TimeoutError:
        why = parts.engine.trouble() or "the aggregator is too busy"
        raise StoreError(f"the gate could not be written within {seconds:g} s: {why}") from None


async def _decision(parts: Parts, gate_id: str, wait: float, response: Response) -> Decision:
    began = time.monotonic()
    decision = await parts.engine.wait(gate_id, wait)
    if parts.drain is not None:
        # A retry must not land on the node that was just rejected, so that one is taken out of the way first.
        decision = await parts.drain.settle(gate_id, decision, wait - (time.monotonic() - began))
    response.headers["location"] = f"/v1/gates/{gate_id}"
    if decision.decision is Verdict.HOLD:
        response.headers["retry-after"] = str(HOLD_RETRY_SECONDS)
    return decision


async def _find(parts: Parts, caller: Caller, name: str) -> str:
    """The id of a gate by its id, or by its job: then the newest."""
    try:
        return (await parts.engine.get(name)).id
    except NotFoundError:
        found = await parts.engine.gates(limit=1, job=_own_job(caller, name))
        if not found:
            raise NotFoundError(
                f"no gate and no job {name[:80]!r}; 'healthd fleet history NODE' lists the gates of a node"
            ) from None
        return found[0].id


def _summary(parts: Parts, gate: Gate) -> GateRow:
    decision = parts.engine.answer(gate)
    return GateRow(
        id=gate.id,
        job=gate.request.job,
        attempt=gate.request.attempt,
        asked_attempt=gate.request.attempt if gate.group is None else gate.group.asked_attempt,
        phase=gate.phase,
        created_at=gate.created_at,
        decision=decision.decision,
        would=decision.would,
        reasons=decision.reasons[:3],
        nodes=len(decision.nodes),
        excluded=len(decision.excluded),
        duration_seconds=decision.duration_seconds,
    )


def _override(parts: Parts, job: str) -> Override:
    for record in parts.engine.overrides():
        if record.job == job:
            return record
    raise NotFoundError(f"job {job[:80]!r} has no active override")


def _why_bad(parts: Parts, node: str) -> str:
    """What is known to be wrong with a node; empty where nothing is, and where nothing is known."""
    view = parts.fleet.view(node)
    if view is None:
        return ""
    if view.node.quarantine is not None:
        return f"quarantined: {view.node.quarantine.reason}"
    if view.health is not Health.UNHEALTHY:
        return ""
    return view.reasons[0].message if view.reasons else Health.UNHEALTHY.value


def _told(gate: Gate, decision: Decision) -> ValidationState:
    return ValidationState(
        id=gate.id, job=gate.request.job, phase=gate.phase, decision=decision, validations=gate.validations
    )


def _own_job(caller: Caller, job: str) -> str:
    """
    The job that a caller means: a hook's, in a pod, is one of its namespace, `NAMESPACE/JOB`, written so or without it.

    So the jobs of two namespaces never meet, whatever they are called.
    """
    if not job or caller.hook is None or job.startswith(f"{caller.hook.namespace}/"):
        return job
    return f"{caller.hook.namespace}/{job}"


def _of_caller(caller: Caller, asked: GateRequest) -> GateRequest:
    """A request as it is meant: of a job of the caller's namespace, and for the pod that joins where it names none."""
    asked, pod = dataclasses.replace(asked, job=_own_job(caller, asked.job)), caller.hook
    if pod is None or asked.join is None or asked.workload is not None:
        return asked
    return dataclasses.replace(asked, workload=f"pod:{pod.full_name}/{pod.uid}")


def _check_namespace(caller: Caller, gate: str, jobs: Iterable[str]) -> None:
    """AuthError where a hook in a pod means a gate of a job that is none of its namespace."""
    if caller.hook is not None and not all(job.startswith(f"{caller.hook.namespace}/") for job in jobs):
        namespace = caller.hook.namespace
        raise AuthError(403, f"{caller} may only end and follow jobs of namespace {namespace}, not gate {gate[:80]}")


def _check_asked(parts: Parts, caller: Caller, asked: GateRequest) -> None:
    """AuthError where a gate is asked for nodes, or for a workload, for which the caller may not speak."""
    if caller.nodes is None:
        return
    if asked.pool is not None:
        raise AuthError(
            403,
            f"{caller} may only ask for named nodes, but the aggregator chooses the nodes of pool "
            f"{asked.pool[:80]!r}; name the nodes, or use a token without 'nodes'",
        )
    joins = () if asked.join is None else (asked.join.node,)
    caller.check_speaks_for(_own_names(parts, (*asked.nodes, *joins)))
    if caller.hook is not None and asked.workload is not None and process_of(asked.workload) is None:
        told = pod_of(asked.workload)
        if told is None or dataclasses.replace(told, uid=told.uid or caller.hook.uid) != caller.hook:
            raise AuthError(403, f"{caller} may only ask for its own workload, not for {asked.workload[:120]!r}")


async def _check_gate(parts: Parts, caller: Caller, gate: str) -> None:
    """AuthError where a gate, or a lease of it, is not the caller's to end or to follow up; NotFoundError."""
    if caller.nodes is None:
        return
    held = tuple(row for row in parts.engine.leases() if row.lease.gate == gate)
    try:
        found: Gate | None = await parts.engine.get(gate)
    except NotFoundError:
        if not held:
            raise
        found = None
    _check_concerned(caller, gate, found, held)


async def _check_job(parts: Parts, caller: Caller, job: str, attempt: int) -> None:
    """As `_check_gate`, of the newest gate of a job and of its leases."""
    if caller.nodes is None:
        return
    held = tuple(row for row in parts.engine.leases() if (row.lease.job, row.lease.attempt) == (job, attempt))
    newest = await parts.engine.gates(limit=1, job=job)
    if newest or held:
        _check_concerned(caller, f"of job {job}", newest[0] if newest else None, held)


async def _check_member(parts: Parts, caller: Caller, gate: str, member: str) -> None:
    """AuthError where a member of a gate is not on a node for which the caller may speak; NotFoundError."""
    if caller.nodes is not None:
        found = await parts.engine.get(gate)
        caller.check_speaks_for(one.node for one in found.members if one.member == member)
        _check_namespace(caller, gate, (found.request.job,))


def _check_concerned(caller: Caller, gate: str, found: Gate | None, held: Sequence[LeaseRow]) -> None:
    """A job in pods belongs to its namespace; for others all nodes must be those for which the caller may speak."""
    gates = () if found is None else (found,)
    if caller.hook is not None:
        _check_namespace(caller, gate, (*(one.request.job for one in gates), *(row.lease.job for row in held)))
        return
    if any(one.request.pool is not None for one in gates):
        raise AuthError(403, f"{caller} may only ask for named nodes, but gate {gate[:80]} is for a pool")
    for one in gates:
        caller.check_speaks_for((*one.request.nodes, *(member.node for member in one.members), *one.granted))
    caller.check_speaks_for(row.node for row in held)


def _own_names(parts: Parts, names: Iterable[str]) -> Iterable[str]:
    """The nodes that are meant, by their own names; a name that no node has stands for itself."""
    for name in names:
        yield from parts.fleet.called(name) or (name,)
