"""
Collects the members of a group: hooks that know only themselves and join one gate. Pure, a part of `machine.step`.

Every member says its rank, its node and which process it is. A gate collects members until all ranks have joined or its
time is up; then it goes on without the missing ranks if `min_nodes` allows it, and otherwise rejects and names them.
The members whose nodes are checked are the roster. As soon as one of the roster is gone (its hook has stopped asking,
or another process has taken its rank), the gate gives back its nodes and collects the members again, so that no
incomplete group is ever admitted; the hooks of the other members just go on asking. Two members that claim one rank or
one node are a conflict: the gate names it and waits, because one of the two may be about to end.

Also here:

- the members of a group: who has joined its gate, and what one more request of a member changes;
- the two-step end of a gate that several hooks ask for: decision, acknowledgement by all included, then go for all
  or for none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthd.aggregator.gate.records import Collecting, Gate, GateGroup, Member, Phase, Waiting
from healthd.aggregator.gate.reservation import Hold, Reject, StepContext, deadline_of, return_nodes
from healthd.aggregator.gate.transitions import Event
from healthd.core.errors import ConflictError
from healthd.core.evidence import reason
from healthd.core.model import GateRequest, Join, Mode, Reason, Verdict

MOST_NAMED = 16
"""Missing ranks that get a reason of their own; the sentence about all of them has the rest."""

MOST_RESTARTS = 20
"""How often one gate begins anew because a member was replaced. A pod that crashes for ever must not hold all."""
CONFLICT_TIMES = 2.0
"""Reject after a conflict has lasted for this many times `Tuning.member_seconds`: a pod that ends is gone by then."""


def check_same_question(gate: Gate, request: GateRequest) -> None:
    """ConflictError that names what this member asks differently from the members before it."""
    asked, others = shared_request(request), shared_request(gate.request)
    if asked == others:
        return
    join, theirs = asked.join, others.join
    if join is None or theirs is None:
        raise ConflictError(
            f"job {request.job} was requested before without joining a group (gate {gate.id}); use another job name"
        )
    for name in ("group", "size"):
        if getattr(join, name) != getattr(theirs, name):
            raise ConflictError(
                f"job {request.job}: this member has {name} {getattr(join, name)}, earlier members have "
                f"{getattr(theirs, name)} (gate {gate.id})"
            )
    name = next(f.name for f in dataclasses.fields(asked) if getattr(asked, f.name) != getattr(others, f.name))
    raise ConflictError(
        f"group {join.group}: this member requests {name} {getattr(asked, name)}, earlier members "
        f"{getattr(others, name)} (gate {gate.id}); all must request the same"
    )


def shared_request(request: GateRequest) -> GateRequest:
    """The part of a request that all members of a group must ask alike."""
    if request.join is None:
        return request
    join = dataclasses.replace(request.join, rank=0, member="", node="", execute=False)
    return dataclasses.replace(request, attempt=0, nodes=(), workload=None, join=join)


def add_member(now: float, gate: Gate, join: Join, workload: str | None) -> Gate:
    """
    The gate after this member has asked, for the first time or again. ConflictError when a member contradicts itself.

    A new member of a known rank replaces the one before it; that is a new generation.
    """
    known = next((one for one in gate.members if one.member == join.member), None)
    if known is not None:
        if (known.rank, known.node) != (join.rank, join.node):
            raise ConflictError(
                f"group {join.group}: member {join.member} was rank {known.rank} on {known.node} and is now rank "
                f"{join.rank} on {join.node}; every process needs its own member name"
            )
        heard = tuple(dataclasses.replace(one, heard_at=now) if one is known else one for one in gate.members)
        return with_group(gate, members=heard)
    if len(gate.members) >= 4 * join.size + 64:
        raise ConflictError(f"group {join.group}: {len(gate.members)} members have joined for {join.size} ranks")
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


def executors(gate: Gate) -> Mapping[str, str]:
    """The members that run the checks of their own nodes, by node; of each rank the newest."""
    newest = {one.rank: one for one in gate.members}
    return {one.node: one.member for one in newest.values() if one.execute}


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """
    What is known of a group when a member asks: its newest `gate`, whatever that came to, and whether the job that the
    gate has admitted is `over`. `newest` is the newest attempt of the job; None where there was none.
    """

    newest: int | None
    gate: Gate | None
    over: bool

    def answer(self, join: Join, attempt: int) -> Gate | None:
        """
        The gate that this member joins, if it is open, or whose decision is the answer. None: it opens the next one.

        A decision answers the members that the gate had. An admission also answers a rank that joins too late, because
        the job has started without it, until that job is over. ConflictError for a member of an attempt that is over.
        """
        gate = self.gate
        if gate is None:
            return None
        if gate.group is not None and gate.group.asked_attempt > attempt:
            raise ConflictError(
                f"attempt {attempt} of group {join.group} is over: attempt {gate.group.asked_attempt} was requested "
                "meanwhile"
            )
        if gate.decision is None:
            return gate if gate.group is None or gate.group.asked_attempt == attempt else None
        if gate.group is None or gate.group.asked_attempt != attempt:
            return None
        if any(one.member == join.member for one in gate.members):
            return gate
        too_late = gate.decision.decision is Verdict.ADMIT and all(one.rank != join.rank for one in gate.members)
        return gate if too_late and not self.over else None

    def next_attempt(self, attempt: int) -> int:
        """The attempt of the next gate, which counts on where the members ask for the same attempt again."""
        return attempt if self.newest is None else max(attempt, self.newest + 1)

    def former(self, attempt: int) -> Mapping[str, int]:
        """The leases of the gates before the next one of this attempt, by the rank whose they were."""
        gate = self.gate
        if gate is None or gate.group is None or gate.group.asked_attempt != attempt:
            return {}
        ranks = {one.node: one.rank for one in gate.group.members}
        own = {grant.lease_id: ranks[node] for node, grant in gate.granted.items() if node in ranks}
        return {**gate.group.former, **own}


def collect_members(context: StepContext) -> Hold | Reject | None:
    """None when the nodes of the gate are known; they are in `request.nodes` then. Else what the gate waits for."""
    join = context.gate.request.join
    if join is None:
        return None
    _drop_silent(context)
    present, conflicts = _members_by_rank(context)
    if context.gate.phase is not Phase.COLLECTING:
        group = group_of(context.gate)
        if _complete(group.roster, present, conflicts):
            return _unheard_since_start(context)
        if group.restarts >= MOST_RESTARTS:
            text = f"group {join.group}: members were replaced so often that the gate restarted {group.restarts}"
            return Reject(
                (reason("MemberMissing", f"{text} times; find out why their pods end"), *_missing(context, present))
            )
        _restart(context)
    if unheard := _unheard_since_start(context):
        return unheard
    missing = _missing(context, present)
    if conflicts:
        why = tuple(reason("MemberConflict", one.text) for one in conflicts)
        borne = CONFLICT_TIMES * context.policy.tuning.member_seconds
        over = context.now >= deadline_of(context) or any(context.now - one.since >= borne for one in conflicts)
        return _failed(context, (*why, *missing)) if over else Hold((*why, *missing))
    if not missing:
        _start_with(context, present)
        return None
    if context.now < deadline_of(context):
        return Hold(missing)
    least = context.gate.request.min_nodes
    if least is None or len(present) < least:
        return _failed(context, missing)
    _start_with(context, present)
    return None


def with_members(gate: Gate, kept: Sequence[Member]) -> Gate:
    """The gate with only these members. Members whose rank nobody has now are remembered as gone."""
    there = {one.rank for one in kept}
    lost = {one.rank: one for one in (*group_of(gate).gone, *gate.members) if one.rank not in there}
    gone = tuple(dataclasses.replace(lost[rank], heard_at=lost[rank].joined_at) for rank in sorted(lost))
    return with_group(gate, members=tuple(kept), gone=gone)


def with_group(gate: Gate, **changes: Any) -> Gate:
    """The gate with these fields of its group changed."""
    return dataclasses.replace(gate, group=dataclasses.replace(group_of(gate), **changes))


def group_of(gate: Gate) -> GateGroup:
    """The group of the gate; an empty one unless the gate was asked for by a `join`."""
    return gate.group or GateGroup(asked_attempt=gate.request.attempt)


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two members of which only one can be meant, since `since`."""

    text: str
    since: float


def wake_at(context: StepContext) -> float:
    """When a member will have been silent for too long, or a conflict will have lasted for too long."""
    if context.gate.request.join is None or not context.gate.members:
        return math.inf
    bound = context.policy.tuning.member_seconds
    times = [one.heard_at + bound for one in context.gate.members]
    if context.gate.phase is Phase.COLLECTING:
        times += [one.joined_at + CONFLICT_TIMES * bound for one in context.gate.members]
    # A bound that is reached just now is passed a millisecond later.
    return min((max(at, context.now + 0.001) for at in times if at >= context.now), default=math.inf)


def with_members_so_far(gate: Gate) -> Gate:
    """A gate that is answered before its group is complete: its nodes are those of the members so far."""
    if gate.phase is not Phase.COLLECTING:
        return gate
    newest = {one.rank: one for one in gate.members}
    nodes = dict.fromkeys(newest[rank].node for rank in sorted(newest))
    return dataclasses.replace(gate, request=dataclasses.replace(gate.request, nodes=tuple(nodes)))


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """
    Who is to acknowledge and who has, for one decided gate.

    `everyone` was asked for and waits for the outcome; `included` must all acknowledge before `deadline` (monotonic
    seconds). `go` is None until that is settled, and never changes afterwards, so that nobody starts when another was
    told not to. `told` are those who have fetched the outcome or withdrawn, `ended` those whose command is over.
    `withdrawn` is who settled it by not starting; then nobody can say whether the others would have acknowledged.
    """

    everyone: frozenset[str]
    included: frozenset[str]
    deadline: float
    acknowledged: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    go: bool | None = None
    withdrawn: str | None = None

    def acknowledge(self, node: str, now: float) -> Handshake:
        """`node` has read the decision. Once the deadline has passed, or all are here, `go` is settled."""
        if self.go is None and now < self.deadline and node in self.included:
            return dataclasses.replace(self, acknowledged=self.acknowledged | {node}).settle(now)
        return self.settle(now)

    def withdraw(self, node: str, now: float) -> Handshake:
        """`node` does not start, whatever it has acknowledged: nobody does, unless that they go was settled before."""
        settled = dataclasses.replace(self.settle(now), told=self.told | {node})  # it waits for no outcome
        if settled.go is not None or node not in self.included:
            return settled.end(node)
        return dataclasses.replace(settled, withdrawn=node, go=False)

    def settle(self, now: float) -> Handshake:
        """The handshake as of now."""
        if self.go is not None:
            return self
        if self.included <= self.acknowledged:
            return dataclasses.replace(self, go=True)
        return dataclasses.replace(self, go=False) if now >= self.deadline else self

    def tell(self, node: str) -> Handshake:
        """`node` has been given the outcome."""
        return self if self.go is None else dataclasses.replace(self, told=self.told | {node})

    def end(self, node: str) -> Handshake:
        """The command of `node` is over."""
        return dataclasses.replace(self, ended=self.ended | ({node} & self.included))

    @property
    def all_told(self) -> bool:
        """Whether nobody waits for the outcome any more."""
        return self.go is not None and self.everyone <= self.told

    @property
    def over(self) -> bool:
        """Whether the job has ended on all nodes that ran it, so that those who were left out may leave."""
        return self.go is False or (self.go is True and self.included <= self.ended)

    @property
    def missing(self) -> tuple[str, ...]:
        """Why it is not to go: who has withdrawn, or else all who have not acknowledged, sorted."""
        return (self.withdrawn,) if self.withdrawn else tuple(sorted(self.included - self.acknowledged))


def _drop_silent(context: StepContext) -> None:
    """Drop members that have stopped asking. After a start of the aggregator all get the time to ask again."""
    if context.snapshot.settling is not None:
        return
    bound = context.policy.tuning.member_seconds
    kept = tuple(one for one in context.gate.members if context.now - one.heard_at <= bound)
    if kept != context.gate.members:
        context.gate = with_members(context.gate, kept)


def _unheard_since_start(context: StepContext) -> Hold | None:
    """Wait for members that have not asked since the aggregator started: they may be gone."""
    bound = context.policy.tuning.member_seconds
    silent = [one for one in context.gate.members if context.now - one.heard_at > bound]
    if context.gate.phase is not Phase.COLLECTING:
        silent = [one for one in silent if one.member in group_of(context.gate).roster]
    if not silent:
        return None
    if context.gate.phase is Phase.COLLECTING and context.now >= context.gate.deadline:
        context.gate = dataclasses.replace(context.gate, deadline=context.now + context.policy.tuning.settle_seconds)
    text = ", ".join(f"rank {one.rank} on {one.node}" for one in silent[:MOST_NAMED])
    return Hold((reason("MemberMissing", f"no report yet since the aggregator started: {text}"),))


def _members_by_rank(context: StepContext) -> tuple[Mapping[int, Member], Sequence[Conflict]]:
    """The newest member of each rank, and the conflicts."""
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
    """The sentence about two members that claim the same."""
    join = context.gate.request.join
    first, second = (
        f"{m.member} (rank {m.rank} on {m.node}{', ' + m.workload if m.workload else ''})" for m in (one, other)
    )
    return f"group {join.group if join else '?'}: two members claim {what}, {first} and {second}; end one of them"


def _complete(roster: Sequence[str], present: Mapping[int, Member], conflicts: Sequence[Conflict]) -> bool:
    """Whether every member of the roster is still the member of its rank, without a conflict."""
    standing = {one.member for one in present.values()}
    return not conflicts and all(member in standing for member in roster)


def _missing(context: StepContext, present: Mapping[int, Member]) -> tuple[Reason, ...]:
    """One sentence about all missing ranks; empty when none is missing."""
    join = context.gate.request.join
    if join is None or len(present) == join.size:
        return ()
    ranks = [rank for rank in range(join.size) if rank not in present]
    rest = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    named = ", ".join(f"{rank}{_last_seen(context.gate, rank)}" for rank in ranks[:MOST_NAMED]) + rest
    asked = deadline_of(context) - (context.gate.deadline - context.policy.join_seconds)
    late = f" within {asked:.0f} s" if context.now >= deadline_of(context) else ""
    text = f"group {join.group}: {len(present)} of {join.size} members have joined; missing{late}: rank {named}"
    return (reason("MemberMissing", text),)


def _last_seen(gate: Gate, rank: int) -> str:
    """Where a missing rank was before; empty where it never joined."""
    return next((f" (its hook on {one.node} stopped polling)" for one in group_of(gate).gone if one.rank == rank), "")


def _failed(context: StepContext, why: tuple[Reason, ...]) -> Reject:
    """Reject; in observe mode the members so far are admitted all the same."""
    if context.gate.terms.mode is Mode.OBSERVE:
        context.gate = with_members_so_far(context.gate)
    return Reject(why)


def _start_with(context: StepContext, present: Mapping[int, Member]) -> None:
    """Check these members from now on; ranks that have not joined are left out."""
    gate, join = context.gate, context.gate.request.join
    assert join is not None
    late = {
        f"rank-{rank}": (
            reason("MemberMissing", f"rank {rank} of group {join.group} did not join in time{_last_seen(gate, rank)}"),
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
    """Collect the members again; nothing that was done for the former ones counts."""
    return_nodes(context, context.gate.reserved, "a member of the group was replaced or has ended")
    context.assessments.clear()
    context.gate = dataclasses.replace(
        with_group(context.gate, roster=(), restarts=group_of(context.gate).restarts + 1, began_at=None),
        request=dataclasses.replace(context.gate.request, nodes=()),
        ordered={},
        failed={},
        ended=(),
        returned={},
        deadline=context.now + context.policy.join_seconds,
    )
    context.move(Event.REGROUPED, Collecting())
