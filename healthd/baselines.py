"""
Limits learned from what healthy machines of one kind measured. Pure.

A limit is k standard deviations from the median, where k follows from how many false alarms the whole fleet may have:
with n numbers judged in a run and a budget of b alarms each may be wrong with probability b/n, and k is the two-sided
quantile of the normal distribution for it. The standard deviation comes from the MAD, as `checks.peers` does it, which
has the arithmetic of who is slow too. No limit is nearer to the median than `share_ratio` of it, because so few samples
tell little of the tails.

`healthd baseline` prints learned limits as a settings file; nothing here judges, and nothing changes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from checks.accelerators import find_descriptor
from checks.collective.nccom.run import MAIN_DTYPE
from checks.contract import Finding, Measurement, Status, Tier
from checks.limits import hardware_of
from checks.peers import LEAST_PEERS, factor_of, normal
from healthd.core.model import CheckResult, Health, NodeState

LEAST_SAMPLES = LEAST_PEERS
"""Below it nothing is learned: median and deviation of fewer say too little, and absolute floors alone judge."""
LEAST_DEVICES = 3
"""Devices that the samples must come from at least: of two that differ nobody can say which is the normal one."""
MOST_SAMPLES = 256
"""The aggregator gives so many of a series, drawn by chance: their MAD is right to 7 %."""
WINDOW_DAYS = 28
"""Samples that are older than the newest one by so much are left out: four weeks hold every weekly habit of a fleet."""
FALSE_ALARMS = 0.01
"""False alarms that are acceptable in one run of the whole fleet: one in a hundred runs."""
SHARE_RATIO = 0.1
"""No limit is nearer to the median than a tenth of it; stragglers are found more finely, among their peers."""
LEAST_COMPARISONS = 1000
"""Numbers that a run is taken to judge at least, so that the limits of a small fleet still hold when it grows."""
MOST_VALUE = 1e100
"""Sums of larger values would be no numbers any more."""
DAY_SECONDS = 86400
# Of messages below it the bandwidth is the latency in other words, and their durations are learned.
LEAST_BANDWIDTH_BYTES = 1 << 20
# The same number as busbw, but for a factor that depends on the number of ranks alone.
_TWICE = "_algbw_bytes_per_second"
MOST_NAME = 120


def learn(
    series: SampleSeries, *, comparisons: int, false_alarms: float = FALSE_ALARMS, share_ratio: float = SHARE_RATIO
) -> Learned | None:
    """
    The limit of a series; None where there are too few samples or devices, or they are no rates or durations.

    `comparisons` is how many numbers one run of the whole fleet judges.
    """
    values = [value for value in series.values if is_usable(value)]
    better = higher_is_better(series.name)
    if len(values) < LEAST_SAMPLES or series.devices < LEAST_DEVICES or better is None:
        return None
    factor = factor_of(false_alarms, max(LEAST_COMPARISONS, comparisons)) * widening(len(values))
    usual = normal(values, lambda middle: share_ratio * middle, factor=factor)
    middle, margin = usual.median, usual.margin
    lower = middle - margin if better and margin < middle else None
    upper = middle + margin if not better and math.isfinite(middle + margin) else None
    return Learned(
        median=middle,
        mad=usual.mad,
        samples=len(values),
        lower=lower,
        upper=upper,
        outside=sum((lower is not None and value < lower) or (upper is not None and value > upper) for value in values),
    )


@dataclass(frozen=True, kw_only=True)
class Learned:
    """
    What a series came to. `mad` is the median of the absolute deviations from the median; `outside` counts samples
    that the limit itself would have failed.

    Both limits None: the samples differ by so much that no limit can be drawn.
    """

    median: float
    mad: float
    samples: int
    lower: float | None
    upper: float | None
    outside: int


def widening(count: int) -> float:
    """
    By how much k grows for a deviation that is itself uncertain: two of its standard errors, each 1.16 / sqrt(count).

    Source: the MAD's efficiency of 37 % for normal values. Without it one run in four had false alarms where eleven
    samples with 5 % of noise made the limit, with it one in twenty (simulated, 512 devices).
    """
    return 1 + 2 * 1.16 / math.sqrt(count)


def samples_of(state: NodeState, *, now: float) -> Iterator[Sample]:
    """
    Each number of a node that may be learned: of passing, real results while it is healthy and nobody has it.

    `now` in seconds since the epoch gives the day, together with the ages. Results of more than a day ago are left out.
    A job beside the probe slows it, and an injected fault is no property of the hardware. Only checks that use the
    devices are learned from: what passive ones read (free memory, temperatures) depends on what the machine does.
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
            for name, value in _numbers(finding, ranks) if finding.status is Status.PASS else ():
                yield Sample(
                    name=name,
                    node=state.node,
                    target=finding.target,
                    began=result.started_at,
                    day=day,
                    value=value,
                )


def is_usable(value: float) -> bool:
    """Whether a value can be that of anything."""
    return 0 < value <= MOST_VALUE


def series_of(samples: Iterable[tuple[Kind, Sample]]) -> tuple[SampleSeries, ...]:
    """
    The samples by kind of machine and name: one of each device and day, and none that is older than the window.

    A node that measures every minute has no more say than one that does so once a day.
    """
    by_day: dict[tuple[Kind, str], dict[tuple[str, str, int], float]] = {}
    newest = 0
    for kind, one in samples:
        by_day.setdefault((kind, one.name), {})[(one.node, one.target, one.day)] = one.value
        newest = max(newest, one.day)
    found = []
    for (kind, name), values in sorted(by_day.items(), key=lambda item: (str(item[0][0]), item[0][1])):
        recent = {key: value for key, value in values.items() if newest - key[2] < WINDOW_DAYS}
        found.append(
            SampleSeries(
                hardware=kind.hardware,
                accelerator=kind.accelerator,
                versions=dict(kind.versions),
                name=name,
                devices=len({(node, target) for node, target, _ in recent}),
                values=tuple(recent.values()),
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """
    One value of one device (or of `node` as a whole), by the name of its limits (`matmul_flops_per_second/bf16`).

    `began` is when its run began, by the node's clock; `day` is counted from the epoch.
    """

    name: str
    node: str
    target: str
    began: float
    day: int
    value: float


@dataclass(frozen=True, kw_only=True)
class SampleSeries:
    """
    What devices of one kind of machine measured under one name: `values` of `devices` devices.

    `values` may be a draw of what there is. `hardware`, `accelerator` and `versions` are those of a `Kind`.
    """

    hardware: str
    accelerator: str
    versions: Mapping[str, str]
    name: str
    devices: int
    values: tuple[float, ...]

    @property
    def kind(self) -> Kind:
        return Kind(hardware=self.hardware, accelerator=self.accelerator, versions=tuple(sorted(self.versions.items())))


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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What may be compared: `hardware` (see `checks.limits.hardware_of`) and sorted (name, version) pairs."""

    hardware: str
    accelerator: str
    versions: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return ", ".join((self.hardware, self.accelerator, *(f"{name} {version}" for name, version in self.versions)))


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


def higher_is_better(name: str) -> bool | None:
    """True for rates, False for durations; None for what has no good direction and is not learned."""
    plain = name.partition("/")[0]
    if plain.endswith(("_flops_per_second", "_bytes_per_second")):
        return True
    return False if plain.endswith("_duration_seconds") else None


def _counts(result: CheckResult) -> bool:
    return result.status is Status.PASS and not result.injected and 0 <= result.age_seconds < DAY_SECONDS


def _numbers(finding: Finding, ranks: int) -> Iterator[tuple[str, float]]:
    for measurement in finding.measurements:
        name = limit_name(measurement, ranks)
        if name is not None and measurement.value is not None and is_usable(measurement.value):
            yield name, measurement.value
