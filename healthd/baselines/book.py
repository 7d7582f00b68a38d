"""
All series with their samples, bounded: what is learned, what a person has agreed to, what has drifted.

No I/O. Of more samples than are kept those with the smallest random rank stay (`Sample.rank`): a fair draw that does
not depend on the order in which they came, and of which the same again changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from checks.contract import Status
from checks.limits import quantity
from checks.reasons import action_of, blame_of
from healthd.baselines.judging import has_limit, limits_of
from healthd.baselines.learning import drift_of, higher_is_better, learn
from healthd.baselines.model import WINDOW_DAYS, Baseline, Kind, Learned, Sample, Series, State, series_id
from healthd.baselines.rule import Rule
from healthd.core.errors import BadInputError, ConflictError, NotFoundError
from healthd.core.model import LearnedLimits, Reason

MOST_SAMPLES = 256
"""Of a series: the MAD of so many is right to 7 %."""
MOST_SERIES = 2000
"""A fleet of ten kinds of machine with twenty numbers each has 200; versions come and go."""
RECENT_DAYS = 7
"""Drift is looked for in so many days: a week, because loads have weekly habits."""
CHANGED_RATIO = 0.01
"""New samples make a new candidate only where they move the median or the limit by so much."""
_RANKS = 1 << 56


@dataclasses.dataclass
class _Pool:
    """The samples of a series by rank."""

    samples: dict[int, Sample] = dataclasses.field(default_factory=dict)

    def add(self, sample: Sample) -> bool:
        rank = sample.rank
        if rank in self.samples:
            return False
        if len(self.samples) >= MOST_SAMPLES:
            last = max(self.samples)
            if rank > last:
                return False
            del self.samples[last]
        self.samples[rank] = sample
        return True

    def total(self) -> float:
        """How many samples there were, as far as those that were kept tell: they are the first of so many."""
        if len(self.samples) < MOST_SAMPLES:
            return len(self.samples)
        return (MOST_SAMPLES - 1) * _RANKS / max(self.samples)


class Book:
    """See the module. `rule` has no comparisons of its own: they are counted from what is heard."""

    def __init__(self, rule: Rule | None = None, *, most_series: int = MOST_SERIES) -> None:
        self.rule = rule or Rule()
        self._most = most_series
        self._series: dict[str, Series] = {}
        self._pools: dict[str, _Pool] = {}
        self._of_kind: dict[Kind, set[str]] = {}

    # --- what comes in ------------------------------------------------------------------------------------------------

    def put(self, series: Series, samples: Iterable[Sample] = ()) -> None:
        """A series as it was kept elsewhere; replaces what is here of it."""
        if series.id not in self._series:
            self._make_room()
        self._series[series.id] = series
        self._of_kind.setdefault(series.kind, set()).add(series.id)
        pool = self._pools.setdefault(series.id, _Pool())
        for sample in samples:
            pool.add(sample)

    def add(self, kind: Kind, name: str, sample: Sample) -> str | None:
        """Take in one sample: the id of its series, None where it was known, or is not kept, or cannot be learned."""
        if higher_is_better(name) is None:
            return None
        found = series_id(kind, name)
        if found not in self._series:
            self.put(Series(kind=kind, name=name, heard_day=sample.day))
        series = self._series[found]
        if sample.day > series.heard_day:
            self._series[found] = dataclasses.replace(series, heard_day=sample.day)
        return found if self._pools[found].add(sample) else None

    def _make_room(self) -> None:
        """The series that was not heard of for longest goes; frozen ones stay. ConflictError when all are frozen."""
        while len(self._series) >= self._most:
            loose = [one for one in self._series.values() if not _is(one, State.FROZEN)]
            if not loose:
                raise ConflictError(f"all {self._most} baselines are frozen; revoke some of hardware that is gone")
            self._drop(min(loose, key=lambda one: (one.in_force is not None, one.heard_day, one.id)))

    def _drop(self, series: Series) -> None:
        del self._series[series.id]
        del self._pools[series.id]
        self._of_kind[series.kind].discard(series.id)
        if not self._of_kind[series.kind]:
            del self._of_kind[series.kind]

    # --- what is known ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._series)

    def all(self) -> tuple[Series, ...]:
        """By kind of machine and name."""
        return tuple(sorted(self._series.values(), key=lambda one: (str(one.kind), one.name)))

    def get(self, series_id: str) -> Series | None:
        """One by its id."""
        return self._series.get(series_id)

    def samples(self, series_id: str) -> tuple[Sample, ...]:
        """Those that are kept, in the order of their ranks."""
        pool = self._pools.get(series_id)
        return () if pool is None else tuple(pool.samples[rank] for rank in sorted(pool.samples))

    def find(self, names: Sequence[str]) -> tuple[Series, ...]:
        """Series by id (four digits are enough) or name; all where no name is given. NotFoundError for one of none."""
        found: dict[str, Series] = {}
        for name in names:
            plain = [one for one in self.all() if name in (one.name, one.name.partition("/")[0], one.id)]
            some = plain or [one for one in self.all() if len(name) >= 4 and one.id.startswith(name)]
            if not some:
                raise NotFoundError(f"no baseline {name[:80]!r}; 'healthd baseline show' lists all")
            found.update((one.id, one) for one in some)
        return tuple(found.values()) if names else self.all()

    def limits_of(self, kind: Kind) -> LearnedLimits | None:
        """What nodes of a kind are told."""
        return limits_of(kind, (self._series[one] for one in self._of_kind.get(kind, ())))

    def comparisons(self) -> int:
        """How many numbers one run of the whole fleet judges, as far as the samples tell; at least the rule's own."""
        total = 0.0
        for pool in self._pools.values():
            days = {sample.day for sample in pool.samples.values()}
            total += pool.total() / max(1, len(days))
        return max(self.rule.comparisons, round(total))

    # --- what is made of it -------------------------------------------------------------------------------------------

    def learn(self, *, now: float, automatic: bool = False) -> tuple[str, ...]:
        """
        Look at all samples: candidates, drift. Returns the ids of the series that changed.

        `automatic` approves the first candidate of a series if no sample of its own lies outside of it. Never a later
        one: a baseline that follows the fleet down by itself would find nothing.
        """
        day = int(now // 86400)
        rule = dataclasses.replace(self.rule, comparisons=self.comparisons())
        changed = []
        for series in self.all():
            pool = self._pools[series.id]
            pool.samples = {rank: one for rank, one in pool.samples.items() if 0 <= day - one.day < WINDOW_DAYS}
            if not pool.samples and series.in_force is None:
                self._drop(series)
                continue
            after = self._learned(series, pool, rule, now=now, automatic=automatic)
            if after != series:
                self._series[series.id] = after
                changed.append(series.id)
        return tuple(changed)

    def _learned(self, series: Series, pool: _Pool, rule: Rule, *, now: float, automatic: bool) -> Series:
        learned = learn(pool.samples.values(), series.name, rule)
        old = series.in_force
        if learned is None or (old is not None and old.state is State.FROZEN):
            candidate = None
        elif series.candidate is not None and not _moved(series.candidate, learned):
            candidate = series.candidate
        elif old is not None and old.state is State.APPROVED and not _moved(old, learned):
            candidate = None
        else:
            version = 1 if old is None else old.version + 1
            candidate = Baseline(version=version, state=State.CANDIDATE, learned=learned, learned_at=now)
        drift = None
        if old is not None and old.state is not State.REVOKED:
            newest = int(now // 86400) - RECENT_DAYS
            drift = drift_of((one for one in pool.samples.values() if one.day > newest), old.learned, rule)
        if drift is not None and series.drift is not None and abs(drift - series.drift) < CHANGED_RATIO:
            drift = series.drift
        after = dataclasses.replace(series, candidate=candidate, drift=drift)
        sound = candidate is not None and has_limit(candidate.learned) and candidate.learned.outside == 0
        return decided(after, State.APPROVED, by="auto", now=now) if automatic and old is None and sound else after

    def decide(self, ids: Iterable[str], state: State, *, by: str, now: float) -> tuple[Series, ...]:
        """Approve, freeze or revoke; the series that changed. BadInputError where there is nothing to decide about."""
        after = [decided(self._series[one], state, by=by, now=now) for one in ids]
        changed = tuple(one for one in after if one != self._series[one.id])
        self._series.update((one.id, one) for one in changed)
        return changed

    def drifts(self) -> tuple[Reason, ...]:
        """The drifts of medians, as warnings about the fleet: no node is at fault."""
        return tuple(drift_reason(one) for one in self.all() if one.drift is not None and one.in_force is not None)


def decided(series: Series, state: State, *, by: str, now: float) -> Series:
    """The series once `by` has approved its candidate, or frozen or revoked what is in force."""
    current, candidate = series.in_force, series.candidate
    if state is State.APPROVED:
        if candidate is None:
            if current is not None and current.state in (State.APPROVED, State.FROZEN):
                # A frozen one thaws.
                thawed = dataclasses.replace(current, state=State.APPROVED)
                return series if thawed == current else _decided(series, thawed, by, now)
            raise BadInputError(f"{series.id} {series.name}: nothing to approve: too few samples yet")
        if not has_limit(candidate.learned):
            raise BadInputError(f"{series.id} {series.name}: its samples differ by too much, so it has no limit")
        after = _decided(series, dataclasses.replace(candidate, state=State.APPROVED), by, now)
        return dataclasses.replace(after, candidate=None, drift=None)
    if current is None or current.state is State.REVOKED:
        if state is State.REVOKED and current is not None:
            return series
        raise BadInputError(f"{series.id} {series.name}: nothing is approved that could be {state.value}")
    after = _decided(series, dataclasses.replace(current, state=state), by, now)
    gone = dataclasses.replace(after, candidate=None)
    return (
        series if current.state is state else (gone if state is State.FROZEN else dataclasses.replace(gone, drift=None))
    )


def due(series: Series, state: State) -> bool:
    """Whether a decision about all of them means this one: candidates wait for approval, approved ones for freezing."""
    if state is State.APPROVED:
        return series.candidate is not None and has_limit(series.candidate.learned)
    return state is State.FROZEN and _is(series, State.APPROVED)


def drift_reason(series: Series) -> Reason:
    """Of a series that has drifted."""
    assert series.in_force is not None
    assert series.drift is not None
    was = series.in_force.learned.median
    text = (
        f"{series.name} on {series.kind}: the median of the last {RECENT_DAYS} days is "
        f"{quantity(_unit_name(series.name), was * (1 + series.drift))}, {100 * series.drift:+.1f} % from the approved "
        f"{quantity(_unit_name(series.name), was)}; find out what changed for all, or approve the new one"
    )
    code = "BaselineDrift"
    return Reason(code=code, message=text, status=Status.WARN, blame=blame_of(code), action=action_of(code))


def _unit_name(name: str) -> str:
    return name.partition("/")[0]


def _decided(series: Series, baseline: Baseline, by: str, now: float) -> Series:
    return dataclasses.replace(series, in_force=dataclasses.replace(baseline, by=by, decided_at=now))


def _moved(old: Baseline, new: Learned) -> bool:
    """Whether newer samples say something else."""
    was = old.learned
    if abs(new.median / was.median - 1) > CHANGED_RATIO:
        return True
    return any(
        (limit is None) != (before is None)
        or (limit is not None and before is not None and abs(limit - before) > CHANGED_RATIO * new.median)
        for limit, before in ((new.lower, was.lower), (new.upper, was.upper))
    )


def _is(series: Series, state: State) -> bool:
    return series.in_force is not None and series.in_force.state is state
