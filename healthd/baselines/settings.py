"""What an operator can set of baselines: the table `[baseline]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from healthd.baselines.rule import Rule


@dataclass(frozen=True, kw_only=True)
class BaselineSettings:
    """Of learned limits. `file` is for nodes and `healthd check`, the rest for the aggregator and `baseline learn`."""

    file: Path | None = None
    """File of `healthd baseline export` whose approved limits judge on this node; beats what an aggregator tells."""

    learn: bool = True
    """Whether the aggregator learns from passing runs. It costs one look at each node an hour."""

    approve: Literal["person", "auto"] = "person"
    """Who lets a first baseline judge. auto: nobody is asked where no sample lies outside of it; later ones always
    need a person, since a baseline that follows the fleet down by itself would find nothing."""

    false_alarms: float = 0.01
    """How many false alarms one run of all checks on the whole fleet may have on average, one in a hundred runs."""

    share_ratio: float = 0.1
    """No limit is nearer to the median than this share of it. A tenth: what few samples tell of the tails is little;
    stragglers are found more finely, among their peers of the same hour."""

    drift_ratio: float = 0.05
    """From which change of the recent median against the approved one there is a warning about the fleet."""

    def __post_init__(self) -> None:
        if not 0 < self.false_alarms <= 100:
            raise ValueError(f"false_alarms must be more than 0 and at most 100, not {self.false_alarms}")
        if not 0 < self.share_ratio < 1 or not 0 < self.drift_ratio < 1:
            raise ValueError(f"share_ratio and drift_ratio are shares: not {self.share_ratio} and {self.drift_ratio}")

    @property
    def rule(self) -> Rule:
        """How limits are made."""
        return Rule(false_alarms=self.false_alarms, share_ratio=self.share_ratio, drift_ratio=self.drift_ratio)
