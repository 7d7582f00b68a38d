"""Time and bandwidths of one operation over ranks, by the definitions of nccl-tests (doc/PERFORMANCE.md)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from checks.contract import SEVERITY, Finding, Limit
from checks.limits import within


def bus_factor(op: str, ranks: int) -> float:
    """What makes the bus bandwidth of the algorithm bandwidth."""
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def judge_bandwidth(
    name: str,
    subject: str,
    size_bytes: int,
    seconds: float,
    *,
    factor: float,
    limit: Callable[[str], Limit],
    labels: Mapping[str, str],
) -> Finding:
    """
    One finding with three measurements, `NAME_` and a suffix; its message is that of the worst.

    `limit` gives the limit of a suffix, `busbw_bytes_per_second` and so on. A time that is none makes no bandwidth.
    """
    algbw = size_bytes / seconds if seconds > 0 else math.nan
    values = {
        "busbw_bytes_per_second": algbw * factor,
        "algbw_bytes_per_second": algbw,
        "duration_seconds": seconds,
    }
    judged = [
        within(
            value,
            name=f"{name}_{suffix}",
            target="node",
            limit=limit(suffix),
            reason="SlowLink",
            subject=f"{subject}: {suffix.partition('_')[0]}",
            labels=labels,
        )
        for suffix, value in values.items()
    ]
    worst = max(judged, key=lambda finding: SEVERITY[finding.status])
    return dataclasses.replace(worst, measurements=tuple(one for finding in judged for one in finding.measurements))


def limit_of(size: Mapping[str, Any], suffix: str) -> Limit:
    """The limit that a rank has told with what it measured at one size."""
    lower, upper, origin = size["limits"][suffix]
    return Limit(lower=lower, upper=upper, origin=origin)
