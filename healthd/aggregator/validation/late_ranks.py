"""
Which nodes of a group hold up the others: ranks that come late to a collective. Pure.

A node is late when it is further from the median than its peers' deviation explains, and by more than the floors. A
group that is slow is then looked into in pairs: nobody is named by one measurement.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from checks.contract import Status
from checks.limits import quantity
from healthd.aggregator.model.validations import Group, Tested
from healthd.aggregator.validation.rank_data import is_number
from healthd.baselines import LEAST_SAMPLES, SIGMA_OF_MAD, factor_of, spread
from healthd.core.evidence import reason
from healthd.core.model import RankReport, Reason
from healthd.localize.model import Outcome

FALSE_ALARMS = 0.005
"""In one look at a group; a second measurement has to agree."""
MOST_LATE = 64
"""Nodes looked at in one group, the latest first: each is compared with all others."""
LATE_SECONDS = 0.3
"""
A rank must be late by so much at least. On two cores with other work the ranks of sound nodes were seen late by up to
0.22 s, and one with a fifth of a core by 0.31 s: what is less cannot be told from a busy host, and accuses nobody.
"""
LATE_RATIO = 2.0
"""And by so many times what its peers need: what takes them milliseconds may take it some more."""
LATE_SHARE = 0.25
"""And by a quarter of what the operation takes: what is late by less hardly holds up anybody."""


@dataclass(frozen=True, kw_only=True)
class Late:
    """A node whose rank comes late: by how long it needs between leaving an operation and entering the next."""

    node: str
    rank: int
    check: str
    size_bytes: int
    seconds: float
    others_seconds: float


def of_group(tested: Tested, group: Group, ranks: Mapping[str, Mapping[int, RankReport]]) -> Tested:
    """
    The outcome of a group that passed: SLOW, with the node of a rank that is late, where one is; else as it is.

    Nobody is named by that alone: a group that is slow is looked into in pairs. Where nodes do not say how late they
    are, nothing is made of it. `ranks` are reports by check and rank.
    """
    if tested.outcome is not Outcome.PASS:
        return tested
    worst: dict[str, Reason] = {}
    for check, reports in ranks.items():
        for one in sorted(late_nodes(check, group, reports), key=lambda each: each.others_seconds - each.seconds):
            worst.setdefault(one.node, _reason(one, injected=tested.injected))
    if not worst:
        return tested
    return dataclasses.replace(tested, outcome=Outcome.SLOW, accused=worst, reasons=tuple(worst.values())[:16])


def late_nodes(check: str, group: Group, reports: Mapping[int, RankReport]) -> Iterator[Late]:
    """
    The nodes of one check that are out of line, of each size that was measured: by their latest rank each.

    Compared by node, since what makes a node late makes its ranks late together, and in a pair they are half of all.
    """
    for size_bytes, measured in _ready(reports).items():
        latest: dict[str, tuple[float, int]] = {}
        for seat in group.seats:
            mine = [(measured[r][0], r) for r in range(seat.first_rank, seat.first_rank + seat.ranks) if r in measured]
            if mine:
                latest[seat.node] = max(mine)
        operation_seconds = median(seconds for _, seconds in measured.values())
        factor = factor_of(FALSE_ALARMS, len(latest))
        for node, (seconds, rank) in sorted(latest.items(), key=lambda item: (-item[1][0], item[0]))[:MOST_LATE]:
            others = [ready for other, (ready, _) in latest.items() if other != node]
            if not others:
                continue
            middle, mad = spread(others)
            # The deviation of few says nothing: then the floors alone judge, and they are not small.
            margin = factor * SIGMA_OF_MAD * mad if len(others) >= LEAST_SAMPLES else 0.0
            floor = max(LATE_SECONDS, LATE_RATIO * middle, LATE_SHARE * operation_seconds)
            if seconds - middle > max(margin, floor):
                yield Late(
                    node=node,
                    rank=rank,
                    check=check,
                    size_bytes=size_bytes,
                    seconds=seconds,
                    others_seconds=middle,
                )


def _ready(reports: Mapping[int, RankReport]) -> dict[int, dict[int, tuple[float, float]]]:
    """size_bytes -> rank -> (seconds between operations, seconds in one), of the ranks that say both."""
    found: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for rank, report in reports.items():
        sizes = report.data.get("sizes") if report.data is not None else None
        for size in sizes if isinstance(sizes, (list, tuple)) else ():
            if not isinstance(size, Mapping):
                continue
            ready, took, size_bytes = (size.get(name) for name in ("ready_seconds", "seconds", "size_bytes"))
            if _is_time(ready) and _is_time(took) and isinstance(size_bytes, int):
                found[size_bytes][rank] = (float(ready), float(took))  # type: ignore[arg-type]
    return found


def _is_time(value: object) -> bool:
    return is_number(value) and value >= 0


def _reason(late: Late, *, injected: bool) -> Reason:
    text = (
        f"{late.node}: rank:{late.rank} needs {quantity('_seconds', late.seconds)} to come to {late.check} of "
        f"{late.size_bytes} bytes, the others {quantity('_seconds', late.others_seconds)}"
    )
    target = f"rank:{late.rank}"
    return reason(
        "SlowNode", text, node=late.node, target=target, check=late.check, status=Status.FAIL, injected=injected
    )
