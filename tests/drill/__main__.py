"""
A game day of the fleet's own service: PostgreSQL, three aggregators, simulated nodes, and jobs that ask for gates all
the time; meanwhile the leader is killed, frozen, cut off, stopped and told to step down, and the database is killed.
In each round a node boots and another one breaks, so that what was known of them is wrong when another one leads.

Printed, for each: how many gates were held then, how long until somebody led, decided and had all nodes again. And
what was lost: answers that were unsaid, nodes in two jobs, admissions that nothing that the nodes ran speaks for. Any
is exit code 1.

    python -m tests.drill                                             # each fault once
    python -m tests.drill --short                                     # two of them
    python -m tests.drill --rounds 100 --faults killed,frozen,cut --nodes 10000 --jobs 50
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.aggregator.service import Service
from tests.benchmarks.figures import percentile
from tests.drill.nodes import Node
from tests.drill.site import Site, site, until

LIMIT_SECONDS = 112.0
"""Of a run of each fault once, on a quiet machine."""
ROUND_SECONDS = 90.0
NODES_EACH_SECOND = 50
"""A round, and the start, may take a second longer for each so many nodes."""
UNWELL = 3
LEAST_SYNC_SECONDS = 3.0
SYNCS_EACH_SECOND = 1000
DATABASE_AWAY_SECONDS = 3.0
NODE_SECONDS = 1.5
"""How long a node takes to boot, and one that has broken is broken."""


class Fault(StrEnum):
    """What can happen, by its name on the command line."""

    KILLED = "killed"
    FROZEN = "frozen"
    CUT = "cut"
    STOPPED = "stopped"
    DEPOSED = "deposed"
    DATABASE = "database"


TEXTS = {
    Fault.KILLED: "the leader is killed (-9)",
    Fault.FROZEN: "the leader is frozen past its lease, and goes on",
    Fault.CUT: "the leader is cut from the database",
    Fault.STOPPED: "the leader is stopped (SIGTERM)",
    Fault.DEPOSED: "the leader is told to step down",
    Fault.DATABASE: f"the database is killed, and back after {DATABASE_AWAY_SECONDS:g} s",
}
SHORT = (Fault.KILLED, Fault.DATABASE)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one fault came to, in seconds from its beginning (for the database: from its return)."""

    fault: Fault
    held: int
    leads: float
    decides: float
    nodes: float


@contextlib.asynccontextmanager
async def happening(fleet: Site, fault: Fault, leader: Service) -> AsyncIterator[None]:
    """Let it happen to the leader; undone on leaving."""
    if fault is Fault.FROZEN:
        async with fleet.frozen(leader):
            yield
    elif fault is Fault.CUT:
        with fleet.cut(leader):
            yield
    elif fault is Fault.DEPOSED:
        await fleet.depose()
        yield
    elif fault is Fault.DATABASE:
        await fleet.lose_database(DATABASE_AWAY_SECONDS)
        yield
    else:
        leader.signal(signal.SIGKILL if fault is Fault.KILLED else signal.SIGTERM)
        yield
        await asyncio.to_thread(leader.ended)
        fleet.start_again(leader)


async def go_through(fleet: Site, fault: Fault) -> Round:
    """One round: from a fleet that is quiet to one that has all its nodes again."""
    leader = await fleet.quiet()
    but = None if fault is Fault.DATABASE else leader
    breaking = asyncio.create_task(break_nodes(fleet))
    held, began = fleet.held, time.monotonic()
    async with happening(fleet, fault, leader):
        if fault is Fault.DATABASE:
            began = time.monotonic()
        found = await fleet.leader(but=but)
        came = time.monotonic()
        await until(lambda: fleet.last_admission >= came)
        decided = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await fleet.followed(found)
                    break
            found = await fleet.leader(but=but)
        nodes = time.monotonic()
        await breaking
    return Round(fault=fault, held=held, leads=came - began, decides=decided - began, nodes=nodes - began)


async def break_nodes(fleet: Site) -> None:
    """A node boots, and a check of another one fails for a while."""
    boots, breaks = fleet.chance.sample([node for node in fleet.here if not node.bad], 2)
    breaks.bad = True
    breaks.run_checks()
    await fleet.boot(boots, NODE_SECONDS)
    breaks.bad = False
    breaks.run_checks()


async def work(fleet: Site, number: int) -> None:
    """Jobs, one after the other."""
    attempt = 0
    while not fleet.over:
        attempt += 1
        name, seconds = f"job-{number}-{attempt}", fleet.chance.uniform(0.5, 1.5)
        if not await fleet.job(name, fresh=number % 2 == 0, seconds=seconds):
            return


async def drill(fleet: Site, faults: Sequence[Fault], arguments: argparse.Namespace) -> list[Round]:
    """Start all, let everything happen, and look at what is left."""
    names = [f"node-{n:05}" for n in range(arguments.nodes)] + [f"unwell-{n}" for n in range(UNWELL)]
    sync_seconds = max(LEAST_SYNC_SECONDS, len(names) / SYNCS_EACH_SECOND)
    nodes = [Node(name, sync_seconds, bad=name.startswith("unwell")) for name in names]
    each = ROUND_SECONDS + arguments.nodes / NODES_EACH_SECOND
    jobs: list[asyncio.Task[None]] = []
    found: list[Round] = []
    doing = "the start"
    try:
        async with asyncio.timeout(each):
            await fleet.start(nodes)
            jobs += [asyncio.create_task(work(fleet, number)) for number in range(arguments.jobs)]
            await until(lambda: fleet.answered >= min(arguments.jobs, arguments.nodes // 16))
        ends = time.monotonic() + 60.0 * arguments.minutes
        for number, fault in enumerate(faults, 1):
            if time.monotonic() > ends:
                break
            doing = f"round {number}, {fault}"
            async with asyncio.timeout(each):
                found.append(await go_through(fleet, fault))
            print(f"{number:5} {shown(found[-1])}", flush=True)
        doing = "the end"
        async with asyncio.timeout(each):
            await fleet.quiet()
            fleet.over = True
            for ended in await asyncio.gather(*jobs, return_exceptions=True):
                if isinstance(ended, Exception):
                    fleet.lost.refused.append(f"a job ended with {ended!r}")
        await fleet.look_again()
    except TimeoutError:
        fleet.lost.refused.append(f"{doing} was not over after {each:g} s")
        print(fleet.logs(), file=sys.stderr)
    finally:
        for task in jobs:
            task.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await fleet.stop()
    return found


HEAD = f"{'round':>5} {'what happens':52}{'held':>6}{'leads':>9}{'decides':>9}{'all nodes':>11}"


def shown(one: Round) -> str:
    """A line of the table."""
    return f"{TEXTS[one.fault]:52}{one.held:6}{one.leads:7.2f} s{one.decides:7.2f} s{one.nodes:9.2f} s"


def summary(rounds: Sequence[Round]) -> list[str]:
    """For each fault how often it happened, and p50, p99 and maximum of its seconds."""
    lines = [f"{'':12}{'rounds':>7}  {'p50, p99, max of: leads':26}{'decides':26}{'all nodes':26}".rstrip()]
    for fault in Fault:
        those = [one for one in rounds if one.fault is fault]
        if not those:
            continue
        cells = ""
        for seconds in ([r.leads for r in those], [r.decides for r in those], [r.nodes for r in those]):
            values = (statistics.median(seconds), percentile([*seconds, *seconds], 99), max(seconds))
            cells += f"{', '.join(f'{value:.2f}' for value in values) + ' s':26}"
        lines.append(f"{fault:12}{len(those):7}  {cells}".rstrip())
    return lines


def faults_of(text: str) -> list[Fault]:
    """The faults of a list with commas."""
    try:
        return [Fault(name) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; there are: {', '.join(Fault)}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 when anything was lost, or took longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the jobs' pauses and of whom they ask")
    parser.add_argument(
        "--rounds", type=int, help="so many of each fault, in turn; without it each once, in two minutes"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no round after so many")
    parser.add_argument("--faults", type=faults_of, help=f"of these alone: {','.join(Fault)}")
    parser.add_argument("--short", action="store_true", help=f"these alone: {','.join(SHORT)}")
    arguments = parser.parse_args(argv)
    if arguments.nodes < 16:
        parser.error(f"--nodes {arguments.nodes}: gates and faults need at least 16")
    kinds = arguments.faults or (SHORT if arguments.short else list(Fault))
    limit = LIMIT_SECONDS if arguments.rounds is None else None
    began = time.monotonic()
    found: list[Round] = []
    with site(aggregators=3, nodes=arguments.nodes + UNWELL, seed=arguments.seed) as fleet:
        print(f"three aggregators, {arguments.nodes} nodes and {UNWELL} unwell ones, {arguments.jobs} jobs that ask")
        print(f"\n{HEAD}", flush=True)
        try:
            faults = list(kinds) * (arguments.rounds or 1)
            found = asyncio.run(asyncio.wait_for(drill(fleet, faults, arguments), limit))
        except TimeoutError:
            fleet.lost.refused.append(f"it was not over after {LIMIT_SECONDS:g} s")
            print(fleet.logs(), file=sys.stderr)
    if arguments.rounds is not None:
        print("", *summary(found), sep="\n")
    print("", *fleet.report(f"{time.monotonic() - began:.0f} s"), sep="\n")
    return 1 if fleet.lost else 0


if __name__ == "__main__":
    sys.exit(main())
