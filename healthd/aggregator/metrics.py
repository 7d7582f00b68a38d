"""The aggregator's own metrics."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from types import MappingProxyType
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from checks.reasons import REASONS
from healthd.aggregator.fleet import Fleet, Standing
from healthd.aggregator.gate.records import Gate, PassTimes
from healthd.aggregator.jobs.calibration import device_seconds
from healthd.aggregator.jobs.outcome_records import STARTED, Ended
from healthd.aggregator.quarantine.records import HARD_ACTIONS, Rule, RuleMode
from healthd.aggregator.quarantine.repair_records import Repair
from healthd.core.http.server import exposition, task_errors_metric
from healthd.core.model import Health, Verdict

# A node is heard every 25 s when all is well, and silent after 60 s.
AGE_BOUNDS = (1.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 900.0, 3600.0)
OWNER_KINDS = ("person", "rule")

LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
LAG_EACH_SECONDS = 0.1
LOOP_LAG = Histogram(
    "healthd_aggregator_loop_lag_seconds",
    "How much later than asked for the event loop came back, ten times a second: what every request waits for.",
    buckets=LAG_BOUNDS,
    registry=None,
)

DECISIONS = "healthd_gate_decisions"
DEVICE_SECONDS = "healthd_gate_device_seconds"
EXCLUDED = "healthd_nodes_excluded"
OUTCOMES = "healthd_job_outcomes"
FALSE_ALARMS = "healthd_gate_false_alarms"
MISSES = "healthd_gate_misses"
OBSERVED = "healthd_gate_observed_decisions"
# Name -> what it counts, and its labels.
COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    DECISIONS: ("Decided gates, by verdict, first reason and mode.", ("decision", "reason", "mode")),
    DEVICE_SECONDS: ("Device seconds spent on runs ordered by gates and on their collectives.", ()),
    EXCLUDED: ("Nodes that decisions excluded, by first reason.", ("reason",)),
    OUTCOMES: (
        "Reported job outcomes, by outcome and by how the gate had admitted the job.",
        ("outcome", "gate"),
    ),
    FALSE_ALARMS: ("Successful jobs although a check had failed on one of their nodes.", ()),
    MISSES: (
        "Jobs stopped by a device, link or host although the gate had admitted them with all evidence passing.",
        (),
    ),
    OBSERVED: (
        "Jobs admitted by observe mode or by hand, by what enforce mode would have decided and its first reason.",
        ("would", "reason"),
    ),
}
DURATION = "healthd_gate_duration_seconds"
VALIDATION = "healthd_validation_duration_seconds"
REPAIR = "healthd_repair_seconds"
# Name -> what it measures, its labels and its buckets.
HISTOGRAMS: Mapping[str, tuple[str, Sequence[str], Sequence[float]]] = {
    DURATION: (
        "Time from the request to the decision on disk.",
        (),
        # Fresh evidence takes a tenth of a second, ordered runs some seconds, waiting for nodes up to hours.
        (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0),
    ),
    VALIDATION: (
        "Duration of collective tests over several nodes, localisation included.",
        (),
        # A validation starts processes on every node and runs several rounds.
        (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    ),
    REPAIR: (
        "Time from the finding to the end of a repair that was made, by the action that healthd advised.",
        ("advice",),
        # A reboot takes minutes, a part of a vendor weeks.
        tuple(3600.0 * hours for hours in (0.25, 1, 4, 12, 24, 72, 168, 336, 672)),
    ),
}
# Grants whose moment is remembered for the answer to the one who asked.
REMEMBERED_GRANTS = 1000

_WATCHED = frozenset({"Observed", "Override"})


class FleetMetrics:
    """
    Counts what the engine tells (`on_ready`, `on_decided`, `on_repaired`), and renders everything.

    `task_errors` is how often each supervised task has failed. `now` is the clock that quarantines go by.
    """

    def __init__(
        self,
        fleet: Fleet,
        engine: EngineFigures,
        store: StoreFigures,
        *,
        task_errors: Mapping[str, int] = MappingProxyType({}),
        now: Callable[[], float] = time.time,
    ) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._fleet = fleet
        self._granted: OrderedDict[str, PassTimes] = OrderedDict()
        self._registry = CollectorRegistry(auto_describe=False)
        self._counters = {name: Counter(name, *about, registry=self._registry) for name, about in COUNTERS.items()}
        self._histograms = {
            name: Histogram(name, about, labels, buckets=buckets, registry=self._registry)
            for name, (about, labels, buckets) in HISTOGRAMS.items()
        }
        for action in HARD_ACTIONS:
            self._histograms[REPAIR].labels(advice=action.value)
        self.add(FleetCollector(fleet, engine, task_errors, now))
        failed = "Failed writes to the database since the start."
        self.read("healthd_store_failures", failed, lambda: store.failures, family=CounterMetricFamily)
        for name, about, value in _gauges(fleet, engine, store):
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

    def collect(self) -> Iterator[Metric]:
        """All of them as they are now."""
        return iter(self._registry.collect())

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, as the `Accept` header asks: Prometheus text or OpenMetrics."""
        return exposition(self._registry, accept)

    def gate_ready(self, gate: Gate, times: PassTimes) -> None:
        """The first leases of a gate are on disk: remembered for `granted`."""
        self._granted[gate.id] = times
        while len(self._granted) > REMEMBERED_GRANTS:
            self._granted.popitem(last=False)

    def granted(self, gate_id: str) -> PassTimes | None:
        """The times of the pass that put the first leases of a gate on disk; None if there are none, or long ago."""
        return self._granted.get(gate_id)

    def gate_decided(self, gate: Gate) -> None:
        """Count a decision that is on disk."""
        decision = gate.decision
        if decision is None:
            return
        first = decision.reasons[0].code if decision.reasons else None
        mode = gate.terms.mode.value
        self._counters[DECISIONS].labels(decision=decision.decision.value, reason=_bounded(first), mode=mode).inc()
        self._histograms[DURATION].observe(max(0.0, decision.duration_seconds))
        if decision.would is not None:
            # The first reason says that the gate only watched, or who overrode it.
            held = next((reason.code for reason in decision.reasons if reason.code not in _WATCHED), None)
            code = _bounded(held) if decision.would is not Verdict.ADMIT else "none"
            self._counters[OBSERVED].labels(would=decision.would.value, reason=code).inc()
        for excluded in decision.excluded:
            self._counters[EXCLUDED].labels(
                reason=_bounded(excluded.reasons[0].code if excluded.reasons else None)
            ).inc()
        nodes = {name: self._fleet.node(name) for name in gate.ordered}
        states = {name: node.current() for name, node in nodes.items() if node is not None}
        known = {name: state for name, state in states.items() if state is not None}
        self._counters[DEVICE_SECONDS].inc(device_seconds(gate, known))
        for validation in gate.validations:
            if validation.ended_at is not None:
                self._histograms[VALIDATION].observe(max(0.0, validation.ended_at - validation.started_at))

    def repair_closed(self, repair: Repair) -> None:
        """Count a repair whose end is on disk; one that was not made does not count."""
        if repair.repaired_seconds is not None:
            self._histograms[REPAIR].labels(advice=repair.advice.value).observe(repair.repaired_seconds)

    def job_ended(self, ended: Ended) -> None:
        """Count the end of a job; of a gate that did not admit it nothing is counted."""
        if ended.way not in STARTED:
            return
        self._counters[OUTCOMES].labels(outcome=ended.outcome, gate=ended.way.value).inc()
        if ended.outcome == "ok" and ended.alarmed:
            self._counters[FALSE_ALARMS].inc()
        if ended.outcome == "infra" and ended.clean:
            self._counters[MISSES].inc()


class EngineFigures(Protocol):
    """What is shown of the engine."""

    def open_gates(self) -> Sized: ...
    def waits(self) -> Sequence[float]: ...
    def overrides(self) -> Sized: ...
    def breakers(self) -> Sized: ...
    def repairs(self) -> Sized: ...
    def recovering(self) -> str | None: ...
    def rule_words(self) -> Mapping[tuple[str, str], int]: ...
    def internal_errors(self) -> Mapping[str, int]: ...


class StoreFigures(Protocol):
    """What is shown of the database."""

    @property
    def failures(self) -> int: ...
    @property
    def failing(self) -> bool: ...


class FleetCollector(Collector):
    """What has labels, in one walk over the fleet, and what the aggregator itself failed in. `now` is the engine's."""

    def __init__(
        self, fleet: Fleet, engine: EngineFigures, task_errors: Mapping[str, int], now: Callable[[], float]
    ) -> None:
        self._fleet, self._engine, self._task_errors, self._now = fleet, engine, task_errors, now

    def collect(self) -> Iterator[Metric]:
        counts = {(health, drill): 0 for health in Health for drill in (False, True)}
        within = [0] * (len(AGE_BOUNDS) + 1)
        longest, now = 0.0, self._now()
        owners, ages = dict.fromkeys(OWNER_KINDS, 0), dict.fromkeys(OWNER_KINDS, 0.0)
        for health, heard_seconds, quarantine, drill in self._fleet.survey():
            counts[health, drill] += 1
            if heard_seconds is not None:
                within[bisect_left(AGE_BOUNDS, heard_seconds)] += 1
                longest = max(longest, heard_seconds)
            if quarantine is not None and (kind := quarantine.owner_kind) in owners:
                owners[kind] += 1
                ages[kind] = max(ages[kind], now - quarantine.since)
        nodes = GaugeMetricFamily(
            "healthd_fleet_nodes",
            "Known nodes by health, and by whether a drill injects faults there.",
            labels=("health", "injected"),
        )
        for (health, drill), number in counts.items():
            nodes.add_metric((health.value, str(drill).lower()), number)
        yield nodes
        yield _labelled(
            "healthd_fleet_nodes_heard",
            "Nodes that reported within this many seconds.",
            "within_seconds",
            {f"{bound:g}": sum(within[: i + 1]) for i, bound in enumerate(AGE_BOUNDS)},
        )
        yield GaugeMetricFamily(
            "healthd_fleet_node_age_max_seconds",
            "Seconds since the longest-silent node reported; nodes that have never reported do not count.",
            value=longest,
        )
        yield _labelled("healthd_quarantined_nodes", "Quarantined nodes, by kind of owner.", "owner_kind", owners)
        yield _labelled(
            "healthd_quarantine_oldest_seconds",
            "Age of the oldest quarantine, by kind of owner.",
            "owner_kind",
            ages,
        )
        differing = Counts(one.standing for one in self._fleet.peers.digests.differing.values())
        yield _labelled(
            "healthd_fleet_digests_differing_nodes",
            "Nodes whose training-step digest differs from their peers: a minority, or undecided.",
            "standing",
            {one.value: differing[one] for one in (Standing.MINORITY, Standing.UNDECIDED)},
        )
        spoken = CounterMetricFamily(
            "healthd_rule_verdicts",
            "Times that a rule decided to quarantine a node, by the effect.",
            labels=("rule", "mode"),
        )
        counted = self._engine.rule_words()
        for rule in Rule:
            for mode in RuleMode:
                spoken.add_metric((rule.value, mode.value), counted.get((rule.value, mode.value), 0))
        yield spoken
        internal = CounterMetricFamily(
            "healthd_internal_errors",
            "Unexpected failures of the aggregator, by what they stopped; its log has the tracebacks.",
            labels=("where",),
        )
        for where, count in self._engine.internal_errors().items():
            internal.add_metric((where,), count)
        yield internal
        yield task_errors_metric(self._task_errors)


class LeadershipCollector(Collector):
    """Who leads, as this aggregator knows it."""

    def __init__(self, leads: Callable[[], bool], term: Callable[[], int]) -> None:
        self._leads, self._term = leads, term

    def collect(self) -> Iterator[Metric]:
        about = "1 while this aggregator leads, 0 while it is a standby."
        yield GaugeMetricFamily("healthd_aggregator_leader", about, value=float(self._leads()))
        about = "Number of leaders the database has had, as known to this aggregator."
        yield GaugeMetricFamily("healthd_aggregator_term", about, value=self._term())


class Reading(Collector):
    """One number that is asked for at each scrape, as a gauge or a counter."""

    def __init__(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        about: str,
        read: Callable[[], float],
    ) -> None:
        self._family, self._name, self._about, self._read = family, name, about, read

    def collect(self) -> Iterator[Metric]:
        yield self._family(self._name, self._about, value=float(self._read()))


def tasks_metric() -> Reading:
    """
    How many tasks of asyncio the process has: about two for each request that is held.
    """
    about = "Asyncio tasks of this process: its own, and those of current requests."
    return Reading(GaugeMetricFamily, "healthd_aggregator_tasks", about, lambda: len(asyncio.all_tasks()))


async def observe_lag() -> None:
    """Measure the lag of the event loop, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EACH_SECONDS
        await asyncio.sleep(LAG_EACH_SECONDS)
        LOOP_LAG.observe(max(0.0, loop.time() - due))


def _gauges(fleet: Fleet, engine: EngineFigures, store: StoreFigures) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Name, description and value of those without labels."""
    peers = fleet.peers
    yield "healthd_store_failing", "1 while the last write to the database failed.", lambda: store.failing
    yield "healthd_gates_holding", "Undecided gates.", lambda: len(engine.open_gates())
    yield (
        "healthd_gates_holding_oldest_seconds",
        "How long the oldest undecided gate has been waiting.",
        lambda: max(engine.waits(), default=0.0),
    )
    yield "healthd_overrides_active", "Active overrides.", lambda: len(engine.overrides())
    yield (
        "healthd_quarantine_breaker_open",
        "Pools in which the quarantine rules are stopped until an operator resets their breaker.",
        lambda: len(engine.breakers()),
    )
    yield (
        "healthd_repairs_open",
        "Repairs that healthd advises and that are not finished.",
        lambda: len(engine.repairs()),
    )
    yield (
        "healthd_fleet_recovering",
        "1 while nothing is admitted because the aggregator waits for its nodes to report.",
        lambda: engine.recovering() is not None,
    )
    yield (
        "healthd_fleet_digests_nodes",
        "Nodes that have reported training-step digests, which are compared between nodes.",
        lambda: len(peers.digests),
    )
    yield "healthd_fleet_step_jobs", "Jobs whose nodes report step times.", lambda: len(peers.jobs.jobs)
    yield (
        "healthd_fleet_slow_ranks_nodes",
        "Nodes that are slow in a running job by their own time, compared with the job's other nodes.",
        lambda: len(peers.jobs.slow_nodes),
    )


def _labelled(name: str, about: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """A gauge with one label."""
    family = GaugeMetricFamily(name, about, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def _bounded(code: str | None) -> str:
    """Third-party checks bring reasons of their own; they share one label."""
    if code is None:
        return "none"
    return code if code in REASONS else "other"
