"""
Who sits where in a group: its ranks, its main node and port, and the groups of a round as they start. Pure.

Groups of one round share no member, so they run at once, on as many nodes as there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from healthd.aggregator.model.nodes import FleetNode
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.validations import Group, RankRange, Tested, Validation
from healthd.aggregator.validation import nccom
from healthd.aggregator.validation.group_outcome import read_group
from healthd.core.model import NodeState, OrderReport, OrderStatus

LAST_WORDS_SECONDS = 5.0
"""How long a group that was called off may take to say what it saw: a kill and one sync."""

Nodes = Mapping[str, FleetNode]


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
        lame = {seat.node: "its devices are not known" for seat in group.seats if not seat.ranks}
        if main is None:
            lame[members[0]] = "nobody knows by which address other nodes reach it; set interface for it"
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


def _seats(members: Iterable[str], ranks: Mapping[str, int]) -> tuple[RankRange, ...]:
    members = tuple(members)
    firsts = first_ranks(members, ranks)
    return tuple(RankRange(node=name, first_rank=firsts[name], ranks=ranks.get(name, 0)) for name in members)


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
