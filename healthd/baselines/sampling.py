"""
What may be learned from a node: its passing, real results while it is healthy and nobody has it. Pure.

A job beside the probe slows it, and an injected fault is no property of the hardware. Only checks that use the devices
are learned from: what passive ones read (free memory, temperatures) depends on what the machine does.
"""

from __future__ import annotations

from collections.abc import Iterator

from checks.accelerators import find_descriptor
from checks.collective.nccom.plan import MAIN_DTYPE
from checks.contract import Finding, Measurement, Status, Tier
from checks.learned import hardware_of
from healthd.baselines.learning import higher_is_better
from healthd.baselines.model import Kind, Sample
from healthd.core.model import CheckResult, Health, NodeState

DAY_SECONDS = 86400
# Of messages below it the bandwidth is the latency in other words, and their durations are learned.
LEAST_BANDWIDTH_BYTES = 1 << 20
# The same number as busbw, but for a factor that depends on the number of ranks alone.
_TWICE = "_algbw_bytes_per_second"
MOST_NAME = 120


def kind_of(state: NodeState) -> Kind | None:
    """What the node may be compared with; None where its hardware or the versions that matter are not known."""
    inventory = state.inventory
    if inventory is None:
        return None
    described = find_descriptor(inventory.accelerator)
    matter = described.speed_versions if described is not None else ()
    known = tuple(sorted((name, state.versions[name]) for name in matter if name in state.versions))
    hardware = hardware_of(
        state.instance_type, [device.kind for device in inventory.devices], len(inventory.rank_targets)
    )
    if hardware is None or not matter or matter[0] not in state.versions:
        return None
    return Kind(hardware=hardware[:MOST_NAME], accelerator=inventory.accelerator, versions=known)


def why_not(state: NodeState) -> str | None:
    """Why nothing may be learned from the node now; None where it may."""
    if state.health is not Health.HEALTHY:
        first = f" ({state.reasons[0].message})" if state.reasons else ""
        return f"it is {state.health.value}{first}"
    if state.allocated:
        return f"it is in use by {state.allocated[0].holder}"
    if state.faults:
        return f"faults are injected: {state.faults[0]}"
    if state.quarantine is not None:
        return f"it is quarantined: {state.quarantine.reason}"
    return None if kind_of(state) is not None else "its hardware or the versions of its libraries are not known"


def samples_of(state: NodeState, *, now: float) -> Iterator[tuple[str, float, Sample]]:
    """
    (name of the limits, when its run began by the node's clock, sample) of each number that may be learned.

    `now` in seconds since the epoch gives the day, together with the ages. Results of more than a day ago are left out.
    """
    if why_not(state) is not None:
        return
    active = {spec.name for spec in state.checks if spec.tier is not Tier.PASSIVE}
    ranks = 0 if state.inventory is None else len(state.inventory.rank_targets)
    for result in state.results:
        if result.check not in active or not _counts(result):
            continue
        day = int((now - result.age_seconds) // DAY_SECONDS)
        for finding in result.findings:
            if finding.status is not Status.PASS:
                continue
            for name, value in _numbers(finding, ranks):
                yield name, result.started_at, Sample(node=state.node, target=finding.target, day=day, value=value)


def _counts(result: CheckResult) -> bool:
    return result.status is Status.PASS and not result.injected and 0 <= result.age_seconds < DAY_SECONDS


def _numbers(finding: Finding, ranks: int) -> Iterator[tuple[str, float]]:
    for measurement in finding.measurements:
        name = limit_name(measurement, ranks)
        if name is not None and measurement.value is not None and measurement.value > 0:
            yield name, measurement.value


def limit_name(measurement: Measurement, ranks: int) -> str | None:
    """
    The name of a measurement's limits: `name`, or `name/label` where it has one; None where none is to be learned.

    nccom-test's numbers have more labels, and limits for all `ranks` of the node and the main type alone.
    """
    name, labels = measurement.name, dict(measurement.labels)
    if higher_is_better(name) is None or name.endswith(_TWICE) or len(name) > MOST_NAME:
        return None
    if "size_bytes" in labels:
        if labels.pop("dtype", MAIN_DTYPE) != MAIN_DTYPE or labels.pop("ranks", str(ranks)) != str(ranks):
            return None
        size = labels["size_bytes"]
        if (
            not size.isdecimal()
            or len(size) > 15
            or (name.endswith("_bytes_per_second") and int(size) < LEAST_BANDWIDTH_BYTES)
        ):
            return None
    if len(labels) > 1:
        return None
    label = next(iter(labels.values()), None)
    if label is None:
        return name
    return f"{name}/{label}" if 0 < len(label) <= MOST_NAME else None
