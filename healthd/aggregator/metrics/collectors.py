"""What is counted anew at each scrape: the fleet, its nodes compared with each other, and single numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

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


class FleetCollector(Collector):
    """What has labels, in one walk over the fleet, and what the aggregator itself failed in. `now` is the engine's."""

    def __init__(
        self,
        fleet: Fleet,
        words: Callable[[], Mapping[tuple[str, str], int]],
        errors: Callable[[], Mapping[str, int]],
        task_errors: Mapping[str, int],
        now: Callable[[], float],
    ) -> None:
        self._fleet, self._words, self._errors, self._task_errors, self._now = fleet, words, errors, task_errors, now

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
            "Known nodes by health, and by whether faults are injected there, in a drill.",
            labels=("health", "injected"),
        )
        for (health, drill), number in counts.items():
            nodes.add_metric((health.value, str(drill).lower()), number)
        yield nodes
        yield _labelled(
            "healthd_fleet_nodes_heard",
            "Nodes that were heard within so many seconds.",
            "within_seconds",
            {f"{bound:g}": sum(within[: i + 1]) for i, bound in enumerate(AGE_BOUNDS)},
        )
        yield GaugeMetricFamily(
            "healthd_fleet_node_age_max_seconds",
            "Seconds since the node was heard that is silent the longest; nodes that were never heard do not count.",
            value=longest,
        )
        yield _labelled(
            "healthd_quarantined_nodes", "Nodes kept out of admissions, by who said so.", "owner_kind", owners
        )
        yield _labelled(
            "healthd_quarantine_oldest_seconds",
            "How long the node that has been kept out longest has been, by who said so.",
            "owner_kind",
            ages,
        )
        differing = Counter(one.standing for one in self._fleet.peers.digests.differing.values())
        yield _labelled(
            "healthd_fleet_digests_differing_nodes",
            "Nodes whose training step gives other bits than that of their peers: a minority, or undecided.",
            "standing",
            {one.value: differing[one] for one in (Standing.MINORITY, Standing.UNDECIDED)},
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
        internal = CounterMetricFamily(
            "healthd_internal_errors",
            "Failures of the aggregator that nobody foresaw, by what they stopped; its log has the tracebacks.",
            labels=("where",),
        )
        for where, count in self._errors().items():
            internal.add_metric((where,), count)
        yield internal
        yield task_errors_metric(self._task_errors)


def _labelled(name: str, about: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """A gauge with one label."""
    family = GaugeMetricFamily(name, about, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family
