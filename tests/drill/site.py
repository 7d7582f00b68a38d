"""
What the drill and the soak let things happen to: a PostgreSQL, aggregators as processes of their own, nodes, and jobs
that ask for gates. It keeps what must never happen, as told by the nodes and by who asked, not by an aggregator.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import resource
import signal
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from healthd.aggregator.store import step_down
from tests import prepared
from tests.aggregator.cluster import Cluster
from tests.aggregator.postgres import Server, serving
from tests.aggregator.proxy import Rule
from tests.aggregator.service import Service
from tests.drill.line import Line
from tests.drill.nodes import POOL, Node, trouble_with

OF_ONE_GATE = 8
HOLD_SECONDS = 300.0
FRESH_SECONDS = 5.0
"""How old evidence may be of every other gate: it has its nodes run their checks. The others take what is there."""
MAX_AGE_SECONDS = 3600.0
PAUSE_SECONDS = 0.2
JOINING_AT_ONCE = 500
LOST_LINES = 20
OTHER_FILES = 1000

CONFIG = """
[policy]
tuning.settle = "0s"
collective = false
node_grace = "5s"
silent = "10s"
rules = false                     # so that nothing but evidence keeps a node out
"""


async def until(true: Callable[[], bool]) -> None:
    """Wait for it; whoever runs the drill has a limit."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


@dataclass
class Lost:
    """What must never happen, in a line each."""

    unsaid: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def report(self) -> list[str]:
        """The counts, and the first lines."""
        each = (self.twice, self.unfit, self.unsaid, self.refused)
        every = [line for lines in each for line in lines[: LOST_LINES // len(each)]]
        return [
            f"Answered decisions lost: {len(self.unsaid)}. Double leases: {len(self.twice)}.",
            f"Admissions without evidence: {len(self.unfit)}. Requests that got a wrong answer: {len(self.refused)}.",
            *(f"  {line}" for line in every),
        ]

    def __bool__(self) -> bool:
        return bool(self.unsaid or self.twice or self.unfit or self.refused)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """One that was answered: what is found of it later must be the same."""

    gate: str
    nodes: tuple[str, ...]
    number: int
    """How many decisions were answered before it."""


class Site:
    """Everything that runs. `services` are the aggregators, each with its own way (`lines`) to the database."""

    def __init__(
        self, cluster: Cluster, server: Server, lines: Sequence[Line], *, config: str, seed: int, executed: bool
    ) -> None:
        self.server, self.lines = server, lines
        self.chance = random.Random(seed)
        self.lost = Lost()
        self.services: list[Service] = []
        for number, line in enumerate(lines, 1):
            url = f"postgresql+psycopg://healthd@127.0.0.1:{line.port}/postgres"
            service = cluster.aggregator("--database", url, config=config, name=f"aggregator-{number}")
            if executed and prepared.EXECUTED is not None:
                service.command[0] = str(prepared.EXECUTED)  # its memory is its own, not that of a fork
            self.services.append(service)
        self.nodes: dict[str, Node] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=200)
        self.http = httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0, limits=limits)
        self.held = 0
        self.over = False
        self.admitted: deque[Admission] = deque()
        self.answered = 0
        self.asked_again = 0
        self.seconds: list[float] = []
        """How long each gate took that was admitted, for who takes them out."""
        self.owner: dict[str, tuple[str, float]] = {}
        """By node the job that has it, and when that asked."""
        self.last_admission = 0.0
        self._starting: list[asyncio.Task[Service]] = []

    async def start(self, nodes: Sequence[Node]) -> None:
        """Start the aggregators and the nodes; returns when all nodes have synced."""
        await asyncio.gather(*(asyncio.to_thread(service.start) for service in self.services))
        self.nodes = {node.name: node for node in nodes}
        for begin in range(0, len(nodes), JOINING_AT_ONCE):
            joining = nodes[begin : begin + JOINING_AT_ONCE]
            for node in joining:
                self.join(node)
            await until(lambda joining=joining: all(node.at for node in joining))  # type: ignore[misc]
        await until(lambda: all(node.seq > 2 for node in nodes))
        gc.collect()
        gc.freeze()  # a full collection over ten thousand nodes would stop all that is measured

    async def stop(self) -> None:
        """End the nodes, and wait for aggregators that are about to start."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await asyncio.gather(*self._starting, return_exceptions=True)
        await self.http.aclose()

    # --- nodes --------------------------------------------------------------------------------------------------------

    def join(self, node: Node) -> None:
        """The node's daemon starts, with the aggregators in an order of its own."""
        ports = [port_of(service) for service in self.services]
        node.ports = self.chance.sample(ports, len(ports))
        self._running[node.name] = asyncio.create_task(node.run(), name=node.name)

    async def cut_off(self, node: Node) -> None:
        """The node's daemon ends, and tells nobody."""
        task = self._running.pop(node.name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def here(self) -> list[Node]:
        """The nodes whose daemon runs."""
        return [self.nodes[name] for name in self._running]

    async def boot(self, node: Node, seconds: float) -> None:
        """The node boots, which takes so long, and then runs its checks."""
        await self.cut_off(node)
        node.boot()
        await asyncio.sleep(seconds)
        self.join(node)
        await asyncio.sleep(seconds)
        node.run_checks()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def job(self, name: str, *, fresh: bool, seconds: float) -> bool:
        """
        Ask for a gate, work for so long, give it back. False: there was no admission.

        One that is rejected asks again with the next attempt where it is told to: a leader that takes over a gate with
        leases takes no other nodes for one that has broken meanwhile.
        """
        max_age = FRESH_SECONDS if fresh else MAX_AGE_SECONDS
        asked = time.monotonic()
        self.held += 1
        try:
            decision = await self._decided(name, max_age)
        finally:
            self.held -= 1
        if decision is None:
            return False
        nodes = tuple(one["node"] for one in decision["nodes"])
        now = self.last_admission = time.monotonic()
        self.seconds.append(now - asked)
        self.admitted.append(Admission(gate=decision["id"], nodes=nodes, number=self.answered + self.asked_again))
        self.answered += 1
        for node in nodes:
            other, since = self.owner.get(node, ("", now))
            if other and not self.nodes[node].gone_since(since):
                self.lost.twice.append(f"{node} was given to {name} while {other} had it")
            if (why := trouble_with(self.nodes[node], asked, now, max_age)) is not None:
                self.lost.unfit.append(f"{name} was admitted on {node}: {why}")
            self.owner[node] = (name, asked)
        await asyncio.sleep(seconds)
        for node in nodes:
            if self.owner.get(node) == (name, asked):
                del self.owner[node]
        await self.asked("DELETE", f"/v1/gates/{decision['id']}/lease")
        return True

    async def _decided(self, job: str, max_age: float) -> dict[str, Any] | None:
        """The decision of a gate, asked for at any aggregator until there is one; None at the end of all."""
        terms = {"pool": POOL, "count": OF_ONE_GATE, "wait_seconds": HOLD_SECONDS, "max_age_seconds": max_age}
        attempt = 0
        while not self.over:
            body = {"job": job, "attempt": attempt, **terms}
            answer = await self.asked("POST", "/v1/gates", params={"wait": "5"}, json=body, conflicts=True)
            if answer is None:
                return None
            if answer.status_code == 409:  # it was admitted, the answer was lost, and a node has booted meanwhile
                self.asked_again += 1
                attempt += 1
                continue
            decision: dict[str, Any] = answer.json()
            if decision["decision"] == "admit":
                return decision
            if decision["decision"] == "reject" and decision["retryable"]:
                self.asked_again += 1
                attempt += 1
            elif decision["decision"] == "reject":
                self.lost.refused.append(f"{job} was rejected: {[one['message'] for one in decision['reasons']][:2]}")
                return None
        return None

    async def asked(self, method: str, path: str, *, conflicts: bool = False, **more: Any) -> httpx.Response | None:
        """
        A good answer of any aggregator, or that there is no such thing (404); None at the end of all. `conflicts`: it
        may be refused as things are (409).
        """
        while not self.over:
            service = self.chance.choice(self.services)
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.http.request(method, f"{service.url}{path}", **more)
                if answer.status_code in (200, 404) or (conflicts and answer.status_code == 409):
                    return answer
                if answer.status_code < 500:
                    self.lost.refused.append(f"{method} {path}: HTTP {answer.status_code} {answer.text[:200]}")
                    return None
            await asyncio.sleep(self.chance.uniform(0.5, 1.0) * PAUSE_SECONDS)
        return None

    async def look_again(self, newest: int | None = None) -> None:
        """
        Whether every answer still stands, or the newest ones; and what the nodes were told. Of the newest one may be
        dropped by now, as old, once as many have been answered after it.
        """
        looked_at = list(self.admitted) if newest is None else list(self.admitted)[-newest:]
        for one in looked_at:
            answer = await self._looked_up(one.gate)
            later = self.answered + self.asked_again - one.number
            if answer.status_code == 404 and newest is not None and later > newest:
                continue
            found = answer.json() if answer.status_code == 200 else {}
            now = tuple(node["node"] for node in found.get("nodes", ()))
            if found.get("decision") != "admit" or now != one.nodes:
                said = found.get("decision") or f"HTTP {answer.status_code}"
                self.lost.unsaid.append(f"{one.gate} was answered with an admission, and is {said} now")
        for node in self.nodes.values():
            if node.twice:
                self.lost.twice.append(f"{node.name} was told two leases at once, {node.twice} times")
                node.twice = 0

    async def _looked_up(self, gate: str) -> httpx.Response:
        """What the leader says of a gate, whoever that is by now."""
        while True:
            leader = await self.leader()
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.http.get(f"{leader.url}/v1/gates/{gate}")
                if answer.status_code < 500:
                    return answer
            await asyncio.sleep(PAUSE_SECONDS)

    # --- aggregators --------------------------------------------------------------------------------------------------

    async def leader(self, *, but: Service | None = None) -> Service:
        """The one that says so, another than `but`; waits for it."""
        while True:
            for service in self.services:
                if service is but:
                    continue
                with contextlib.suppress(httpx.HTTPError):
                    said = (await self.http.get(f"{service.url}/readyz", timeout=1.0)).text
                    if said.startswith("leader") and "until" not in said:
                        return service
            await asyncio.sleep(0.02)

    async def quiet_leader(self) -> Service:
        """The leader, once every aggregator is ready."""
        await asyncio.gather(*self._starting)
        self._starting.clear()
        for service in self.services:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await self.http.get(f"{service.url}/readyz", timeout=1.0)).status_code == 200:
                        break
                await asyncio.sleep(0.05)
        return await self.leader()

    async def quiet(self) -> Service:
        """The leader, once every aggregator is ready and every node has followed it."""
        leader = await self.quiet_leader()
        await self.followed(leader)
        return leader

    async def followed(self, leader: Service) -> None:
        """Returns when the last answer of each node was the leader's."""
        port = port_of(leader)
        await until(lambda: all(node.at == port for node in self.here))

    def start_again(self, service: Service) -> None:
        """An aggregator that has ended starts, beside what comes next."""
        self._starting.append(asyncio.create_task(asyncio.to_thread(service.start)))

    async def depose(self) -> None:
        """The leader is told to step down."""
        await asyncio.to_thread(step_down, self.server.url)

    @contextlib.asynccontextmanager
    async def frozen(self, service: Service) -> AsyncIterator[None]:
        """The aggregator does not run meanwhile."""
        service.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            service.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def cut(self, service: Service) -> Iterator[None]:
        """The aggregator does not reach the database meanwhile."""
        line = self.lines[self.services.index(service)]
        line.obey(Rule.CUT)
        try:
            yield
        finally:
            line.obey(Rule.PASS)

    async def lose_database(self, seconds: float) -> None:
        """The database is killed, and back after so long."""
        await asyncio.to_thread(self.server.stop)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self.server.start)

    def report(self, over: str) -> list[str]:
        """What was answered, and lost; `over` is the time of it."""
        said = f"{self.answered} admissions were answered in {over}; {self.asked_again} jobs were told to ask again."
        return [said, *self.lost.report()]

    def logs(self) -> str:
        """The end of what each aggregator has logged."""
        return "\n".join(f"{service.name}:\n{service.said()[-1500:]}" for service in self.services)


def port_of(service: Service) -> int:
    return int(service.url.rpartition(":")[2])


@contextlib.contextmanager
def site(
    *, aggregators: int, nodes: int, config: str = CONFIG, seed: int = 0, executed: bool = False
) -> Iterator[Site]:
    """
    A site with room for so many nodes; nothing of it runs yet but the database.

    `executed`: the memory of each aggregator is its own, and not that of a fork, which starts sooner.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended then, too
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = nodes + OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise SystemExit(f"{nodes} nodes need {wanted} open files, and {hard} are allowed; name fewer with --nodes")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="healthd-drill-"))
        lines = [stack.enter_context(Line(f"tcp://127.0.0.1:{server.port}")) for _ in range(aggregators)]
        cluster = stack.enter_context(Cluster(Path(folder)))
        yield Site(cluster, server, lines, config=config, seed=seed, executed=executed)
