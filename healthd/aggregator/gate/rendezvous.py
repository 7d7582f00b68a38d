"""
Hooks that know only themselves come together: pure, a part of `gate.step`, and what one more that asks does to it.

Every member says its rank, its node and which process it is. A gate collects them until all ranks are there, or until
time is up: then it goes on with those that have come where `min_nodes` of them will do, else it names the missing. The
members that are checked are its roster. As soon as one of the roster is gone (its hook asks no more, or another
process has taken its rank) all is given back and the members come together anew, so that nothing is ever admitted
for a group that is not whole: the hooks of the others just go on asking. Two members that both ask for one rank, or
from one node, are a conflict that is named and waited out, because one of them may be on its way out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthd.aggregator.gate.reservation import StepContext, deadline_of, return_nodes
from healthd.aggregator.gate.transitions import Event
from healthd.aggregator.model import Collecting, Gate, GateGroup, Member, Phase, Waiting
from healthd.core.errors import ConflictError
from healthd.core.evidence import reason
from healthd.core.model import GateRequest, Join, Mode, Reason, Verdict

MOST_NAMED = 16
"""Missing ranks that get a reason of their own; the sentence about all of them has the rest."""

CONFLICT_TIMES = 2.0
"""A conflict that lasts so many times as a silent member is borne is the answer: a pod that ends is gone by then."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """The gate cannot go on: `failed` why it never will, or `waiting` what for."""

    failed: tuple[Reason, ...] = ()
    waiting: tuple[Reason, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two members of which only one can be meant, since `since`."""

    text: str
    since: float


# --- what a request does ----------------------------------------------------------------------------------------------


def shared_request(request: GateRequest) -> GateRequest:
    """What all members of a group must ask alike."""
    if request.join is None:
        return request
    join = dataclasses.replace(request.join, rank=0, member="", node="", execute=False)
    return dataclasses.replace(request, attempt=0, nodes=(), workload=None, join=join)


def check_same_question(gate: Gate, request: GateRequest) -> None:
    """ConflictError that names what this member asks otherwise than those before it."""
    asked, others = shared_request(request), shared_request(gate.request)
    if asked == others:
        return
    join, theirs = asked.join, others.join
    if join is None or theirs is None:
        raise ConflictError(f"job {request.job} was asked before without joining (gate {gate.id}); name it otherwise")
    for name in ("group", "size"):
        if getattr(join, name) != getattr(theirs, name):
            raise ConflictError(
                f"job {request.job}: this member says {name} {getattr(join, name)}, those before it said "
                f"{getattr(theirs, name)} (gate {gate.id})"
            )
    name = next(f.name for f in dataclasses.fields(asked) if getattr(asked, f.name) != getattr(others, f.name))
    raise ConflictError(
        f"group {join.group}: this member asks for {name} {getattr(asked, name)}, those before it for "
        f"{getattr(others, name)} (gate {gate.id}); all must ask alike"
    )


def add_member(now: float, gate: Gate, join: Join, workload: str | None) -> Gate:
    """
    The gate once this member has asked (again). ConflictError when the member contradicts itself.

    Another member of the same rank takes its place: that is a new generation.
    """
    known = next((one for one in gate.members if one.member == join.member), None)
    if known is not None:
        if (known.rank, known.node) != (join.rank, join.node):
            raise ConflictError(
                f"group {join.group}: member {join.member} was rank {known.rank} on {known.node} and says now rank "
                f"{join.rank} on {join.node}; every process needs a name of its own"
            )
        heard = tuple(dataclasses.replace(one, heard_at=now) if one is known else one for one in gate.members)
        return with_group(gate, members=heard)
    if len(gate.members) >= 4 * join.size + 64:
        raise ConflictError(f"group {join.group}: {len(gate.members)} members have come for {join.size} ranks")
    newcomer = Member(
        member=join.member,
        rank=join.rank,
        node=join.node,
        workload=workload,
        joined_at=now,
        heard_at=now,
        execute=join.execute,
    )
    group = group_of(gate)
    replaced = any(one.rank == join.rank for one in group.members)
    return with_group(
        gate,
        members=(*group.members, newcomer),
        gone=tuple(one for one in group.gone if one.rank != join.rank),
        generation=group.generation + int(replaced),
    )


def remove_member(gate: Gate, member: str) -> Gate:
    """The gate without this member, whose hook has said that it ends, and without those whose place it had taken."""
    gone = {member}
    for one in gate.members:
        if one.member == member:
            gone |= {
                m.member for m in gate.members if m.rank == one.rank and m.heard_at <= one.joined_at and m is not one
            }
    return _with_members(gate, [one for one in gate.members if one.member not in gone])


def _with_members(gate: Gate, kept: Sequence[Member]) -> Gate:
    """The gate with these members alone; of the others those are remembered whose rank nobody has now."""
    there = {one.rank for one in kept}
    lost = {one.rank: one for one in (*group_of(gate).gone, *gate.members) if one.rank not in there}
    gone = tuple(dataclasses.replace(lost[rank], heard_at=lost[rank].joined_at) for rank in sorted(lost))
    return with_group(gate, members=tuple(kept), gone=gone)


def group_of(gate: Gate) -> GateGroup:
    """The members of the gate; an empty group where it is none of a `join`."""
    return gate.group or GateGroup(asked_attempt=gate.request.attempt)


def with_group(gate: Gate, **changes: Any) -> Gate:
    """The gate with these fields of its group changed."""
    return dataclasses.replace(gate, group=dataclasses.replace(group_of(gate), **changes))


def executors(gate: Gate) -> Mapping[str, str]:
    """Which member is to run the checks of which node: the newest of each rank, if it said so."""
    newest = {one.rank: one for one in gate.members}
    return {one.node: one.member for one in newest.values() if one.execute}


def answers_member(gate: Gate, join: Join, *, over: bool) -> bool:
    """
    Whether the answer of a decided gate is the answer to this member.

    It is for those who were there, and of an admission also for a rank that came too late: the job has started without
    it. Any other begins the group's next gate, and so does that rank once the job is `over`: it is of the next job.
    """
    if any(one.member == join.member for one in gate.members):
        return True
    admitted = gate.decision is not None and gate.decision.decision is Verdict.ADMIT
    return admitted and not over and all(one.rank != join.rank for one in gate.members)


# --- a step -----------------------------------------------------------------------------------------------------------


def collect_members(context: StepContext) -> Pending | None:
    """None when it is known which nodes are asked for: they are `request.nodes` then. Else what it waits for."""
    join = context.gate.request.join
    if join is None:
        return None
    _drop_silent(context)
    present, conflicts = _members_by_rank(context)
    if context.gate.phase is not Phase.COLLECTING:
        group = group_of(context.gate)
        if _complete(group.roster, present, conflicts):
            return _unheard_since_start(context)
        if group.restarts >= context.policy.most_restarts:
            text = f"group {join.group}: members were replaced so often that the gate began anew {group.restarts}"
            return Pending(
                failed=(reason("MemberMissing", f"{text} times; see why their pods end"), *_missing(context, present))
            )
        _restart(context)
    if unheard := _unheard_since_start(context):
        return unheard
    missing = _missing(context, present)
    if conflicts:
        why = tuple(reason("MemberConflict", one.text) for one in conflicts)
        borne = CONFLICT_TIMES * context.policy.member_seconds
        over = context.now >= deadline_of(context) or any(context.now - one.since >= borne for one in conflicts)
        return _failed(context, (*why, *missing)) if over else Pending(waiting=(*why, *missing))
    if not missing:
        _start_with(context, present)
        return None
    if context.now < deadline_of(context):
        return Pending(waiting=missing)
    least = context.gate.request.min_nodes
    if least is None or len(present) < least:
        return _failed(context, missing)
    _start_with(context, present)
    return None


def wake_at(context: StepContext) -> float:
    """When a member will have been silent for too long, or a conflict was borne for long enough."""
    if context.gate.request.join is None or not context.gate.members:
        return math.inf
    bound = context.policy.member_seconds
    times = [one.heard_at + bound for one in context.gate.members]
    if context.gate.phase is Phase.COLLECTING:
        times += [one.joined_at + CONFLICT_TIMES * bound for one in context.gate.members]
    # A bound that is reached just now is passed in a moment.
    return min((max(at, context.now + 0.001) for at in times if at >= context.now), default=math.inf)


def with_members_so_far(gate: Gate) -> Gate:
    """A gate that is answered before its members have come together: those who have come are meant."""
    if gate.phase is not Phase.COLLECTING:
        return gate
    newest = {one.rank: one for one in gate.members}
    nodes = dict.fromkeys(newest[rank].node for rank in sorted(newest))
    return dataclasses.replace(gate, request=dataclasses.replace(gate.request, nodes=tuple(nodes)))


def _drop_silent(context: StepContext) -> None:
    """Members that ask no more are gone; after a restart of ours all get the time to ask again."""
    if context.snapshot.settling is not None:
        return
    kept = tuple(one for one in context.gate.members if context.now - one.heard_at <= context.policy.member_seconds)
    if kept != context.gate.members:
        context.gate = _with_members(context.gate, kept)


def _unheard_since_start(context: StepContext) -> Pending | None:
    """Members that have not asked since we were started: whether they are still there is not known."""
    bound = context.policy.member_seconds
    silent = [one for one in context.gate.members if context.now - one.heard_at > bound]
    if context.gate.phase is not Phase.COLLECTING:
        silent = [one for one in silent if one.member in group_of(context.gate).roster]
    if not silent:
        return None
    if context.gate.phase is Phase.COLLECTING and context.now >= context.gate.deadline:
        context.gate = dataclasses.replace(context.gate, deadline=context.now + context.policy.settle_seconds)
    text = ", ".join(f"rank {one.rank} on {one.node}" for one in silent[:MOST_NAMED])
    return Pending(waiting=(reason("MemberMissing", f"not heard again yet since the aggregator started: {text}"),))


def _members_by_rank(context: StepContext) -> tuple[Mapping[int, Member], Sequence[Conflict]]:
    """Who stands for each rank: the last that came for it; and the conflicts."""
    present: dict[int, Member] = {}
    conflicts: list[Conflict] = []
    for one in context.gate.members:
        present[one.rank] = one
    for one in context.gate.members:
        other = present[one.rank]
        if one is not other and one.heard_at > other.joined_at:
            conflicts.append(
                Conflict(text=_conflict_text(context, f"rank {one.rank}", one, other), since=other.joined_at)
            )
    by_node: dict[str, Member] = {}
    for rank in sorted(present):
        one = present[rank]
        other = by_node.setdefault(one.node, one)
        if other is not one:
            since = max(one.joined_at, other.joined_at)
            conflicts.append(Conflict(text=_conflict_text(context, f"node {one.node}", other, one), since=since))
    return present, conflicts


def _conflict_text(context: StepContext, what: str, one: Member, other: Member) -> str:
    join = context.gate.request.join
    first, second = (
        f"{m.member} (rank {m.rank} on {m.node}{', ' + m.workload if m.workload else ''})" for m in (one, other)
    )
    return (
        f"group {join.group if join else '?'}: {what} is claimed by two members at once, {first} and {second}; end one"
    )


def _complete(roster: Sequence[str], present: Mapping[int, Member], conflicts: Sequence[Conflict]) -> bool:
    """Every member that is being checked still stands for its rank, and nobody disputes it."""
    standing = {one.member for one in present.values()}
    return not conflicts and all(member in standing for member in roster)


def _missing(context: StepContext, present: Mapping[int, Member]) -> tuple[Reason, ...]:
    """One sentence about all missing ranks; nothing when none is."""
    join = context.gate.request.join
    if join is None or len(present) == join.size:
        return ()
    ranks = [rank for rank in range(join.size) if rank not in present]
    rest = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    named = ", ".join(f"{rank}{_last_seen(context.gate, rank)}" for rank in ranks[:MOST_NAMED]) + rest
    asked = deadline_of(context) - (context.gate.deadline - context.policy.join_seconds)
    late = f" within {asked:.0f} s" if context.now >= deadline_of(context) else ""
    text = f"group {join.group}: {len(present)} of {join.size} members have come; missing{late}: rank {named}"
    return (reason("MemberMissing", text),)


def _last_seen(gate: Gate, rank: int) -> str:
    """Where a rank that is missing was before; empty where it never came."""
    return next((f" (its hook on {one.node} asks no more)" for one in group_of(gate).gone if one.rank == rank), "")


def _failed(context: StepContext, why: tuple[Reason, ...]) -> Pending:
    """The answer is no; observe mode admits those who have come all the same."""
    if context.gate.terms.mode is Mode.OBSERVE:
        context.gate = with_members_so_far(context.gate)
    return Pending(failed=why)


def _start_with(context: StepContext, present: Mapping[int, Member]) -> None:
    """These members are checked from now on; ranks that did not come are left out."""
    gate, join = context.gate, context.gate.request.join
    assert join is not None
    late = {
        f"rank-{rank}": (
            reason("MemberMissing", f"rank {rank} of group {join.group} did not come in time{_last_seen(gate, rank)}"),
        )
        for rank in range(join.size)
        if rank not in present
    }
    chosen = [present[rank] for rank in sorted(present)]
    least = gate.request.min_nodes
    context.gate = dataclasses.replace(
        with_group(gate, roster=tuple(one.member for one in chosen), began_at=context.now),
        request=dataclasses.replace(gate.request, nodes=tuple(one.node for one in chosen)),
        terms=dataclasses.replace(gate.terms, wanted=len(chosen), needed=len(chosen) if least is None else least),
        failed=late,
        deadline=context.now + gate.terms.wait_seconds,
    )
    context.move(Event.GATHERED, Waiting())


def _restart(context: StepContext) -> None:
    """Nothing of what was done for the former members counts for those who come now."""
    return_nodes(context, context.gate.reserved, "a member of the group was replaced or is gone")
    context.assessments.clear()
    context.gate = dataclasses.replace(
        with_group(context.gate, roster=(), restarts=group_of(context.gate).restarts + 1, began_at=None),
        request=dataclasses.replace(context.gate.request, nodes=()),
        ordered={},
        failed={},
        ended=(),
        deadline=context.now + context.policy.join_seconds,
    )
    context.move(Event.REGROUPED, Collecting())
