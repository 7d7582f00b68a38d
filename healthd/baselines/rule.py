"""How limits are made of samples: apart from what is learned, because every command reads it with the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """
    How limits are made of samples.

    `false_alarms` is how many are acceptable in one run of the whole fleet, `comparisons` how many numbers that run
    judges. `share_ratio`: no limit is nearer to the median than this share of it.
    """

    false_alarms: float = 0.01
    comparisons: int = 1000
    share_ratio: float = 0.1
    drift_ratio: float = 0.05
