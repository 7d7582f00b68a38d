"""What the hand did, for Prometheus: calls, failures, nodes held out, and for how long nothing has come through."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from healthd.aggregator.drain.controller import DrainController

CALLS = ("list", "remove", "restore")
"""All that a scheduler is asked to do; the label `call`."""


class ActuatorCollector(Collector):
    """Counted anew at each scrape. Every series is there from the start, at 0; without a hand there is none."""

    def __init__(self, hand: DrainController | None) -> None:
        self._hand = hand

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks."""
        labels = ("kind", "call")
        calls = CounterMetricFamily(
            "healthd_actuator_calls", "Times that the actuator's scheduler was asked.", labels=labels
        )
        failures = CounterMetricFamily(
            "healthd_actuator_failures", "Calls of the actuator that its scheduler refused or lost.", labels=labels
        )
        out = GaugeMetricFamily(
            "healthd_actuator_nodes_out", "Nodes that bear the actuator's mark now.", labels=("kind",)
        )
        overdue = GaugeMetricFamily(
            "healthd_actuator_nodes_overdue",
            "Nodes about which the last call failed: not out, or not back. 1 while the scheduler cannot be listed.",
            labels=("kind",),
        )
        if (hand := self._hand) is not None:
            for call in CALLS:
                calls.add_metric((hand.kind, call), hand.calls[call])
                failures.add_metric((hand.kind, call), hand.failures[call])
            out.add_metric((hand.kind,), len(hand.out()))
            overdue.add_metric((hand.kind,), hand.overdue)
        yield from (calls, failures, out, overdue)
