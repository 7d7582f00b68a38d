"""What the rules may see of a node: its state turned into facts. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from checks.contract import Blame, Status, Tier
from checks.reasons import action_of, blame_of
from healthd.aggregator.inventory.machine_identity import machine_identity, name_of
from healthd.aggregator.model.nodes import FleetNode
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantine_facts import Facts, Fault, Outcome, PoolLimit
from healthd.aggregator.model.quarantines import COLLECTIVES
from healthd.core.evidence import blames_node, judge_tier
from healthd.core.model import CheckResult, Health, Inventory, NodeState, Reason
from healthd.core.text import plain

MOST_FAULTS = 8
"""Findings of one result that are looked at: one is enough to fail it, more only say more."""

MOST_MESSAGE = 500
"""Characters of a finding's message: what is longer is cut, because sentences are built of it and kept."""

MOST_OUTCOMES = 200
"""Checks of one node that are looked at: some five times as many as there are."""


def facts_of(
    now: float,
    node: FleetNode,
    policy: Policy,
    *,
    room: PoolLimit,
    person: bool,
    kept: bool,
    accusations: tuple[Reason, ...] = (),
    probe: str | None = None,
) -> Facts:
    """
    A node whose state is known and whose contact is confirmed. `probe` is the id of the run that the rules ordered.

    What an injected fault did counts only while the fault is in force.
    """
    state = node.state
    assert state is not None  # the caller has looked
    specs = {spec.name: spec for spec in state.checks}
    outcomes = tuple(
        Outcome(
            check=result.check,
            tier=result.tier,
            active=specs[result.check].tier is not Tier.PASSIVE,
            interval_seconds=specs[result.check].interval_seconds,
            passed=_passed(result, policy),
            faults=tuple(_faults(result, state.inventory)),
            measured_at=now - node.behind_seconds - result.age_seconds,
            started_at=result.started_at,
        )
        for result in state.results[:MOST_OUTCOMES]
        if result.check in specs
        and name_of(result.check) is not None
        and math.isfinite(result.age_seconds)
        and (not result.injected or in_force(result.check, state.faults))
    )
    report = None if probe is None else node.orders.get(probe)
    return Facts(
        node=node.node,
        identity=machine_identity(state),
        boot_id=name_of(state.boot_id),
        serials=_serials(state.inventory),
        outcomes=outcomes,
        quick_at=_passed_at(now - node.behind_seconds, state, Tier.QUICK, policy),
        deep_at=_passed_at(now - node.behind_seconds, state, Tier.DEEP, policy),
        injected=state.faults,
        allocated=bool(state.allocated or state.leases),
        person=person,
        kept=kept,
        room=room,
        accusations=tuple(accusation(reason) for reason in accusations if counts(reason)),
        probe_status=None if report is None else report.status,
        compile_seconds=node.compile_seconds,
    )


def counts(reason: Reason) -> bool:
    """Whether an accusation is one: the node is to blame, and somebody is sure that it is this one."""
    return reason.blame is blame_of(reason.code) is Blame.NODE and reason.status is Status.FAIL


def accusation(reason: Reason) -> Fault:
    """A validation's word as a fault of the machine: which of its devices it was, collectives do not tell."""
    # Who shows a fault says by itself that it was injected.
    said = reason.message.removesuffix(" (injected)")
    return Fault(
        code=reason.code,
        check=COLLECTIVES,
        target=plain(reason.target or "node", 128),
        message=plain(said, MOST_MESSAGE),
        action=reason.action,
        device=None,
        injected=reason.injected,
    )


def _serials(inventory: Inventory | None) -> dict[str, str | None]:
    """Serial numbers of the devices; one that two devices tell is none."""
    devices = inventory.devices if inventory is not None else ()
    times = Counter(device.serial for device in devices)
    return {device.target: name_of(device.serial) if times[device.serial] == 1 else None for device in devices}


def in_force(check: str, faults: Iterable[str]) -> bool:
    """Whether an injected fault that stands touches this check; a device injected as missing is counted by others."""
    for fault in faults:
        if check == COLLECTIVES or re.split("[@=]", fault, maxsplit=1)[0] == check or "=missing" in fault:
            return True
    return False


def device_of(target: str, inventory: Inventory | None) -> str | None:
    """The device that a target is or belongs to (a core, a rank); None where that cannot be told."""
    if inventory is None:
        return None
    devices = inventory.devices
    number = target.removeprefix("rank:")
    if number != target and number.isdecimal() and len(number) < 10 and int(number) < len(inventory.rank_targets):
        target = inventory.rank_targets[int(number)]
    if any(device.target == target for device in devices):
        return target
    if target not in inventory.workers:
        return None
    if len(devices) == 1:
        return devices[0].target
    cores = [device.cores or 0 for device in devices]
    if not all(cores) or sum(cores) != len(inventory.workers):
        return None
    index = inventory.workers.index(target)
    for device, count in zip(devices, cores, strict=True):
        if index < count:
            return device.target
        index -= count
    return None


def _passed(result: CheckResult, policy: Policy) -> bool | None:
    """False only for what is the node's own fault; None for all that says nothing of the node."""
    if any(blames_node(finding) for finding in result.findings):
        return False
    if result.status is Status.PASS and result.findings:
        return True
    return True if result.status is Status.WARN and policy.admit_degraded else None


def _faults(result: CheckResult, inventory: Inventory | None) -> Iterator[Fault]:
    for finding in [f for f in result.findings if blames_node(f)][:MOST_FAULTS]:
        yield Fault(
            code=plain(finding.reason or "NoData", 64),
            check=result.check,
            target=plain(finding.target, 128),
            message=plain(finding.message, MOST_MESSAGE),
            action=finding.action or action_of(finding.reason),
            device=device_of(finding.target, inventory),
            injected=result.injected,
        )


def _passed_at(sent_at: float, state: NodeState, tier: Tier, policy: Policy) -> float | None:
    """When the oldest active result was measured of a tier that passed whole; None where it did not."""
    health, _, age = judge_tier(state, tier, math.inf)
    passed = health is Health.HEALTHY or (health is Health.DEGRADED and policy.admit_degraded)
    if not passed or age is None:
        return None
    active = {spec.name for spec in state.checks if spec.tier is not Tier.PASSIVE and spec.tier.rank <= tier.rank}
    ages = [r.age_seconds for r in state.results if r.check in active and r.status is not Status.SKIP]
    return sent_at - max(ages) if ages else None
