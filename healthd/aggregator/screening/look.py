"""What the state of a node says of its screenings. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping

from checks.contract import Status, Tier
from healthd.aggregator.screening.records import Screened
from healthd.core.evidence import blames_node, untested_devices
from healthd.core.model import CheckResult, NodeState

CORRECTED = ("neuron_corrected_errors_per_hour_count", "gpu_remapped_rows_count")
"""Measurements of memory that was repaired: what a node corrects an hour, and rows that a GPU has replaced."""
SAME_SECONDS = 1.0
"""Ages travel, so the same result seems to be this much older or younger."""
NOT_HARDWARE = ("torch",)
"""Versions that are no driver's and no firmware's."""


def wanted_checks(state: NodeState, tier: Tier) -> tuple[str, ...]:
    """The active checks that a run of the tier has on this node; none where it only reads."""
    return tuple(spec.name for spec in state.checks if spec.tier is not Tier.PASSIVE and spec.tier.rank <= tier.rank)


def machine_in(state: NodeState) -> str:
    """The machine and its devices, as a short text to compare."""
    devices = state.inventory.devices if state.inventory is not None else ()
    words = [state.instance_id or "", *(f"{one.target}={one.serial or ''}" for one in devices)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def drivers_in(state: NodeState) -> dict[str, str]:
    """The versions of drivers, firmware and runtimes."""
    return {name: version for name, version in state.versions.items() if name not in NOT_HARDWARE}


def corrected_in(state: NodeState) -> float | None:
    """Corrected memory errors of all devices; None where nothing counts them."""
    found = [
        one.value
        for result in state.results
        for finding in result.findings
        for one in finding.measurements
        if one.name in CORRECTED and one.value is not None
    ]
    return sum(found) if found else None


def passed_at(screened: Screened, wanted: Collection[str]) -> float:
    """When the oldest of these checks passed; -inf while one never has."""
    return min((screened.passed.get(check, -math.inf) for check in wanted), default=-math.inf)


def left(screened: Screened, wanted: Collection[str], before: float) -> tuple[str, ...]:
    """The checks that have not passed since `before`: what a screening that was interrupted still has to run."""
    return tuple(check for check in wanted if screened.passed.get(check, -math.inf) <= before)


def look(now: float, known: Screened | None, state: NodeState, tier: Tier) -> Screened:
    """What is remembered once this state, whose ages are as of `now`, was seen."""
    machine = machine_in(state)
    if known is None or known.machine != machine:
        known = Screened(node=state.node, machine=machine, known_at=now, tier=tier)
    elif known.tier.rank < tier.rank:  # a lighter tier says nothing of this one
        known = dataclasses.replace(known, tier=tier, passed={})
    elif known.tier is not tier:
        known = dataclasses.replace(known, tier=tier)
    wanted = wanted_checks(state, tier)
    specs = {spec.name: spec for spec in state.checks}
    passed, failures, failed_at = dict(known.passed), known.failures, known.failed_at
    for result in state.results:
        if result.check not in wanted or result.tier.rank < tier.rank or result.injected:
            continue
        at = now - result.age_seconds
        if _passes(result) and not untested_devices(specs[result.check], result, state.inventory):
            if at > passed.get(result.check, -math.inf) + SAME_SECONDS:
                passed[result.check] = at
        elif at > (failed_at or -math.inf) + SAME_SECONDS and any(map(blames_node, result.findings)):
            failures, failed_at = failures + 1, at
            passed.pop(result.check, None)
    if passed == known.passed and failures == known.failures:
        return known
    after = dataclasses.replace(known, passed=passed, failures=failures, failed_at=failed_at)
    if passed_at(after, wanted) > passed_at(known, wanted):
        after = dataclasses.replace(after, corrected_per_hour=corrected_in(state), versions=drivers_in(state))
    return after


def is_changed(screened: Screened, versions: Mapping[str, str]) -> bool:
    """Whether a driver or firmware is another one than at the last pass; one that is not known has not changed."""
    return any(screened.versions.get(name, version) != version for name, version in versions.items())


def _passes(result: CheckResult) -> bool:
    """A pass, a warning, or a check that does not apply to this machine."""
    if result.status is Status.SKIP:
        return bool(result.findings) and all(one.reason == "NotApplicable" for one in result.findings)
    return result.status in (Status.PASS, Status.WARN)
