"""
The aggregator's own metrics (design, section 8): counters of what gates came to, and the fleet counted at each scrape.

Labels are bounded by what they are: health, verdict, mode, owner kind, and the reasons of the catalogue.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from checks.reasons import REASONS
from healthd.aggregator.calibration.facts import STARTED, Ended, device_seconds
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.model import Gate
from healthd.aggregator.model.quarantines import Mode as RuleMode
from healthd.aggregator.model.quarantines import Rule
from healthd.core.http.exposition import exposition, task_errors_metric
from healthd.core.model import Health, Verdict

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
    Counts what the engine tells (see `healthd.aggregator.model.Observer`), and renders everything.

    `holding` and `overrides` give the numbers of open gates and of overrides in force, `breakers` that of the rules'
    breakers that have tripped, `words` how often each rule came to a word and what came of it, `drifts` how many
    baselines have drifted, `errors` how often something failed in an unforeseen way, by what it stopped, `task_errors`
    how often each supervised task did. `now` is the clock that quarantines go by.
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
        drifts: Callable[[], int] = lambda: 0,
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
        self._registry.register(_Survey(fleet, holding, overrides, breakers, words))
        self._registry.register(_Plight(fleet, waits, recovering, store, drifts, errors, task_errors, now))

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


class _Survey(Collector):
    """What is counted anew at each scrape, in one walk over the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        holding: Callable[[], int],
        overrides: Callable[[], int],
        breakers: Callable[[], int],
        words: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        self._fleet = fleet
        self._breakers = breakers
        self._words = words
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
        yield GaugeMetricFamily(
            "healthd_quarantine_breaker_open",
            "Pools in which rules quarantine nobody any more until a person resets their breaker.",
            value=self._breakers(),
        )
        spoken = CounterMetricFamily(
            "healthd_rule_verdicts",
            "Times that a rule came to keep a node out, by what came of it.",
            labels=("rule", "mode"),
        )
        counted = self._words()
        for rule in Rule:
            for mode in RuleMode:
                spoken.add_metric((rule.value, mode.value), counted.get((rule.value, mode.value), 0))
        yield spoken


class _Plight(Collector):
    """What the aggregator itself has trouble with, and how long things have waited; all 0 in good days."""

    def __init__(
        self,
        fleet: Fleet,
        waits: Callable[[], Sequence[float]],
        recovering: Callable[[], bool],
        store: Callable[[], tuple[int, bool]],
        drifts: Callable[[], int],
        errors: Callable[[], Mapping[str, int]],
        task_errors: Mapping[str, int],
        now: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._task_errors = task_errors
        self._drifts = drifts
        self._errors = errors
        self._now = now
        self._waits = waits
        self._recovering = recovering
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "healthd_gates_holding_oldest_seconds",
            "How long the gate that has waited longest has been waiting.",
            value=max(self._waits(), default=0.0),
        )
        now = self._now()
        ages = dict.fromkeys(OWNER_KINDS, 0.0)
        for _, _, quarantine in self._fleet.survey():
            if quarantine is not None and quarantine.owner_kind in ages:
                ages[quarantine.owner_kind] = max(ages[quarantine.owner_kind], now - quarantine.since)
        oldest = GaugeMetricFamily(
            "healthd_quarantine_oldest_seconds",
            "How long the node that has been kept out longest has been, by who said so.",
            labels=("owner_kind",),
        )
        for owner, seconds in ages.items():
            oldest.add_metric((owner,), seconds)
        yield oldest
        yield GaugeMetricFamily(
            "healthd_fleet_recovering",
            "1 while nothing is admitted because the aggregator does not know its fleet again yet.",
            value=float(self._recovering()),
        )
        yield GaugeMetricFamily(
            "healthd_baseline_drifts",
            "Baselines in force from which the median of the fleet has drifted away.",
            value=self._drifts(),
        )
        failures, failing = self._store()
        yield CounterMetricFamily(
            "healthd_store_failures", "Writes to the database that failed since the start.", value=failures
        )
        yield GaugeMetricFamily(
            "healthd_store_failing", "1 while the last write to the database failed.", value=float(failing)
        )
        internal = CounterMetricFamily(
            "healthd_internal_errors",
            "Failures of the aggregator that nobody foresaw, by what they stopped; its log has the tracebacks.",
            labels=("where",),
        )
        for where, count in self._errors().items():
            internal.add_metric((where,), count)
        yield internal
        yield task_errors_metric(self._task_errors)
