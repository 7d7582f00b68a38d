"""
The aggregator's own metrics (design, section 8): counters of what gates came to, and the fleet counted at each scrape.

Labels are bounded by what they are: health, verdict, mode, owner kind, and the reasons of the catalogue.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from checks.reasons import REASONS
from healthd.aggregator.calibration.facts import device_seconds
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.metrics.collectors import FleetCollector, Reading
from healthd.aggregator.model.calibration import STARTED, Ended
from healthd.aggregator.model.gates import Gate
from healthd.core.http.exposition import exposition
from healthd.core.model import Verdict

# Fresh evidence takes a tenth of a second, ordered runs some seconds, waiting for nodes up to hours.
GATE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)
# A validation starts processes on every node and runs several rounds.
VALIDATION_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# Grants whose moment is remembered for the answer to the one who asked.
REMEMBERED_GRANTS = 1000


class FleetMetrics:
    """
    Counts what the engine tells (`on_ready`, `on_decided`), and renders everything.

    `holding` and `overrides` give the numbers of open gates and of overrides in force, `breakers` that of the rules'
    breakers that have tripped, `words` how often each rule came to a word and what came of it, `errors` how often
    something failed in an unforeseen way, by what it stopped, `task_errors` how often each supervised task did. `now`
    is the clock that quarantines go by.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        holding: Callable[[], int],
        overrides: Callable[[], int],
        breakers: Callable[[], int] = lambda: 0,
        words: Callable[[], Mapping[tuple[str, str], int]] = dict,
        waits: Callable[[], Sequence[float]] = tuple,
        recovering: Callable[[], bool] = lambda: False,
        store: Callable[[], tuple[int, bool]] = lambda: (0, False),
        errors: Callable[[], Mapping[str, int]] = dict,
        task_errors: Mapping[str, int] = MappingProxyType({}),
        now: Callable[[], float] = time.time,
    ) -> None:
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
            "Seconds of devices spent on runs that gates ordered, and on their collectives.",
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
        self._outcomes = Counter(
            "healthd_job_outcomes",
            "Jobs that told their end, by it and by how the gate had let them start.",
            ("outcome", "gate"),
            registry=self._registry,
        )
        self._false_alarms = Counter(
            "healthd_gate_false_alarms",
            "Jobs that were successful although a check had failed on a node of theirs.",
            registry=self._registry,
        )
        self._misses = Counter(
            "healthd_gate_misses",
            "Jobs that a device, link or host stopped although the gate had admitted them with all evidence passing.",
            registry=self._registry,
        )
        self._observed = Counter(
            "healthd_gate_observed_decisions",
            "Jobs that observe mode or a person admitted, by what enforce mode would have said and its first reason.",
            ("would", "reason"),
            registry=self._registry,
        )
        self.add(FleetCollector(fleet, words, errors, task_errors, now))
        peers = fleet.peers
        failed = "Writes to the database that failed since the start."
        self.read("healthd_store_failures", failed, lambda: store()[0], family=CounterMetricFamily)
        gauges: Mapping[str, tuple[str, Callable[[], float]]] = {
            "healthd_store_failing": ("1 while the last write to the database failed.", lambda: store()[1]),
            "healthd_gates_holding": ("Gates that are not decided yet.", holding),
            "healthd_gates_holding_oldest_seconds": (
                "How long the gate that has waited longest has been waiting.",
                lambda: max(waits(), default=0.0),
            ),
            "healthd_overrides_active": ("Jobs that a person admits by hand.", overrides),
            "healthd_quarantine_breaker_open": (
                "Pools in which rules quarantine nobody any more until a person resets their breaker.",
                breakers,
            ),
            "healthd_fleet_recovering": (
                "1 while nothing is admitted because the aggregator does not know its fleet again yet.",
                recovering,
            ),
            "healthd_fleet_digests_nodes": (
                "Nodes that have given digests of a training step, which are compared between nodes.",
                lambda: len(peers.digests),
            ),
            "healthd_fleet_step_jobs": (
                "Jobs whose nodes tell the times of their steps.",
                lambda: len(peers.jobs.jobs),
            ),
            "healthd_fleet_slow_ranks_nodes": (
                "Nodes that are slow in a running job by their own time, compared with the job's other nodes.",
                lambda: len({one.node for one in peers.jobs.slow}),
            ),
        }
        for name, (about, value) in gauges.items():
            self.read(name, about, value)

    def read(
        self,
        name: str,
        about: str,
        value: Callable[[], float],
        *,
        family: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
    ) -> None:
        """A metric of one number that is asked for at each scrape."""
        self.add(Reading(family, name, about, value))

    def add(self, collector: Collector) -> None:
        """One more that is asked at each scrape."""
        self._registry.register(collector)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, as the `Accept` header asks: Prometheus text or OpenMetrics."""
        return exposition(self._registry, accept)

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
        if decision.would is not None:
            # The first reason says that the gate only watched, or who overrode it.
            why = next((reason.code for reason in decision.reasons if reason.code not in _WATCHED), None)
            code = _bounded(why) if decision.would is not Verdict.ADMIT else "none"
            self._observed.labels(would=decision.would.value, reason=code).inc()
        for excluded in decision.excluded:
            self._excluded.labels(reason=_bounded(excluded.reasons[0].code if excluded.reasons else None)).inc()
        nodes = {name: self._fleet.node(name) for name in gate.ordered}
        states = {name: node.current() for name, node in nodes.items() if node is not None}
        known = {name: state for name, state in states.items() if state is not None}
        self._device_seconds.inc(device_seconds(gate, known))
        for validation in gate.validations:
            if validation.ended_at is not None:
                self._validations.observe(max(0.0, validation.ended_at - validation.started_at))

    def job_ended(self, ended: Ended) -> None:
        """Count the end of a job; of a gate that did not admit it nothing is counted."""
        if ended.way not in STARTED:
            return
        self._outcomes.labels(outcome=ended.outcome, gate=ended.way.value).inc()
        if ended.outcome == "ok" and ended.alarmed:
            self._false_alarms.inc()
        if ended.outcome == "infra" and ended.clean:
            self._misses.inc()


_WATCHED = frozenset({"Observed", "Override"})


def _bounded(code: str | None) -> str:
    """Third-party checks bring reasons of their own; they share one label."""
    if code is None:
        return "none"
    return code if code in REASONS else "other"
