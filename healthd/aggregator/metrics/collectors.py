"""What is counted anew at each scrape: the fleet, and what the aggregator itself has trouble with."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from healthd.aggregator.inventory.digest_votes import Standing
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.model.quarantines import Mode as RuleMode
from healthd.aggregator.model.quarantines import Rule
from healthd.core.http.exposition import task_errors_metric
from healthd.core.model import Health

# A node is heard every 25 s when all is well, and silent after 60 s.
AGE_BOUNDS = (1.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 900.0, 3600.0)
OWNER_KINDS = ("person", "rule")


class FleetCollector(Collector):
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
        within = [0] * (len(AGE_BOUNDS) + 1)
        longest = 0.0
        owners = dict.fromkeys(OWNER_KINDS, 0)
        for health, heard_seconds, quarantine in self._fleet.survey():
            counts[health] += 1
            if heard_seconds is not None:
                within[bisect_left(AGE_BOUNDS, heard_seconds)] += 1
                longest = max(longest, heard_seconds)
            if quarantine is not None and quarantine.owner_kind in owners:
                owners[quarantine.owner_kind] += 1
        nodes = GaugeMetricFamily("healthd_fleet_nodes", "Known nodes by health.", labels=("health",))
        for health, count in counts.items():
            nodes.add_metric((health.value,), count)
        yield nodes
        heard = GaugeMetricFamily(
            "healthd_fleet_nodes_heard", "Nodes that were heard within so many seconds.", labels=("within_seconds",)
        )
        for i, bound in enumerate(AGE_BOUNDS):
            heard.add_metric((f"{bound:g}",), sum(within[: i + 1]))
        yield heard
        yield GaugeMetricFamily(
            "healthd_fleet_node_age_max_seconds",
            "Seconds since the node was heard that is silent the longest; nodes that were never heard do not count.",
            value=longest,
        )
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


class PeerCollector(Collector):
    """What the comparison of nodes with each other has found."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        differing = Counter(one.standing for one in self._fleet.peers.digests.differing.values())
        nodes = GaugeMetricFamily(
            "healthd_fleet_digests_differing_nodes",
            "Nodes whose training step gives other bits than that of their peers: a minority, or undecided.",
            labels=("standing",),
        )
        for standing in (Standing.MINORITY, Standing.UNDECIDED):
            nodes.add_metric((standing.value,), differing[standing])
        yield nodes
        yield GaugeMetricFamily(
            "healthd_fleet_digests_nodes",
            "Nodes that have given digests of a training step, which are compared between nodes.",
            value=len(self._fleet.peers.digests),
        )
        jobs = self._fleet.peers.jobs
        yield GaugeMetricFamily(
            "healthd_fleet_step_jobs", "Jobs whose nodes tell the times of their steps.", value=len(jobs.jobs)
        )
        yield GaugeMetricFamily(
            "healthd_fleet_slow_ranks_nodes",
            "Nodes that are slow in a running job by their own time, compared with the job's other nodes.",
            value=len({one.node for one in jobs.slow}),
        )


class TroubleCollector(Collector):
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
