"""The members of a group: who has joined its gate, and what one more request of a member changes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from healthd.aggregator.model.gates import Gate, GateGroup, Member
from healthd.core.errors import ConflictError
from healthd.core.model import GateRequest, Join, Verdict


def shared_request(request: GateRequest) -> GateRequest:
    """The part of a request that all members of a group must ask alike."""
    if request.join is None:
        return request
    join = dataclasses.replace(request.join, rank=0, member="", node="", execute=False)
    return dataclasses.replace(request, attempt=0, nodes=(), workload=None, join=join)


def check_same_question(gate: Gate, request: GateRequest) -> None:
    """ConflictError that names what this member asks differently from the members before it."""
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
    The gate after this member has asked, for the first time or again. ConflictError when a member contradicts itself.

    A new member of a known rank replaces the one before it; that is a new generation.
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
    """The gate without this member, whose hook has said that it ends, and without the members that it had replaced."""
    gone = {member}
    for one in gate.members:
        if one.member == member:
            gone |= {
                m.member for m in gate.members if m.rank == one.rank and m.heard_at <= one.joined_at and m is not one
            }
    return with_members(gate, [one for one in gate.members if one.member not in gone])


def with_members(gate: Gate, kept: Sequence[Member]) -> Gate:
    """The gate with only these members. Members whose rank nobody has now are remembered as gone."""
    there = {one.rank for one in kept}
    lost = {one.rank: one for one in (*group_of(gate).gone, *gate.members) if one.rank not in there}
    gone = tuple(dataclasses.replace(lost[rank], heard_at=lost[rank].joined_at) for rank in sorted(lost))
    return with_group(gate, members=tuple(kept), gone=gone)


def group_of(gate: Gate) -> GateGroup:
    """The group of the gate; an empty one unless the gate was asked for by a `join`."""
    return gate.group or GateGroup(asked_attempt=gate.request.attempt)


def with_group(gate: Gate, **changes: Any) -> Gate:
    """The gate with these fields of its group changed."""
    return dataclasses.replace(gate, group=dataclasses.replace(group_of(gate), **changes))


def executors(gate: Gate) -> Mapping[str, str]:
    """The members that run the checks of their own nodes, by node; of each rank the newest."""
    newest = {one.rank: one for one in gate.members}
    return {one.node: one.member for one in newest.values() if one.execute}


def answers_member(gate: Gate, join: Join, *, over: bool) -> bool:
    """
    Whether the decision of a decided gate is the answer to this member.

    It answers the members that it had. An admission also answers a rank that joins too late, because the job has
    started without it, until that job is `over`. Any other member opens the next gate of the group.
    """
    if any(one.member == join.member for one in gate.members):
        return True
    admitted = gate.decision is not None and gate.decision.decision is Verdict.ADMIT
    return admitted and not over and all(one.rank != join.rank for one in gate.members)
