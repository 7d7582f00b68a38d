"""Asking for a gate: what a request may be, what a repeated one gets, what a later attempt does to an earlier one."""

from __future__ import annotations

import dataclasses
import math

from healthd.aggregator.controller.fleet_state import Batch, Ledger
from healthd.aggregator.gate import decisions, rendezvous
from healthd.aggregator.model import Closing, Gate, Phase, Terms
from healthd.aggregator.model.policy import Policy
from healthd.core.errors import BadInputError, ConflictError, StoreError
from healthd.core.model import LARGEST_ATTEMPT, GateRequest, Join
from healthd.core.node_name import check_name

LONGEST_NAME = 253
"""Of a node (DNS allows as many) or a pool."""
LONGEST_JOB = 256
LONGEST_MEMBER = 128


def check(request: GateRequest, policy: Policy) -> None:
    """BadInputError with one sentence when the request cannot be meant."""
    if not request.job or len(request.job) > LONGEST_JOB or not request.job.isprintable():
        raise BadInputError(f"job must be 1 to {LONGEST_JOB} printable characters, not {request.job[:40]!r}")
    if not 0 <= request.attempt <= LARGEST_ATTEMPT:
        raise BadInputError(f"attempt must be from 0 to {LARGEST_ATTEMPT}, not {request.attempt}")
    if request.join is not None:
        _check_join(request, request.join, policy)
    elif bool(request.nodes) == (request.pool is not None):
        raise BadInputError("name either nodes or a pool with a count, or join a group")
    else:
        _check_size(request, policy)
    several = len(request.nodes) > 1 or (request.count or 0) > 1
    if several and (request.workload or "").startswith("pid:"):
        text = f"workload {request.workload} is a process of one host, and several nodes are asked for"
        raise BadInputError(f"{text}; leave it out, or ask node by node")
    for name in (*request.nodes, *((request.pool,) if request.pool is not None else ())):
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            raise BadInputError(f"a name must be 1 to {LONGEST_NAME} printable characters, not {name[:40]!r}")
    if request.max_age_seconds is not None and not (
        request.max_age_seconds > 0 and math.isfinite(request.max_age_seconds)
    ):
        raise BadInputError(f"max_age_seconds must be greater than 0, not {request.max_age_seconds}")
    if request.wait_seconds is not None and not 0 <= request.wait_seconds <= policy.max_wait_seconds:
        raise BadInputError(f"wait_seconds must be 0 to {policy.max_wait_seconds:.0f}, not {request.wait_seconds}")


def _check_join(request: GateRequest, join: Join, policy: Policy) -> None:
    if request.nodes or request.pool is not None or request.count is not None:
        raise BadInputError("who joins a group names its own node alone; leave out nodes, pool and count")
    for what, text, longest in (("group", join.group, LONGEST_NAME), ("member", join.member, LONGEST_MEMBER)):
        if not text or len(text) > longest or not text.isprintable():
            raise BadInputError(f"{what} must be 1 to {longest} printable characters, not {text[:40]!r}")
    check_name(join.node)
    if not 1 <= join.size <= policy.max_nodes_per_gate:
        raise BadInputError(f"a group can have 1 to {policy.max_nodes_per_gate} members, not {join.size}")
    if not 0 <= join.rank < join.size:
        raise BadInputError(f"rank {join.rank} is not one of 0 to {join.size - 1}")
    if request.min_nodes is not None and not 1 <= request.min_nodes <= join.size:
        raise BadInputError(f"min_nodes must be 1 to {join.size}, not {request.min_nodes}")


def _check_size(request: GateRequest, policy: Policy) -> None:
    if request.nodes and request.count is not None:
        raise BadInputError("count goes with a pool; of named nodes all are meant, or min_nodes of them")
    if request.pool is not None and request.count is None:
        raise BadInputError(f"how many nodes of pool {request.pool}? give a count")
    wanted = len(request.nodes) or request.count or 0
    if not 1 <= wanted <= policy.max_nodes_per_gate:
        raise BadInputError(f"1 to {policy.max_nodes_per_gate} nodes can be asked for, not {wanted}")
    if len(set(request.nodes)) != len(request.nodes):
        twice = sorted({name for name in request.nodes if request.nodes.count(name) > 1})
        raise BadInputError(f"node named twice: {', '.join(twice[:5])}")
    if request.min_nodes is not None and not 1 <= request.min_nodes <= wanted:
        raise BadInputError(f"min_nodes must be 1 to {wanted}, not {request.min_nodes}")


def terms_of(request: GateRequest, policy: Policy) -> Terms:
    """The request with the policy filled in."""
    wanted = len(request.nodes) or request.count or (request.join.size if request.join is not None else 0)
    return Terms(
        tier=request.tier or policy.tier,
        max_age_seconds=policy.max_age_seconds if request.max_age_seconds is None else request.max_age_seconds,
        wait_seconds=policy.wait_seconds if request.wait_seconds is None else request.wait_seconds,
        mode=request.mode or policy.mode,
        wanted=wanted,
        needed=wanted if request.min_nodes is None else request.min_nodes,
        collective=wanted > 1 and (policy.collective if request.collective is None else request.collective),
    )


def new_gate(gate_id: str, request: GateRequest, policy: Policy, now: float) -> Gate:
    """The gate as it begins."""
    terms = terms_of(request, policy)
    gate = Gate(id=gate_id, request=request, terms=terms, created_at=now, deadline=now + terms.wait_seconds)
    if request.join is None:
        return gate
    shared = dataclasses.replace(rendezvous.common(request), attempt=request.attempt)
    return dataclasses.replace(
        gate,
        request=shared,
        phase=Phase.COLLECTING,
        deadline=now + policy.join_seconds,
        asked_attempt=request.attempt,
    )


def same(gate: Gate, request: GateRequest, ledger: Ledger) -> None:
    """
    ConflictError unless the request is the one that the gate answers, and its admission still stands.

    Who asks again because the answer was lost gets it again; who asks after the leases ended must not start on nodes
    that may be somebody else's by now. Named nodes that were admitted anyway (observe mode, an override) never hung on
    their leases.
    """
    who = f"job {request.job} attempt {request.attempt}"
    if request.join is not None or gate.request.join is not None:
        rendezvous.alike(gate, request)
    elif gate.as_asked != request:
        raise ConflictError(
            f"{who} was asked before with another request (gate {gate.id}): {_difference(gate.as_asked, request)}; "
            "use the next attempt"
        )
    if gate.decision is None or (gate.decision.would is not None and gate.request.pool is None):
        return
    if gate.granted:
        ended = [name for name, grant in gate.granted.items() if not ledger.holds(grant.lease_id)]
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
    odd = sorted(set(before.nodes) ^ set(now.nodes))
    named = f"in only one of them: {', '.join(odd[:5])}" if odd else "in another order"
    return f"it named {len(before.nodes)} nodes and names {len(now.nodes)} now, {named}"


def _shown(value: object) -> str:
    return "not given" if value is None else str(getattr(value, "value", value))[:80]


def open_gate(batch: Batch, ledger: Ledger, policy: Policy, request: GateRequest, decided: Gate | None = None) -> Gate:
    """
    The gate of this job and attempt: the open one, or a new one, which takes the place of earlier attempts.

    `decided` is the newest gate of a group's job where that is decided and not in memory.
    """
    if request.join is not None:
        return _join(batch, ledger, policy, request, request.join, decided)
    key = (request.job, request.attempt)
    known = ledger.gates.get(ledger.keys.get(key, "")) or ledger.decided.get(ledger.keys.get(key, ""))
    if known is not None:
        same(known, request, ledger)
        return known
    if key in ledger.keys:
        raise StoreError(f"job {request.job} attempt {request.attempt} was just read from the database; ask again")
    _check_room(ledger, policy)
    gate = new_gate(ledger.new_id(batch.now), request, policy, batch.now)
    newest = ledger.newest.get(request.job)
    ledger.add(gate)
    if newest is not None and newest > request.attempt:
        text = f"attempt {newest} of job {request.job} was asked before this one"
        after, effects = decisions.close(batch.now, gate, policy, Closing.SUPERSEDED, text)
        ledger.carry_out(batch, after, effects, ())
        return after
    _take_the_place(batch, ledger, policy, gate, first=newest is None)
    # Written even when its first step changes nothing: who asked must be able to ask after it.
    ledger.carry_out(batch, gate, (), ())
    return gate


def _check_room(ledger: Ledger, policy: Policy) -> None:
    if len(ledger.gates) >= policy.max_open_gates:
        raise StoreError(f"{policy.max_open_gates} gates are open already; ask again later, or raise max_open_gates")


def _join(batch: Batch, ledger: Ledger, policy: Policy, request: GateRequest, join: Join, decided: Gate | None) -> Gate:
    """
    The gate of this member's group: the open one, the decided one if it answers this member, or the group's next.

    Gates of a group are counted on by their attempts, whatever attempt its members ask for: a group whose members were
    replaced after the answer comes together anew. What they ask for tells restarts of the whole job apart.
    """
    newest = ledger.newest.get(request.job)
    key = ledger.keys.get((request.job, newest)) if newest is not None else None
    gate = ledger.gates.get(key or "") or ledger.decided.get(key or "") or decided
    if gate is not None and gate.asked_attempt > request.attempt and gate.request.join is not None:
        raise ConflictError(
            f"attempt {request.attempt} of group {join.group} is over: attempt {gate.asked_attempt} was asked meanwhile"
        )
    if gate is not None and (gate.request.join is None or gate.asked_attempt == request.attempt):
        if gate.decision is None:
            rendezvous.alike(gate, request)
            return _arrived(batch, ledger, gate, request, join)
        leases = [grant.lease_id for grant in gate.granted.values()]
        over = bool(leases) and not any(ledger.holds(lease_id) for lease_id in leases)
        if gate.request.join is not None and rendezvous.belongs(gate, join, over=over):
            same(gate, request, ledger)
            return gate
    _check_room(ledger, policy)
    attempt = request.attempt if newest is None else max(request.attempt, newest + 1)
    if attempt > LARGEST_ATTEMPT:
        raise ConflictError(f"job {request.job} has used up its attempts ({LARGEST_ATTEMPT}); name the job otherwise")
    opened = new_gate(ledger.new_id(batch.now), dataclasses.replace(request, attempt=attempt), policy, batch.now)
    opened = dataclasses.replace(opened, asked_attempt=request.attempt)
    if gate is not None and gate.request.join is not None and gate.asked_attempt == request.attempt:
        ranks = {one.node: one.rank for one in gate.members}
        own = {grant.lease_id: ranks[node] for node, grant in gate.granted.items() if node in ranks}
        opened = dataclasses.replace(opened, former={**gate.former, **own})
    ledger.add(opened)
    if not opened.former:
        _take_the_place(batch, ledger, policy, opened, first=newest is None)
    return _arrived(batch, ledger, opened, request, join)


def _arrived(batch: Batch, ledger: Ledger, gate: Gate, request: GateRequest, join: Join) -> Gate:
    """Take in a member that asks; what its rank still has of the group's gate before this one ends."""
    after = rendezvous.arrive(batch.now, gate, join, request.workload)
    if durable(after) == durable(gate) and gate.members:
        ledger.heard(after)
        return after
    for lease_id, rank in gate.former.items():
        if rank == join.rank:
            ledger.end_lease(batch, lease_id, f"rank {rank} of group {join.group} asks anew (gate {gate.id})")
    ledger.carry_out(batch, after, (), ())
    return after


def free_for_executor(batch: Batch, ledger: Ledger, gate: Gate, node: str) -> None:
    """
    A hook has the devices of a node that has no daemon: jobs before it are over there, and nobody else could say so.
    """
    for lease_id in ledger.leases_of.get(node, ()):
        row = ledger.leases[lease_id]
        if row.lease.gate != gate.id:
            ledger.close_lease(batch, row, f"a hook of job {gate.request.job} has the devices; no daemon is there")


def left(batch: Batch, ledger: Ledger, gate: Gate, member: str) -> Gate:
    """Take in that a member's hook ends without starting the job: its rank is free, its node too."""
    open_one = ledger.gates.get(gate.id)
    if open_one is not None:
        after = rendezvous.leave(open_one, member)
        if after != open_one:
            ledger.carry_out(batch, after, (), ())
        return after
    for one in gate.members:
        if one.member == member and one.node in gate.granted:
            ledger.end_lease(batch, gate.granted[one.node].lease_id, f"the hook of rank {one.rank} ended")
    return gate


def _take_the_place(batch: Batch, ledger: Ledger, policy: Policy, gate: Gate, *, first: bool) -> None:
    """
    End what earlier attempts of the job have, open or admitted. `first`: this database knows of none; another one may
    have given leases.
    """
    job, attempt, group = gate.request.job, gate.request.attempt, gate.request.join is not None
    text = f"attempt {attempt} of job {job} takes its place (gate {gate.id})"
    for other in [g for g in ledger.gates.values() if g.request.job == job and g.id != gate.id]:
        after, effects = decisions.close(batch.now, other, policy, Closing.SUPERSEDED, text)
        ledger.carry_out(batch, after, effects, ())
    rows = [ledger.leases[lease_id] for lease_id in ledger.adopted] if first else [*ledger.leases.values()]
    for row in rows:
        # Gates of a group count on by themselves, and how far another database had counted is not known here.
        earlier = row.lease.attempt < attempt or (group and row.adopted)
        if row.lease.job == job and earlier:
            ledger.end_lease(batch, row.lease.id, text)


def durable(gate: Gate) -> Gate:
    """The gate without what is not kept on disk."""
    members = tuple(dataclasses.replace(one, heard_at=one.joined_at) for one in gate.members)
    return dataclasses.replace(gate, waiting=(), members=members)
