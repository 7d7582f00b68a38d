"""
The course of a validation: the whole first, then what localisation asks for, to the verdict. Pure.

`advance` looks at the reports of the groups under test. A round ends when all its groups have; then localisation says
what comes next. Groups of one round share no member, so they run at once, on as many nodes as there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from healthd.fleet.model import FleetNode
from healthd.fleet.policy import Policy
from healthd.fleet.validation import nccom
from healthd.fleet.validation.model import Group, Seat, Tested, Validation
from healthd.fleet.validation.reading import FINAL, all_inside, all_up, how_far, lost_ranks, read_group
from healthd.localize import Bounds, GroupOutcome, NextRound, Noise, Outcome, Problem, localize
from healthd.model import CollectiveOrder, NodeState, Order, OrderReport

LAST_WORDS_SECONDS = 5.0
"""How long a group that was called off may take to say what it saw: a kill and one sync."""

WAKE_SECONDS = 0.1
"""So much after a node counts as silent: to look a moment before would be to look in vain, again and again."""

Nodes = Mapping[str, FleetNode]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A validation as it goes on: what it waits for, in words, and when to look again if nobody reports."""

    validation: Validation
    waiting: str
    wake_at: float


def begin(
    now: float, validation_id: str, members: Sequence[str], nodes: Nodes, policy: Policy, *, deadline: float
) -> Validation:
    """A validation of `members`, in this order of ranks, that has not started a group yet."""
    ranks = {node: _ranks_of(nodes.get(node)) for node in members}
    return Validation(
        id=validation_id,
        members=tuple(members),
        ranks=ranks,
        whole=_first_ranks(members, ranks),
        labels=_labels(members, nodes, policy),
        seed=int.from_bytes(hashlib.sha256(validation_id.encode()).digest()[:4], "big") >> 1,
        started_at=now,
        deadline=min(deadline, now + policy.validation_seconds),
        launch=nccom.launch_mode(members, nodes, policy),
    )


def advance(
    now: float,
    validation: Validation,
    nodes: Nodes,
    policy: Policy,
    find_partners: Callable[[int], Sequence[str]],
) -> Step:
    """
    Take a validation as far as it can go now; one with a verdict stays as it is.

    `find_partners(count)` gives idle nodes that are known to be good; it is asked once, when the whole did not pass.
    """
    if validation.verdict is not None:
        return Step(validation=validation, waiting="", wake_at=math.inf)
    if not validation.groups and not validation.done and not validation.history:
        validation = _start_round(now, validation, [validation.members], nodes, policy)
    validation = _watch(now, validation, nodes, policy)
    while not validation.groups and validation.verdict is None:
        validation = _next_round(now, validation, nodes, policy, find_partners)
    if validation.verdict is not None:
        return Step(validation=validation, waiting="", wake_at=math.inf)
    return Step(
        validation=validation,
        waiting=_waiting(validation, nodes),
        wake_at=min(_wake_at(now, group, nodes, policy) for group in validation.groups),
    )


def conclude(now: float, validation: Validation, policy: Policy, why: str) -> Validation:
    """End it with what is known; `why` says what ended it."""
    if validation.verdict is not None:
        return validation
    history = [*validation.history, *validation.done]
    found = localize(_problem(validation, policy), _outcomes(history), conclude=True)
    assert not isinstance(found, NextRound)
    return dataclasses.replace(
        validation, groups=(), done=(), history=tuple(history), verdict=found, ended_at=now, why=why
    )


def orders_of(validation: Validation, node: str, policy: Policy, *, workload: str) -> tuple[Order, ...]:
    """
    What a node is to do for it, asked by `workload`: its order in the group that it is a member of.

    That of a group that was called off stays listed as withdrawn: what is no longer listed, nodes soon stop to repeat,
    and the last words of all members are wanted together.
    """
    for group in validation.groups:
        seat = next((seat for seat in group.seats if seat.node == node), None)
        if seat is None:
            continue
        within = group.ends_at - group.started_at - LAST_WORDS_SECONDS
        order = CollectiveOrder(
            validation=validation.id,
            group=group.id,
            checks=nccom.checks_of(validation, policy),
            first_rank=seat.first_rank,
            ranks=seat.ranks,
            size=sum(other.ranks for other in group.seats),
            whole_rank=validation.whole.get(node, -1),
            main=group.main,
            port=group.port,
            seed=validation.seed,
            # A node does not know how far the ranks of the others are: who was late is seen here, see `_looked_at`.
            join_seconds=policy.collective_join_seconds + (0 if group.hosts else policy.collective_start_seconds),
            timeout_seconds=policy.collective_timeout_seconds,
            workload=workload,
            nccom=nccom.nccom_of(group, validation),
        )
        order_id = group.order_id(node)
        return (
            Order(id=order_id, kind="collective", deadline_seconds=within, withdrawn=group.closed, collective=order),
            *nccom.launch_orders(group, validation, node, deadline_seconds=within),
        )
    return ()


def peer_host(state: NodeState) -> str | None:
    """Where the ranks of a node can be reached."""
    if state.peer_address:
        return state.peer_address
    if not state.address:
        return None
    return state.address.rpartition(":")[0].strip("[]") or None


# --- the groups under test --------------------------------------------------------------------------------------------


def _watch(now: float, validation: Validation, nodes: Nodes, policy: Policy) -> Validation:
    """Take in what was reported; groups that ended are done."""
    groups: list[Group] = []
    done = list(validation.done)
    for group in validation.groups:
        reports = _reports(group, nodes)
        ended = all(report.status in FINAL for report in reports.values()) and len(reports) == len(group.seats)
        if ended or now >= group.ends_at:
            done.append(
                read_group(
                    group,
                    reports,
                    nccom.checks_of(validation, policy),
                    round_number=validation.round,
                    seconds=now - group.started_at,
                )
            )
            continue
        if group.hosts and not group.closed:
            group = _followed(now, validation, group, reports, policy)
        groups.append(_looked_at(now, group, reports, nodes, policy))
    if tuple(groups) == validation.groups:
        return validation
    return dataclasses.replace(validation, groups=tuple(groups), done=tuple(done))


def _followed(
    now: float, validation: Validation, group: Group, reports: Mapping[str, OrderReport], policy: Policy
) -> Group:
    """One that nccom-test runs over: its main node knows when it is over, and asks to have things started before."""
    order = orders_of(validation, group.members[0], policy, workload="")[0].collective
    assert order is not None
    group, over = nccom.follow(group, order, reports)
    if not over:
        return group
    return dataclasses.replace(group, closed=True, ends_at=min(group.ends_at, now + LAST_WORDS_SECONDS))


def _looked_at(now: float, group: Group, reports: Mapping[str, OrderReport], nodes: Nodes, policy: Policy) -> Group:
    """Once a rank is lost, or some have not found each other in time, the others wait in vain: it is called off."""
    if group.closed:
        return group
    if group.met_at is None and all_up(group, reports):
        group = dataclasses.replace(group, met_at=now)
    if _join_by(group, reports, policy) <= now:
        return dataclasses.replace(group, closed=True, ends_at=min(group.ends_at, now + LAST_WORDS_SECONDS))
    mute = len(reports) < len(group.seats) and now >= group.started_at + policy.collective_contact_seconds
    gone = any(_unheard_seconds(nodes.get(name)) > policy.silent_seconds for name in group.members)
    if group.failing_since is None and (mute or gone or lost_ranks(reports)):
        group = dataclasses.replace(group, failing_since=now)
    if group.failing_since is not None and now >= group.failing_since + policy.collective_grace_seconds:
        return dataclasses.replace(group, closed=True, ends_at=min(group.ends_at, now + LAST_WORDS_SECONDS))
    return group


def _unheard_seconds(node: FleetNode | None) -> float:
    """Since a node was heard; 0 where it was not heard since this aggregator started: it may be about to come back."""
    return 0.0 if node is None or node.heard_seconds is None else node.heard_seconds


def _join_by(group: Group, reports: Mapping[str, OrderReport], policy: Policy) -> float:
    """When all ranks must be up and, from then on, in the group; for ever once they are."""
    if len(reports) < len(group.seats) or group.hosts or all_inside(group, reports):
        return math.inf  # of a node that is not heard nothing is known; see `mute`
    if group.met_at is None:
        return group.started_at + policy.collective_start_seconds
    return group.met_at + policy.collective_join_seconds


def _reports(group: Group, nodes: Nodes) -> dict[str, OrderReport]:
    found = {}
    for name in group.members:
        node = nodes.get(name)
        report = None if node is None else node.orders.get(group.order_id(name))
        report = nccom.with_launches(group, node, report, group.launches)
        if report is not None:
            found[name] = report
    return found


def _wake_at(now: float, group: Group, nodes: Nodes, policy: Policy) -> float:
    if group.closed:
        return group.ends_at
    if group.failing_since is not None:
        return group.failing_since + policy.collective_grace_seconds
    silent_at = now + policy.silent_seconds - max(_unheard_seconds(nodes.get(name)) for name in group.members)
    if len(_reports(group, nodes)) < len(group.seats):
        return min(group.ends_at, silent_at + WAKE_SECONDS, group.started_at + policy.collective_contact_seconds)
    return min(group.ends_at, silent_at + WAKE_SECONDS, _join_by(group, _reports(group, nodes), policy))


def _waiting(validation: Validation, nodes: Nodes) -> str:
    sizes = sorted({len(group.members) for group in validation.groups})
    what = f"{len(validation.groups)} groups of {sizes[0]}" if len(validation.groups) > 1 else "all together"
    if validation.round:
        what = f"round {validation.round} ({validation.why}), {what}"
    return f"collectives over {len(validation.members)} nodes, {what}: " + how_far(
        validation.groups[0], _reports(validation.groups[0], nodes)
    )


# --- rounds -----------------------------------------------------------------------------------------------------------


def _next_round(
    now: float,
    validation: Validation,
    nodes: Nodes,
    policy: Policy,
    find_partners: Callable[[int], Sequence[str]],
) -> Validation:
    """The round is over: what next, or the verdict."""
    history = (*validation.history, *validation.done)
    validation = dataclasses.replace(validation, history=history, done=())
    first = validation.round == 0
    if first and history[-1].outcome is not Outcome.PASS and not validation.partners:
        count = min(policy.most_partners, max(2, -(-len(validation.members) // 8)))
        partners = tuple(
            # One that cannot take part would end the search.
            name
            for name in find_partners(count)
            if name not in validation.members and _ranks_of(nodes.get(name)) and _main([name], nodes)
        )
        if validation.launch is not None:  # which wants as many on each
            partners = tuple(n for n in partners if _ranks_of(nodes.get(n)) == validation.ranks[validation.members[0]])
        ranks = {**validation.ranks, **{name: _ranks_of(nodes.get(name)) for name in partners}}
        labels = {**validation.labels, **_labels(partners, nodes, policy)}
        validation = dataclasses.replace(validation, partners=partners, ranks=ranks, labels=labels)
    # A member that falls out changes what is asked; a partner that does has only given no outcome.
    lost = {name for tested in history if tested.round == validation.round for name in (*tested.silent, *tested.unfit)}
    fallen = not lost.isdisjoint(validation.members)
    if fallen or now >= validation.deadline:
        return conclude(now, validation, policy, "nodes fell out" if fallen else "time is up")
    found = localize(_problem(validation, policy), _outcomes(history))
    if not isinstance(found, NextRound):
        return dataclasses.replace(validation, verdict=found, ended_at=now)
    validation = dataclasses.replace(validation, round=found.number, why=found.why)
    return _start_round(now, validation, found.groups, nodes, policy)


def _start_round(
    now: float, validation: Validation, groups: Sequence[Sequence[str]], nodes: Nodes, policy: Policy
) -> Validation:
    # The first ranks of a node import torch; those of later rounds are there already, unless a group was lost.
    allowance = policy.collective_start_seconds + policy.collective_join_seconds
    checks = nccom.checks_of(validation, policy)
    allowance += policy.collective_timeout_seconds * len(checks) + 2 * LAST_WORDS_SECONDS
    if validation.launch is not None:
        allowance += policy.collective_join_seconds * len(checks)
    first, last = policy.collective_ports
    span = last - first + 1
    started: list[Group] = []
    failed: list[Tested] = []
    for index, members in enumerate(groups):
        turn = validation.turn + index
        main = _main(members, nodes)
        group = Group(
            id=f"{validation.id}.{turn}",
            seats=_seats(members, validation.ranks),
            main=main or "",
            port=first + (validation.seed + turn) % span,
            started_at=now,
            ends_at=min(now + allowance, max(now, validation.deadline) + LAST_WORDS_SECONDS),
        )
        lame = {seat.node: "its devices are not known" for seat in group.seats if not seat.ranks}
        if main is None:
            lame[members[0]] = "nobody knows by which address other nodes reach it; set interface for it"
        if validation.launch is not None and not lame:
            hosts = [nccom.host_of(nodes.get(n), _main([n], nodes), validation.launch) for n in members]
            lame.update(nccom.lame_nodes(group, hosts))
            group = dataclasses.replace(group, hosts=tuple(host or "" for host in hosts))
        if lame:
            unfit = {
                node: OrderReport(status="refused", message=lame.get(node, "another node cannot take part"))
                for node in lame
            }
            failed.append(read_group(group, unfit, checks, round_number=validation.round, seconds=0))
        else:
            started.append(group)
    return dataclasses.replace(
        validation, groups=tuple(started), done=tuple(failed), turn=validation.turn + len(groups)
    )


def _main(members: Sequence[str], nodes: Nodes) -> str | None:
    """The address of the first member's ranks."""
    node = nodes.get(members[0])
    return None if node is None or node.state is None else peer_host(node.state)


def _seats(members: Iterable[str], ranks: Mapping[str, int]) -> tuple[Seat, ...]:
    members = tuple(members)
    firsts = _first_ranks(members, ranks)
    return tuple(Seat(node=name, first_rank=firsts[name], ranks=ranks.get(name, 0)) for name in members)


def _first_ranks(members: Sequence[str], ranks: Mapping[str, int]) -> dict[str, int]:
    found, at = {}, 0
    for name in members:
        found[name] = at
        at += ranks.get(name, 0)
    return found


def _ranks_of(node: FleetNode | None) -> int:
    if node is None or node.state is None or node.state.inventory is None:
        return 0
    return len(node.state.inventory.rank_targets)


def _outcomes(history: Iterable[Tested]) -> list[GroupOutcome]:
    return [GroupOutcome(members=one.members, outcome=one.outcome, round=one.round) for one in history]


def _labels(names: Iterable[str], nodes: Nodes, policy: Policy) -> dict[str, Mapping[str, str]]:
    """The labels of topology of each node that has any."""
    found: dict[str, Mapping[str, str]] = {}
    for name in names:
        node = nodes.get(name)
        if node is not None and node.state is not None:
            said = {key: node.state.labels[key] for key in policy.topology_labels if key in node.state.labels}
            if said:
                found[name] = said
    return found


def _problem(validation: Validation, policy: Policy) -> Problem:
    # Borrowed partners passed their own checks; whether they are good together with others is yet to be seen. So they
    # are members of the problem, not the known-good partners that localisation would take for granted.
    return Problem(
        members=(*validation.members, *validation.partners),
        labels=validation.labels,
        seed=validation.seed,
        noise=Noise(false_alarm_ratio=policy.collective_noise_ratio),
        bounds=Bounds(max_rounds=policy.most_rounds),
    )
