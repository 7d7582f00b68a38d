"""What the tests of the aggregator's metrics are made with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Sized

from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.metrics import FleetMetrics


@dataclasses.dataclass(kw_only=True)
class Figures:
    """What metrics show of an engine and of a database, both at rest unless something else is said."""

    gates: int = 0
    forced: int = 0
    waited: Sequence[float] = ()
    recovery: str | None = None
    failures: int = 0
    failing: bool = False

    def open_gates(self) -> Sized:
        return range(self.gates)

    def waits(self) -> Sequence[float]:
        return self.waited

    def overrides(self) -> Sized:
        return range(self.forced)

    def breakers(self) -> Sized:
        return ()

    def repairs(self) -> Sized:
        return ()

    def recovering(self) -> str | None:
        return self.recovery

    def rule_words(self) -> Mapping[tuple[str, str], int]:
        return {}

    def internal_errors(self) -> Mapping[str, int]:
        return {}


def metrics_of(registry: Fleet, figures: Figures | None = None) -> FleetMetrics:
    shown = figures or Figures()
    return FleetMetrics(registry, shown, shown)
