"""
No node is given to a second job while a first one runs there: whatever copy of the database is put back, and whenever.

The whole of it: the real store, registry and engine, and the real orders, leases and sync line of three machines. Time
is virtual. Jobs are seen by nothing but their leases, as on plain CPUs: what keeps a node is what is known of a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks.contract import Tier
from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.store.rows import PutKey
from healthd.aggregator.store.store import Store
from healthd.core.errors import ConflictError, NotFoundError
from healthd.core.model import Decision, GateRequest, Verdict
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.checks.scheduler import Scheduler
from healthd.node.orders.leases import LeaseStore
from healthd.node.orders.orders import Orders
from healthd.node.settings import SyncSettings
from healthd.node.state.store import NodeStore
from healthd.node.sync import SyncClient
from tests.node import node_kit
from tests.profile import examples

T = TypeVar("T")

POLICY = Policy(
    tuning=Tuning(settle_seconds=0.0),
    recovery_seconds=0.0,
    collective=False,
    tier=Tier.PASSIVE,
    wait_seconds=300.0,
    lease_grace_seconds=1e6,
)
"""
Without a time of recovery, in which nothing is admitted and nothing can go wrong; and no lease ends because nobody has
seen its job yet.
"""
MACHINES, JOBS = ("m0", "m1", "m2"), ("a", "b", "c")


class Machine:
    """One machine: its state directory and /proc stay, while daemons on it start again, under other names too."""

    def __init__(self, folder: Path, name: str, clock: node_kit.MovedClock) -> None:
        self.folder, self.clock, self.base, self.silent = folder, clock, name, False
        self.names = 0
        folder.mkdir()
        self.start(name)

    def start(self, name: str) -> None:
        """A new daemon; what the one before had in memory is gone."""
        self.name = name
        own = node_kit.settings(self.folder, name=name, labels={"pool": "p"}, host_root=self.folder)
        book = NodeStore(own, enabled_checks(node_kit.CATALOGUE, own), clock=self.clock.clock, boot_id=node_kit.BOOT)
        probes = node_kit.ScriptedProbes()
        probes.boot = self.clock.clock.boot
        tasks = node_kit.Tasks(first_restart_seconds=1.0)
        scheduler = Scheduler(book, probes, own, clock=self.clock.clock, tasks=tasks, seed=1)
        leases = LeaseStore(self.folder / "orders.json", clock=self.clock.clock, boot_id=node_kit.BOOT)
        self.book, self.scheduler, self.tasks = book, scheduler, tasks
        self.orders = Orders(book, scheduler, leases, own, clock=self.clock.clock, tasks=tasks)
        self.line = SyncClient(book, self.orders, SyncSettings(), key="k" * 40, clock=self.clock.clock)

    def rename(self) -> None:
        """The daemon starts again under another name."""
        self.names += 1
        self.start(f"{self.base}-{self.names}")

    def set_process(self, pid: int, *, runs: bool) -> None:
        """Start or end a process of this machine."""
        folder = self.folder / "proc" / str(pid)
        if runs:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "comm").write_text("job\n")
            (folder / "stat").write_text(f"{pid} (job) S 1 " + "0 " * 17 + "500 0 0")
        else:
            shutil.rmtree(folder, ignore_errors=True)

    async def sync(self, to: Fleet) -> None:
        """Look at everything, and one request and its answer."""
        await self.scheduler.refresh()
        for check in ("disk", "load"):
            self.book.record(node_kit.result(check))
        self.orders.tick()
        request = self.line.compose()
        answer = await to.sync(self.name, self.base, request, 0.0)
        self.line.apply(request, answer, self.clock.clock.boot())
        await node_kit.quiet()


@dataclasses.dataclass
class Job:
    """What is true of a job: the attempt that it asks with or runs as, and the machines where it runs."""

    pid: int
    attempt: int = 0
    request: GateRequest | None = None
    runs_on: frozenset[str] = frozenset()


class Site:
    """Three machines, three jobs, and the aggregator between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = node_kit.MovedClock()
        self.machines = {name: Machine(folder / name, name, self.clock) for name in MACHINES}
        self.jobs = {name: Job(pid=4001 + number) for number, name in enumerate(JOBS)}
        self.went: list[str] = []
        self.store: Store | None = None

    def open(self) -> None:
        """Start an aggregator on the database as it is."""
        self.store = store = Store.open(f"sqlite:///{self.folder}/a.db")

        async def enrol(node: str, key: str) -> str:
            await store.write([PutKey(node=node, key_hash=key, seen_at=self.clock.clock.wall())])
            return key

        self.registry = Fleet(
            issuer=store.store_id,
            enrol=enrol,
            silent_seconds=60.0,
            max_nodes=100,
            clock=self.clock.clock.wall,
            first_seq=store.term << 32,
        )
        for row in store.load().nodes:
            self.registry.load(row.node, key_hash=row.key_hash, pool=row.labels.get("pool"))
        self.engine = Engine(store=store, registry=self.registry, policy=POLICY, clock=self.clock.clock.wall)

    def close(self) -> None:
        """End the aggregator as kill -9 does: what is in memory is gone."""
        if self.store is not None:
            self.store.close()

    # --- what may happen ----------------------------------------------------------------------------------------------

    async def do(self, step: tuple[str, ...]) -> None:
        """One step."""
        kind, *of = step
        self.went.append(" ".join(step))
        match kind:
            case "ask":
                self.ask(*of)
            case "end":
                await self.end(of[0], release=of[1] == "release")
            case "copy":
                with (
                    contextlib.closing(sqlite3.connect(self.folder / "a.db")) as source,
                    contextlib.closing(sqlite3.connect(self.folder / "copy.db")) as copy,
                ):
                    source.backup(copy)
            case "restore" | "restart":
                self.close()
                if kind == "restore" and (self.folder / "copy.db").exists():
                    for old in self.folder.glob("a.db*"):
                        old.unlink()
                    shutil.copy(self.folder / "copy.db", self.folder / "a.db")
                self.open()
            case "rename":
                self.machines[of[0]].rename()
            case "again":
                self.machines[of[0]].start(self.machines[of[0]].name)
            case "silent" | "heard":
                self.machines[of[0]].silent = kind == "silent"
            case "sync":
                await self.sync(of[0])
            case "time":
                self.clock.move(float(of[0]))
        await self.turn()

    def ask(self, name: str, where: str) -> None:
        """A job that does not run asks for a node or two, or one of the pool; one that runs, for what it has."""
        job = self.jobs[name]
        if job.request is None:
            job.attempt += 1
            asked = {"pool": "p", "count": 1} if where == "pool" else {"nodes": tuple(self.names(where.split("+")))}
            workload = f"pid:{job.pid}" if "+" not in where else None
            job.request = GateRequest(job=name, attempt=job.attempt, workload=workload, **asked)  # type: ignore[arg-type]
            for machine in self.machines.values():
                machine.set_process(job.pid, runs=True)

    def names(self, machines: list[str]) -> list[str]:
        return [self.machines[name].name for name in machines]

    async def end(self, name: str, *, release: bool) -> None:
        """A job ends, if it runs or asks; its hook may give its nodes back."""
        job = self.jobs[name]
        if job.request is None:
            return
        for machine in self.machines.values():
            machine.set_process(job.pid, runs=False)
        seen = job.request.workload is not None
        job.request, job.runs_on = None, frozenset()
        if release or not seen:
            with contextlib.suppress(NotFoundError):
                await self.drive(self.engine.release_job(name, job.attempt))

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Turn the engine until this is answered."""
        task = asyncio.create_task(work)
        while not task.done():
            await self.engine.run_once()
            await asyncio.sleep(0)
        return await task

    async def sync(self, name: str) -> None:
        if not self.machines[name].silent:
            await self.machines[name].sync(self.registry)

    async def turn(self) -> None:
        """The nodes that are not silent sync, the engine takes that in, and every hook asks again."""
        for name in MACHINES:
            await self.sync(name)
        await self.engine.run_once()
        for name, job in self.jobs.items():
            if job.request is not None:
                await self.poll(name, job, job.request)
        await self.engine.run_once()

    async def poll(self, name: str, job: Job, request: GateRequest | None) -> None:
        """The hook asks, again or for the first time, and the job starts when it may."""
        assert request is not None
        try:
            gate = await self.drive(self.engine.ask(request))
        except ConflictError:
            return
        decision = await self.engine.wait(gate.id, 0.0)
        if decision.decision is Verdict.ADMIT:
            called = {machine.name: base for base, machine in self.machines.items()}
            own = {node.node.split("-")[0] for node in decision.nodes}
            assert own <= set(called.values())
            for other, running in self.jobs.items():
                both = own & running.runs_on
                assert other == name or not both, f"{both} of {other} given to {name}: {'; '.join(self.went)}"
            assert not job.runs_on or own == job.runs_on, f"{name} is told other nodes: {'; '.join(self.went)}"
            job.runs_on = frozenset(own)
        elif decision.decision is Verdict.REJECT and not job.runs_on:
            await self.end(name, release=False)


@contextlib.asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    made = Site(folder)
    made.open()
    try:
        await made.turn()
        await made.turn()
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


machines, jobs = st.sampled_from(MACHINES), st.sampled_from(JOBS)
wheres = st.sampled_from(["pool", "pool", "m0", "m1", "m2", "m0+m1", "m1+m2"])
steps = st.one_of(
    st.tuples(st.just("ask"), jobs, wheres),
    st.tuples(st.just("ask"), jobs, wheres),
    st.tuples(st.just("end"), jobs, st.sampled_from(["release", "leave"])),
    st.tuples(st.just("copy")),
    st.tuples(st.just("restore")),
    st.tuples(st.just("restart")),
    st.tuples(st.sampled_from(["rename", "again", "silent", "heard", "sync"]), machines),
    st.tuples(st.just("time"), st.sampled_from(["1", "20", "61", "301"])),
)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=6, max_size=24))
def test_no_node_is_given_to_a_second_job_while_a_first_one_runs_there(
    tmp_path_factory: pytest.TempPathFactory, taken: list[tuple[str, ...]]
) -> None:
    async def main() -> None:
        async with site(tmp_path_factory.mktemp("site")) as made:
            for step in taken:
                await made.do(step)

    asyncio.run(main())


# --- situations -------------------------------------------------------------------------------------------------------


def played(folder: Path, scene: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
    """Play this scene on a site."""

    async def main() -> None:
        async with site(folder / "site") as made:
            await scene(made)

    (folder / "site").mkdir()
    asyncio.run(main())


async def answer(made: Site, job: str) -> Decision:
    """What the newest gate of a job says."""
    (gate,) = await made.engine.gates(limit=1, job=job)
    return made.engine.answer(gate)


def holders(made: Site) -> dict[str, tuple[str, ...]]:
    """The jobs whose leases the machines hold."""
    return {base: tuple(lease.job for lease in one.book.leases) for base, one in made.machines.items()}


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("where", ["m0", "pool"])
def test_gate_that_was_open_in_a_copy_is_decided_by_the_lease_that_its_node_holds(
    tmp_path: Path, where: str, granted: bool
) -> None:
    """Asked, copied, admitted; the copy is put back; another job wants the node."""

    async def scene(made: Site) -> None:
        if not granted:
            await made.do(("restart",))  # so that its nodes are not confirmed yet
        made.ask("b", where)
        await made.poll("b", made.jobs["b"], made.jobs["b"].request)
        assert bool(made.engine.leases()) is granted
        await made.do(("copy",))
        for _ in range(4):
            await made.do(("time", "20"))
        (base,) = made.jobs["b"].runs_on
        await made.do(("restore",))
        for _ in range(3):
            await made.do(("ask", "c", base))
        decision = await answer(made, "b")
        assert decision.decision is Verdict.ADMIT
        assert [node.node for node in decision.nodes] == [base]
        assert (await answer(made, "c")).decision is Verdict.HOLD
        assert holders(made)[base] == ("b",)
        await made.do(("end", "b", "leave"))
        for _ in range(4):
            await made.do(("time", "1"))
        assert made.jobs["c"].runs_on == {base}, "the end of the job is a record that its lease is over"

    played(tmp_path, scene)


def test_job_of_an_open_gate_keeps_its_nodes_also_while_one_of_them_is_silent(tmp_path: Path) -> None:
    async def scene(made: Site) -> None:
        made.ask("a", "m0+m1")
        await made.poll("a", made.jobs["a"], made.jobs["a"].request)
        await made.do(("copy",))
        await made.do(("time", "1"))
        assert made.jobs["a"].runs_on == {"m0", "m1"}
        await made.do(("silent", "m1"))
        await made.do(("restore",))
        for _ in range(3):
            await made.do(("time", "61"))
        assert holders(made)["m0"] == ("a",)
        for _ in range(3):
            await made.do(("time", "61"))
        rejected = await answer(made, "a")
        assert rejected.decision is Verdict.REJECT
        assert "these leases stay until the job ends" in rejected.reasons[0].message
        await made.do(("heard", "m1"))
        for job, base in (("b", "m0"), ("c", "m1")):
            await made.do(("ask", job, base))
        for _ in range(3):
            await made.do(("time", "1"))
        assert holders(made) == {"m0": ("a",), "m1": ("a",), "m2": ()}

    played(tmp_path, scene)


def test_lease_goes_with_the_machine_that_starts_again_under_another_name(tmp_path: Path) -> None:
    async def scene(made: Site) -> None:
        for _ in range(3):
            await made.do(("ask", "a", "m0"))
        assert made.jobs["a"].runs_on == {"m0"}
        await made.do(("rename", "m0"))
        for _ in range(3):
            await made.do(("ask", "c", "m0"))  # which asks for it by its new name
        assert holders(made)["m0"] == ("a",)
        assert [row.node for row in made.engine.leases()] == ["m0-1"]
        held = await answer(made, "c")
        assert held.decision is Verdict.HOLD
        assert "job a" in held.reasons[0].message
        await made.do(("time", "61"))
        view = made.registry.view("m0")
        assert view is not None
        assert "the machine that was m0 is now named m0-1" in view.reasons[0].message
        given = await made.drive(made.engine.release_job("a", 1))
        assert [row.node for row in given.leases] == ["m0-1"], "a person reaches it under its new name"
        await made.do(("end", "a", "leave"))
        for _ in range(3):
            await made.do(("time", "1"))
        assert made.jobs["c"].runs_on == {"m0"}

    played(tmp_path, scene)


def test_same_job_and_attempt_is_answered_with_the_lease_that_it_has(tmp_path: Path) -> None:
    """The copy is from before the job was asked for."""

    async def scene(made: Site) -> None:
        await made.do(("copy",))
        for _ in range(3):
            await made.do(("ask", "a", "m0"))
        await made.do(("restore",))
        await made.do(("time", "1"))
        decision = await answer(made, "a")
        assert decision.decision is Verdict.ADMIT
        assert [node.node for node in decision.nodes] == ["m0"]
        (row,) = (await made.drive(made.engine.release(decision.id))).leases
        assert (row.node, row.lease.job, row.adopted) == ("m0", "a", True)
        await made.do(("end", "a", "leave"))
        for _ in range(2):
            await made.do(("time", "1"))
        assert holders(made)["m0"] == ()
        assert (await made.drive(made.engine.release_job("a", 1))).leases == ()

    played(tmp_path, scene)


def test_release_by_job_ends_a_lease_whose_gate_the_copy_does_not_know(tmp_path: Path) -> None:
    async def scene(made: Site) -> None:
        await made.do(("copy",))
        for _ in range(3):
            await made.do(("ask", "a", "m0"))
        job, made.jobs["a"] = made.jobs["a"], Job(pid=4009)  # its hook stopped polling
        await made.do(("restore",))
        await made.do(("time", "1"))
        given = await made.drive(made.engine.release_job("a", job.attempt))
        assert (given.gate, [row.node for row in given.leases]) == (None, ["m0"])
        for _ in range(2):
            await made.do(("time", "1"))
        assert holders(made)["m0"] == ()
        with pytest.raises(NotFoundError, match="no gate and no lease of job 'a' attempt 1"):
            await made.drive(made.engine.release_job("a", job.attempt))

    played(tmp_path, scene)


def test_node_that_was_forgotten_with_its_lease_is_told_that_it_is_over(tmp_path: Path) -> None:
    async def scene(made: Site) -> None:
        for _ in range(3):
            await made.do(("ask", "a", "m0"))
        await made.do(("silent", "m0"))
        await made.drive(made.engine.release_node("m0", "ana"))
        await made.drive(made.engine.forget("m0", "ana"))
        await made.do(("restart",))
        await made.do(("heard", "m0"))
        assert holders(made)["m0"] == ("a",)
        for _ in range(3):
            await made.do(("time", "1"))
        assert holders(made)["m0"] == ()
        assert made.engine.leases() == ()

    played(tmp_path, scene)
