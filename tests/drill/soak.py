"""
A long run of two aggregators on one PostgreSQL with five hundred nodes that come, leave, boot and break, about three
gates a second, and leaders that change. Does anything grow for ever?

A line a minute: memory, open files and tasks of the aggregators, rows of the database, the time of a gate. At the end
the verdict: of each figure the median of the last third is held against that of the first third, after a warm-up (from
FLAT_MINUTES on: a shorter run is all warm-up); and what the drill counts as lost. 1 where anything has grown or was
lost.

What is kept is bounded in production by 28 to 90 days and 20,000 gates; here by so little (CONFIG) that each bound is
reached within the warm-up. The database is pruned every 20 s, not each hour.

    python -m tests.drill.soak --minutes 60
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import sqlalchemy as sa

from healthd.aggregator.store import tables
from tests.aggregator.postgres import connected
from tests.aggregator.service import Service
from tests.benchmarks.figures import percentile
from tests.benchmarks.processes import memory_bytes
from tests.drill.nodes import Node
from tests.drill.site import Site, site

CONFIG = """
[policy]
tuning.settle = "0s"
tuning.prune = "20s"
tuning.keep_events = 20
keep_gates = 300
collective = false
node_grace = "5s"
silent = "10s"
out_ratio = 1.0                   # a breaker would end what is to go on
"""
SYNC_SECONDS = 10.0
MOST_OPEN = 60
"""So many jobs are asked for or at work at most, as there are nodes for; what a busy machine leaves out is counted."""
LOOKED_AT = 100
"""Of the newest answers so many are looked at again, once a minute: fewer than are kept."""
AWAY = 0.04
"""The part of the nodes that is away on average."""
CHANGES = 16
"""How often the leader or the database is troubled in one soak."""
LEAST_CHANGE_SECONDS = 8.0
FLAT_MINUTES = 25.0
WARM_UP = 0.3
STALL_SECONDS = 90.0

SLACK: Mapping[str, tuple[float, float]] = {
    "MB": (1.05, 8.0),
    "files": (1.02, 20.0),
    "tasks": (1.05, 60.0),
    "rows": (1.10, 100.0),
}
"""By the kind of a figure: how many times its first third the last one may be, and how much more than that."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The site at one moment: figures by name, each with its kind first, as in `rows gates`."""

    seconds: float
    figures: Mapping[str, float]


def grown(samples: Sequence[Sample]) -> list[str]:
    """A line for each figure that has grown beyond its slack from the first third after the warm-up to the last one."""
    rest = samples[int(len(samples) * WARM_UP) :]
    third = len(rest) // 3
    lines = []
    for name in rest[0].figures if third else ():
        first, last = (statistics.median(one.figures[name] for one in part) for part in (rest[:third], rest[-third:]))
        ratio, more = SLACK[name.split()[0]]
        if last > first * ratio + more:
            lines.append(f"{name}: {first:.0f} in the first third, {last:.0f} in the last")
    return lines


class Soak:
    """The events of a soak; `late` counts gates that were not asked for because too many were open."""

    def __init__(self, fleet: Site, arguments: argparse.Namespace) -> None:
        self.fleet = fleet
        self.seconds: float = 60.0 * arguments.minutes
        self.each_second: float = arguments.gates_per_second
        self.late = 0
        self.samples: list[Sample] = []
        self._jobs: set[asyncio.Task[bool]] = set()
        self._away: set[str] = set()

    async def run(self, nodes: Sequence[Node]) -> None:
        """All of it."""
        await self.fleet.start(nodes)
        print(HEAD, flush=True)
        self.began = time.monotonic()
        async with asyncio.timeout(self.seconds + STALL_SECONDS):
            work = [asyncio.create_task(one()) for one in (self.ask, self.churn, self.change_leaders, self.tell)]
            try:
                await asyncio.gather(*work)
            finally:
                for task in work:
                    task.cancel()
            await asyncio.gather(*self._jobs)
            self.fleet.over = True
            await self.fleet.look_again(LOOKED_AT)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    async def ask(self) -> None:
        """A job now and then, whether those before it have ended or not."""
        for number in itertools.count():
            if self.left <= 0:
                return
            if len(self._jobs) < MOST_OPEN:
                seconds = self.fleet.chance.uniform(1.0, 10.0)
                task = asyncio.create_task(self.fleet.job(f"job-{number}", fresh=number % 2 == 0, seconds=seconds))
                self._jobs.add(task)
                task.add_done_callback(self._jobs.discard)
            else:
                self.late += 1
            await asyncio.sleep(self.fleet.chance.expovariate(self.each_second))

    async def churn(self) -> None:
        """Something happens to a node every second: two of a hundred each ten seconds, at five hundred nodes."""
        busy: set[asyncio.Task[None]] = set()
        while self.left > 0:
            one = self.fleet.chance.choice(list(self.fleet.nodes.values()))
            if one.name not in self._away:
                what = self.fleet.chance.choice((self.boot, self.go_away, self.be_bad, self.be_kept_out))
                self._away.add(one.name)
                task = asyncio.create_task(what(one))
                busy.add(task)
                task.add_done_callback(busy.discard)
                task.add_done_callback(lambda _, name=one.name: self._away.discard(name))  # type: ignore[misc]
            await asyncio.sleep(self.fleet.chance.expovariate(1.0))
        for task in busy:
            task.cancel()
        for ended in await asyncio.gather(*busy, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def boot(self, node: Node) -> None:
        await self.fleet.boot(node, self.fleet.chance.uniform(1.0, 5.0))

    async def go_away(self, node: Node) -> None:
        """It leaves and comes back with another boot; where no job had it, it is forgotten meanwhile."""
        await self.fleet.cut_off(node)
        node.leave()
        await asyncio.sleep(self.fleet.chance.uniform(1.0, 2.0 * AWAY * len(self.fleet.nodes)))
        if not node.leases and self.fleet.chance.random() < 0.5:
            await self.fleet.asked("DELETE", f"/v1/nodes/{node.name}", conflicts=True)
        node.boot()
        self.fleet.join(node)
        node.run_checks()

    async def be_bad(self, node: Node) -> None:
        """A check fails on it, rules keep it out, it is well again, and a person lets it in."""
        node.bad = True
        node.run_checks()
        await asyncio.sleep(self.fleet.chance.uniform(5.0, 20.0))
        node.bad = False
        node.run_checks()
        await asyncio.sleep(SYNC_SECONDS)
        await self.fleet.asked("DELETE", f"/v1/nodes/{node.name}/quarantine", conflicts=True)

    async def be_kept_out(self, node: Node) -> None:
        """A person quarantines it, and releases it."""
        path = f"/v1/nodes/{node.name}/quarantine"
        answer = await self.fleet.asked("PUT", path, json={"reason": "the soak", "owner": "soak"})
        if answer is None or answer.status_code != 200:
            return
        node.kept_out_since = time.monotonic()
        await asyncio.sleep(self.fleet.chance.uniform(5.0, 20.0))
        node.kept_out_since = float("inf")
        await self.fleet.asked("DELETE", path, conflicts=True)

    async def change_leaders(self) -> None:
        """
        The leader is killed once, during the warm-up: later that would hide how its memory grows. Then it steps down,
        is frozen past its lease, and loses its database, in turn.
        """
        pause = max(LEAST_CHANGE_SECONDS, self.seconds / CHANGES)
        await asyncio.sleep(pause / 4)
        leader = await self.fleet.leader()
        leader.kill()
        await self.fleet.leader(but=leader)
        self.fleet.start_again(leader)
        for number in itertools.count():
            if self.left < pause + LEAST_CHANGE_SECONDS:
                return
            await asyncio.sleep(pause)
            leader = await self.fleet.quiet_leader()
            if number % 3 == 0:
                await self.fleet.depose()
            elif number % 3 == 1:
                async with self.fleet.frozen(leader):
                    await self.fleet.leader(but=leader)
            else:
                await self.fleet.lose_database(3.0)

    async def tell(self) -> None:
        """A line each minute, or twelve of a short soak."""
        every = min(60.0, self.seconds / 12)
        while True:
            passed = time.monotonic() - self.began
            await asyncio.sleep(every - passed % every)
            sample = await self.sample()
            self.samples.append(sample)
            taken, self.fleet.seconds = self.fleet.seconds, []
            print(shown(sample, taken, len(self.fleet.here)), flush=True)
            if self.left < every / 2:
                return
            if every == 60.0:
                await self.fleet.look_again(LOOKED_AT)

    async def sample(self) -> Sample:
        """What there is now; asked again while an aggregator or the database does not answer."""
        while True:
            with contextlib.suppress(httpx.HTTPError, sa.exc.DBAPIError, OSError):
                rows = await asyncio.to_thread(rows_of, self.fleet.server.url)
                figures = {"MB": 0.0, "files": 0.0, "tasks": 0.0}
                for service in self.fleet.services:
                    figures["MB"] += memory_bytes(service.pid) / 1e6
                    figures["files"] += len(os.listdir(f"/proc/{service.pid}/fd"))
                    figures["tasks"] += await self._tasks(service)
                each = {f"rows {table}": float(count) for table, count in rows.items()}
                return Sample(seconds=time.monotonic() - self.began, figures=figures | each)
            await asyncio.sleep(0.5)

    async def _tasks(self, service: Service) -> float:
        text = (await self.fleet.http.get(f"{service.url}/metrics")).raise_for_status().text
        found = re.search(r"^healthd_aggregator_tasks (\S+)", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])


def rows_of(url: str) -> dict[str, int]:
    """The rows of each table, by its name."""
    with connected(url) as connection:
        return {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in tables.METADATA.sorted_tables
        }


COLUMNS = ("gates", "leases", "events", "records", "nodes")
HEAD = f"{'minute':>7}{'nodes':>6}{'MB':>6}{'files':>6}{'tasks':>6}  rows: " + "".join(f"{name:>8}" for name in COLUMNS)
HEAD += f"{'others':>8}  gates: {'n':>5}{'p50':>8}{'p99':>8}{'max':>8}"


def shown(sample: Sample, taken: Sequence[float], nodes: int) -> str:
    """A line of the table; `taken` are the seconds of the gates since the last one."""
    figures = sample.figures
    others = sum(figures.values()) - sum(figures[name] for name in ("MB", "files", "tasks"))
    others -= sum(figures[f"rows {name}"] for name in COLUMNS)
    line = (
        f"{sample.seconds / 60:7.1f}{nodes:6}{figures['MB']:6.0f}{figures['files']:6.0f}{figures['tasks']:6.0f}        "
    )
    line += "".join(f"{figures[f'rows {name}']:8.0f}" for name in COLUMNS) + f"{others:8.0f}         {len(taken):5}"
    if taken:
        line += "".join(f"{value:6.2f} s" for value in (statistics.median(taken), p99(taken), max(taken)))
    return line


def p99(seconds: Sequence[float]) -> float:
    """That percentile; of one value, the value."""
    return percentile(seconds, 99) if len(seconds) > 1 else seconds[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 when something has grown or was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--gates-per-second", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0, help="of what happens to the nodes, and when")
    arguments = parser.parse_args(argv)
    if arguments.nodes < 64 or not arguments.minutes >= 0.2:
        parser.error("a soak needs --nodes 64 and --minutes 0.2 at least")
    with site(aggregators=2, nodes=arguments.nodes, config=CONFIG, seed=arguments.seed, executed=True) as fleet:
        soak = Soak(fleet, arguments)
        asyncio.run(soak_until_over(soak, [Node(f"node-{n:03}", SYNC_SECONDS) for n in range(arguments.nodes)]))
    tells = arguments.minutes >= FLAT_MINUTES
    growth = grown(soak.samples) if tells else []
    print("", *fleet.report(f"{arguments.minutes:g} minutes"), sep="\n")
    if soak.late:
        print(f"{soak.late} jobs were not asked for, because {MOST_OPEN} were under way.")
    if not tells:
        print(f"Too short to tell whether anything grows: that takes {FLAT_MINUTES:g} minutes.")
    else:
        print("NOT flat:" if growth else "Flat: nothing has grown.", *(f"  {line}" for line in growth), sep="\n")
    return 1 if growth or fleet.lost else 0


async def soak_until_over(soak: Soak, nodes: Sequence[Node]) -> None:
    """Run it, and end everything; TimeoutError becomes a line of what was lost."""
    try:
        await soak.run(nodes)
    except TimeoutError:
        soak.fleet.lost.refused.append(f"it was not over {STALL_SECONDS:g} s after its time")
        print(soak.fleet.logs(), file=sys.stderr)
    finally:
        await soak.fleet.stop()


if __name__ == "__main__":
    sys.exit(main())
