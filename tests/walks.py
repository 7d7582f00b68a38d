"""
Three walks through healthd, traced: which files they really enter. `python -m tests.walks NAME` prints the list of one,
and without a name all are written into docs/architecture.md.

Nothing is left out of a trace but what runs at import: the worker of a check is traced in its own process. Each walk is
done in a process of its own, so that nothing is remembered from another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from checks.discover import builtin_checks
from healthd.aggregator.api.sync import SyncEndpoint
from healthd.aggregator.application import make_app
from healthd.aggregator.engine.engine import Engine, steady_clock
from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.page.events import Feed
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.store.store import Store
from healthd.core.model import CheckResult, CollectiveOrder, Lease, OrderReport, SyncAnswer
from healthd.core.tasks import Tasks
from healthd.core.wire import decode, encode
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.checks.scheduler import Scheduler
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.state.store import NodeStore
from healthd.runner.runner import Runner
from healthd.runner.settings import RunnerSettings
from tests.aggregator.application import parts_of_test
from tests.aggregator.lab import Lab, inventory
from tests.aggregator.parts import KEY, Node
from tests.aggregator.world import good_results, state
from tests.entered import ROOT, Entered, interpreter
from tests.node.node_kit import BOOT, MovedClock, quiet, settings
from tests.patience import PATIENCE

PAGE = ROOT / "docs/architecture.md"


@contextlib.contextmanager
def entered(folder: Path) -> Iterator[Entered]:
    trace = Entered(folder)
    trace.install()
    try:
        yield trace
    finally:
        trace.remove()


# --- a check's result, to /health -------------------------------------------------------------------------------------


class CountedRuns(Runner):
    """Tells when a run is over."""

    def __init__(self, settings: RunnerSettings) -> None:
        super().__init__(settings)
        self.over = asyncio.Event()

    async def run(self, *args: Any, **more: Any) -> tuple[CheckResult, ...]:
        try:
            return await super().run(*args, **more)
        finally:
            self.over.set()


async def passive_result(folder: Path) -> list[str]:
    """The second round of a node with one passive check, and an answer of `/health` after it."""
    with entered(folder) as trace:
        chosen, time_of_test, tasks = settings(folder), MovedClock(), Tasks()
        specs = enabled_checks({"disk_space": builtin_checks()["disk_space"].info()}, chosen)
        book = NodeStore(chosen, specs, clock=time_of_test.clock, boot_id=BOOT)
        runner = CountedRuns(RunnerSettings(accelerator="cpu", run_dir=folder, probe_python=interpreter(folder)))
        scheduler = Scheduler(book, runner, chosen, clock=time_of_test.clock, tasks=tasks, seed=1)
        transport = httpx.ASGITransport(app=NodeApi(book))  # type: ignore[arg-type]
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                tasks.supervise("passive", scheduler.run_passive)
                await runner.over.wait()
                await quiet()
                time_of_test.move(3600)
                assert (await http.get("/health")).status_code == 503, "the result is old"
                runner.over.clear()
                trace.switch.touch()
                scheduler.survey_soon()
                await runner.over.wait()
                await quiet()
                answer = await http.get("/health")
                trace.switch.unlink()
                assert answer.status_code == 200, answer.text
        finally:
            await tasks.stop(1.0)
    return trace.files()


# --- at the aggregator ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Member:
    """A node that speaks sync and stores leases. Collectives that it is ordered to join wait in `collectives`."""

    client: httpx.AsyncClient
    line: Node
    began: float
    leases: dict[str, Lease] = dataclasses.field(default_factory=dict)
    reports: dict[str, OrderReport] = dataclasses.field(default_factory=dict)
    collectives: dict[str, CollectiveOrder] = dataclasses.field(default_factory=dict)

    async def sync(self) -> None:
        name = self.line.name
        now = dataclasses.replace(
            state(name, good_results(5.0 + self.line.clock() - self.began), leases=tuple(self.leases.values())),
            inventory=inventory(),
            peer_address="10.0.0.1",
        )
        body = encode(self.line.request(now, digest=f"d{self.line.seq}", orders=self.reports))
        headers = {"x-healthd-node-key": KEY}
        response = await self.client.post(f"/v1/nodes/{name}/sync", content=body, headers=headers)
        assert response.status_code == 200, response.text
        self.line.answer = answer = decode(response.content, SyncAnswer, what="answer")
        self.line.received_at = self.line.clock()
        self.reports = {one: report for one, report in self.reports.items() if one not in answer.acknowledged}
        for order in answer.orders or ():
            if order.id not in self.reports and order.lease is not None and not order.withdrawn:
                self.leases[order.id] = order.lease
                self.reports[order.id] = OrderReport(status="accepted")
            elif order.id not in self.reports and order.collective is not None:
                self.collectives[order.id] = order.collective


def run_groups(members: Sequence[Member], lab: Lab) -> None:
    """Every group whose members have all been ordered to join it runs, and ends as the faults of `lab` make it end."""
    groups: dict[str, dict[str, str]] = {}
    for member in members:
        for order_id, order in member.collectives.items():
            groups.setdefault(order.group, {})[member.line.name] = order_id
    for orders in groups.values():
        joined = [member for member in members if member.line.name in orders]
        if sum(member.collectives[orders[member.line.name]].ranks for member in joined) < next(
            member.collectives[orders[member.line.name]].size for member in joined
        ):
            continue
        for member in joined:
            order = member.collectives.pop(orders[member.line.name])
            report = lab.report(member.line.name, order, tuple(orders))
            assert report is not None
            member.reports[orders[member.line.name]] = report


@contextlib.asynccontextmanager
async def fleet_of(
    folder: Path, names: Sequence[str], policy: Policy
) -> AsyncIterator[tuple[httpx.AsyncClient, list[Member], Feed]]:
    """The real application, engine, registry and store of an aggregator; its nodes have been heard and confirmed."""
    store = Store.open(f"sqlite:///{folder}/aggregator.db")
    task = None
    try:
        clock = steady_clock()
        registry = Fleet(
            issuer=store.store_id,
            enrol=lambda node, key: store.enrol(node, key, now=clock()),
            silent_seconds=60.0,
            max_nodes=100,
            clock=clock,
        )
        engine = Engine(store=store, registry=registry, policy=policy, clock=clock)
        parts = parts_of_test(folder, store=store, fleet=registry, engine=engine)
        application = make_app(parts)
        app = SyncEndpoint(
            application, fleet=registry, guard=parts.guard, settings=parts.settings, on_state=parts.ungated.see
        )
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
        task = asyncio.create_task(engine.run(), name="engine")
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            members = [Member(client, Node(registry, clock, name=name), clock()) for name in names]  # type: ignore[arg-type]
            for _ in range(2):
                for member in members:
                    await member.sync()
            await engine.run_once()
            yield client, members
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        store.close()


def without_samples(files: list[str]) -> list[str]:
    """The page samples states once a second, which is no part of a walk and may fall into one."""
    return [file for file in files if file != "healthd/aggregator/page/samples.py"]


async def admission(folder: Path) -> list[str]:
    """`POST /v1/gates` of two healthy nodes, the syncs by which they store their leases, and the answer."""
    policy = Policy(tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0, collective=False)
    with entered(folder) as trace:
        async with fleet_of(folder, ("n1", "n2"), policy) as (client, members):
            trace.switch.touch()
            question = {"job": "train", "nodes": ["n1", "n2"]}
            asked = asyncio.create_task(client.post("/v1/gates?wait=30", json=question))
            while not asked.done():
                for member in members:
                    await member.sync()
                await asyncio.wait([asked], timeout=0.01)
            assert asked.result().json()["decision"] == "admit", asked.result().text
            trace.switch.unlink()
    return without_samples(trace.files())


async def validation(folder: Path) -> list[str]:
    """`POST /v1/validations` of four nodes, one of which gives wrong sums, until the verdict names it."""
    policy = Policy(tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0, collective_checks=("all_reduce",))
    names = ("n1", "n2", "n3", "n4")
    lab = Lab(names, bad={"n3": "corrupt"}, policy=policy)
    with entered(folder) as trace:
        async with fleet_of(folder, names, policy) as (client, members):
            trace.switch.touch()
            begun = await client.post("/v1/validations", json={"nodes": list(names)})
            assert begun.status_code in (200, 202), begun.text
            place = begun.headers["location"]
            async with asyncio.timeout(60 * PATIENCE):
                while (told := (await client.get(place)).json())["phase"] != "decided":
                    for member in members:
                        await member.sync()
                    run_groups(members, lab)
                    await asyncio.sleep(0)  # nothing above waits for anything, and the engine is to have a turn
            assert [one["node"] for one in told["decision"]["excluded"]] == ["n3"], told
            trace.switch.unlink()
    return without_samples(trace.files())


# --- the page ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Walk:
    """`most_files` is what a test holds it to, `aim` what we want."""

    trace: Callable[[Path], Coroutine[Any, Any, list[str]]]
    most_files: int
    aim: int


WALKS = {
    "result": Walk(passive_result, most_files=46, aim=30),
    "admission": Walk(admission, most_files=46, aim=32),
    "validation": Walk(validation, most_files=68, aim=48),
}


def files_of(name: str) -> list[str]:
    """The files that a walk enters, in a process of its own."""
    command = [sys.executable, "-m", "tests.walks", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def written(name: str, files: Sequence[str]) -> str:
    """
    What the page says: the files of each room.

    By name and not in the order of the walk, because threads and processes have no common one.
    """
    rooms: dict[str, list[str]] = {}
    for room, _, module in sorted(file.rpartition("/") for file in files):
        rooms.setdefault(room, []).append(f"`{module}`")
    aim = WALKS[name].aim
    count = f"{len(files)} files" + (f"; the aim is {aim}." if len(files) > aim else ".")
    return "\n".join([count, "", *(f"- `{room}/`: {', '.join(modules)}" for room, modules in rooms.items())])


def block(name: str) -> re.Pattern[str]:
    """Where it stands in the page."""
    return re.compile(rf"(?s)(?<=<!-- walk {name}: made by `make docs` from a trace -->\n\n).*?(?=\n\n<!-- end -->)")


def main(name: str | None) -> None:
    if name is not None:
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(asyncio.run(WALKS[name].trace(Path(folder)))))
        return
    text = PAGE.read_text(encoding="utf-8")
    for walk in WALKS:
        found = block(walk).search(text)
        assert found is not None, f"{PAGE} has no place for the walk {walk}"
        text = text[: found.start()] + written(walk, files_of(walk)) + text[found.end() :]
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None))
