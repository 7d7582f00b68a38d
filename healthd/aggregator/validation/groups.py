"""The groups under test: what each of their nodes is to do, what was reported, and when one is called off. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from healthd.aggregator.model.nodes import FleetNode
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.validations import Group, Validation
from healthd.aggregator.validation import nccom
from healthd.aggregator.validation.group_outcome import all_inside, all_up, any_cold, lost_ranks, read_group
from healthd.aggregator.validation.progress import how_far
from healthd.aggregator.validation.rank_assignment import LAST_WORDS_SECONDS, Nodes
from healthd.core.model import FINAL_STATUSES, CollectiveOrder, Order, OrderKind, OrderReport

WAKE_SECONDS = 0.1
"""So much after a node counts as silent: to look a moment before would be to look in vain, again and again."""


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
            compile_seconds=group.compile_seconds,
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
    mute = len(reports) < len(group.seats) and now >= group.started_at + policy.collective_contact_seconds
    gone = any(_unheard_seconds(nodes.get(name)) > policy.silent_seconds for name in group.members)
    if group.failing_since is None and (mute or gone or lost_ranks(reports)):
        group = dataclasses.replace(group, failing_since=now)
    if group.failing_since is not None and now >= group.failing_since + policy.collective_grace_seconds:
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


def wake_at(now: float, group: Group, nodes: Nodes, policy: Policy, checks: int) -> float:
    """When to look at a group, which runs so many checks, again if nobody reports."""
    if group.closed:
        return group.ends_at
    if group.failing_since is not None:
        return group.failing_since + policy.collective_grace_seconds
    silent_at = now + policy.silent_seconds - max(_unheard_seconds(nodes.get(name)) for name in group.members)
    if len(_reports(group, nodes)) < len(group.seats):
        return min(group.ends_at, silent_at + WAKE_SECONDS, group.started_at + policy.collective_contact_seconds)
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
