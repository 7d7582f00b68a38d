"""
Groups that nccom-test runs over instead of ranks of torch: which those are, what their nodes are told, what they gave.

Pure. The main node says what it found; launches that it asks for are judged here before another node hears of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from checks.collective.nccom.vector import Refused
from checks.contract import Finding, Status
from healthd.aggregator.model.nodes import FleetNode
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.validations import Group, Validation
from healthd.core.evidence import reason
from healthd.core.model import (
    FINAL_STATUSES,
    CollectiveOrder,
    Launch,
    LaunchOrder,
    NccomGroup,
    Order,
    OrderReport,
    OrderStatus,
    Reason,
)
from healthd.core.model.launch_permission import checks_over_nodes, judge


def launch_mode(
    members: Sequence[str], nodes: Mapping[str, FleetNode], policy: Policy, checks: Sequence[str]
) -> str | None:
    """How nccom-test gets onto these nodes; None where torch carries their collectives, or it can run no check."""
    if policy.collective_carrier == "torch" or not checks_over_nodes(checks):
        return None
    if policy.collective_carrier == "nccom":
        return policy.nccom_launch
    kinds = {_kind(nodes.get(name)) for name in members}
    willing = policy.nccom_launch != "carried" or all(_lets_carry(nodes.get(name)) for name in members)
    return policy.nccom_launch if kinds == {"neuron"} and willing else None


def checks_of(validation: Validation, policy: Policy) -> tuple[str, ...]:
    """What the groups of a validation run; with nccom-test those that it can run."""
    checks = validation.checks or policy.collective_checks
    return checks if validation.launch is None else checks_over_nodes(checks)


def host_of(node: FleetNode | None, address: str | None, mode: str) -> str | None:
    """By what the other nodes, or Slurm, know a node. Slurm's name is its first alias, else its own."""
    if node is None or node.state is None or mode != "slurm":
        return address
    return node.state.aliases[0] if node.state.aliases else node.node


def lame_nodes(group: Group, hosts: Sequence[str | None]) -> dict[str, str]:
    """Why nodes cannot be in such a group."""
    most = max(seat.ranks for seat in group.seats)
    found: dict[str, str] = {}
    for seat, host in zip(group.seats, hosts, strict=True):
        if host is None:
            found[seat.node] = "nobody knows by which address other nodes reach it; set interface for it"
        elif hosts.count(host) > 1:
            found[seat.node] = f"another node says that its address is {host} as well; set interface for both"
        elif seat.ranks != most:
            found[seat.node] = f"nccom-test wants as many cores on each node: {seat.ranks} here, {most} on others"
    return found


def nccom_of(group: Group, validation: Validation) -> NccomGroup | None:
    """What nodes are told of it; None for a group of torch."""
    if validation.launch is None:
        return None
    return NccomGroup(mode=validation.launch, hosts=group.hosts, nodes=group.members)


def launch_id(group: Group, launch: Launch) -> str:
    """Of the order to start it: each check of a group starts one thing on a node, once."""
    return f"{group.order_id(launch.node)}:launch:{launch.check}"


def launch_orders(group: Group, validation: Validation, node: str, *, deadline_seconds: float) -> tuple[Order, ...]:
    """What a node is to start, as long as the group is open."""
    return tuple(
        Order(
            id=launch_id(group, launch),
            kind="launch",
            deadline_seconds=deadline_seconds,
            launch=LaunchOrder(validation=validation.id, group=group.id, check=launch.check, argv=launch.argv),
        )
        for launch in group.launches
        if launch.node == node and not group.closed
    )


def with_launches(
    group: Group, node: FleetNode | None, report: OrderReport | None, launches: Sequence[Launch]
) -> OrderReport | None:
    """The report of a node on its order, but that of a launch that it refused: then it takes no part."""
    for launch in launches:
        said = node.orders.get(launch_id(group, launch)) if node is not None and launch.node == node.node else None
        if said is not None and said.status == OrderStatus.REFUSED:
            return OrderReport(status=OrderStatus.REFUSED, message=said.message)
    return report


def follow(group: Group, order: CollectiveOrder, reports: Mapping[str, OrderReport]) -> tuple[Group, bool]:
    """Take in what the main node wants started; and whether the group is over: it has ended, or it asks too much."""
    main = reports.get(group.members[0])
    launches, refused = list(group.launches), group.refused
    for launch in main.launches if main is not None and not refused else ():
        if launch in launches:
            continue
        found = judge(order, launch, launches)
        if isinstance(found, Refused):
            refused = found.reason
            break
        launches.append(launch)
    if refused != group.refused or len(launches) > len(group.launches):
        group = dataclasses.replace(group, launches=tuple(launches), refused=refused)
    return group, bool(refused) or (main is not None and main.status in FINAL_STATUSES)


# --- what it gave -----------------------------------------------------------------------------------------------------


def findings_of(group: Group, reports: Mapping[str, OrderReport], check: str) -> list[Finding]:
    """What the main node found; that it found nothing, or passed without a number, is a finding."""
    main = reports.get(group.members[0])
    found = list(main.findings.get(check, ())) if main is not None else []
    if not found:
        return [_nothing(f"the main node {group.members[0]} did not say how {check} ended")]
    good = all(one.status in (Status.PASS, Status.WARN) for one in found)
    if good and not any(number.value is not None for one in found for number in one.measurements):
        found.append(
            _nothing(f"the main node {group.members[0]} says that {check} passed, and nothing that it measured")
        )
    return found


def unfit_main(group: Group, reports: Mapping[str, OrderReport], checks: Sequence[str]) -> Reason | None:
    """Why the main node could not find out anything, which says nothing of the others; None when it has."""
    name = group.members[0]
    if group.refused:
        return reason("LaunchRefused", f"{name} asked for what was not planned: {group.refused}", node=name)
    for check in checks:
        findings = findings_of(group, reports, check)
        if any(one.status is Status.FAIL for one in findings):
            return None
        nothing = next((one for one in findings if one.status not in (Status.PASS, Status.WARN)), None)
        if nothing is not None:
            return reason(nothing.reason or "NoData", f"{name}: {nothing.message}", node=name, check=check)
    return None


def _nothing(text: str) -> Finding:
    return Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")


def _lets_carry(node: FleetNode | None) -> bool:
    return node is not None and node.state is not None and "nccom" in node.state.carriers


def _kind(node: FleetNode | None) -> str | None:
    if node is None or node.state is None or node.state.inventory is None:
        return None
    return node.state.inventory.accelerator
