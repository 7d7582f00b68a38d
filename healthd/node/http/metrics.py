"""
`GET /metrics`: the names of the contract, rendered from the one snapshot.

Labels are bounded: of the findings that are no pass the 48 worst are listed, and the rest counted; matrix products have
series in two dtypes and collectives in four sizes, whatever else was measured. No `_created` series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from checks.contract import SEVERITY, Finding, Measurement, Status, Tier
from healthd import __version__
from healthd.core.http.server import task_errors_metric
from healthd.core.model import CheckResult, Health, NodeState
from healthd.node.services import StepSource
from healthd.node.state.store import NodeStore

MAX_FINDINGS = 48
MAX_READINGS = 24

_DTYPES = ("fp32", "bf16")  # those of matrix products that have series
_MAX_SIZES = 4  # of a collective: the checks' own three, and one that an operator adds
_OP_DTYPE = "fp32"  # the one that has series; a check may measure others, and fewer ranks, besides


class NodeCollector(Collector):
    """Renders the store at each scrape."""

    def __init__(self, store: NodeStore, task_errors: Mapping[str, int], steps: StepSource | None) -> None:
        self._store = store
        self._steps = steps
        self._task_errors = task_errors

    def collect(self) -> Iterator[Metric]:
        state = self._store.snapshot()
        yield from _node(state)
        yield from _checks(state, self._store.runs)
        yield from _findings(state)
        yield from _speeds(state)
        yield _readings(state)
        yield GaugeMetricFamily(
            "healthd_compile_duration_seconds",
            "Time spent compiling in the last runs of all checks; 0 if nothing was compiled.",
            value=round(sum(result.compile_seconds for result in state.results), 3),
        )
        yield CounterMetricFamily(
            "healthd_probe_device_seconds",
            "Device time used by active checks since the daemon started.",
            value=self._store.device_seconds,
        )
        if self._steps is not None:
            yield from self._steps.metrics()
        yield task_errors_metric(self._task_errors)


def registry_of(store: NodeStore, task_errors: Mapping[str, int], steps: StepSource | None = None) -> CollectorRegistry:
    """A registry of this daemon alone: nothing of the process or of Python, which would be a hundred series."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(store, task_errors, steps))
    return registry


def _node(state: NodeState) -> Iterator[Metric]:
    build = GaugeMetricFamily("healthd_build_info", "The running version.", labels=["version"])
    build.add_metric([__version__], 1)
    yield build
    info = GaugeMetricFamily(
        "healthd_node_info",
        "Properties of the node.",
        labels=["node", "instance_id", "instance_type", "accelerator", "pool"],
    )
    accelerator = state.inventory.accelerator if state.inventory else ""
    info.add_metric(
        [state.node, state.instance_id or "", state.instance_type or "", accelerator, state.labels.get("pool", "")], 1
    )
    yield info
    health = GaugeMetricFamily("healthd_node_health", "1 for the node's current health.", labels=["health"])
    for value in Health:
        health.add_metric([value.value], float(state.health is value))
    yield health
    yield GaugeMetricFamily(
        "healthd_node_allocated", "1 while a job uses the devices, or may use them.", value=float(bool(state.allocated))
    )
    yield GaugeMetricFamily(
        "healthd_node_quarantined",
        "1 while the aggregator keeps the node out of admissions, as last reported to the node.",
        value=float(state.quarantine is not None),
    )
    yield GaugeMetricFamily("healthd_injected_faults", "Active injected faults.", value=len(state.faults))


def _checks(state: NodeState, runs_by_status: Mapping[Status, int]) -> Iterator[Metric]:
    status = GaugeMetricFamily(
        "healthd_check_status",
        "1 for the status of the last run of a check; a check that has not run is unknown.",
        labels=["check", "status"],
    )
    last = GaugeMetricFamily(
        "healthd_check_last_run_timestamp_seconds",
        "When a check last ran, in seconds since the epoch.",
        labels=["check"],
    )
    duration = GaugeMetricFamily("healthd_check_duration_seconds", "Duration of its last run.", labels=["check"])
    results = {result.check: result for result in state.results}
    for spec in state.checks:
        result = results.get(spec.name)
        current = result.status if result is not None else Status.UNKNOWN
        for value in Status:
            status.add_metric([spec.name, value.value], float(current is value))
        if result is not None:
            last.add_metric([spec.name], round(state.observed_at - result.age_seconds, 3))
            duration.add_metric([spec.name], result.duration_seconds)
    yield from (status, last, duration)
    runs = CounterMetricFamily("healthd_check_runs", "Runs of checks since the daemon started.", labels=["status"])
    for value in Status:
        runs.add_metric([value.value], runs_by_status[value])
    yield runs


def _findings(state: NodeState) -> Iterator[Metric]:
    """
    Reasons of the node are findings too: a stale or missing result is worse than any that is there.

    Of findings that are equally bad, real ones come before those of injected faults, so that a drill hides none.
    """
    found: dict[tuple[str, str, str, Status, bool], None] = {}
    for reason in state.reasons:
        found[(reason.check or "", reason.target or "node", reason.code, reason.status, reason.injected)] = None
    for result in state.results:
        for finding in result.findings:
            if finding.status not in (Status.PASS, Status.SKIP):
                found[(result.check, finding.target, finding.reason or "", finding.status, result.injected)] = None
    worst = sorted(found, key=lambda key: (-SEVERITY[key[3]], key[4], key[:3]))
    family = GaugeMetricFamily(
        "healthd_finding",
        "The worst findings that are not pass. injected: whether a drill caused it.",
        labels=["check", "target", "reason", "status", "injected"],
    )
    for check, target, code, status, injected in worst[:MAX_FINDINGS]:
        family.add_metric([check, target, code, status.value, str(injected).lower()], 1)
    yield family
    yield GaugeMetricFamily(
        "healthd_findings_dropped",
        "Findings that are not among the worst shown.",
        value=max(0, len(worst) - MAX_FINDINGS),
    )


def _speeds(state: NodeState) -> Iterator[Metric]:
    declared = {series.measurement: series for spec in state.checks for series in spec.series}
    families = {
        name: GaugeMetricFamily(f"healthd_device_{name}", series.help, labels=["device", *series.labels])
        for name, series in declared.items()
    }
    bandwidth = GaugeMetricFamily(
        "healthd_collective_bus_bandwidth_bytes_per_second",
        "Bus bandwidth of a collective between the devices of this node, by the nccl-tests definition.",
        labels=["op", "size_bytes"],
    )
    duration = GaugeMetricFamily(
        "healthd_collective_duration_seconds", "Duration of a collective.", labels=["op", "size_bytes"]
    )
    seen: set[tuple[str, ...]] = set()
    collectives = {spec.name for spec in state.checks if spec.collective}
    shown = {result.check: _shown(result) for result in state.results if result.check in collectives}
    for result, finding, measured in _measured(state):
        value = measured.value
        if value is None:
            continue
        if measured.name in families:
            if measured.labels.get("dtype", _DTYPES[0]) not in _DTYPES:
                continue
            labels = [finding.target, *(measured.labels.get(label, "") for label in declared[measured.name].labels)]
            family = families[measured.name]
        elif result.check in shown and measured.name in (
            f"{result.check}_busbw_bytes_per_second",
            f"{result.check}_duration_seconds",
        ):
            ranks, sizes = shown[result.check]
            if not _is_main(measured, ranks) or measured.labels.get("size_bytes", "") not in sizes:
                continue
            labels = [result.check, measured.labels.get("size_bytes", "")]
            family = bandwidth if "busbw" in measured.name else duration
        else:
            continue
        if (family.name, *labels) not in seen:
            seen.add((family.name, *labels))
            family.add_metric(labels, value)
    yield from (*families.values(), bandwidth, duration)


def _readings(state: NodeState) -> Metric:
    """Numbers of passive checks that differ by target or label share a series: the one that is worst is shown."""
    passive = {spec.name for spec in state.checks if spec.tier is Tier.PASSIVE}
    worst: dict[tuple[str, str], float] = {}
    for result, _, measured in _measured(state):
        if result.check not in passive or measured.value is None:
            continue
        key = (result.check, measured.name)
        lower_is_worse = measured.lower is not None and measured.upper is None
        known = worst.get(key, measured.value)
        worst[key] = min(known, measured.value) if lower_is_worse else max(known, measured.value)
    family = GaugeMetricFamily(
        "healthd_reading",
        "Last reading of a passive check: the worst over its targets, in the unit at the end of its name.",
        labels=["check", "measurement"],
    )
    for check, name in sorted(worst)[:MAX_READINGS]:
        family.add_metric([check, name], worst[check, name])
    return family


def _shown(result: CheckResult) -> tuple[str, frozenset[str]]:
    """
    The number of ranks and the sizes of a collective that have series.

    That is all ranks; and the smallest size, which tells the latency, with the largest ones.
    """
    measured = [one for finding in result.findings for one in finding.measurements]
    ranks = max((one.labels.get("ranks", "") for one in measured), key=_number, default="")
    found = {one.labels.get("size_bytes", "") for one in measured if _is_main(one, ranks)}
    ranked = sorted(found, key=lambda text: (_number(text), text))
    return ranks, frozenset(ranked if len(ranked) <= _MAX_SIZES else [ranked[0], *ranked[1 - _MAX_SIZES :]])


def _is_main(measured: Measurement, ranks: str) -> bool:
    """Whether it is of the one dtype and of all ranks; what has no such labels has been measured in one way alone."""
    return measured.labels.get("ranks", ranks) == ranks and measured.labels.get("dtype", _OP_DTYPE) == _OP_DTYPE


def _number(text: str) -> int:
    """For comparing labels; what is no number comes first."""
    return int(text) if text.isdecimal() else -1


def _measured(state: NodeState) -> Iterator[tuple[CheckResult, Finding, Measurement]]:
    for result in state.results:
        for finding in result.findings:
            for measurement in finding.measurements:
                yield result, finding, measurement
