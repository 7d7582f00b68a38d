"""
Which devices are slow among their peers, by their rates. Pure. Ranks are compared in `validation.late_ranks`.

A value is suspect when it is further on the bad side of the median than its peers' deviation explains, with the number
of values looked at together in mind (`healthd.baselines.learning.factor_of`), and by more than the floors: a
few per cent hold up nobody. Nobody is named on one measurement: the second, of another run, must say the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checks.limits import quantity
from healthd.baselines.learning import SIGMA_OF_MAD, factor_of, higher_is_better, spread
from healthd.baselines.model import LEAST_SAMPLES

FALSE_ALARMS = 0.005
"""In one look at the whole fleet: with the second measurement that has to agree it is far below one in a hundred."""
RATE_FLOOR_RATIO = 0.05
"""A device must be slower than the median by so much: below it a job hardly notices."""
MOST_SUSPECTS = 200


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
    A value out of line with `count` others of `median`; `limit` is where the line is, `message` the sentence.

    `peers` are the machines of this kind. `runs` are the measurements that said so, oldest first: of one alone it is
    not confirmed, and nobody may be named for it.
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
    message: str

    @property
    def confirmed(self) -> bool:
        """Whether a second measurement has said the same."""
        return len(self.runs) > 1

    @property
    def key(self) -> tuple[str, str, str]:
        """What is suspected of what."""
        return (self.name, self.node, self.target)


def compared(samples: Iterable[Sample]) -> tuple[tuple[Sample, ...], ...]:
    """
    The samples in groups that are compared with each other.

    Peers of fewer than eleven are in none: so few tell nothing of what is normal.
    """
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if higher_is_better(sample.name) is not None and math.isfinite(sample.value):
            groups[(sample.peers, sample.name)].append(sample)
    return tuple(tuple(group) for group in groups.values() if len(group) >= LEAST_SAMPLES)


def find(groups: Sequence[Sequence[Sample]], history: Iterable[Suspect] = ()) -> tuple[Suspect, ...]:
    """
    Those out of line in their group of `compared`, the furthest first, at most `MOST_SUSPECTS`.

    `history` is what was found before: whoever was suspect in another run is confirmed; who is in line now is not
    returned any more.
    """
    factor = factor_of(FALSE_ALARMS, sum(map(len, groups)))
    before = {suspect.key: suspect for suspect in history}
    found = [suspect for group in groups for suspect in _outliers(group, factor, before)]
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
        earlier = before.get((sample.name, sample.node, sample.target))
        runs = () if earlier is None else tuple(run for run in earlier.runs if run != sample.run)
        plain, apart = sample.name.partition("/")[0], 100 * (sample.value - middle) / (middle or 1.0)
        text = (
            f"{sample.node} {sample.target}: {sample.name} is {quantity(plain, sample.value)}, {apart:+.0f} % from the "
            f"median {quantity(plain, middle)} of {len(group)} like it ({sample.peers})"
        )
        yield Suspect(
            peers=sample.peers,
            name=sample.name,
            node=sample.node,
            target=sample.target,
            value=sample.value,
            median=middle,
            limit=middle + sign * margin,
            count=len(group),
            runs=(*runs[-1:], sample.run),
            message=text if runs else f"{text}; to be measured again before anybody is named",
        )


def _apart(suspect: Suspect) -> float:
    return abs(suspect.value - suspect.median) / (abs(suspect.median) or 1.0)
