"""
The aggregator's own metrics (design, section 8): counters of what gates came to, and the fleet counted at each scrape.

Labels are bounded by what they are: health, verdict, mode, owner kind, and the reasons of the catalogue.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from checks.contract import Tier
from checks.reasons import REASONS
from healthd.fleet.model import Gate
from healthd.fleet.registry import Fleet
from healthd.model import Health

# Fresh evidence takes a tenth of a second, ordered runs some seconds, waiting for nodes up to hours.
GATE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)
# A validation starts processes on every node and runs several rounds.
VALIDATION_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# A node is heard every 25 s when all is well, and silent after 60 s.
AGE_BUCKETS = (1.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 900.0, 3600.0)
# Grants whose moment is remembered for the answer to the one who asked.
REMEMBERED_GRANTS = 1000
OWNER_KINDS = ("person", "rule")


class FleetMetrics:
    """
    Counts what the engine tells (see `healthd.fleet.model.Observer`), and renders everything.

    `holding` and `overrides` give the numbers of open gates and of overrides in force.
    """

    def __init__(self, fleet: Fleet, *, holding: Callable[[], int], overrides: Callable[[], int]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._fleet = fleet
        self._granted: OrderedDict[str, float] = OrderedDict()
        self._registry = CollectorRegistry(auto_describe=False)
        self._decisions = Counter(
            "healthd_gate_decisions",
            "Gates decided, by verdict, first reason and mode.",
            ("decision", "reason", "mode"),
            registry=self._registry,
        )
        self._durations = Histogram(
            "healthd_gate_duration_seconds",
            "From the question to the decision on disk.",
            buckets=GATE_BUCKETS,
            registry=self._registry,
        )
        self._device_seconds = Counter(
            "healthd_gate_device_seconds",
            "Seconds of devices spent on runs that gates ordered.",
            registry=self._registry,
        )
        self._excluded = Counter(
            "healthd_nodes_excluded",
            "Nodes that decisions left out, by first reason.",
            ("reason",),
            registry=self._registry,
        )
        self._validations = Histogram(
            "healthd_validation_duration_seconds",
            "Collective tests over several nodes, localisation included.",
            buckets=VALIDATION_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_Survey(fleet, holding, overrides))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, as the `Accept` header asks: Prometheus text or OpenMetrics."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def gate_ready(self, gate: Gate, seconds: float) -> None:
        """The first leases of a gate are on disk: remembered for `granted_at`."""
        self._granted[gate.id] = time.perf_counter()
        while len(self._granted) > REMEMBERED_GRANTS:
            self._granted.popitem(last=False)

    def granted_at(self, gate_id: str) -> float | None:
        """When the first leases of a gate were on disk, by `time.perf_counter`; None if not, or long ago."""
        return self._granted.get(gate_id)

    def gate_decided(self, gate: Gate) -> None:
        """Count a decision that is on disk."""
        decision = gate.decision
        if decision is None:
            return
        first = decision.reasons[0].code if decision.reasons else None
        mode = gate.terms.mode.value
        self._decisions.labels(decision=decision.decision.value, reason=_bounded(first), mode=mode).inc()
        self._durations.observe(max(0.0, decision.duration_seconds))
        for excluded in decision.excluded:
            self._excluded.labels(reason=_bounded(excluded.reasons[0].code if excluded.reasons else None)).inc()
        self._device_seconds.inc(sum(self._cost(gate, node) for node in gate.ordered))

    def validation_ended(self, seconds: float) -> None:
        """Count a validation."""
        self._validations.observe(seconds)

    def _cost(self, gate: Gate, name: str) -> float:
        """Device seconds of the active checks that a node has run since the gate ordered it to."""
        node = self._fleet.node(name)
        state = node.current() if node is not None else None
        if state is None or gate.decision is None:
            return 0.0
        since = gate.decision.decided_at - gate.ordered[name].ordered_at
        active = {spec.name for spec in state.checks if spec.tier is not Tier.PASSIVE}
        devices = (state.inventory.device_count if state.inventory is not None else None) or 1
        return devices * sum(
            max(0.0, result.duration_seconds)
            for result in state.results
            if result.check in active and result.age_seconds <= since
        )


def _bounded(code: str | None) -> str:
    """Third-party checks bring reasons of their own; they share one label."""
    if code is None:
        return "none"
    return code if code in REASONS else "other"


class _Survey(Collector):
    """What is counted anew at each scrape, in one walk over the fleet."""

    def __init__(self, fleet: Fleet, holding: Callable[[], int], overrides: Callable[[], int]) -> None:
        self._fleet = fleet
        self._holding = holding
        self._overrides = overrides

    def collect(self) -> Iterator[Metric]:
        counts = dict.fromkeys(Health, 0)
        buckets = [0] * (len(AGE_BUCKETS) + 1)
        total = 0.0
        owners = dict.fromkeys(OWNER_KINDS, 0)
        for health, heard_seconds, quarantine in self._fleet.survey():
            counts[health] += 1
            if heard_seconds is not None:
                buckets[bisect_left(AGE_BUCKETS, heard_seconds)] += 1
                total += heard_seconds
            if quarantine is not None and quarantine.owner_kind in owners:
                owners[quarantine.owner_kind] += 1
        nodes = GaugeMetricFamily("healthd_fleet_nodes", "Known nodes by health.", labels=("health",))
        for health, count in counts.items():
            nodes.add_metric((health.value,), count)
        yield nodes
        ages = HistogramMetricFamily("healthd_fleet_node_age_seconds", "Seconds since each node was heard, now.")
        bounds = [*(str(bound) for bound in AGE_BUCKETS), "+Inf"]
        ages.add_metric((), [(bound, sum(buckets[: i + 1])) for i, bound in enumerate(bounds)], sum_value=total)
        yield ages
        quarantined = GaugeMetricFamily(
            "healthd_quarantined_nodes", "Nodes kept out of admissions, by who said so.", labels=("owner_kind",)
        )
        for owner, count in owners.items():
            quarantined.add_metric((owner,), count)
        yield quarantined
        yield GaugeMetricFamily("healthd_gates_holding", "Gates that are not decided yet.", value=self._holding())
        yield GaugeMetricFamily(
            "healthd_overrides_active", "Jobs that a person admits by hand.", value=self._overrides()
        )
