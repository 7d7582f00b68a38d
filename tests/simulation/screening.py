"""
A year of a fleet whose accelerators turn bad: how many failures of jobs screening in idle hours prevents.

Planner and risk are the real ones; nodes, jobs and faults are simulated, an hour at a time. The rates are published
ones where there are any; docs/screening.md has the sources, the assumptions, and the picture that `python -m
tests.simulation.screening` draws.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from healthd.aggregator.screening.plan import REST_RATIO, limit, plan
from healthd.aggregator.screening.records import Candidate, Standing
from healthd.aggregator.screening.risk import risk
from healthd.aggregator.screening.settings import ScreeningSettings

HOUR, DAY, YEAR = 3600.0, 86400.0, 365 * 86400.0
# Sources: SDCHunter and AEGIS (both OSDI 2026), and Kokolis et al. (HPCA 2025); see docs/screening.md.
CORRUPTING_PER_GPU_YEAR = 13 / (35e6 / 8760)
GPUS = 8
"""Of a node."""
FOUND_NEW, FOUND_OLD = 0.25, 0.40
"""The share of corrupting GPUs that were found at burn-in, and after a year of service."""
NEW_DAYS, OLD_DAYS, SEEN_DAYS = 30.0, 365.0, 548.0
"""What counts as burn-in and as a year, and for how long GPUs were looked at (assumed: a year and a half)."""
LEMONS, LEMON_FACTOR = 0.012, 11.0
"""The share of nodes that fail again and again, and how much more often (taken from 13 % of the jobs)."""
VISIBLE = 0.40
"""The share of corrupting GPUs that micro-benchmarks show at all."""
FOUND_BY_FAILURE = 13 / 18
"""How often a job's failure leads to the GPU: 18 incidents, 13 GPUs."""
# Assumptions.
FIRST_FAILURE_DAYS = (2.0, 90.0)
"""How many days of jobs it takes until a bad GPU lets one fail: any order of magnitude between these is as likely."""
DELIVERIES, BAD_DELIVERIES, DELIVERY_FACTOR = 20, 1, 3.0
REPAIR_HOURS = 72
OLDEST_DAYS = 800.0
SIZES = (1, 1, 1, 2, 4, 8, 16, 32)
"""Nodes of a job; each of these is as likely."""
JOB_HOURS = (8.0, 1.2)
"""Median of a job's duration, and sigma of its logarithm."""
START = 1_767_225_600.0


class Choice(enum.Enum):
    """Which free nodes are screened."""

    NONE = "none"
    RANDOM = "random"
    """Any, with as many hours as `RISK` has spent until then."""
    RISK = "risk"


@dataclass(frozen=True, kw_only=True)
class Site:
    """`idle` is the share of the nodes that have no job, on average over a day; `faster` multiplies all faults."""

    seed: int
    nodes: int = 1000
    days: int = 365
    idle: float = 0.05
    run_hours: int = 4
    faster: float = 1.0
    settings: ScreeningSettings = field(default_factory=lambda: ScreeningSettings(tier="soak"))


@dataclass(kw_only=True)
class Node:
    """
    `bad_at` is when its next fault begins. While it is bad, `left` counts the hours of jobs until one fails. `parts`
    are the finished hours of a screening.
    """

    number: int
    dice: random.Random
    delivery: int
    factor: float
    since: float
    bad_at: float = math.inf
    visible: bool = False
    left: float = math.inf
    passed_at: float = START
    parts: int = 0
    failures: int = 0
    quarantines: int = 0
    job: int | None = None
    out_until: float = 0.0

    @property
    def name(self) -> str:
        return f"n{self.number}"

    def next_fault(self, now: float) -> None:
        """The device is a sound one now; it draws when it turns bad, and how that will show."""
        self.bad_at = now + turns_bad(self.dice.expovariate(1.0) / self.factor, (now - self.since) / DAY) * DAY
        self.visible = self.dice.random() < VISIBLE
        self.draw_failure()

    def draw_failure(self) -> None:
        low, high = FIRST_FAILURE_DAYS
        self.left = self.dice.expovariate(1.0) * 24 * low * (high / low) ** self.dice.random()


def turns_bad(effort: float, age: float) -> float:
    """After how many days the hazard of a device of this age (in days) has added up to `effort`."""
    rest = 1 - FOUND_NEW - FOUND_OLD
    mean = CORRUPTING_PER_GPU_YEAR * GPUS * SEEN_DAYS / 365.0
    waited = 0.0
    for begin, end, share in ((0.0, NEW_DAYS, FOUND_NEW), (NEW_DAYS, OLD_DAYS, rest), (OLD_DAYS, math.inf, FOUND_OLD)):
        if age >= end:
            continue
        each_day = mean * share / (min(end, SEEN_DAYS) - begin)
        span = end - age
        if effort <= each_day * span:
            return waited + effort / each_day
        effort -= each_day * span
        waited, age = waited + span, end
    return math.inf


@dataclass(kw_only=True)
class Told:
    """What came of a year. `spent` are the hours of screening at the end of each hour, `idle` those without a job."""

    failed_jobs: int = 0
    found: int = 0
    screenings: int = 0
    interrupted: int = 0
    idle: int = 0
    spent: list[int] = field(default_factory=list)

    @property
    def hours(self) -> int:
        return self.spent[-1] if self.spent else 0


class Year:
    """One fleet with one choice. The same seed has the same devices, whatever is chosen."""

    def __init__(self, site: Site, choice: Choice, budget: Sequence[int] = ()) -> None:
        self.site, self.choice, self.budget = site, choice, budget
        self.told = Told()
        dice = random.Random(f"{site.seed} fleet")
        ages = [dice.uniform(0.0, OLDEST_DAYS) for _ in range(DELIVERIES)]
        bad = set(dice.sample(range(DELIVERIES), BAD_DELIVERIES))
        lemons = set(dice.sample(range(site.nodes), round(LEMONS * site.nodes)))
        self.jobs_dice, self.choice_dice = random.Random(f"{site.seed} jobs"), random.Random(f"{site.seed} choice")
        self.turning: list[tuple[float, int]] = []
        self.bad: set[int] = set()
        self.nodes: list[Node] = []
        for number in range(site.nodes):
            delivery = number * DELIVERIES // site.nodes
            factor = site.faster * (DELIVERY_FACTOR if delivery in bad else 1.0)
            node = Node(
                number=number,
                dice=random.Random(f"{site.seed} {number}"),
                delivery=delivery,
                factor=factor * (LEMON_FACTOR if number in lemons else 1.0),
                since=START - ages[delivery] * DAY,
                # Its screenings began before the year: the last one was some time ago.
                passed_at=START - dice.uniform(0.0, site.settings.every_seconds),
            )
            self.nodes.append(node)
            self._fault(node, START)
        self.free = set(range(site.nodes))
        self.out: list[tuple[float, int]] = []
        self.jobs: dict[int, list[int]] = {}
        self.ends: list[tuple[float, int]] = []
        self.ids = itertools.count()
        self.running: dict[int, None] = {}
        self.failed_at: dict[int, list[tuple[float, int]]] = {}

    def run(self) -> Told:
        """The whole time, an hour after the other."""
        for hour in range(self.site.days * 24):
            now = START + hour * HOUR
            self._return_repaired(now)
            self._end_jobs(now)
            self._start_jobs(now)
            if self.choice is not Choice.NONE:
                self._start_screenings(now, hour)
            self._pass_an_hour(now + HOUR)
        return self.told

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _end_jobs(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            _, job = heapq.heappop(self.ends)
            self._end_job(job)

    def _end_job(self, job: int) -> None:
        for number in self.jobs.pop(job, ()):
            node = self.nodes[number]
            node.job = None
            if not node.out_until:
                self.free.add(number)

    def _start_jobs(self, now: float) -> None:
        """Jobs come until only so many nodes are idle: more at night. A screening never delays one."""
        night = 1.0 + 0.8 * math.cos((now % DAY) / DAY * 2 * math.pi)
        wanted = round(self.site.idle * night * self.site.nodes)
        while len(self.free) > wanted:
            size = min(self.jobs_dice.choice(SIZES), len(self.free) - wanted)
            median, sigma = JOB_HOURS
            hours = max(1.0, median * math.exp(self.jobs_dice.gauss(0.0, sigma)))
            taken = self.jobs_dice.sample(sorted(self.free), size)
            job = next(self.ids)
            self.jobs[job] = taken
            heapq.heappush(self.ends, (now + hours * HOUR, job))
            for number in taken:
                self.free.discard(number)
                self.nodes[number].job = job
                if number in self.running:
                    del self.running[number]
                    self.told.interrupted += 1

    # --- screenings ---------------------------------------------------------------------------------------------------

    def _start_screenings(self, now: float, hour: int) -> None:
        if self.choice is Choice.RISK:
            starts = plan(
                now,
                {"": self.site.nodes},
                self._standings(now),
                {self.nodes[number].name: "" for number in self.running},
                self.site.settings,
                lambda _: True,  # only free ones are in the list
            )
            self.running |= dict.fromkeys(int(start.node[1:]) for start in starts)
            return
        room = limit(self.site.settings, self.site.nodes)
        while len(self.running) < room and self.told.hours + len(self.running) < self.budget[hour]:
            left = sorted(self.free - self.running.keys())
            if not left:
                return
            self.running[self.choice_dice.choice(left)] = None

    def _standings(self, now: float) -> Iterator[Standing]:
        """The free nodes that do not rest: the planner drops the others anyway."""
        rested = now - REST_RATIO * self.site.settings.every_seconds
        since = now - self.site.settings.every_seconds
        failed = Counter({delivery: sum(at >= since for at, _ in known) for delivery, known in self.failed_at.items()})
        for number in sorted(self.free):
            node = self.nodes[number]
            if node.passed_at > rested:
                continue
            candidate = Candidate(
                node=node.name,
                pool=None,
                days_since_pass=(now - node.passed_at) / DAY,
                failures=node.failures,
                quarantines=node.quarantines,
                age_days=(now - node.since) / DAY,
                changed=False,
                neighbour_failed=failed[node.delivery] > 0,
            )
            total = risk(candidate).total
            yield Standing(node=node.name, pool="", risk=total, tier_at=node.passed_at, pair_at=now)

    # --- an hour ------------------------------------------------------------------------------------------------------

    def _pass_an_hour(self, now: float) -> None:
        self.told.idle += len(self.free)
        self.told.spent.append(self.told.hours + len(self.running))
        for number in list(self.running):
            node = self.nodes[number]
            node.parts += 1
            if node.parts < self.site.run_hours:
                continue
            del self.running[number]
            node.parts = 0
            self.told.screenings += 1
            if node.bad_at < now and node.visible:
                node.failures += 1
                self._take_out(node, now)
            else:
                node.passed_at = now
        while self.turning and self.turning[0][0] < now:
            at, number = heapq.heappop(self.turning)
            if self.nodes[number].bad_at == at:
                self.bad.add(number)
        for number in sorted(self.bad):
            node = self.nodes[number]
            if node.job is not None:
                node.left -= 1.0
                if node.left <= 0:
                    self._fail_job(node, now)

    def _fail_job(self, node: Node, now: float) -> None:
        self.told.failed_jobs += 1
        assert node.job is not None
        self._end_job(node.job)
        node.draw_failure()
        if node.dice.random() < FOUND_BY_FAILURE:
            self._take_out(node, now)

    def _take_out(self, node: Node, now: float) -> None:
        """It is quarantined, gets another device, and passes the tier before it comes back."""
        self.told.found += 1
        node.quarantines += 1
        self.failed_at.setdefault(node.delivery, []).append((now, node.number))
        self.free.discard(node.number)
        node.out_until = now + REPAIR_HOURS * HOUR
        node.bad_at = math.inf
        self.bad.discard(node.number)
        heapq.heappush(self.out, (node.out_until, node.number))

    def _return_repaired(self, now: float) -> None:
        while self.out and self.out[0][0] <= now:
            _, number = heapq.heappop(self.out)
            node = self.nodes[number]
            node.out_until, node.since, node.passed_at, node.parts = 0.0, now, now, 0
            self._fault(node, now)
            self.free.add(number)

    def _fault(self, node: Node, now: float) -> None:
        node.next_fault(now)
        if node.bad_at < START + self.site.days * DAY:
            heapq.heappush(self.turning, (node.bad_at, node.number))


# The picture: what is prevented, and what it costs, by how many nodes are idle.


PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "screening.svg"
IDLE = (0.005, 0.01, 0.02, 0.05)
SEEDS = 12
FASTER = 5.0
"""So that fewer years have to be simulated; with more of them, failures of neighbours would say less."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What the years of all seeds came to at one share of idle nodes. Shares are of the failures without screening."""

    idle: float
    failures: int
    by_risk: float
    by_chance: float
    hours_ratio: float
    days_between: float


def compare(site: Site) -> dict[Choice, Told]:
    """The same year with each choice."""
    by_risk = Year(site, Choice.RISK).run()
    return {
        Choice.NONE: Year(site, Choice.NONE).run(),
        Choice.RISK: by_risk,
        Choice.RANDOM: Year(site, Choice.RANDOM, by_risk.spent).run(),
    }


def point(idle: float, years: Sequence[dict[Choice, Told]], site: Site) -> Point:
    """The years of one share of idle nodes together."""
    failed = {choice: sum(year[choice].failed_jobs for year in years) for choice in Choice}
    by_risk = [year[Choice.RISK] for year in years]
    screenings = sum(one.screenings for one in by_risk)
    return Point(
        idle=idle,
        failures=failed[Choice.NONE],
        by_risk=1 - failed[Choice.RISK] / failed[Choice.NONE],
        by_chance=1 - failed[Choice.RANDOM] / failed[Choice.NONE],
        hours_ratio=sum(one.hours for one in by_risk) / sum(one.idle for one in by_risk),
        days_between=site.nodes * site.days * len(years) / screenings,
    )


WIDTH, HEIGHT, TOP, BOTTOM = 720, 300, 48, 44
PANELS = ((56, 340), (420, 704))
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #57606a; }
.title { font-weight: 600; fill: #24292f; }
.grid { stroke: #d0d7de; }
polyline { fill: none; stroke-width: 2.5; }
.risk { stroke: #0969da; } .chance { stroke: #bc4c00; stroke-dasharray: 6 4; } .hours { stroke: #1a7f37; }
circle { stroke: none; } circle.risk, text.risk { fill: #0969da; stroke: none; }
circle.chance, text.chance { fill: #bc4c00; stroke: none; } circle.hours { fill: #1a7f37; }
@media (prefers-color-scheme: dark) {
  text { fill: #9da7b3; } .title { fill: #e6edf3; } .grid { stroke: #3d444d; }
  .risk { stroke: #58a6ff; } .chance { stroke: #ffa657; } .hours { stroke: #56d364; }
  circle.risk, text.risk { fill: #58a6ff; } circle.hours { fill: #56d364; }
  circle.chance, text.chance { fill: #ffa657; }
}
"""


def picture(points: Sequence[Point]) -> str:
    """Two panels in SVG, readable on light and dark pages."""
    about = "Left: failures of jobs that screening prevents, by risk and by chance. Right: idle hours that it takes."
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">',
        f"<style>{STYLE}</style>",
        *_panel(PANELS[0], "Failures of jobs prevented", 40, points),
        *_series(PANELS[0], 40, "risk", "by risk", -12, points, [one.by_risk for one in points]),
        *_series(PANELS[0], 40, "chance", "by chance", 22, points, [one.by_chance for one in points]),
        *_panel(PANELS[1], "Idle hours used", 100, points),
        *_series(PANELS[1], 100, "hours", "", 0, points, [one.hours_ratio for one in points]),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(panel: tuple[int, int], idle: float) -> float:
    low, high = math.log(IDLE[0]), math.log(IDLE[-1])
    return round(panel[0] + 16 + (math.log(idle) - low) / (high - low) * (panel[1] - panel[0] - 32), 1)


def _y(most: int, percent: float) -> float:
    return round(HEIGHT - BOTTOM - percent / most * (HEIGHT - BOTTOM - TOP), 1)


def _panel(panel: tuple[int, int], title: str, most: int, points: Sequence[Point]) -> Iterator[str]:
    yield f'<text class="title" x="{panel[0]}" y="22">{title}</text>'
    for percent in range(0, most + 1, most // 4):
        y = _y(most, percent)
        yield f'<line class="grid" x1="{panel[0]}" x2="{panel[1]}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{panel[0] - 8}" y="{y + 4}" text-anchor="end">{percent} %</text>'
    for one in points:
        yield f'<text x="{_x(panel, one.idle)}" y="{HEIGHT - 24}" text-anchor="middle">{100 * one.idle:g} %</text>'
    yield f'<text x="{sum(panel) / 2}" y="{HEIGHT - 5}" text-anchor="middle">nodes without a job</text>'


def _series(
    panel: tuple[int, int],
    most: int,
    kind: str,
    name: str,
    below: int,
    points: Sequence[Point],
    values: Sequence[float],
) -> Iterator[str]:
    places = [(_x(panel, one.idle), _y(most, 100 * value)) for one, value in zip(points, values, strict=True)]
    yield f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in places)}"/>'
    yield from (f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"/>' for x, y in places)
    if name:
        x, y = places[1]
        yield f'<text class="{kind}" x="{x}" y="{y + below}" text-anchor="middle">{name}</text>'


def main() -> int:
    """Simulate, print the table of docs/screening.md, and draw its picture. Minutes on two cores."""
    sites = [Site(seed=seed, idle=idle, faster=FASTER) for idle in IDLE for seed in range(SEEDS)]
    with ProcessPoolExecutor(max_workers=2) as pool:
        years = list(pool.map(compare, sites))
    points = [point(idle, years[n * SEEDS : (n + 1) * SEEDS], sites[0]) for n, idle in enumerate(IDLE)]
    print(
        "| idle | failures of jobs a year | prevented by risk | by chance | idle hours used | days between screenings |"
    )
    print("|---|---|---|---|---|---|")
    for one in points:
        row = (
            f"{100 * one.idle:g} %",
            f"{one.failures / SEEDS / FASTER:.0f}",
            f"{100 * one.by_risk:.0f} %",
            f"{100 * one.by_chance:.0f} %",
            f"{100 * one.hours_ratio:.0f} %",
            f"{one.days_between:.0f}",
        )
        print(f"| {' | '.join(row)} |")
    PICTURE.write_text(picture(points), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
