"""Which rank of a job is slow by its own time: pure arithmetic over windows of steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checks.peers import excess_ratios, sigma_of
from healthd.integrations.steps.blocks import Blocks
from healthd.integrations.steps.datagram import StepReport

WINDOW_STEPS = 50
WINDOW_SECONDS = 1.0
"""A window is at least so many steps and so long: the scatter of steps of a millisecond is the scheduler's."""
LATE_RATIO = 0.05
"""Half of the smallest slowness that is to be found (10 %); the scatter of healthy ranks is 1 to 2 %."""
SURE = 3.0
"""How many standard errors the excess must be above zero: by chance once in 700 windows, and four are needed."""
MOST_STEPS_RATIO = 0.87
"""Of the steps of a window the rank must be behind in so many. A slow device is behind in nearly all, also where the
times of steps scatter by 5 %; long data is in some."""
RECENT, NEEDED = 5, 4
"""Late in so many of the last windows makes a rank slow; data that moves on within 100 steps is late in 3 at most."""
ALIKE = 2.0
"""The excess of those windows may differ by this factor: a slow device is slow by the same amount."""
ABOVE_DRIFT = 3.0
"""How many times the excess must be what the ranks' excesses wander by from window to window."""
TURNS_WINDOWS = 10
"""Over so many windows ranks that take turns are looked for."""
HISTORY_WINDOWS = 120
_MOST_PENDING_STEPS = 8 * WINDOW_STEPS
_MOST_WINDOW_STEPS = 50 * WINDOW_STEPS


@dataclass(frozen=True)
class Window:
    """
    One window: medians over its steps. `excess` is how much longer a rank took than its peers, as a ratio; `at_times`
    what a fifth of its steps exceeded.
    """

    first_step: int
    last_step: int
    step_seconds: float
    own_seconds: Mapping[int, float]
    wait_seconds: Mapping[int, float]
    excess: Mapping[int, float]
    at_times: Mapping[int, float]
    late: frozenset[int]


@dataclass(frozen=True)
class SlowRank:
    """
    A rank that is slow by its own time: late in `windows` of the last `of_windows`. `since_step` None: for as long as
    it is known.
    """

    rank: int
    own_seconds: float
    peers_seconds: float
    excess_ratio: float
    windows: int
    of_windows: int
    since_step: int | None


class JobSteps:
    """The steps of one job on one node. Feed it reports; `slow` says who is slow as of the last window."""

    def __init__(self, spacing_seconds: float = 25.0) -> None:
        """`spacing_seconds`: see `Blocks`."""
        self.blocks = Blocks(spacing_seconds)
        self.windows: deque[Window] = deque(maxlen=HISTORY_WINDOWS)
        self.slow: tuple[SlowRank, ...] = ()
        self._ranks: set[int] = set()
        self._pending: dict[int, dict[int, StepReport]] = {}
        self._complete: list[dict[int, StepReport]] = []
        self._seconds = 0.0
        self._done = -1

    @property
    def ranks(self) -> frozenset[int]:
        """Those that are compared."""
        return frozenset(self._ranks)

    def add(self, report: StepReport) -> bool:
        """Take in one report; whether it has closed a window."""
        if report.rank not in self._ranks:
            self._ranks.add(report.rank)
            self._complete, self._seconds = [], 0.0  # what was complete without it is not
        if report.step <= self._done:
            if self._done - report.step < _MOST_PENDING_STEPS:
                return False  # late, or told twice
            self._begin_anew(report.rank)
        step = self._pending.setdefault(report.step, {})
        step[report.rank] = report
        if step.keys() == self._ranks:
            return self._take(report.step)
        return len(self._pending) > _MOST_PENDING_STEPS and self._catch_up()

    def _begin_anew(self, rank: int) -> None:
        """The job began again at an earlier step; what it was compared with no longer counts."""
        self.windows.clear()
        self.slow, self._ranks, self._pending, self._complete, self._seconds, self._done = (), {rank}, {}, [], 0.0, -1

    def _take(self, number: int) -> bool:
        """Count a complete step, and give up those long before it; whether a window is full with it."""
        step = self._pending.pop(number)
        self._done = max(self._done, number)
        self.blocks.add(number, step)
        for older in [one for one in self._pending if one < number - WINDOW_STEPS]:
            del self._pending[older]
        self._complete.append(step)
        self._seconds += max(one.own_seconds + one.wait_seconds for one in step.values())
        full = len(self._complete) >= WINDOW_STEPS and self._seconds >= WINDOW_SECONDS
        if not full and len(self._complete) < _MOST_WINDOW_STEPS:
            return False
        self.windows.append(judge_window(self._complete))
        self.slow = find_slow(list(self.windows))
        self._complete, self._seconds = [], 0.0
        return True

    def _catch_up(self) -> bool:
        """Too many steps are open, so a rank is gone: those count that still report. Whether a window is full."""
        newest = sorted(self._pending)[-WINDOW_STEPS:]
        self._ranks = {rank for number in newest for rank in self._pending[number]}
        self._complete, self._seconds = [], 0.0
        whole = [number for number in sorted(self._pending) if set(self._pending[number]) == self._ranks]
        closed = False
        for number in whole:
            closed = (number in self._pending and self._take(number)) or closed
        if not whole:  # each reports steps of its own: nothing can be compared
            self._pending.clear()
        return closed


def judge_window(steps: Sequence[Mapping[int, StepReport]]) -> Window:
    """The window of these steps, each with the same ranks."""
    excesses: dict[int, list[float]] = {rank: [] for rank in steps[0]}
    for step in steps:
        own = {rank: one.own_seconds / (one.work or 1.0) for rank, one in step.items()}
        for rank, value in excess_ratios(own).items():
            excesses[rank].append(value)
    excess = {rank: statistics.median(values) if values else 0.0 for rank, values in excesses.items()}
    numbers = [one.step for step in steps for one in step.values()]
    return Window(
        first_step=min(numbers),
        last_step=max(numbers),
        step_seconds=statistics.median(
            max(one.own_seconds + one.wait_seconds for one in step.values()) for step in steps
        ),
        own_seconds={rank: statistics.median(step[rank].own_seconds for step in steps) for rank in excesses},
        wait_seconds={rank: statistics.median(step[rank].wait_seconds for step in steps) for rank in excesses},
        excess=excess,
        at_times={rank: sorted(values)[4 * len(values) // 5] if values else 0.0 for rank, values in excesses.items()},
        late=frozenset(rank for rank, values in excesses.items() if _is_late(values)),
    )


def _is_late(excesses: Sequence[float]) -> bool:
    """
    Whether the median excess is above the ratio, and above what the scatter of the steps explains.

    A rank is compared with its own other steps here, which are many and of one cause: the uncertainty of their median
    decides, not how far a single one is from it as in `checks.peers.normal`.
    """
    if len(excesses) < WINDOW_STEPS // 2:
        return False
    middle = statistics.median(excesses)
    scatter = sigma_of(value - middle for value in excesses)
    error = 1.2533 * scatter / math.sqrt(len(excesses))  # of a median
    behind = sum(value > 0 for value in excesses) / len(excesses)
    return middle > LATE_RATIO and middle > SURE * error and behind >= MOST_STEPS_RATIO


def find_slow(windows: Sequence[Window]) -> tuple[SlowRank, ...]:
    """The ranks that are slow as of the last of these windows."""
    # Of two ranks one is always behind, and nothing tells how usual that is: that takes twice as long.
    recent_count, needed = (RECENT, NEEDED) if len(windows[-1].own_seconds) > 2 else (2 * RECENT, 2 * RECENT - 1)
    recent = windows[-recent_count:]
    counts = {rank: sum(rank in window.late for window in recent) for rank in recent[-1].late}
    slow = {rank for rank, count in counts.items() if count >= needed and _is_alike(rank, recent)}
    least = min((windows[-1].excess[rank] for rank in slow), default=0.0)
    others = sum(
        rank in window.late or value > least
        for window in windows[-TURNS_WINDOWS:]
        for rank, value in window.at_times.items()
        if rank not in slow
    )
    # Ranks that take turns, at least for a fifth of a window, are uneven data; once is not yet a turn. And where most
    # ranks are slower than the others, these are the outliers.
    if others > 1 or 2 * len(slow) > len(recent[-1].own_seconds):
        return ()
    return tuple(_describe(rank, windows, recent, counts[rank]) for rank in sorted(slow))


def _is_alike(rank: int, recent: Sequence[Window]) -> bool:
    """Whether a rank was late by about as much in each window in which it was."""
    excesses = [window.excess[rank] for window in recent if rank in window.late]
    return max(excesses) <= ALIKE * min(excesses) and statistics.median(excesses) > ABOVE_DRIFT * _drift(recent)


def _drift(recent: Sequence[Window]) -> float:
    """By how much the ranks' excesses wander from window to window: data whose share wanders makes them do so."""
    deviations = []
    for rank in recent[-1].excess:
        series = [window.excess[rank] for window in recent if rank in window.excess]
        middle = statistics.median(series)
        deviations += [value - middle for value in series]
    # Of five values one is the median itself.
    return sigma_of(deviations) * RECENT / (RECENT - 1) if deviations else 0.0


def _describe(rank: int, windows: Sequence[Window], last: Sequence[Window], count: int) -> SlowRank:
    own = statistics.median(window.own_seconds[rank] for window in last if rank in window.own_seconds)
    excess = statistics.median(window.excess[rank] for window in last if rank in window.late)
    with_it = [window for window in windows if rank in window.excess]
    change = change_point([window.excess[rank] for window in with_it])
    return SlowRank(
        rank=rank,
        own_seconds=own,
        peers_seconds=own / (1 + excess),
        excess_ratio=excess,
        windows=count,
        of_windows=len(last),
        since_step=None if change is None else with_it[change].first_step,
    )


def change_point(values: Sequence[float]) -> int | None:
    """
    Where a series steps up for good: the index of its first value after; None where it does not.

    The split that leaves the least squares, taken where the step is several times what is left of the scatter and at
    least half of the level after it.
    """
    best, place = math.inf, None
    for split in range(1, len(values)):
        left, right = values[:split], values[split:]
        rest = sum((value - statistics.fmean(part)) ** 2 for part in (left, right) for value in part)
        if rest < best:
            best, place = rest, split
    if place is None:
        return None
    before, after = statistics.fmean(values[:place]), statistics.fmean(values[place:])
    scatter = math.sqrt(best / len(values))
    return place if after - before > max(3 * scatter, after / 2) else None
