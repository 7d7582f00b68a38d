"""
Steps of running jobs, as their ranks report them: the datagram, and the rank that is slow by its own time.

Pure: no clock, no socket, no file.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checks.peers import excess_ratios, sigma_of

# The datagram by which a rank reports one step: one line of text, so that any program can write it.


PREFIX = b"step1"
END_PREFIX = b"end1"
MAX_BYTES = 512
MAX_JOB_CHARACTERS = 128
MAX_RANKS = 1 << 20
_MAX_STEP = 1 << 62
_MAX_SECONDS = 86400.0
_LEAST_WORK, _MOST_WORK = 1e-6, 1e15


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of one rank. `work` None: not told."""

    job: str
    rank: int
    size: int
    step: int
    own_seconds: float
    wait_seconds: float
    work: float | None


@dataclass(frozen=True, slots=True)
class RankEnd:
    """A rank reports no more steps."""

    job: str
    rank: int


def parse_end(data: bytes) -> RankEnd | None:
    """The end of a rank's reports in a datagram; None for anything else."""
    words = data.split() if len(data) <= MAX_BYTES else []
    if len(words) != 3 or words[0] != END_PREFIX:
        return None
    try:
        job, rank = words[1].decode("ascii"), int(words[2])
    except ValueError:
        return None
    return RankEnd(job, rank) if 0 <= rank < MAX_RANKS else None


def parse(data: bytes) -> StepReport | None:
    """The report in a datagram; None for anything else, since any process of the host may write there."""
    words = data.split() if len(data) <= MAX_BYTES else []
    if len(words) not in (7, 8) or words[0] != PREFIX:
        return None
    try:
        job = words[1].decode("ascii")
        rank, size, step = (int(word) for word in words[2:5])
        own, wait = float(words[5]), float(words[6])
        work = float(words[7]) if len(words) == 8 else None
    except ValueError:
        return None
    if not job.isprintable() or len(job) > MAX_JOB_CHARACTERS:
        return None
    if not (0 <= rank < size <= MAX_RANKS and 0 <= step < _MAX_STEP):
        return None
    if not (0 <= own <= _MAX_SECONDS and 0 <= wait <= _MAX_SECONDS):  # also catches NaN
        return None
    if work is not None and not _LEAST_WORK <= work <= _MOST_WORK:  # also catches NaN
        return None
    return StepReport(job, rank, size, step, own, wait, work)


# What a node tells of a job's steps for the comparison over nodes: blocks of steps that are the same on every node.


BLOCK_STEPS = 50
"""As many as the windows of the detector have at least."""
LEAST_SECONDS = 1.0
"""A block that took less is not told: the scatter of steps of a millisecond is the scheduler's."""
LEAST_KNOWN_STEPS = 40
"""Datagrams get lost; of a block with fewer steps too little is known."""
MOST_WAITING = 4
"""Blocks of a job that wait to be told; the oldest go."""
_LATE_STEPS = 10  # a block is closed when the job is so many steps beyond it


@dataclass(frozen=True)
class Block:
    """Own seconds of each step (for each unit of work, where work is told) from `first_step` on; None: not known."""

    first_step: int
    own_seconds: tuple[float | None, ...]
    ranks: tuple[int, ...]


class Blocks:
    """The blocks of one job. `spacing_seconds` is how far apart those are that are told."""

    def __init__(self, spacing_seconds: float) -> None:
        self.waiting: deque[Block] = deque(maxlen=MOST_WAITING)
        self._spacing_seconds = spacing_seconds
        self._open: dict[int, dict[int, tuple[float, float, tuple[int, ...]]]] = {}

    def add(self, number: int, step: Mapping[int, StepReport]) -> None:
        """Take in a step that all ranks of the node have reported."""
        own = statistics.median(one.own_seconds / (one.work or 1.0) for one in step.values())
        whole = max(one.own_seconds + one.wait_seconds for one in step.values())
        newest = max(self._open, default=number // BLOCK_STEPS)
        if number // BLOCK_STEPS < newest - 1:
            self._open.clear()  # the job began again
        self._open.setdefault(number // BLOCK_STEPS, {})[number % BLOCK_STEPS] = (own, whole, tuple(sorted(step)))
        for block in sorted(self._open):
            if number >= (block + 1) * BLOCK_STEPS + _LATE_STEPS:
                self._close(block, self._open.pop(block))

    def _close(self, block: int, steps: Mapping[int, tuple[float, float, tuple[int, ...]]]) -> None:
        ranks = {ranks for _, _, ranks in steps.values()}
        if len(steps) < LEAST_KNOWN_STEPS or len(ranks) != 1:
            return
        seconds = sum(whole for _, whole, _ in steps.values()) * BLOCK_STEPS / len(steps)
        # Every node leaves out the same blocks, also where one is told to take twice the others' stride.
        stride = 1 << max(0, math.ceil(math.log2(self._spacing_seconds / max(seconds, 1e-9))))
        if seconds < LEAST_SECONDS or block % stride:
            return
        own = tuple(float(f"{steps[i][0]:.4g}") if i in steps else None for i in range(BLOCK_STEPS))
        self.waiting.append(Block(first_step=block * BLOCK_STEPS, own_seconds=own, ranks=next(iter(ranks))))


# Which rank is slow by its own time: pure arithmetic over windows of steps.


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


# The nodes of one job compared by the detector of ranks: which is slow by its own time. Pure, but for what it
# remembers.


MOST_OPEN = 4
"""Blocks that wait for nodes which have not told theirs yet."""
MOST_NODES = 4096
"""Of one job; more are not compared."""
_BEGAN_AGAIN_STEPS = 8 * BLOCK_STEPS


class JobOverNodes:
    """
    One job. On one thread, but for `Due.judge`, which may be done in another: it reads nothing that `put` changes.

    `slow` are those that are slow by the last block that was judged, by node.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        """Ranks of the job: the most that a node has told since it began."""
        self.slow: Mapping[str, SlowRank] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}
        """Of each node that was judged last."""
        self.step_seconds: float | None = None
        """What a step took of the slowest node's own time, in the last block; None before the first."""
        self._windows: deque[Window] = deque(maxlen=TURNS_WINDOWS)
        self._open: dict[int, dict[str, Block]] = {}
        self._judged = -1
        self._beginnings = 0

    @property
    def windows(self) -> int:
        """How many blocks are remembered."""
        return len(self._windows)

    def put(self, node: str, block: Block, size: int = 0) -> bool:
        """Take in what a node tells, of the job and of its `size`; whether there is a block to be judged."""
        if block.first_step <= self._judged:
            if self._judged - block.first_step < _BEGAN_AGAIN_STEPS:
                return False  # told twice, or too late
            self._windows.clear()
            self._open.clear()
            self.slow, self._judged, self.size = {}, -1, size or self.size
            self._beginnings += 1
        self.size = max(self.size, size)
        nodes = self._open.setdefault(block.first_step, {})
        if len(self._open) > 2 * MOST_OPEN:
            del self._open[min(self._open)]  # whoever judges is too busy for all of them
        if node in nodes or len(nodes) < MOST_NODES:
            nodes[node] = block
        return self._next() is not None

    def _next(self) -> int | None:
        """The oldest block that all ranks have told, or that the others have left behind."""
        for first in sorted(self._open):
            told = sum(len(block.ranks) for block in self._open[first].values())
            if told >= self.size or len(self._open) > MOST_OPEN:
                return first
        return None

    def judge(self) -> bool:
        """Judge the next block, if there is one; whether there was."""
        due = self.take()
        if due is not None:
            self.store(due, due.judge())
        return due is not None

    def take(self) -> Due | None:
        """The next block that can be judged, which is no longer here then; None: there is none."""
        first = self._next()
        if first is None:
            return None
        nodes = self._open.pop(first)
        for older in [one for one in self._open if one < first]:
            del self._open[older]
        self._judged = first
        return Due(nodes, tuple(self._windows), self._beginnings)

    def store(self, due: Due, judged: Judged | None) -> None:
        """Keep what came of a block; nothing where the job has begun again since it was taken."""
        if due.beginnings != self._beginnings:
            return
        if judged is None:
            if due.nodes.keys() != self.ranks.keys():
                self.slow = {}  # found in comparison with nodes that are not in the job any more
            return
        self.ranks = {node: due.nodes[node].ranks for node in sorted(due.nodes)}
        self.step_seconds = judged.windows[-1].step_seconds
        self._windows = deque(judged.windows, maxlen=TURNS_WINDOWS)
        self.slow = judged.slow


@dataclass(frozen=True)
class Due:
    """A block of a job that can be judged: what each node has told, and the windows before it."""

    nodes: Mapping[str, Block]
    before: tuple[Window, ...]
    beginnings: int
    """How often the job had begun again when it was taken."""

    def judge(self) -> Judged | None:
        """Who is slow; None where too little is known. It takes 0.15 ms a node."""
        window = _window_of(self.nodes)
        if window is None:
            return None
        before = self.before
        if before and before[-1].own_seconds.keys() != window.own_seconds.keys():
            before = ()  # other nodes: what was compared before was compared with others
        windows = (*before, window)[-TURNS_WINDOWS:]
        by_first_rank = {block.ranks[0]: node for node, block in self.nodes.items()}
        return Judged(windows, {by_first_rank[one.rank]: one for one in find_slow(list(windows))})


@dataclass(frozen=True)
class Judged:
    """What came of a block: the windows with its own, and who is slow by node."""

    windows: tuple[Window, ...]
    slow: Mapping[str, SlowRank]


def _window_of(nodes: Mapping[str, Block]) -> Window | None:
    """The window of a block, each node by its first rank; None where too few steps are known of two nodes at least."""
    blocks = {block.ranks[0]: block for block in nodes.values()}
    if len(blocks) < 2 or len(blocks) < len(nodes):  # or several claim one rank
        return None
    steps: list[dict[int, StepReport]] = []
    for i in range(BLOCK_STEPS):
        step: dict[int, StepReport] = {}
        for rank, block in blocks.items():
            own = block.own_seconds[i]
            if own is None:
                break
            step[rank] = StepReport("", rank, 0, block.first_step + i, own, 0.0, None)
        else:
            steps.append(step)
    if len(steps) < LEAST_KNOWN_STEPS // 2:
        return None
    return dataclasses.replace(judge_window(steps), wait_seconds={})


def are_bounded(own_seconds: Sequence[float | None], ranks: Sequence[int]) -> bool:
    """Whether a block that came from elsewhere is one."""
    return (
        len(own_seconds) == BLOCK_STEPS
        and 0 < len(ranks) <= 64
        and all(0 <= rank < 1 << 20 for rank in ranks)
        and all(own is None or 0 <= own <= 86400.0 for own in own_seconds)
    )
