"""
What stands for a node's health: pure, shared by the daemon, the gate and the command line.

Never takes not knowing for health: no data, old data, an empty list of checks and a skipped check are never a pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from checks.contract import NO_LIMIT, SEVERITY, Action, Blame, Finding, Status, Tier, worst
from checks.limits import FLOOR, unit
from checks.printable import some
from checks.reasons import action_of, blame_of
from healthd.core.model import CheckResult, CheckSpec, Health, Inventory, NodeState, Reason
from healthd.core.text import span


class Judged(NamedTuple):
    """What the evidence of a node says of one tier: reasons are worst first."""

    health: Health
    reasons: tuple[Reason, ...]
    age_seconds: float | None
    """The age of the oldest result that was counted; None where nothing was counted."""


def judge_health(state: NodeState) -> tuple[Health, tuple[Reason, ...]]:
    """
    The health of a node and its reasons, worst first.

    While the node is allocated its active evidence is suspended: it does not expire and its absence says nothing, so
    that a job of three days does not turn a fleet red. What it found wrong stays wrong.
    """
    results = {result.check: result for result in state.results}
    reasons: list[Reason] = []
    expected = [spec for spec in state.checks if spec.tier in (Tier.PASSIVE, Tier.QUICK) or spec.name in results]
    for spec in expected:
        result = results.get(spec.name)
        suspended = bool(state.allocated) and spec.tier is not Tier.PASSIVE
        if result is None:
            if not suspended:
                reasons.append(reason("NotYetRun", f"{spec.name} has not run yet", node=state.node, check=spec.name))
            continue
        if not suspended and expired(spec, result):
            text = (
                f"{spec.name}: last run {span(result.age_seconds)} ago; at most {span(spec.expires_seconds or 0)} "
                "is allowed"
            )
            reasons.append(reason("Stale", text, node=state.node, check=spec.name))
        if not suspended:
            reasons.extend(_untested(state, spec, result))
        reasons.extend(_not_passed(state.node, result, suspended=suspended))
    if (
        not any(results[spec.name].status is not Status.SKIP for spec in expected if spec.name in results)
        and not reasons
    ):
        reasons.append(reason("NoChecks", "no check has measured anything, so the health is unknown", node=state.node))
    if state.accused is not None:
        reasons.append(state.accused)
    return health_of(reasons), sorted_reasons(reasons)


def judge_tier(state: NodeState, tier: Tier, max_age_seconds: float, *, require: tuple[str, ...] = ()) -> Judged:
    """
    The strict answer: is there evidence of `tier`, not older than asked, for every applicable check?

    `require` names checks that must be among them. Only NotApplicable takes a check out of the set.
    """
    results = {result.check: result for result in state.results}
    specs = [spec for spec in state.checks if spec.tier.rank <= tier.rank]
    reasons = [
        reason("NotYetRun", f"{name} is required but not enabled on the node", node=state.node, check=name)
        for name in require
        if name not in {spec.name for spec in specs}
    ]
    counted: list[CheckResult] = []
    for spec in specs:
        result = results.get(spec.name)
        if result is None:
            reasons.append(reason("NotYetRun", f"{spec.name} has not run yet", node=state.node, check=spec.name))
        elif result.tier.rank < (tier.rank if spec.tier is not Tier.PASSIVE else 0):
            text = f"{spec.name} has only run in tier {result.tier.value}; {tier.value} is required"
            reasons.append(reason("NotYetRun", text, node=state.node, check=spec.name))
        elif not result.age_seconds <= max_age_seconds:  # also catches NaN
            text = f"{spec.name}: last run {span(result.age_seconds)} ago; at most {span(max_age_seconds)} is allowed"
            reasons.append(reason("Stale", text, node=state.node, check=spec.name))
        else:
            if result.status is not Status.SKIP:
                counted.append(result)
            reasons.extend(_untested(state, spec, result))
            reasons.extend(_not_passed(state.node, result, suspended=False))
    active = {spec.name for spec in specs if spec.tier is not Tier.PASSIVE}
    wanted = active if tier is not Tier.PASSIVE else {spec.name for spec in specs}
    # A warning is no measurement of the tier; what is worse needs no other reason.
    worse = any(one.status is not Status.WARN for one in reasons)
    if not worse and not any(result.check in wanted for result in counted):
        reasons.append(reason("NoChecks", f"no check of tier {tier.value} has measured anything", node=state.node))
    oldest = max((result.age_seconds for result in counted), default=None)
    return Judged(health_of(reasons), sorted_reasons(reasons), oldest)


def untested_devices(spec: CheckSpec, result: CheckResult, inventory: Inventory | None) -> tuple[str, ...]:
    """
    The devices that a good result of an accelerator check does not stand for.

    It did not measure them, or they appeared, were reset or were swapped since.
    """
    if not spec.accelerators or inventory is None or result.status not in (Status.PASS, Status.WARN):
        return ()
    began = math.nan if result.began_at is None else result.began_at
    return tuple(
        device.target
        for device in inventory.devices
        if device.target not in result.devices or not (device.since is None or began >= device.since)
    )


def _untested(state: NodeState, spec: CheckSpec, result: CheckResult) -> list[Reason]:
    """The reason for the devices that a result does not stand for."""
    targets = untested_devices(spec, result, state.inventory)
    if not targets:
        return []
    text = f"{spec.name} has not run on {some(targets, 4)} since the device appeared, was reset or was replaced"
    return [
        reason(
            "NotYetRun",
            text,
            node=state.node,
            target=targets[0] if len(targets) == 1 else None,
            check=spec.name,
            injected=result.injected,
        )
    ]


def expired(spec: CheckSpec, result: CheckResult) -> bool:
    """Whether a result has outlived its check's bound."""
    return spec.expires_seconds is not None and not result.age_seconds <= spec.expires_seconds  # also catches NaN


def aged(state: NodeState, seconds: float) -> NodeState:
    """The state as it is `seconds` later if nothing was heard since: every age moves on."""
    return dataclasses.replace(
        state,
        results=tuple(dataclasses.replace(r, age_seconds=r.age_seconds + seconds) for r in state.results),
        leases=tuple(dataclasses.replace(lease, age_seconds=lease.age_seconds + seconds) for lease in state.leases),
    )


def _not_passed(node: str, result: CheckResult, *, suspended: bool) -> list[Reason]:
    """The reasons in one result; no findings, or a skip for another reason than the check's nature, is unknown."""
    if not result.findings:
        return [
            reason("NoData", f"{result.check} yielded nothing", node=node, check=result.check, injected=result.injected)
        ]
    reasons = []
    for finding in result.findings:
        if finding.status is Status.PASS or (suspended and finding.reason == "Busy"):
            continue
        if finding.status is Status.SKIP:
            if finding.reason != "NotApplicable" and not suspended:
                reasons.append(reason_of(node, result.check, finding, Status.UNKNOWN, injected=result.injected))
            continue
        reasons.append(reason_of(node, result.check, finding, finding.status, injected=result.injected))
    said = (*(finding.status for finding in result.findings), *(one.status for one in reasons), Status.PASS)
    if SEVERITY[result.status] > SEVERITY[worst(said)]:
        reasons.append(
            reason(
                "NoData",
                f"{result.check} is {result.status.value}",
                node=node,
                check=result.check,
                injected=result.injected,
            )
        )
    return reasons


def blames_node(finding: Finding) -> bool:
    """Whether a finding is a fault of the node itself."""
    return finding.status is Status.FAIL and (finding.blame or blame_of(finding.reason)) is Blame.NODE


def reason_of(node: str, check: str, finding: Finding, status: Status, *, injected: bool) -> Reason:
    """A finding that is no pass, as a reason of its node."""
    return Reason(
        code=finding.reason or "NoData",
        message=f"{check} {finding.target}: {finding.message}" + (" (injected)" if injected else ""),
        status=status,
        blame=finding.blame or blame_of(finding.reason),
        action=finding.action or action_of(finding.reason),
        node=node,
        target=finding.target,
        check=check,
        injected=injected,
    )


def reason(
    code: str,
    message: str,
    *,
    node: str | None = None,
    target: str | None = None,
    check: str | None = None,
    status: Status = Status.UNKNOWN,
    blame: Blame | None = None,
    action: Action | None = None,
    injected: bool = False,
) -> Reason:
    """A reason that no finding of a check gives; blame and action are the catalogue's unless they are given."""
    return Reason(
        code=code,
        message=message,
        status=status,
        blame=blame or blame_of(code),
        action=action or action_of(code),
        node=node,
        target=target,
        check=check,
        injected=injected,
    )


def health_of(reasons: Sequence[Reason]) -> Health:
    """What these reasons come to."""
    if any(r.status is Status.FAIL and r.blame is Blame.NODE for r in reasons):
        return Health.UNHEALTHY
    if any(r.status in (Status.FAIL, Status.UNKNOWN) for r in reasons):
        return Health.UNKNOWN
    if any(r.status is Status.WARN for r in reasons):
        return Health.DEGRADED
    return Health.HEALTHY


def sorted_reasons(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The worst first."""

    def order(reason: Reason) -> tuple[int, bool, str, str]:
        return (-SEVERITY[reason.status], reason.blame is not Blame.NODE, reason.check or "", reason.target or "")

    return tuple(sorted(reasons, key=order))


def speeds_note(results: Iterable[CheckResult]) -> str | None:
    """What to say if no measured speed has a configured or learned limit; None if one has, or no speed was measured."""
    origins = {
        one.origin
        for result in results
        for finding in result.findings
        for one in finding.measurements
        if one.value is not None and unit(one.name) in ("FLOP/s", "B/s")
    }
    if not origins or not origins <= {NO_LIMIT.origin, FLOOR}:
        return None
    floors = ", only floors from published peaks" if FLOOR in origins else ""
    return f"no speed limits configured{floors}: 'healthd baseline' learns them"
