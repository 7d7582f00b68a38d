"""What happens to a request for a gate: what a repeated one gets, what a later attempt supersedes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.controller.state.fleet_state import FleetState
from healthd.aggregator.gate import decisions, members
from healthd.aggregator.model.gates import Closing, Collecting, Gate, GateGroup, Terms
from healthd.aggregator.model.policy import Policy
from healthd.core.errors import ConflictError, StoreError
from healthd.core.model import LARGEST_ATTEMPT, GateRequest, Join


def terms_of(request: GateRequest, policy: Policy) -> Terms:
    """The request with the policy filled in."""
    wanted = len(request.nodes) or request.count or (request.join.size if request.join is not None else 0)
    tier = request.tier or policy.tier
    return Terms(
        tier=tier,
        max_age_seconds=policy.max_age_seconds if request.max_age_seconds is None else request.max_age_seconds,
        wait_seconds=policy.wait_seconds if request.wait_seconds is None else request.wait_seconds,
        mode=request.mode or policy.mode,
        wanted=wanted,
        needed=wanted if request.min_nodes is None else request.min_nodes,
        collective=wanted > 1 and (policy.collective if request.collective is None else request.collective),
        checks=policy.checks_over_nodes(request.kind, tier),
        runtime_seconds=policy.runtime_seconds if request.runtime_seconds is None else request.runtime_seconds,
    )


def new_gate(gate_id: str, request: GateRequest, policy: Policy, now: float) -> Gate:
    """A gate as it begins."""
    terms = terms_of(request, policy)
    gate = Gate(id=gate_id, request=request, terms=terms, created_at=now, deadline=now + terms.wait_seconds)
    if request.join is None:
        return gate
    shared = dataclasses.replace(members.shared_request(request), attempt=request.attempt)
    return dataclasses.replace(
        gate,
        request=shared,
        progress=Collecting(),
        deadline=now + policy.join_seconds,
        group=GateGroup(asked_attempt=request.attempt),
    )


def check_same_request(gate: Gate, request: GateRequest, fleet_state: FleetState) -> None:
    """
    ConflictError unless the request is the one that the gate answers, and its admission still stands.

    A client that has lost the answer gets it again. A client that asks after its leases have ended must not start,
    because its nodes may belong to another job by now. Named nodes that were admitted regardless (observe mode, an
    override) never depended on leases.
    """
    who = f"job {request.job} attempt {request.attempt}"
    if request.join is not None or gate.request.join is not None:
        members.check_same_question(gate, request)
    elif gate.as_asked != request:
        raise ConflictError(
            f"{who} was asked before with another request (gate {gate.id}): {_difference(gate.as_asked, request)}; "
            f"use the next attempt (--attempt {request.attempt + 1})"
        )
    if gate.decision is None or (gate.decision.would is not None and gate.request.pool is None):
        return
    if gate.granted:
        ended = [name for name, grant in gate.granted.items() if not fleet_state.lease_stands(grant.lease_id)]
        if ended:
            raise ConflictError(
                f"{who} was admitted (gate {gate.id}) and its lease on {', '.join(sorted(ended)[:5])} has ended; "
                "use the next attempt"
            )


def _difference(before: GateRequest, now: GateRequest) -> str:
    """The first member in which two requests differ, and its two values."""
    name = next(one.name for one in dataclasses.fields(now) if getattr(before, one.name) != getattr(now, one.name))
    if name != "nodes":
        first, second = (_shown(getattr(one, name)) for one in (before, now))
        return f"{name} was {first} and is {second} now"
    gone, new = (sorted(set(one.nodes) - set(other.nodes)) for one, other in ((before, now), (now, before)))
    parts = [f"no more {', '.join(gone[:5])}"] if gone else []
    parts += [f"newly {', '.join(new[:5])}"] if new else []
    named = "; ".join(parts) or "in another order"
    return f"{len(before.nodes)} nodes were named and {len(now.nodes)} are now: {named}"


def _shown(value: object) -> str:
    return "not given" if value is None else str(getattr(value, "value", value))[:80]


def open_gate(
    batch: Batch, fleet_state: FleetState, policy: Policy, request: GateRequest, decided: Gate | None = None
) -> Gate:
    """
    The gate of this job and attempt: the open one, or a new one, which supersedes earlier attempts.

    `decided` is the newest gate of the job of a group where that is decided and not in memory.
    """
    if request.join is not None:
        return _open_group(batch, fleet_state, policy, request, request.join, decided)
    key = (request.job, request.attempt)
    known = fleet_state.gates.get(fleet_state.keys.get(key, "")) or fleet_state.decided.get(
        fleet_state.keys.get(key, "")
    )
    if known is not None:
        check_same_request(known, request, fleet_state)
        return known
    if key in fleet_state.keys:
        raise StoreError(f"job {request.job} attempt {request.attempt} was just read from the database; ask again")
    _check_room(fleet_state, policy)
    gate = new_gate(fleet_state.new_id(batch.now), request, policy, batch.now)
    newest = fleet_state.newest.get(request.job)
    fleet_state.add(gate)
    if newest is not None and newest > request.attempt:
        text = f"attempt {newest} of job {request.job} was asked before this one"
        after, effects = decisions.close(batch.now, gate, policy, Closing.SUPERSEDED, text)
        fleet_state.carry_out(batch, after, effects, ())
        return after
    _supersede_earlier(batch, fleet_state, policy, gate, first=newest is None)
    # Written even when its first step changes nothing: the client must be able to find it later.
    fleet_state.carry_out(batch, gate, (), ())
    return gate


def _check_room(fleet_state: FleetState, policy: Policy) -> None:
    if len(fleet_state.gates) >= policy.max_open_gates:
        raise StoreError(f"{policy.max_open_gates} gates are open already; ask again later, or raise max_open_gates")


def _open_group(
    batch: Batch, fleet_state: FleetState, policy: Policy, request: GateRequest, join: Join, decided: Gate | None
) -> Gate:
    """
    The gate for this member: the open gate of its group, the decided one if that answers it, or the next one.

    The gates of a group count their own attempts, whatever attempt the members ask for, because a group whose members
    were replaced after the decision gets another gate. The attempt of the members tells restarts of the whole job
    apart.
    """
    newest = fleet_state.newest.get(request.job)
    key = fleet_state.keys.get((request.job, newest)) if newest is not None else None
    gate = fleet_state.gates.get(key or "") or fleet_state.decided.get(key or "") or decided
    group = None if gate is None else gate.group
    if group is not None and group.asked_attempt > request.attempt:
        text = f"attempt {request.attempt} of group {join.group} is over"
        raise ConflictError(f"{text}: attempt {group.asked_attempt} was asked meanwhile")
    if gate is not None and (group is None or group.asked_attempt == request.attempt):
        if gate.decision is None:
            members.check_same_question(gate, request)
            return _add_member(batch, fleet_state, gate, request, join)
        leases = [grant.lease_id for grant in gate.granted.values()]
        over = bool(leases) and not any(fleet_state.lease_stands(lease_id) for lease_id in leases)
        if group is not None and members.answers_member(gate, join, over=over):
            check_same_request(gate, request, fleet_state)
            return gate
    _check_room(fleet_state, policy)
    attempt = request.attempt if newest is None else max(request.attempt, newest + 1)
    if attempt > LARGEST_ATTEMPT:
        raise ConflictError(f"job {request.job} has used up its attempts ({LARGEST_ATTEMPT}); name the job otherwise")
    opened = new_gate(fleet_state.new_id(batch.now), dataclasses.replace(request, attempt=attempt), policy, batch.now)
    former: Mapping[str, int] = {}
    if gate is not None and group is not None and group.asked_attempt == request.attempt:
        ranks = {one.node: one.rank for one in group.members}
        own = {grant.lease_id: ranks[node] for node, grant in gate.granted.items() if node in ranks}
        former = {**group.former, **own}
    opened = members.with_group(opened, asked_attempt=request.attempt, former=former)
    fleet_state.add(opened)
    if not former:
        _supersede_earlier(batch, fleet_state, policy, opened, first=newest is None)
    return _add_member(batch, fleet_state, opened, request, join)


def _add_member(batch: Batch, fleet_state: FleetState, gate: Gate, request: GateRequest, join: Join) -> Gate:
    """Add a member to the gate. The leases that its rank still has of the gate before this one end."""
    after = members.add_member(batch.now, gate, join, request.workload)
    if stored_part(after) == stored_part(gate) and gate.members:
        fleet_state.update_members(after)
        return after
    for lease_id, rank in members.group_of(gate).former.items():
        if rank == join.rank:
            fleet_state.end_lease(batch, lease_id, f"rank {rank} of group {join.group} asks anew (gate {gate.id})")
    fleet_state.carry_out(batch, after, (), ())
    return after


def end_leases_for_executor(batch: Batch, fleet_state: FleetState, gate: Gate, node: str) -> None:
    """End the leases of a node without a daemon once a hook has its devices: the jobs before it are over there."""
    for lease_id in fleet_state.leases_of.get(node, ()):
        row = fleet_state.leases[lease_id]
        if row.lease.gate != gate.id:
            fleet_state.close_lease(batch, row, f"a hook of job {gate.request.job} has the devices; no daemon is there")


def remove_member(batch: Batch, fleet_state: FleetState, gate: Gate, member: str) -> Gate:
    """Remove a member whose hook ends without starting the job: its rank and its node are free."""
    open_one = fleet_state.gates.get(gate.id)
    if open_one is not None:
        after = members.remove_member(open_one, member)
        if after != open_one:
            fleet_state.carry_out(batch, after, (), ())
        return after
    for one in gate.members:
        if one.member == member and one.node in gate.granted:
            fleet_state.end_lease(batch, gate.granted[one.node].lease_id, f"the hook of rank {one.rank} ended")
    return gate


def _supersede_earlier(batch: Batch, fleet_state: FleetState, policy: Policy, gate: Gate, *, first: bool) -> None:
    """
    End the open gates and the leases of earlier attempts of the job. `first`: this database knows of no earlier one,
    but another database may have given leases.
    """
    job, attempt, group = gate.request.job, gate.request.attempt, gate.request.join is not None
    text = f"attempt {attempt} of job {job} takes its place (gate {gate.id})"
    for other in [g for g in fleet_state.gates.values() if g.request.job == job and g.id != gate.id]:
        after, effects = decisions.close(batch.now, other, policy, Closing.SUPERSEDED, text)
        fleet_state.carry_out(batch, after, effects, ())
    rows = (
        [fleet_state.leases[lease_id] for lease_id in fleet_state.adopted] if first else [*fleet_state.leases.values()]
    )
    for row in rows:
        # Gates of a group count their own attempts, and the count of another database is not known here.
        earlier = row.lease.attempt < attempt or (group and row.adopted)
        if row.lease.job == job and earlier:
            fleet_state.end_lease(batch, row.lease.id, text)


def stored_part(gate: Gate) -> Gate:
    """The gate without what is not written to disk."""
    gate = dataclasses.replace(gate, waiting=())
    if gate.group is None:
        return gate
    written = tuple(dataclasses.replace(one, heard_at=one.joined_at) for one in gate.group.members)
    return members.with_group(gate, members=written)
