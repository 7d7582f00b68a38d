"""
Devices that are slow among their peers when they are tested.

A value is suspect when it is further on the bad side of the median than its peers' deviation explains, with the number
of values looked at together in mind (`checks.peers.factor_of`), and by more than the floor: a few per cent hold up no
job. No device is named on one measurement: the second, of another run, must say the same. Idle nodes measure themselves
every hour, alone, so that a second opinion comes by itself. Ranks of a collective are compared in
`healthd.aggregator.validation.outcome`.

`Peers` is the table of what each device of the fleet measured last; `healthd baseline` learns limits from the same
numbers. `Stragglers` fills it from the nodes' reports, and searches it now and then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checks.limits import quantity
from checks.peers import factor_of, slow_ones
from healthd import baselines
from healthd.aggregator.fleet import Fleet
from healthd.baselines import Kind, SampleSeries
from healthd.core.model import Health

FALSE_ALARMS = 0.005
"""In one look at the whole fleet: with the second measurement that has to agree it is far below one in a hundred."""
RATE_FLOOR_RATIO = 0.05
"""A device must be slower than the median by so much: below it a job hardly notices."""
MOST_SUSPECTS = 200
MOST_VALUES = 4_000_000
"""Numbers kept, 8 bytes each and a little more: twenty thousand nodes with sixteen devices and a dozen of numbers."""
MOST_SERIES = 2000
"""Series given to be learned from: a fleet of ten kinds of machine with twenty numbers each has 200."""

LOOK_SECONDS = 1800.0
"""A node's devices are measured once an hour while it is idle, and opening its evidence costs a millisecond."""
SOON_SECONDS = 60.0
"""And again so soon while there is nothing to see: the versions of a node are known from its first active run on."""
TURN_SECONDS = 1.0
LOOKS_EACH_TURN = 50
"""Fifty milliseconds of each second at most, right after a start; ten thousand nodes have been met in three minutes."""
SEARCH_SECONDS = 600.0
"""How often stragglers are looked for; a request gets a search of its own."""


# --- the arithmetic ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """
    One value of one device. `peers` names what it may be compared with; `run` tells one measurement from the next (when
    it began).
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


def comparable(samples: Iterable[Sample]) -> Sequence[Sample]:
    """The numbers of one name and kind of machine; none of fewer than eleven, which tell nothing of what is normal."""
    found = [sample for sample in samples if math.isfinite(sample.value)]
    return found if len(found) >= baselines.LEAST_SAMPLES else ()


def find(groups: Sequence[Sequence[Sample]], history: Iterable[Suspect] = ()) -> tuple[Suspect, ...]:
    """
    Those out of line in a group of `comparable` samples, the furthest first, at most `MOST_SUSPECTS`.

    `history` is what was found before: a suspect of another run is confirmed; what is in line now is not returned any
    more.
    """
    factor = factor_of(FALSE_ALARMS, sum(map(len, groups)))
    before = {suspect.key: suspect for suspect in history}
    found = [suspect for group in groups if group for suspect in _outliers(group, factor, before)]
    return tuple(sorted(found, key=lambda one: (not one.confirmed, -_apart(one), one.key))[:MOST_SUSPECTS])


def _outliers(
    group: Sequence[Sample], factor: float, before: Mapping[tuple[str, str, str], Suspect]
) -> Iterator[Suspect]:
    rate = baselines.higher_is_better(group[0].name) is True
    normal, slow = slow_ones(
        [sample.value for sample in group],
        lambda middle: RATE_FLOOR_RATIO * abs(middle),
        factor=factor,
        higher_is_better=rate,
    )
    middle = normal.median
    for sample in (group[place] for place in slow):
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
            limit=normal.limit(higher_is_better=rate),
            count=len(group),
            runs=(*runs[-1:], sample.run),
            message=text if runs else f"{text}; it is measured again before a device is named",
        )


def _apart(suspect: Suspect) -> float:
    return abs(suspect.value - suspect.median) / (abs(suspect.median) or 1.0)


# --- what each device measured last -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """One measurement on all devices of a node: `values` in the order of `targets`, which many nodes share."""

    began: float
    targets: tuple[str, ...]
    values: array[float]


class Peers:
    """On the event loop alone, but for the arithmetic of `search`."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Kind, str], dict[str, _Run]] = {}
        self._targets: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._values = 0
        self._found: tuple[Suspect, ...] = ()
        self.compared = 0
        """How many nodes the last search has compared with others."""
        self.news: deque[tuple[str, str]] = deque(maxlen=MOST_SUSPECTS)
        """(node, message) of those that were confirmed lately."""
        self._confirmed: set[tuple[str, str, str]] = set()

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """As of the last search: confirmed ones first."""
        return self._found

    def take_in(self, kind: Kind, node: str, found: Sequence[baselines.Sample]) -> None:
        """What a node has measured last; nothing: what is known of it stays."""
        by_name: dict[str, tuple[float, dict[str, float]]] = {}
        for sample in found:
            by_name.setdefault(sample.name, (sample.began, {}))[1][sample.target] = sample.value
        if by_name:
            self.forget(node, other_than=kind)
        for name, (began, values) in by_name.items():
            runs = self._runs.setdefault((kind, sys.intern(name)), {})
            if self._values + len(values) > MOST_VALUES and node not in runs:
                continue
            old = runs.get(node)
            targets = tuple(values)
            run = _Run(began, self._targets.setdefault(targets, targets), array("d", values.values()))
            self._values += len(run.values) - (len(old.values) if old is not None else 0)
            runs[node] = run

    def forget(self, node: str, *, other_than: Kind | None = None) -> None:
        """Drop what a node measured, or what it measured while it was a machine of another kind."""
        for (kind, _), runs in self._runs.items():
            if kind != other_than and node in runs:
                self._values -= len(runs.pop(node).values)

    async def series(self) -> tuple[SampleSeries, ...]:
        """
        What there is to learn limits from, by kind of machine and name; of too many series those with the most devices.

        Of each at most `healthd.baselines.MOST_SAMPLES` values, a draw that is the same as long as the numbers are.
        """
        measured = [(kind, name, dict(runs)) for (kind, name), runs in self._runs.items() if runs]
        return await asyncio.to_thread(_series, measured)

    async def search(self) -> tuple[Suspect, ...]:
        """
        Look for stragglers now. Returns those that have been confirmed since the last search; they are in `news` too.

        Sorting a million values takes a second, so it is done beside the loop.
        """
        measured = [(kind, name, dict(runs)) for (kind, name), runs in self._runs.items()]
        self._found, self.compared = await asyncio.to_thread(_search, measured, self._found)
        before, self._confirmed = self._confirmed, {one.key for one in self._found if one.confirmed}
        new = tuple(one for one in self._found if one.confirmed and one.key not in before)
        self.news.extend((one.node, one.message) for one in new)
        return new


def _series(measured: Sequence[tuple[Kind, str, Mapping[str, _Run]]]) -> tuple[SampleSeries, ...]:
    """Off the loop: the numbers of a large fleet take a second."""
    largest = sorted(measured, key=lambda one: -sum(len(run.values) for run in one[2].values()))[:MOST_SERIES]
    found = []
    for kind, name, runs in sorted(largest, key=lambda one: (str(one[0]), one[1])):
        values = [value for node in sorted(runs) for value in runs[node].values]
        drawn = values
        if len(values) > baselines.MOST_SAMPLES:
            drawn = random.Random(name).sample(values, baselines.MOST_SAMPLES)  # noqa: S311
        found.append(
            SampleSeries(
                hardware=kind.hardware,
                accelerator=kind.accelerator,
                versions=dict(kind.versions),
                name=name,
                devices=len(values),
                values=tuple(drawn),
            )
        )
    return tuple(found)


def _search(
    measured: Sequence[tuple[Kind, str, Mapping[str, _Run]]], before: Sequence[Suspect]
) -> tuple[tuple[Suspect, ...], int]:
    """Which devices are out of line, and how many nodes were compared."""
    groups = [
        comparable(
            Sample(peers=str(kind), name=name, node=node, target=target, value=value, run=f"{run.began:.3f}")
            for node, run in runs.items()
            for target, value in zip(run.targets, run.values, strict=True)
        )
        for kind, name, runs in measured
        if len(runs) > 1 and baselines.higher_is_better(name) is not None
    ]
    return find(groups, before), len({sample.node for group in groups for sample in group})


# --- in the aggregator ------------------------------------------------------------------------------------------------


class Stragglers:
    """
    Looks at nodes that report, and searches among them; on the event loop alone. Run `run()` as a task.

    A node is looked at when it is first heard, and twice an hour once it has measured something. What it measured
    counts while the aggregator takes it for healthy, and nobody has it. `clock` gives seconds since the epoch.
    """

    def __init__(self, fleet: Fleet, *, clock: Callable[[], float] = time.time) -> None:
        self.peers = Peers()
        self._fleet = fleet
        self._clock = clock
        self._known: dict[Kind, Kind] = {}
        self._due: dict[str, float] = {}
        self._looked: dict[str, tuple[int | None, float]] = {}  # the version of the state, and when
        self._queue: deque[str] = deque()
        self._queued: set[str] = set()
        self._search_at = fleet.clock() + SEARCH_SECONDS
        fleet.listen(self._hear, quiet=self._hear)

    async def run(self) -> None:
        """Look and search, for ever. Ends by cancellation."""
        while True:
            # One look at a time: a millisecond is the longest that a gate waits for them.
            await asyncio.sleep(TURN_SECONDS / LOOKS_EACH_TURN if self._queue else TURN_SECONDS)
            if self._queue:
                node = self._queue.popleft()
                self._queued.discard(node)
                self._look(node)
            if self._fleet.clock() >= self._search_at:
                self._search_at = self._fleet.clock() + SEARCH_SECONDS
                await self._search()

    def _hear(self, node: str) -> None:
        """A node has reported: it is looked at when that was not done lately, and it has not been the same since."""
        now = self._fleet.clock()
        if node in self._queued or now < self._due.get(node, 0.0):
            return
        version, looked_at = self._looked.get(node, (None, -math.inf))
        if version == self._fleet.version(node) and now - looked_at < LOOK_SECONDS:
            self._due[node] = now + SOON_SECONDS
        else:
            self._queued.add(node)
            self._queue.append(node)

    def _look(self, name: str) -> None:
        """Take in what a node measured."""
        now = self._fleet.clock()
        self._due[name] = now + SOON_SECONDS
        node = self._fleet.node(name)
        state = node.current() if node is not None else None
        if node is None or state is None:
            self._forget(name)
            return
        kind = baselines.kind_of(state)
        if kind is None or node.duplicate or not node.confirmed:
            return
        kind = self._known.setdefault(kind, kind)  # one record for all nodes of a kind
        health = self._fleet.health_of(name)
        if health is Health.HEALTHY:
            self._looked[name] = (self._fleet.version(name), now)
        seen = dataclasses.replace(state, health=health, quarantine=node.quarantine or state.quarantine)
        found = list(baselines.samples_of(seen, now=self._clock()))
        if found:
            self._due[name] = self._fleet.clock() + LOOK_SECONDS
        self.peers.take_in(kind, name, found)

    def _forget(self, node: str) -> None:
        self._due.pop(node, None)
        self._looked.pop(node, None)
        self.peers.forget(node)

    async def _search(self) -> None:
        names = set(self._fleet.names())
        for gone in self._due.keys() - names:
            self._forget(gone)
        await self.peers.search()
