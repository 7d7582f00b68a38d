"""
What happens to a request for a gate: what a repeated one gets, what a later attempt supersedes.

Also here:

- which requests for a gate are valid, and which ask for less than the policy does: pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from healthd.aggregator.engine.memory import Batch, FleetState
from healthd.aggregator.gate import decisions, rendezvous
from healthd.aggregator.gate.records import Closing, Collecting, Gate, GateGroup, LeaseRow, RevokeLease, Terms
from healthd.aggregator.policy import LONGEST_LEASE_SECONDS, MOST_RUNTIME_SECONDS, Policy
from healthd.core.errors import BadInputError, ConflictError, LimitError, StoreError
from healthd.core.model import LARGEST_ATTEMPT, GateRequest, GateTerm, Join, Mode, ValidationKind
from healthd.core.node_name import check_name
from healthd.core.workload import KUEUE, problem_of

LONGEST_NAME = 253
"""Of a node (DNS allows as many) or a pool."""
LONGEST_JOB = 256
LONGEST_MEMBER = 128
LONGEST_WAIT_SECONDS = 86400.0
"""The longest wait that may be asked for. A day: who waits longer is better queued by a scheduler."""
MOST_NODES = 20_000
"""More names or a larger count than that are refused. Twice the largest fleet this was measured with."""


@dataclass(frozen=True, kw_only=True)
class Rights:
    """
    What of earlier attempts a caller ends. `may_end`: whether this lease. `may_close`: whether an open gate, as far as
    this node of it goes; None is any node of a pool.
    """

    may_end: Callable[[LeaseRow], bool]
    may_close: Callable[[str | None], bool]


def _always(_asked: object) -> bool:
    return True


EVERY_RIGHT = Rights(may_end=_always, may_close=_always)
"""Those of a caller who speaks for every node."""


def open_gate(
    batch: Batch,
    fleet_state: FleetState,
    policy: Policy,
    request: GateRequest,
    decided: Gate | None = None,
    *,
    rights: Rights = EVERY_RIGHT,
    asker: str | None = None,
    past: str | None = None,
) -> Gate:
    """
    The gate of this job and attempt: the open one, or a new one, which supersedes earlier attempts.

    `decided` is the newest gate of the job of a group where that is decided and not in memory. `rights` tell which
    leases and open gates of earlier attempts this caller ends; the gate holds until the others have ended. `asker` and
    `past` as in `Gate`.
    """
    if request.join is not None:
        return _open_group(batch, fleet_state, policy, request, request.join, decided, rights, asker)
    key = (request.job, request.attempt)
    known = fleet_state.gates.get(fleet_state.keys.get(key, "")) or fleet_state.decided.get(
        fleet_state.keys.get(key, "")
    )
    if known is not None:
        check_same_request(known, request, fleet_state)
        return known
    if key in fleet_state.keys:
        raise StoreError(f"job {request.job} attempt {request.attempt} was just read from the database; ask again")
    _check_room(fleet_state, policy, request, asker)
    gate = new_gate(fleet_state.new_id(batch.now), request, policy, batch.now)
    gate = dataclasses.replace(gate, asker=asker, past=past)
    newest = fleet_state.newest.get(request.job)
    fleet_state.add(gate)
    if newest is not None and newest > request.attempt:
        text = f"attempt {newest} of job {request.job} was requested before this one"
        after, effects = decisions.close(batch.now, gate, policy, Closing.SUPERSEDED, text)
        fleet_state.carry_out(batch, after, effects, ())
        return after
    gate = _supersede_earlier(batch, fleet_state, policy, gate, rights, first=newest is None)
    # Written even when its first step changes nothing: the client must be able to find it later.
    fleet_state.carry_out(batch, gate, (), ())
    return gate


def new_gate(gate_id: str, request: GateRequest, policy: Policy, now: float) -> Gate:
    """A gate as it begins."""
    terms = terms_of(request, policy)
    gate = Gate(id=gate_id, request=request, terms=terms, created_at=now, deadline=now + terms.wait_seconds)
    if request.join is None:
        return gate
    shared = dataclasses.replace(rendezvous.shared_request(request), attempt=request.attempt)
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
        rendezvous.check_same_question(gate, request)
    elif gate.as_asked != request:
        raise ConflictError(
            f"{who} was requested before with other parameters (gate {gate.id}): "
            f"{_difference(gate.as_asked, request)}; use the next attempt (--attempt {request.attempt + 1})"
        )
    check_leases_stand(gate, fleet_state)


def check_leases_stand(gate: Gate, fleet_state: FleetState) -> None:
    """ConflictError where an admission is over: a lease of it has ended."""
    who = f"job {gate.request.job} attempt {gate.request.attempt}"
    if gate.decision is None or (gate.decision.would is not None and gate.request.pool is None):
        return
    if gate.granted:
        ended = [name for name, grant in gate.granted.items() if not fleet_state.lease_stands(grant.lease_id)]
        if ended:
            raise ConflictError(
                f"{who} was admitted (gate {gate.id}) and its lease on {', '.join(sorted(ended)[:5])} has ended; use "
                "the next attempt"
            )


def end_leases_for_executor(batch: Batch, fleet_state: FleetState, gate: Gate, node: str) -> None:
    """End the leases of a node without a daemon once a hook has its devices: the jobs before it are over there."""
    for lease_id in fleet_state.leases_of.get(node, ()):
        row = fleet_state.leases[lease_id]
        if row.lease.gate != gate.id:
            fleet_state.close_lease(
                batch, row, f"a hook of job {gate.request.job} has the devices, and no daemon runs there"
            )


def remove_member(batch: Batch, fleet_state: FleetState, gate: Gate, member: str) -> Gate:
    """Remove a member whose hook ends without starting the job: its rank and its node are free."""
    open_one = fleet_state.gates.get(gate.id)
    if open_one is not None:
        after = rendezvous.remove_member(open_one, member)
        if after != open_one:
            fleet_state.carry_out(batch, after, (), ())
        return after
    for one in gate.members:
        if one.member == member and one.node in gate.granted:
            fleet_state.end_lease(batch, gate.granted[one.node].lease_id, f"the hook of rank {one.rank} ended")
    return gate


def stored_part(gate: Gate) -> Gate:
    """The gate without what is not written to disk."""
    gate = dataclasses.replace(gate, waiting=())
    if gate.group is None:
        return gate
    written = tuple(dataclasses.replace(one, heard_at=one.joined_at) for one in gate.group.members)
    return rendezvous.with_group(gate, members=written)


def check_request(request: GateRequest) -> None:
    """BadInputError, with one sentence, for a request that is not valid."""
    if not request.job or len(request.job) > LONGEST_JOB or not request.job.isprintable():
        raise BadInputError(f"job must be 1 to {LONGEST_JOB} printable characters, not {request.job[:40]!r}")
    if not 0 <= request.attempt <= LARGEST_ATTEMPT:
        raise BadInputError(f"attempt must be from 0 to {LARGEST_ATTEMPT}, not {request.attempt}")
    if request.join is not None:
        _check_join(request, request.join)
    elif bool(request.nodes) == (request.pool is not None):
        raise BadInputError("name nodes, or a pool with a count, or join a group")
    else:
        _check_size(request)
    _check_workload(request)
    for name in (*request.nodes, *((request.pool,) if request.pool is not None else ())):
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            raise BadInputError(f"a name must be 1 to {LONGEST_NAME} printable characters, not {name[:40]!r}")
    _check_times(request)


def less_than_policy(request: GateRequest, policy: Policy) -> Mapping[GateTerm, str]:
    """
    The terms in which a request asks for less than the policy: what it asks for, and which setting asks for more.

    Empty for a request that leaves everything to the policy, or asks for more.
    """
    terms, found = terms_of(request, policy), dict[GateTerm, str]()
    if terms.mode is Mode.OBSERVE and policy.mode is not Mode.OBSERVE:
        found["mode"] = f"mode {terms.mode.value} (policy.mode is {policy.mode.value})"
    if terms.tier.rank < policy.tier.rank:
        found["tier"] = f"tier {terms.tier.value} (policy.tier is {policy.tier.value})"
    if terms.max_age_seconds > policy.max_age_seconds:
        found["max_age"] = (
            f"evidence of up to {terms.max_age_seconds:g} s (policy.max_age is {policy.max_age_seconds:g} s)"
        )
    if terms.wanted > 1 and policy.collective:
        # Another kind of validation runs other checks: it must not leave out those that every gate runs.
        always = policy.checks_over_nodes(ValidationKind.COLLECTIVES, terms.tier)
        if not terms.collective:
            found["collective"] = "no collectives over the nodes (policy.collective is true)"
        elif lacking := [name for name in always if name not in terms.checks]:
            found["collective"] = f"collectives without {', '.join(lacking)} (policy.collective_checks has them)"
    if not request.lease:
        found["lease"] = "a decision without leases (every gate leases its nodes to the job)"
    return found


def terms_of(request: GateRequest, policy: Policy) -> Terms:
    """The request with the policy filled in."""
    wanted = len(request.nodes) or request.count or (request.join.size if request.join is not None else 0)
    tier = request.tier or policy.tier
    runtime = policy.runtime_seconds if request.runtime_seconds is None else request.runtime_seconds
    lease = min(max(policy.lease_seconds, runtime), LONGEST_LEASE_SECONDS)
    return Terms(
        tier=tier,
        max_age_seconds=policy.max_age_seconds if request.max_age_seconds is None else request.max_age_seconds,
        wait_seconds=policy.wait_seconds if request.wait_seconds is None else request.wait_seconds,
        mode=request.mode or policy.mode,
        wanted=wanted,
        needed=wanted if request.min_nodes is None else request.min_nodes,
        collective=wanted > 1 and (policy.collective if request.collective is None else request.collective),
        checks=policy.checks_over_nodes(request.kind, tier),
        runtime_seconds=runtime,
        lease_seconds=lease if request.lease_seconds is None else request.lease_seconds,
    )


def _difference(before: GateRequest, now: GateRequest) -> str:
    """The first member in which two requests differ, and its two values."""
    name = next(one.name for one in dataclasses.fields(now) if getattr(before, one.name) != getattr(now, one.name))
    if name != "nodes":
        first, second = (_shown(getattr(one, name)) for one in (before, now))
        return f"{name} was {first} and is {second} now"
    gone, new = (sorted(set(one.nodes) - set(other.nodes)) for one, other in ((before, now), (now, before)))
    parts = [f"without {', '.join(gone[:5])}"] if gone else []
    parts += [f"newly {', '.join(new[:5])}"] if new else []
    named = "; ".join(parts) or "in a different order"
    return f"{len(before.nodes)} nodes were named before, {len(now.nodes)} now: {named}"


def _shown(value: object) -> str:
    return "not given" if value is None else str(getattr(value, "value", value))[:80]


def _check_room(fleet_state: FleetState, policy: Policy, request: GateRequest, asker: str | None) -> None:
    """LimitError where the asker, or a node that it names, has too many open gates; StoreError where all have."""
    if asker is not None:
        limited = [gate for gate in fleet_state.gates.values() if gate.asker is not None]
        own, most = sum(gate.asker == asker for gate in limited), policy.open_gates_per_token
        if own >= most:
            raise LimitError(f"{asker}: has {own} open gates (policy.open_gates_per_token); wait until one has ended")
        named = {request.join.node} if request.join is not None else set(request.nodes)
        there = Counter(node for gate in limited for node in named.intersection(_nodes_of(gate)))
        for node, count in there.most_common(1):
            if count >= policy.open_gates_per_node:
                raise LimitError(
                    f"node {node}: {count} open gates name it (policy.open_gates_per_node); wait until one has ended"
                )
    if len(fleet_state.gates) >= policy.tuning.max_open_gates:
        raise StoreError(f"{policy.tuning.max_open_gates} gates are open already; try again when one has ended")


def _nodes_of(gate: Gate) -> Collection[str]:
    return gate.request.nodes if gate.group is None else [one.node for one in gate.group.members]


def _open_group(
    batch: Batch,
    fleet_state: FleetState,
    policy: Policy,
    request: GateRequest,
    join: Join,
    decided: Gate | None,
    rights: Rights,
    asker: str | None,
) -> Gate:
    """
    The gate for this member: the open gate of its group, the decided one if that answers it, or the next one.

    The gates of a group count their own attempts, whatever attempt the members ask for, because a group whose members
    were replaced after the decision gets another gate. The attempt of the members tells restarts of the whole job
    apart.
    """
    group = _group_state(fleet_state, request, decided)
    gate = group.answer(join, request.attempt)
    if gate is not None and gate.decision is None:
        rendezvous.check_same_question(gate, request)
        return _add_member(batch, fleet_state, policy, gate, request, join, rights)
    if gate is not None:
        check_same_request(gate, request, fleet_state)
        return gate
    _check_room(fleet_state, policy, request, asker)
    attempt = group.next_attempt(request.attempt)
    if attempt > LARGEST_ATTEMPT:
        raise ConflictError(f"job {request.job} has used up its attempts ({LARGEST_ATTEMPT}); use another job name")
    opened = new_gate(fleet_state.new_id(batch.now), dataclasses.replace(request, attempt=attempt), policy, batch.now)
    former = group.former(request.attempt)
    opened = dataclasses.replace(opened, asker=asker)
    opened = rendezvous.with_group(opened, asked_attempt=request.attempt, former=former)
    fleet_state.add(opened)
    if not former:
        opened = _supersede_earlier(batch, fleet_state, policy, opened, rights, first=group.newest is None)
    return _add_member(batch, fleet_state, policy, opened, request, join, rights)


def _group_state(fleet_state: FleetState, request: GateRequest, decided: Gate | None) -> rendezvous.GroupState:
    newest = fleet_state.newest.get(request.job)
    key = "" if newest is None else fleet_state.keys.get((request.job, newest), "")
    gate = fleet_state.gates.get(key) or fleet_state.decided.get(key) or decided
    leases = [] if gate is None else [grant.lease_id for grant in gate.granted.values()]
    over = bool(leases) and not any(map(fleet_state.lease_stands, leases))
    return rendezvous.GroupState(newest=newest, gate=gate, over=over)


def _add_member(
    batch: Batch,
    fleet_state: FleetState,
    policy: Policy,
    gate: Gate,
    request: GateRequest,
    join: Join,
    rights: Rights,
) -> Gate:
    """
    Add a member to the gate. The leases that its rank still has of the gate before this one end, and the leases and
    open gates of earlier attempts that no member before it might end, as far as this one may.
    """
    after = rendezvous.add_member(batch.now, gate, join, request.workload)
    if stored_part(after) == stored_part(gate) and gate.members:
        fleet_state.update_members(after)
        return after
    former = rendezvous.group_of(gate).former
    over = (*gate.unfinished, *(lease_id for lease_id, rank in former.items() if rank == join.rank))
    text = f"rank {join.rank} of group {join.group} asks again (gate {gate.id})"
    after = dataclasses.replace(after, unfinished=_end_earlier(batch, fleet_state, policy, after, over, rights, text))
    fleet_state.carry_out(batch, after, (), ())
    return after


def _supersede_earlier(
    batch: Batch,
    fleet_state: FleetState,
    policy: Policy,
    gate: Gate,
    rights: Rights,
    *,
    first: bool,
) -> Gate:
    """
    End the open gates and the leases of earlier attempts of the job, as far as the caller may. `first`: this database
    knows of no earlier one, but another database may have given leases.

    Returns the gate with what it has to wait for.
    """
    job, attempt, group = gate.request.job, gate.request.attempt, gate.request.join is not None
    text = f"attempt {attempt} of job {job} replaces it (gate {gate.id})"
    rows = (
        [fleet_state.leases[lease_id] for lease_id in fleet_state.adopted] if first else [*fleet_state.leases.values()]
    )
    # Gates of a group count their own attempts, and the count of another database is not known here.
    earlier = [
        row.lease.id
        for row in rows
        if row.lease.job == job and (row.lease.attempt < attempt or (group and row.adopted))
    ]
    others = [other.id for other in fleet_state.gates.values() if other.request.job == job and other.id != gate.id]
    unfinished = _end_earlier(batch, fleet_state, policy, gate, (*others, *earlier), rights, text)
    return dataclasses.replace(gate, unfinished=unfinished)


def _end_earlier(
    batch: Batch,
    fleet_state: FleetState,
    policy: Policy,
    gate: Gate,
    ids: Iterable[str],
    rights: Rights,
    text: str,
) -> Mapping[str, str]:
    """
    End those open gates and leases that the caller may end. The others that stand, as in `Gate.unfinished`.

    A lease of a Workload of Kueue stays, and is not waited for: its pods may still be ending while the Workload is
    queued again, and `healthd kueue` ends it with them.
    """
    standing: dict[str, str] = {}
    lease_ids: list[str] = []
    for one in ids:
        other = fleet_state.gates.get(one)
        if other is None:
            lease_ids.append(one)
            # Of a gate that was admitted while this one waited for it, the leases are left.
            lease_ids += [row.lease.id for row in fleet_state.leases.values() if row.lease.gate == one]
        elif _may_close(other, gate, rights):
            _close_superseded(batch, fleet_state, policy, other, text)
        else:
            standing[one] = ""  # and its leases: they end with it, or are of the job
    for lease_id in lease_ids:
        if not fleet_state.lease_stands(lease_id):
            continue
        row = fleet_state.leases[lease_id]
        if row.lease.gate in standing or (row.lease.workload or "").startswith(KUEUE):
            continue
        if rights.may_end(row):
            fleet_state.end_lease(batch, lease_id, text)
        else:
            standing[lease_id] = row.node
    return standing


def _may_close(other: Gate, gate: Gate, rights: Rights) -> bool:
    """Whether another gate of the job ends for this one: for each of its nodes the caller, or a member, may speak."""
    if other.request.pool is not None:
        return rights.may_close(None)
    joined = {one.node for one in gate.members}
    return all(node in joined or rights.may_close(node) for node in (*_nodes_of(other), *other.granted))


def _close_superseded(batch: Batch, fleet_state: FleetState, policy: Policy, other: Gate, text: str) -> None:
    """
    Close an open gate, and take back what it has granted: its job cannot have started.

    Only leases from before this process are left for the caller to end: the database may be an old copy, and the job
    of such a lease may be running.
    """
    before = {row.lease.id for row in fleet_state.leases_from_before(other)}
    after, effects = decisions.close(batch.now, other, policy, Closing.SUPERSEDED, text)
    own = [one for one in effects if not (isinstance(one, RevokeLease) and one.lease_id in before)]
    fleet_state.carry_out(batch, after, own, ())


def _check_workload(request: GateRequest) -> None:
    if request.workload is not None and (why := problem_of(request.workload)):
        raise BadInputError(f"workload {why}, not {request.workload[:80]!r}")
    several = len(request.nodes) > 1 or (request.count or 0) > 1
    if several and (request.workload or "").startswith("pid:"):
        text = f"workload {request.workload} is a process of one host, but several nodes were requested"
        raise BadInputError(f"{text}; leave it out, or ask node by node")


def _check_times(request: GateRequest) -> None:
    if request.max_age_seconds is not None and not (
        request.max_age_seconds > 0 and math.isfinite(request.max_age_seconds)
    ):
        raise BadInputError(f"max_age_seconds must be greater than 0, not {request.max_age_seconds}")
    if request.wait_seconds is not None and not 0 <= request.wait_seconds <= LONGEST_WAIT_SECONDS:
        raise BadInputError(f"wait_seconds must be 0 to {LONGEST_WAIT_SECONDS:.0f}, not {request.wait_seconds}")
    if request.runtime_seconds is not None and not 0 <= request.runtime_seconds <= MOST_RUNTIME_SECONDS:
        raise BadInputError(f"runtime_seconds must be 0 to {MOST_RUNTIME_SECONDS:.0f}, not {request.runtime_seconds}")
    if request.lease_seconds is not None and not 0 < request.lease_seconds <= LONGEST_LEASE_SECONDS:
        longest = f"{LONGEST_LEASE_SECONDS:.0f} (30 d)"
        raise BadInputError(f"lease_seconds must be more than 0 and at most {longest}, not {request.lease_seconds}")


def _check_join(request: GateRequest, join: Join) -> None:
    if request.nodes or request.pool is not None or request.count is not None:
        raise BadInputError("a group member names only its own node; leave out nodes, pool and count")
    for what, text, longest in (("group", join.group, LONGEST_NAME), ("member", join.member, LONGEST_MEMBER)):
        if not text or len(text) > longest or not text.isprintable():
            raise BadInputError(f"{what} must be 1 to {longest} printable characters, not {text[:40]!r}")
    check_name(join.node)
    if not 1 <= join.size <= MOST_NODES:
        raise BadInputError(f"a group can have 1 to {MOST_NODES} members, not {join.size}")
    if not 0 <= join.rank < join.size:
        raise BadInputError(f"rank {join.rank} must be from 0 to {join.size - 1}")
    if request.min_nodes is not None and not 1 <= request.min_nodes <= join.size:
        raise BadInputError(f"min_nodes must be 1 to {join.size}, not {request.min_nodes}")


def _check_size(request: GateRequest) -> None:
    if request.nodes and request.count is not None:
        raise BadInputError("count belongs to a pool; for named nodes, all are meant, or min_nodes of them")
    if request.pool is not None and request.count is None:
        raise BadInputError(f"how many nodes of pool {request.pool}? give a count")
    wanted = len(request.nodes) or request.count or 0
    if not 1 <= wanted <= MOST_NODES:
        raise BadInputError(f"1 to {MOST_NODES} nodes can be requested, not {wanted}")
    if len(set(request.nodes)) != len(request.nodes):
        twice = sorted(name for name, times in Counter(request.nodes).items() if times > 1)
        raise BadInputError(f"node named twice: {', '.join(twice[:5])}")
    if request.min_nodes is not None and not 1 <= request.min_nodes <= wanted:
        raise BadInputError(f"min_nodes must be 1 to {wanted}, not {request.min_nodes}")
