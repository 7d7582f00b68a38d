"""
The groups under test: the orders for each node, the reports, and when a group is cancelled. Pure.

Also here:

- how far the groups under test are, in words for people who wait: who is missing, who lags, where the others are;
- who sits where in a group: its ranks, its main node and port, and the groups of a round as they start.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.policy import Policy
from healthd.aggregator.validation import nccom
from healthd.aggregator.validation.outcome import all_inside, all_up, any_cold, lost_ranks, read_group
from healthd.aggregator.validation.records import Group, RankRange, Tested, Validation
from healthd.core.model import (
    FINAL_STATUSES,
    RANK_READY,
    CollectiveOrder,
    NodeState,
    Order,
    OrderKind,
    OrderReport,
    OrderStatus,
)

MOST_NAMED = 4

Far = tuple[int, int]
"""Checks begun and signs of life in the newest of them, of the rank of a node that is least far."""

LAST_WORDS_SECONDS = 5.0
"""How long a group that was called off may take to say what it saw: a kill and one sync."""

Nodes = Mapping[str, FleetNode]

WAKE_SECONDS = 0.1
"""So much after a node counts as silent: to look a moment before would be to look in vain, again and again."""


def start_round(
    now: float, validation: Validation, groups: Sequence[Sequence[str]], nodes: Nodes, policy: Policy
) -> Validation:
    """These groups begin; one that cannot, because of a node that cannot take part, is done at once."""
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
        main = main_address(members, nodes)
        compile_seconds = 0.0 if validation.launch is not None else longest_compile_seconds(members, nodes)
        group = Group(
            id=f"{validation.id}.{turn}",
            seats=_seats(members, validation.ranks),
            main=main or "",
            port=first + (validation.seed + turn) % span,
            started_at=now,
            ends_at=min(now + allowance + compile_seconds, max(now, validation.deadline) + LAST_WORDS_SECONDS),
            compile_seconds=compile_seconds,
        )
        lame = {seat.node: "its devices are unknown" for seat in group.seats if not seat.ranks}
        if main is None:
            lame[members[0]] = "the address under which other nodes reach it is unknown; set interface for it"
        if validation.launch is not None and not lame:
            hosts = [nccom.host_of(nodes.get(n), main_address([n], nodes), validation.launch) for n in members]
            lame.update(nccom.lame_nodes(group, hosts))
            group = dataclasses.replace(group, hosts=tuple(host or "" for host in hosts))
        if lame:
            unfit = {
                node: OrderReport(status=OrderStatus.REFUSED, message=lame.get(node, "another node cannot take part"))
                for node in lame
            }
            failed.append(read_group(group, unfit, checks, round_number=validation.round, seconds=0))
        else:
            started.append(group)
    return dataclasses.replace(
        validation, groups=tuple(started), done=tuple(failed), turn=validation.turn + len(groups)
    )


def longest_compile_seconds(members: Sequence[str], nodes: Nodes) -> float:
    """How much longer a group may take because one of its nodes compiles, and all others wait for it."""
    return max((node.compile_seconds for name in members if (node := nodes.get(name)) is not None), default=0.0)


def main_address(members: Sequence[str], nodes: Nodes) -> str | None:
    """The address of the first member's ranks."""
    node = nodes.get(members[0])
    return None if node is None or node.state is None else peer_host(node.state)


def peer_host(state: NodeState) -> str | None:
    """Where the ranks of a node can be reached."""
    if state.peer_address:
        return state.peer_address
    if not state.address:
        return None
    return state.address.rpartition(":")[0].strip("[]") or None


def first_ranks(members: Sequence[str], ranks: Mapping[str, int]) -> dict[str, int]:
    """The first rank of each node, in this order of nodes."""
    found, at = {}, 0
    for name in members:
        found[name] = at
        at += ranks.get(name, 0)
    return found


def ranks_of(node: FleetNode | None) -> int:
    """How many ranks a node has; 0 where its devices are not known."""
    if node is None or node.state is None or node.state.inventory is None:
        return 0
    return len(node.state.inventory.rank_targets)


def orders_of(
    validation: Validation, node: str, policy: Policy, *, workload: str | None, past: str | None = None
) -> tuple[Order, ...]:
    """
    What a node is to do for it, asked by `workload` (None: by no job): its order in the group that it is a member of.
    `past` as in `Gate`.

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
            compile_seconds=group.compile_seconds,
            past=past,
        )
        order_id = group.order_id(node)
        return (
            Order(
                id=order_id,
                kind=OrderKind.COLLECTIVE,
                deadline_seconds=within,
                withdrawn=group.closed,
                collective=order,
            ),
        )
    return ()


def watch(now: float, validation: Validation, nodes: Nodes, policy: Policy) -> Validation:
    """Take in what was reported; groups that ended are done."""
    groups: list[Group] = []
    done = list(validation.done)
    for group in validation.groups:
        reports = _reports(group, nodes)
        ended = all(report.status in FINAL_STATUSES for report in reports.values()) and len(reports) == len(group.seats)
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
        if group.hosts and not group.closed and nccom.has_ended(group, reports):
            group = _called_off(now, group)
        groups.append(_looked_at(now, group, reports, nodes, policy, len(nccom.checks_of(validation, policy))))
    if tuple(groups) == validation.groups:
        return validation
    return dataclasses.replace(validation, groups=tuple(groups), done=tuple(done))


def wake_at(now: float, group: Group, nodes: Nodes, policy: Policy, checks: int) -> float:
    """When to look at a group, which runs so many checks, again if nobody reports."""
    if group.closed:
        return group.ends_at
    if group.failing_since is not None:
        return group.failing_since + policy.tuning.collective_grace_seconds
    silent_at = now + policy.silent_seconds - max(_unheard_seconds(nodes.get(name)) for name in group.members)
    if len(_reports(group, nodes)) < len(group.seats):
        return min(group.ends_at, silent_at + WAKE_SECONDS, group.started_at + policy.tuning.collective_contact_seconds)
    return min(group.ends_at, silent_at + WAKE_SECONDS, _join_by(group, _reports(group, nodes), policy, checks))


def waiting(validation: Validation, nodes: Nodes) -> str:
    """What a validation waits for, in words."""
    groups = validation.groups
    sizes = sorted({len(group.members) for group in groups})
    what = "all together"
    if validation.round:
        count = f"{len(groups)} groups" if len(groups) > 1 else "a group"
        what = f"round {validation.round} ({validation.why}), {count} of {sizes[0]}"
    reports = {name: report for group in groups for name, report in _reports(group, nodes).items()}
    size = len(validation.members) if len(validation.members) > 1 else sizes[-1]  # one alone, and idle nodes
    return f"collectives over {size} nodes, {what}: {how_far(groups, reports)}"


def how_far(groups: Sequence[Group], reports: Mapping[str, OrderReport]) -> str:
    """Of all groups of a round together; `reports` has the last report of each member that gave one."""
    members = [node for group in groups for node in group.members]
    absent = [node for node in members if node not in reports]
    if absent:
        return f"waiting for {_named(absent)} to begin"
    places = {node: _place(reports[node]) for node in members if reports[node].status not in FINAL_STATUSES}
    text = f"{len(members) - len(places)} of {len(members)} nodes ended"
    if not any(reports[node].ranks for node in places):
        return text
    (far, where), _ = max(Counter(places.values()).items(), key=lambda one: (one[1], one[0]))
    behind = [node for node, place in places.items() if place[0] < far]
    if not behind:
        return f"{text}, {_named(list(places)) if len(places) < len(members) else 'all'} {where}"
    least = min(places[node] for node in behind)
    last = [node for node in behind if places[node] == least]
    return f"{text}, {_named(last)} {least[1]}, others {where}"


def _place(report: OrderReport) -> tuple[Far, str]:
    """Where the rank of a node is that is least far."""
    if not report.ranks:
        return (0, 0), "starting"
    checks = list(dict.fromkeys(rank.check for rank in report.ranks))
    rank = min((one for one in report.ranks if one.check == checks[-1]), key=lambda one: (one.last != "", one.events))
    if not rank.last:
        return (0, 0), "starting"
    if rank.last == RANK_READY:
        return (len(checks), 0), "ready"
    return (len(checks), rank.events), f"at {rank.last}"


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:MOST_NAMED]) + (f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else "")


def _seats(members: Iterable[str], ranks: Mapping[str, int]) -> tuple[RankRange, ...]:
    members = tuple(members)
    firsts = first_ranks(members, ranks)
    return tuple(RankRange(node=name, first_rank=firsts[name], ranks=ranks.get(name, 0)) for name in members)


def _called_off(now: float, group: Group) -> Group:
    """Its orders are withdrawn; its nodes have a moment to say what they saw."""
    return dataclasses.replace(group, closed=True, ends_at=min(group.ends_at, now + LAST_WORDS_SECONDS))


def _looked_at(
    now: float, group: Group, reports: Mapping[str, OrderReport], nodes: Nodes, policy: Policy, checks: int
) -> Group:
    """Once a rank is lost, or some have not found each other in time, the others wait in vain: it is called off."""
    if group.closed:
        return group
    if group.met_at is None and all_up(group, reports):
        group = dataclasses.replace(group, met_at=now)
    if _join_by(group, reports, policy, checks) <= now:
        return _called_off(now, group)
    mute = len(reports) < len(group.seats) and now >= group.started_at + policy.tuning.collective_contact_seconds
    gone = any(_unheard_seconds(nodes.get(name)) > policy.silent_seconds for name in group.members)
    if group.failing_since is None and (mute or gone or lost_ranks(reports)):
        group = dataclasses.replace(group, failing_since=now)
    if group.failing_since is not None and now >= group.failing_since + policy.tuning.collective_grace_seconds:
        return _called_off(now, group)
    return group


def _unheard_seconds(node: FleetNode | None) -> float:
    """Since a node was heard; 0 where it was not heard since this aggregator started: it may be about to come back."""
    return 0.0 if node is None or node.heard_seconds is None else node.heard_seconds


def _join_by(group: Group, reports: Mapping[str, OrderReport], policy: Policy, checks: int) -> float:
    """
    When all ranks must be up and, from then on, in the group; and at the end of its checks, where all is compiled.
    """
    if len(reports) < len(group.seats) or group.hosts:
        return math.inf  # of a node that is not heard nothing is known; see `mute`
    if all_inside(group, reports):
        if not group.compile_seconds or group.met_at is None or any_cold(reports):
            return math.inf
        # Their nodes wait as long as if somebody compiled, and nobody does.
        return group.met_at + policy.collective_join_seconds + policy.collective_timeout_seconds * checks
    if group.met_at is None:
        return group.started_at + policy.collective_start_seconds
    return group.met_at + policy.collective_join_seconds


def _reports(group: Group, nodes: Nodes) -> dict[str, OrderReport]:
    found = {}
    for name in group.members:
        node = nodes.get(name)
        report = None if node is None else node.orders.get(group.order_id(name))
        if report is not None:
            found[name] = report
    return found
