"""
Who is slow among its peers: devices by their rates, ranks by how late they come to a collective. Pure.

A value is suspect when it is further on the bad side of the median than its peers' deviation explains, with the number
of values looked at together in mind (`healthd.baselines.learning.factor_of`), and by more than the floors: what is late
by a little, or slow by a few per cent, holds up nobody. Nobody is named on one measurement: the second, of another
run or with other partners, must say the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from checks.contract import Status
from checks.limits import quantity
from checks.reasons import action_of, blame_of
from healthd.aggregator.model.validations import Group, Tested
from healthd.aggregator.validation.rank_data import is_number
from healthd.baselines.learning import SIGMA_OF_MAD, factor_of, higher_is_better, spread
from healthd.baselines.model import LEAST_SAMPLES
from healthd.core.model import RankReport, Reason
from healthd.localize import Outcome

FALSE_ALARMS = 0.005
"""In one look at the whole fleet: with the second measurement that has to agree it is far below one in a hundred."""
RATE_FLOOR_RATIO = 0.05
"""A device must be slower than the median by so much: below it a job hardly notices."""
MOST_SUSPECTS = 200

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
class Sample:
    """
    One value of one device or rank. `peers` names what it may be compared with; `run` tells one measurement from the
    next (when it began, or with whom it was made).
    """

    peers: str
    name: str
    node: str
    target: str
    value: float
    run: str


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """
    A value out of line with `count` others of `median`; `limit` is where the line is. `runs` are the measurements that
    said so, oldest first: of one alone it is not `confirmed`, and nobody may be named for it.
    """

    peers: str
    name: str
    node: str
    target: str
    value: float
    median: float
    limit: float
    count: int
    runs: tuple[str, ...]

    @property
    def confirmed(self) -> bool:
        """Whether a second measurement has said the same."""
        return len(self.runs) > 1

    @property
    def key(self) -> tuple[str, str, str]:
        """What is suspected of what."""
        return (self.name, self.node, self.target)

    @property
    def sentence(self) -> str:
        """For people."""
        plain = self.name.partition("/")[0]
        apart = 100 * (self.value / self.median - 1)
        text = (
            f"{self.node} {self.target}: {self.name} is {quantity(plain, self.value)}, {apart:+.0f} % from the median "
            f"{quantity(plain, self.median)} of {self.count} like it ({self.peers})"
        )
        return text if self.confirmed else f"{text}; to be measured again before anybody is named"


def find(
    samples: Iterable[Sample], history: Iterable[Suspect] = (), *, false_alarms: float = FALSE_ALARMS
) -> tuple[Suspect, ...]:
    """
    Those out of line now, the furthest first, at most `MOST_SUSPECTS`.

    `history` is what was found before: whoever was suspect in another run is confirmed; who is in line now is not
    returned any more. Peers of fewer than eleven are not judged: so few tell nothing of what is normal.
    """
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if higher_is_better(sample.name) is not None and math.isfinite(sample.value):
            groups[(sample.peers, sample.name)].append(sample)
    judged = {key: group for key, group in groups.items() if len(group) >= LEAST_SAMPLES}
    factor = factor_of(false_alarms, sum(map(len, judged.values())))
    before = {suspect.key: suspect for suspect in history}
    found = [suspect for group in judged.values() for suspect in _outliers(group, factor, before)]
    return tuple(sorted(found, key=lambda one: (not one.confirmed, -_apart(one), one.key))[:MOST_SUSPECTS])


def _outliers(
    group: Sequence[Sample], factor: float, before: Mapping[tuple[str, str, str], Suspect]
) -> Iterator[Suspect]:
    middle, mad = spread([sample.value for sample in group])
    margin = max(factor * SIGMA_OF_MAD * mad, RATE_FLOOR_RATIO * abs(middle))
    sign = -1.0 if higher_is_better(group[0].name) else 1.0
    for sample in group:
        if sign * (sample.value - middle) <= margin:
            continue
        suspect = Suspect(
            peers=sample.peers,
            name=sample.name,
            node=sample.node,
            target=sample.target,
            value=sample.value,
            median=middle,
            limit=middle + sign * margin,
            count=len(group),
            runs=(sample.run,),
        )
        earlier = before.get(suspect.key)
        runs = () if earlier is None else tuple(run for run in earlier.runs if run != sample.run)
        yield dataclasses.replace(suspect, runs=(*runs[-1:], sample.run))


def _apart(suspect: Suspect) -> float:
    return abs(suspect.value - suspect.median) / (abs(suspect.median) or 1.0)


# --- ranks of a group -------------------------------------------------------------------------------------------------


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
    return Reason(
        code="SlowNode",
        message=text,
        status=Status.FAIL,
        blame=blame_of("SlowNode"),
        action=action_of("SlowNode"),
        node=late.node,
        target=f"rank:{late.rank}",
        check=late.check,
        injected=injected,
    )
