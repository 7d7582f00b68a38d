"""
Groups tested by nccom-test instead of ranks of torch: which groups, the orders for their nodes, the results.

Pure. The main node reports the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checks.accelerators import find_descriptor
from checks.collective.nccom.launch import checks_over_nodes
from checks.contract import Finding, Status
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.policy import Policy
from healthd.aggregator.validation.records import Group, Validation
from healthd.core.evidence import reason
from healthd.core.model import FINAL_STATUSES, NccomGroup, OrderReport, Reason


def launch_mode(
    members: Sequence[str], nodes: Mapping[str, FleetNode], policy: Policy, checks: Sequence[str]
) -> str | None:
    """How nccom-test gets onto these nodes; None where torch carries their collectives, or it can run no check."""
    if policy.nccom_launch == "off" or not checks_over_nodes(checks):
        return None
    kinds = {_kind(nodes.get(name)) for name in members}
    described = find_descriptor(next(iter(kinds))) if len(kinds) == 1 else None
    return policy.nccom_launch if described is not None and described.nccom else None


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
            found[seat.node] = "the address under which other nodes reach it is unknown; set interface for it"
        elif hosts.count(host) > 1:
            found[seat.node] = f"another node also reports the address {host}; set interface for both"
        elif seat.ranks != most:
            found[seat.node] = (
                f"nccom-test needs the same number of cores on each node: {seat.ranks} here, {most} on others"
            )
    return found


def nccom_of(group: Group, validation: Validation) -> NccomGroup | None:
    """What nodes are told of it; None for a group of torch."""
    if validation.launch is None:
        return None
    return NccomGroup(mode=validation.launch, hosts=group.hosts, nodes=group.members)


def has_ended(group: Group, reports: Mapping[str, OrderReport]) -> bool:
    """Whether the main node is done with a group of nccom-test; the others only wait for that."""
    main = reports.get(group.members[0])
    return main is not None and main.status in FINAL_STATUSES


def unfit_main(group: Group, reports: Mapping[str, OrderReport], checks: Sequence[str]) -> Reason | None:
    """Why the main node could not find out anything, which says nothing of the others; None when it has."""
    name = group.members[0]
    for check in checks:
        findings = findings_of(group, reports, check)
        if any(one.status is Status.FAIL for one in findings):
            return None
        nothing = next((one for one in findings if one.status not in (Status.PASS, Status.WARN)), None)
        if nothing is not None:
            return reason(nothing.reason or "NoData", f"{name}: {nothing.message}", node=name, check=check)
    return None


def findings_of(group: Group, reports: Mapping[str, OrderReport], check: str) -> list[Finding]:
    """What the main node found; that it found nothing, or passed without a number, is a finding."""
    main = reports.get(group.members[0])
    found = list(main.findings.get(check, ())) if main is not None else []
    if not found:
        return [_nothing(f"the main node {group.members[0]} did not report how {check} ended")]
    good = all(one.status in (Status.PASS, Status.WARN) for one in found)
    if good and not any(number.value is not None for one in found for number in one.measurements):
        found.append(_nothing(f"the main node {group.members[0]} reports that {check} passed, but no measurement"))
    return found


def _nothing(text: str) -> Finding:
    return Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")


def _kind(node: FleetNode | None) -> str | None:
    if node is None or node.state is None or node.state.inventory is None:
        return None
    return node.state.inventory.accelerator
