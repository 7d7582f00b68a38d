"""What the hand did, for Prometheus: calls, failures, nodes held out, and for how long nothing has come through."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from healthd.fleet.actuators.hand import Hand

CALLS = ("list", "remove", "restore")
"""All that a scheduler is asked to do; the label `call`."""


class ActuatorCollector(Collector):
    """Counted anew at each scrape. Every series is there from the start, at 0."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks."""
        tally = self._hand.tally()
        for name, text, counts in (
            ("healthd_actuator_calls", "Times that the actuator's scheduler was asked.", tally.calls),
            ("healthd_actuator_failures", "Calls of the actuator that its scheduler refused or lost.", tally.failures),
        ):
            family = CounterMetricFamily(name, text, labels=("kind", "call"))
            for call in CALLS:
                family.add_metric((tally.kind, call), counts.get(call, 0))
            yield family
        for name, text, value in (
            ("healthd_actuator_nodes_out", "Nodes that bear the actuator's mark now.", tally.out),
            (
                "healthd_actuator_nodes_overdue",
                "Nodes about which the last call failed: not out, or not back. 1 while the scheduler cannot be listed.",
                tally.overdue,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("kind",))
            gauge.add_metric((tally.kind,), value)
            yield gauge
