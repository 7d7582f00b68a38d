"""
A game day of the fleet's own service: PostgreSQL, three aggregators, simulated nodes, and jobs that ask for gates all
the time; meanwhile the leader is killed, frozen, cut off, stopped and told to step down, and the database is killed.

Printed, for each: how many gates were held then, how long until somebody led, decided and had all nodes again. And
what was lost: answers that were unsaid, nodes in two jobs, admissions of nodes that are not well. Any is exit code 1.

    python -m tests.drill --nodes 32 --jobs 8
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from checks.contract import Status, Tier
from healthd.aggregator.store import DEFAULT_SHARD, step_down
from healthd.core.wire import encode
from tests.aggregator.cluster import Cluster
from tests.aggregator.parts import result, spec, state
from tests.aggregator.postgres import Server, serving
from tests.aggregator.proxy import Proxy, Rule
from tests.aggregator.service import Service
from tests.benchmarks.simulated import PASSIVE, QUICK, SimulatedNode

LIMIT_SECONDS = 112.0
OF_ONE_GATE = 8
UNWELL = 3
SYNC_SECONDS = 3.0
SILENT_SECONDS = 3.0
"""Beyond its hold, a node takes an aggregator that says nothing for so long for gone."""
PAUSE_SECONDS = 0.2
DATABASE_AWAY_SECONDS = 3.0

CONFIG = """
[policy]
tuning.settle = "0s"
collective = false
node_grace = "5s"
silent = "10s"
"""


class RefusedError(Exception):
    """No answer that a node can use; `leader` is the port of whoever leads instead, where that is known."""

    def __init__(self, leader: int | None = None) -> None:
        super().__init__(leader)
        self.leader = leader


def unwell_template() -> bytes:
    """A node named @ on which the first check of the quick tier has failed."""
    specs = [spec(n, tier=Tier.PASSIVE, expires=300.0) for n in PASSIVE] + [spec(n) for n in QUICK]
    results = [
        result(s.name, age=1.0, tier=s.tier, status=Status.FAIL if s.name == QUICK[0] else Status.PASS) for s in specs
    ]
    return encode(state("@", pool="bench", checks=tuple(specs), results=tuple(results)))


class Node(SimulatedNode):
    """A simulated node that finds its leader by itself, as real ones do; `twice` counts answers with two leases."""

    def __init__(self, name: str, ports: Sequence[int], template: bytes | None) -> None:
        super().__init__(name, ports[0], SYNC_SECONDS)
        self.ports, self.template = ports, template
        self.at = 0  # the port of the aggregator that answered last
        self.twice = 0
        self.writer: asyncio.StreamWriter | None = None  # type: ignore[assignment]

    def state(self) -> bytes:
        return super().state() if self.template is None else self.template.replace(b'"@"', f'"{self.name}"'.encode())

    async def run(self) -> None:
        """Sync for ever, with whoever leads."""
        for port in itertools.cycle(self.ports):
            self.port = port
            for _ in range(3):
                try:
                    await self.open()
                    await self.live()
                except RefusedError as refused:
                    if refused.leader is None:
                        break
                    self.port = refused.leader
                except (OSError, asyncio.IncompleteReadError):
                    break
                finally:
                    if self.writer is not None:
                        self.writer.close()
            await asyncio.sleep(random.uniform(0.5, 1.0) * PAUSE_SECONDS)

    async def sync(self, *, full: bool = False, wait: float) -> None:
        assert self.writer is not None
        body = self.body(full=full)
        path = f"/v1/nodes/{self.name}/sync?wait={wait:.0f}"
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nx-healthd-node-key: {self.key}\r\n"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(wait + SILENT_SECONDS):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
            answer = await self.reader.readexactly(int(headers["content-length"]))
        if lines[0].split()[1] != "200":
            leader = headers.get("leader")
            raise RefusedError(None if leader is None else int(leader.rpartition(":")[2]))
        self.at = self.port
        self.heed(answer)
        self.twice += len(self.leases) > 1


async def until(true: Callable[[], bool]) -> None:
    """Wait for it; the drill as a whole has a limit."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


@dataclass
class Lost:
    """What must never happen, in a line each."""

    unsaid: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [*self.unsaid, *self.twice, *self.unfit, *self.refused]


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one fault came to, in seconds from its beginning (for the database: from its return)."""

    fate: str
    held: int
    leads: float
    decided: float
    nodes: float


class Fleet:
    """Everything that runs; `services` are the aggregators, each with its own way to the database."""

    def __init__(
        self, cluster: Cluster, server: Server, lines: Sequence[Proxy], *, nodes: int, jobs: int, seed: int
    ) -> None:
        self.cluster, self.server = cluster, server
        self.chance = random.Random(seed)
        self.lost = Lost()
        self.services: list[Service] = []
        self.lines = lines
        self.jobs = jobs
        self.size = nodes
        self.nodes: list[Node] = []
        self.http = httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0)
        self.held = 0
        self.over = False
        self.admitted: dict[str, tuple[str, ...]] = {}
        self.owner: dict[str, str] = {}
        self.last_admission = 0.0
        self.starting: list[asyncio.Task[Service]] = []

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def job(self, number: int) -> None:
        """Ask for a gate, work, give it back; and again."""
        for attempt in itertools.count():
            name = f"job-{number}-{attempt}"
            self.held += 1
            try:
                decision = await self.decided(name)
            finally:
                self.held -= 1
            if decision is None:
                return
            nodes = tuple(one["node"] for one in decision["nodes"])
            self.admitted[decision["id"]] = nodes
            self.last_admission = time.monotonic()
            for node in nodes:
                if node in self.owner:
                    self.lost.twice.append(f"{node} was given to {name} while {self.owner[node]} had it")
                if node.startswith("unwell"):
                    self.lost.unfit.append(f"{name} was admitted on {node}, on which a check has failed")
                self.owner[node] = name
            await asyncio.sleep(self.chance.uniform(0.5, 1.5))
            for node in nodes:
                self.owner.pop(node, None)
            await self.asked("DELETE", f"/v1/gates/{decision['id']}/lease")

    async def decided(self, job: str) -> dict[str, Any] | None:
        """The decision of a gate, asked for at any aggregator until there is one; None at the end of the drill."""
        body = {"job": job, "pool": "bench", "count": OF_ONE_GATE, "wait_seconds": 300}
        while not self.over:
            answer = await self.asked("POST", "/v1/gates", params={"wait": "5"}, json=body)
            if answer is None:
                return None
            decision: dict[str, Any] = answer.json()
            if decision["decision"] == "admit":
                return decision
            if decision["decision"] == "reject":
                self.lost.refused.append(f"{job} was rejected: {[one['message'] for one in decision['reasons']][:2]}")
                return None
        return None

    async def asked(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """A good answer of any aggregator; None at the end of the drill."""
        while not self.over:
            service = self.chance.choice(self.services)
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.http.request(method, f"{service.url}{path}", **more)
                if answer.status_code == 200:
                    return answer
                if answer.status_code < 500 and answer.status_code != 404:
                    self.lost.refused.append(f"{method} {path}: HTTP {answer.status_code} {answer.text[:200]}")
                    return None
                if answer.status_code == 404:
                    return None if method == "DELETE" else answer
            await asyncio.sleep(self.chance.uniform(0.5, 1.0) * PAUSE_SECONDS)
        return None

    # --- who leads ----------------------------------------------------------------------------------------------------

    async def leader(self, *, but: Service | None = None) -> Service:
        """The one that says so, another than `but`; waits for it."""
        while True:
            for service in self.services:
                if service is but:
                    continue
                with contextlib.suppress(httpx.HTTPError):
                    said = (await self.http.get(f"{service.url}/readyz", timeout=1.0)).text
                    if said.startswith("leader of default") and "until" not in said:
                        return service
            await asyncio.sleep(0.02)

    async def through(self, fate: str, fault: Callable[[], Awaitable[None]], *, but: Service | None) -> Round:
        """Let it happen; what it came to."""
        held = self.held
        began = time.monotonic()
        await fault()
        if but is None:
            began = time.monotonic()
        found = await self.leader(but=but)
        leads = time.monotonic() - began
        came = time.monotonic()
        await until(lambda: self.last_admission >= came)
        decided = time.monotonic() - began
        port = int(found.url.rpartition(":")[2])
        await until(lambda: all(node.at == port for node in self.nodes))
        return Round(fate=fate, held=held, leads=leads, decided=decided, nodes=time.monotonic() - began)

    # --- faults -------------------------------------------------------------------------------------------------------

    async def rounds(self) -> AsyncIterator[Round]:
        leader = await self.leader()

        async def killed() -> None:
            leader.kill()

        yield await self.through("the leader is killed (-9)", killed, but=leader)
        self.starting.append(asyncio.create_task(asyncio.to_thread(leader.start)))  # beside what comes next
        leader = await self.leader()

        async def frozen() -> None:
            leader.signal(signal.SIGSTOP)

        yield await self.through("the leader is frozen past its lease, and goes on", frozen, but=leader)
        leader.signal(signal.SIGCONT)
        leader = await self.leader(but=leader)
        line = self.lines[self.services.index(leader)]

        async def cut() -> None:
            line.rule = Rule.CUT

        yield await self.through("the leader is cut from the database", cut, but=leader)
        line.rule = Rule.PASS
        leader = await self.leader(but=leader)

        async def stopped() -> None:
            leader.signal(signal.SIGTERM)

        yield await self.through("the leader is stopped (SIGTERM)", stopped, but=leader)
        await asyncio.to_thread(leader.ended)
        self.starting.append(asyncio.create_task(asyncio.to_thread(leader.start)))  # beside what comes next
        leader = await self.leader()

        async def deposed() -> None:
            await asyncio.to_thread(step_down, self.server.url, DEFAULT_SHARD)

        yield await self.through("the leader is told to step down", deposed, but=leader)

        async def lost() -> None:
            await asyncio.to_thread(self.server.stop)
            await asyncio.sleep(DATABASE_AWAY_SECONDS)
            await asyncio.to_thread(self.server.start)

        yield await self.through(f"the database is killed, and back after {DATABASE_AWAY_SECONDS:g} s", lost, but=None)

    async def look_again(self) -> None:
        """Whether every answer still stands."""
        leader = await self.leader()
        for gate, nodes in self.admitted.items():
            answer = await self.http.get(f"{leader.url}/v1/gates/{gate}")
            found = answer.json() if answer.status_code == 200 else {}
            now = tuple(one["node"] for one in found.get("nodes", ()))
            if found.get("decision") != "admit" or now != nodes:
                self.lost.unsaid.append(f"{gate} was answered with an admission, and is {found.get('decision')} now")
        self.lost.twice += [f"{node.name} was told two leases at once" for node in self.nodes if node.twice]


async def drill(fleet: Fleet) -> list[Round]:
    """Start all, let everything happen, and look at what is left."""
    for number, line in enumerate(fleet.lines, 1):
        url = f"postgresql+psycopg://healthd@{line.url.rpartition('/')[2]}/postgres"
        service = fleet.cluster.aggregator("--database", url, config=CONFIG, name=f"aggregator-{number}")
        fleet.services.append(service)
    await asyncio.gather(*(asyncio.to_thread(service.start) for service in fleet.services))
    ports = [int(service.url.rpartition(":")[2]) for service in fleet.services]
    unwell = unwell_template()
    names = [(f"node-{n:03}", None) for n in range(fleet.size)] + [(f"unwell-{n}", unwell) for n in range(UNWELL)]
    fleet.nodes = [Node(name, fleet.chance.sample(ports, len(ports)), template) for name, template in names]
    running = [asyncio.create_task(node.run()) for node in fleet.nodes]
    jobs: list[asyncio.Task[None]] = []
    try:
        await until(lambda: all(node.seq > 2 for node in fleet.nodes))
        jobs += [asyncio.create_task(fleet.job(number)) for number in range(fleet.jobs)]
        await until(lambda: len(fleet.admitted) >= fleet.jobs)
        found = []
        async for one in fleet.rounds():
            print(shown(one), flush=True)
            found.append(one)
        fleet.over = True
        for ended in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(ended, Exception):
                fleet.lost.refused.append(f"a job ended with {ended!r}")
        await fleet.look_again()
        await asyncio.gather(*fleet.starting)
    finally:
        for task in (*jobs, *running):
            task.cancel()
        await asyncio.gather(*jobs, *running, return_exceptions=True)
        await fleet.http.aclose()
    return found


HEAD = f"{'what happens':52}{'held':>6}{'leads':>9}{'decides':>9}{'all nodes':>11}"


def shown(one: Round) -> str:
    """A line of the table."""
    return f"{one.fate:52}{one.held:6}{one.leads:7.2f} s{one.decided:7.2f} s{one.nodes:9.2f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 when anything was lost, or took longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the jobs' pauses and of whom they ask")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="healthd-drill-"))
        lines = [stack.enter_context(Proxy(f"tcp://127.0.0.1:{server.port}")) for _ in range(3)]
        cluster = stack.enter_context(Cluster(Path(folder)))
        fleet = Fleet(cluster, server, lines, nodes=arguments.nodes, jobs=arguments.jobs, seed=arguments.seed)
        print(f"three aggregators, {arguments.nodes} nodes and {UNWELL} unwell ones, {arguments.jobs} jobs that ask")
        print(f"\n{HEAD}", flush=True)
        try:
            asyncio.run(asyncio.wait_for(drill(fleet), LIMIT_SECONDS))
        except TimeoutError:
            fleet.lost.refused.append(f"it was not over after {LIMIT_SECONDS:g} s")
            for service in fleet.services:
                print(f"{service.name}:\n{service.said()[-1500:]}", file=sys.stderr)
    lost = fleet.lost
    took = time.monotonic() - began
    print(f"\n{len(fleet.admitted)} admissions were answered in {took:.0f} s. Lost of them: {len(lost.unsaid)}.")
    print(f"Nodes given to two jobs: {len(lost.twice)}. Admissions of nodes that are not well: {len(lost.unfit)}.")
    print(f"Requests that got a wrong answer: {len(lost.refused)}.")
    for line in lost.lines()[:20]:
        print(f"  {line}")
    return 1 if lost.lines() else 0


if __name__ == "__main__":
    sys.exit(main())
