"""
A whole site in one process: machines, an aggregator that ends and starts again, jobs with their hooks, and faults.

`simulate(plan)` plays a plan and says which promise was broken, if any was. Same plan, same run, to the byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from healthd.aggregator.gate.records import Gate
from healthd.aggregator.store import LEASE_SECONDS
from healthd.core import wire
from healthd.core.model import Decision, GateRequest, Verdict
from healthd.core.tasks import wait_for
from tests.simulation.aggregator import POLICY, SharingAggregator, SimulatedAggregator
from tests.simulation.disk import Disk
from tests.simulation.loop import Machine, Process, VirtualLoop
from tests.simulation.machine import CATALOGUE, SimulatedNode
from tests.simulation.network import Answered, Asked, BrokenPromiseError, Network, NetworkError, Trouble
from tests.simulation.plan import AGGREGATORS, JOBS, NODES, Event, Plan

HOOK_HOLD_SECONDS = 8.0
RESTART_SECONDS = 3.0
"""After so long a service manager starts an aggregator again."""
AGAIN_SECONDS = 10.0
"""How often a job that runs asks its gate again: what it was told stands."""
BOUND_SECONDS = 30.0
"""How much later than its wait a gate may be decided once everything is well again: a restart, a sync and a look."""
TAKEOVER_SECONDS = 10.0
"""Within this somebody leads, once aggregators, disk and network are well and whoever was killed has started again."""
RECOVERED_SECONDS = 25.0
"""Within this a node that was mended has been tested and has told so: its retry, its longest pause, and a run."""
SLACK_SECONDS = 1e-3
"""What ages may be too small by: they are rounded on the way."""


TROUBLES = {
    "cut": Trouble(cut=True),
    "lose": Trouble(lose_request=0.5),
    "lose-answers": Trouble(lose_answer=0.7),
    "slow": Trouble(delay_seconds=6.0),
    "repeat": Trouble(repeat=0.7, delay_seconds=0.5),
    "bad": Trouble(lose_request=0.2, lose_answer=0.2, repeat=0.3, delay_seconds=2.0),
}
"""What may be wrong with the way from a node, or from all hooks, to the aggregator."""


UNSEEN = JOBS[::2]
"""Jobs that open no device: nothing but its lease shows that such a one has a node."""


@dataclass(eq=False)
class Job:
    """What is true of a job: what its hook has asked, and was told."""

    name: str
    attempt: int
    request: GateRequest
    runs_seconds: float
    asked_at: float
    decision: Decision | None = None
    decided_of: int = 0  # how often the database had been lost by then
    runs_on: frozenset[str] = frozenset()
    ended: bool = False
    released: bool = False
    refused: bool = False
    asked_last: float = 0.0
    heard_at: float | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to: `broken` is empty where every promise was kept. `digest` is that of its whole log."""

    broken: str
    digest: str
    steps: int
    seconds: float
    log: tuple[str, ...]
    admitted: int


class World:
    """See the module."""

    def __init__(self, plan: Plan, loop: VirtualLoop, folder: Path) -> None:
        self.plan, self.loop = plan, loop
        self._digest = hashlib.sha256()
        self.lines: list[str] = []
        self.network = Network(loop, self.chance("network"), self.log)
        if plan.aggregators > 1:
            self.network.leads, self.network.on_answer = self._leads, self._on_answer
        self.disk = Disk(self.chance("disk"))
        self.disk.on_commit = self._on_commit
        self.addresses = AGGREGATORS[: plan.aggregators]
        self.hosts = {address: Machine(address) for address in self.addresses}
        self.aggregators: dict[str, SimulatedAggregator] = {}  # the newest one at each address
        self._any = self.chance("hooks")
        self.former: list[SimulatedAggregator] = []
        self.starts = 0
        self.nodes = {
            name: SimulatedNode(
                name,
                folder / name,
                loop=loop,
                network=self.network,
                aggregators=self.addresses,
                chance=self.chance(name),
                log=self.log,
            )
            for name in NODES
        }
        self.jobs: dict[str, Job] = {}
        self.quarantined: dict[str, float] = {}  # since when, by an answer that was read
        self.granted_at: dict[str, float] = {}  # by lease
        self.perhaps_quarantined: set[str] = set()  # asked, and not known to be over
        self.lost = 0  # how often the database was lost or replaced by an older one
        self.healed = False
        self._killed_at: int | None = None  # after so many steps of the aggregator
        self.admitted = 0
        self.decided_at: dict[str, float] = {}  # by job
        self.rebooted_at: dict[str, float] = {}
        self._clock_set_at = -math.inf
        self._tasks: list[asyncio.Task[None]] = []
        loop.after_step = self._after_step

    def chance(self, purpose: str) -> random.Random:
        """The randomness of one purpose: what happens to one part changes nothing for the others."""
        return random.Random(f"{self.plan.seed}:{purpose}")

    def log(self, text: str) -> None:
        """A line of the log."""
        line = f"{self.loop.now:.6f} {text}"
        self._digest.update(line.encode())
        self.lines.append(line)

    # --- the course of it ---------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """The events of the plan; then everything is mended, and everything that was promised has to come true."""
        try:
            await self._play()
        finally:
            self.disk.gone = True

    async def _play(self) -> None:
        for address in self.addresses:
            self.start_aggregator(address)
        for node in self.nodes.values():
            node.start()
        self._soon(self._keep_up())
        for event in self.plan.events:
            await asyncio.sleep(max(0.0, event.at - self.loop.now))
            self.log(f"--- {event}")
            self.happen(event)
        await asyncio.sleep(max(0.0, self.plan.ends_at - self.loop.now))
        await self._examine()

    async def _keep_up(self) -> None:
        """The service managers of the aggregators' machines."""
        while True:
            await asyncio.sleep(RESTART_SECONDS)
            for address in self.addresses:
                if not self.aggregators[address].process.alive:
                    self.start_aggregator(address)

    async def _examine(self) -> None:
        """Everything is well from now on: every gate has to be decided, and in the end all nodes are free."""
        self.log("--- all is well")
        self.heal()
        await self._until(
            lambda: self.leader is not None, RESTART_SECONDS + TAKEOVER_SECONDS, lambda: "no aggregator leads"
        )
        deadline = POLICY.wait_seconds + BOUND_SECONDS
        await self._until(
            lambda: all(job.decision is not None or job.ended for job in self.jobs.values()),
            deadline,
            lambda: f"no decision for {[one.name for one in self.jobs.values() if one.decision is None]}",
        )
        for job in self.jobs.values():
            for address in self.addresses[1:]:
                await self._compare(job, address)
        for job in self.jobs.values():
            job.stop.set()
        await self._until(self._all_released, BOUND_SECONDS, lambda: "a release has no answer")
        if self.lost:
            # An older database does not know which leases there are before the nodes have told it, so that a release
            # from before may have ended none.
            await asyncio.sleep(RECOVERED_SECONDS)
            self._release_again()
            await self._until(self._all_released, BOUND_SECONDS, lambda: "a release has no answer")
        for node in sorted(self.perhaps_quarantined):
            await self._unquarantine(node)
        await asyncio.sleep(RECOVERED_SECONDS)
        probe = self.ask("probe", NODES, max_age=60.0, runs=1.0)
        await self._until(lambda: probe.decision is not None, deadline, lambda: "no decision for the last gate")
        assert probe.decision is not None
        if probe.decision.decision is not Verdict.ADMIT:
            why = "; ".join(reason.message for reason in probe.decision.reasons)
            self.broken(f"all is well and all jobs are over, and a gate for all nodes is not admitted: {why}")

    def _all_released(self) -> bool:
        return all(job.released for job in self.jobs.values())

    async def _until(self, true: Any, seconds: float, what: Any) -> None:
        end = self.loop.now + seconds
        while not true():
            if self.loop.now > end:
                self.broken(f"{seconds:g} s after all is well: {what()}")
            await asyncio.sleep(0.5)

    def heal(self) -> None:
        """Mend everything."""
        self.network.troubles.clear()
        self.disk.slow_seconds = self.disk.fail_before = self.disk.fail_after = 0.0
        self.disk.kill_at = self._killed_at = None
        self.disk.cut_off.clear()
        for node in self.nodes.values():
            node.set_bad(False)
            node.start()
            if node.process is not None and node.process.frozen:
                node.process.thaw()
        for one in self._aggregators():
            if one.process.frozen:
                one.process.thaw()
        self.healed = True

    # --- the aggregators ----------------------------------------------------------------------------------------------

    @property
    def leader(self) -> SimulatedAggregator | None:
        """The newest one that leads; None where none does."""
        leading = [one for one in self.aggregators.values() if one.leads()]
        return max(leading, key=lambda one: one.term, default=None)

    @property
    def aggregator(self) -> SimulatedAggregator:
        """The one to which faults happen: the leader, or one of those that stand by."""
        return self.leader or self.aggregators[self.addresses[0]]

    def start_aggregator(self, address: str) -> None:
        """Another process on the same database; the one before may still be there, frozen."""
        self.starts += 1
        if address in self.aggregators:
            self.former.append(self.aggregators[address])
        kind = SimulatedAggregator if len(self.addresses) == 1 else SharingAggregator
        one = kind(f"a{self.starts}", address, self.hosts[address], self.disk, loop=self.loop, network=self.network)
        self.aggregators[address] = one
        try:
            started = one.start(self._check_decided)
        except BaseException as error:
            if one.process.alive:
                raise
            started = False
            self.log(f"{one.name} was killed as it started: {type(error).__name__}")
        self.log(f"{one.name} has started" if started else f"{one.name} cannot start: {one.ended}")
        if not started:
            one.kill()

    # --- events -------------------------------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """One event of the plan: the method that is named like its kind."""
        act: Callable[..., None] = getattr(self, "_" + event.kind.replace("-", "_"))
        act(*event.of)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Hooks and people act beside the course of events."""
        self._tasks.append(asyncio.create_task(work))

    def _ask(self, name: str, nodes: str, max_age: str, runs: str) -> None:
        self.ask(name, tuple(nodes.split("+")), max_age=float(max_age), runs=float(runs))

    def _end(self, name: str) -> None:
        if name in self.jobs:
            self.jobs[name].stop.set()

    def _ask_again(self, name: str) -> None:
        if name in self.jobs:
            self._soon(self._compare(self.jobs[name]))

    def _quarantine(self, node: str) -> None:
        self._soon(self._keep_out(node))

    def _bad(self, node: str) -> None:
        self.nodes[node].set_bad(True)

    def _good(self, node: str) -> None:
        self.nodes[node].set_bad(False)

    def _swap(self, node: str) -> None:
        self.nodes[node].swap()

    def _restart_node(self, node: str, seconds: str) -> None:
        self.nodes[node].kill()
        self.loop.call_later(float(seconds), self.nodes[node].start)

    def _reboot_node(self, node: str, seconds: str) -> None:
        self.nodes[node].reboot()
        self.rebooted_at[node] = self.loop.now
        for job in self.jobs.values():
            if node in job.runs_on:
                job.stop.set()  # it loses a rank
                job.runs_on -= {node}
        self.loop.call_later(float(seconds), self.nodes[node].start)

    def _freeze_node(self, node: str, seconds: str) -> None:
        process = self.nodes[node].process
        if process is not None:
            process.freeze()
            self.loop.call_later(float(seconds), process.thaw)

    def _kill(self) -> None:
        self.aggregator.kill()

    def _kill_at_step(self, step: str) -> None:
        self._killed_at = int(step)

    def _kill_at_commit(self, commit: str, when: str) -> None:
        self.disk.kill_at, self.disk.kill_after = int(commit), when == "after"

    def _freeze(self, seconds: str) -> None:
        one = self.aggregator
        if one.process.alive:
            one.process.freeze()
            self.loop.call_later(float(seconds), one.process.thaw)

    def _take_over(self, seconds: str) -> None:
        self._freeze(seconds)
        if len(self.addresses) == 1:
            self.start_aggregator(self.addresses[0])

    def _stop(self) -> None:
        self.aggregator.stop()

    def _step_down(self) -> None:
        self.disk.depose()

    def _named(self, name: str) -> str:
        return self.aggregator.address if name == "leader" else name

    def _cut_disk(self, name: str, kind: str, seconds: str) -> None:
        address = self._named(name)
        self.disk.cut_off[address] = kind == "hangs"
        self.loop.call_later(float(seconds), self.disk.cut_off.pop, address, None)

    def _part(self, one: str, other: str, kind: str, seconds: str) -> None:
        self._disturb(self._named(one), self._named(other), kind, seconds)
        self._disturb(self._named(other), self._named(one), kind, seconds)

    def _part_client(self, source: str, address: str, kind: str, seconds: str) -> None:
        self._disturb(source, self._named(address), kind, seconds)

    def _clock(self, seconds: str) -> None:
        for host in self.hosts.values():
            host.wall_offset += float(seconds)
        self._clock_set_at = self.loop.now

    def _copy(self) -> None:
        self.disk.keep_copy()

    def _restore(self) -> None:
        if self.disk.copy is not None:
            self._end_all()
            self.disk.put_back()
            self._forget()

    def _lose(self) -> None:
        self._end_all()
        self.disk.lose()
        self._forget()

    def _end_all(self) -> None:
        for one in self._aggregators():
            one.kill()

    def _forget(self) -> None:
        """The database is an older one: of what it was told since, only what nodes know is left."""
        self.lost += 1
        self.quarantined.clear()
        self._release_again()

    def _release_again(self) -> None:
        for job in self.jobs.values():
            if job.ended and job.released:
                job.released = False
                self._soon(self._release(job))

    def _trouble(self, source: str, kind: str, seconds: str) -> None:
        for address in self.addresses:
            self._disturb(source, address, kind, seconds)

    def _disturb(self, source: str, to: str, kind: str, seconds: str) -> None:
        trouble = TROUBLES[kind]
        self.network.troubles[source, to] = trouble
        self.loop.call_later(float(seconds), self._end_trouble, (source, to), trouble)

    def _end_trouble(self, way: tuple[str, str], trouble: Trouble) -> None:
        if self.network.troubles.get(way) is trouble:
            del self.network.troubles[way]

    def _disk(self, kind: str, seconds: str) -> None:
        if kind == "slow":
            self.disk.slow_seconds = 7.0
        elif kind == "fails":
            self.disk.fail_before = 0.5
        else:
            self.disk.fail_after = 0.5
        self.loop.call_later(float(seconds), self._mend_disk)

    def _mend_disk(self) -> None:
        self.disk.slow_seconds = self.disk.fail_before = self.disk.fail_after = 0.0

    # --- hooks and people ---------------------------------------------------------------------------------------------

    async def call(
        self, source: str, method: str, path: str, query: str = "", body: object = None, *, to: str = ""
    ) -> Answered | None:
        """One request to the API of any aggregator; None where no answer came."""
        to = to or self._any.choice(self.addresses)
        encoded = b"" if body is None else wire.encode(body)
        headers = (("content-type", "application/json"),)
        asked = Asked(source=source, method=method, path=path, query=query, body=encoded, headers=headers)
        try:
            answered = await self.network.ask(to, asked, seconds=HOOK_HOLD_SECONDS + 8.0)
        except NetworkError as error:
            self.log(f"{source} {method} {path}: {error}")
            return None
        if answered.status not in (200, 404, 409, 503):
            self.broken(f"{method} {path} is answered with {answered.status}: {answered.body.decode()}")
        return answered

    def ask(self, name: str, nodes: tuple[str, ...], *, max_age: float, runs: float) -> Job:
        """A job asks for nodes; when it is admitted it has them for so long, and gives them back."""
        if name in self.jobs:
            return self.jobs[name]
        request = GateRequest(job=name, attempt=1, nodes=nodes, max_age_seconds=max_age)
        job = self.jobs[name] = Job(name, 1, request, runs, self.loop.now)
        self._soon(self._run_job(job))
        return job

    async def _run_job(self, job: Job) -> None:
        decision = await self._follow(job)
        if decision is not None and decision.decision is Verdict.ADMIT:
            self._admit(job, decision)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(job.runs_seconds):
                    while not await wait_for(job.stop, AGAIN_SECONDS):
                        await self._compare(job)
            self._end_job(job)
        job.ended = True
        await self._release(job)

    async def _release(self, job: Job) -> None:
        """Give the nodes of a job back, until that is answered."""
        while not job.released:
            lost = self.lost
            answered = await self.call("hooks", "DELETE", "/v1/gates/lease", f"job={job.name}&attempt={job.attempt}")
            # An older database knows nothing of it, and what nobody has seen to end is given back once more.
            job.released = answered is not None and answered.status in (200, 404) and lost == self.lost
            if not job.released:
                await asyncio.sleep(2.0)

    async def _follow(self, job: Job) -> Decision | None:
        """Ask until there is a decision; None where the hook gives up."""
        while not job.refused:
            lost = self.lost  # an answer may be on its way while the database that it is of is lost
            told = await self._ask_once(job)
            if told is not None and told.decision is not Verdict.HOLD:
                job.decision, job.decided_of = told, lost
                return told
            if told is not None and job.heard_at is None:
                job.heard_at = self.loop.now
            if not self.healed and self.loop.now > job.asked_at + POLICY.wait_seconds + 4 * BOUND_SECONDS:
                return None
            if told is None:
                await asyncio.sleep(1.0)
        return None

    async def _ask_once(self, job: Job) -> Decision | None:
        job.asked_last = self.loop.now
        answered = await self.call("hooks", "POST", "/v1/gates", f"wait={HOOK_HOLD_SECONDS:g}", job.request)
        if answered is None or answered.status != 200:
            # Its admission is over, although it has never heard of it: a real hook ends with this, too.
            job.refused = answered is not None and answered.status == 409
            return None
        return wire.decode(answered.body, Decision, what="its answer")

    def _admit(self, job: Job, decision: Decision) -> None:
        """The job starts: it has its nodes from now on."""
        self.admitted += 1
        job.runs_on = frozenset(node.node for node in decision.nodes)
        self.log(f"{job.name} starts on {sorted(job.runs_on)}")
        if job.runs_on != set(job.request.nodes):
            self.broken(f"{job.name} asked for {job.request.nodes} and was given {sorted(job.runs_on)}")
        for other in self.jobs.values():
            if other is not job and (both := other.runs_on & job.runs_on):
                self.broken(f"{sorted(both)} is given to {job.name} while {other.name} runs there")
        decided_at = self.decided_at.get(job.name, job.asked_at)  # its leader may have died as it decided
        if down := {name for name in job.runs_on if self.rebooted_at.get(name, -math.inf) > decided_at}:
            late = sorted(name for name in down if self.rebooted_at[name] < job.asked_last)
            if late and job.name in self.decided_at:
                self.broken(f"{job.name} asks again and is told to start on {late}, started again since its admission")
            job.stop.set()  # a node went down while it was told: it lacks a rank
            job.runs_on -= down
        if job.name not in UNSEEN:
            for name in job.runs_on:
                self.nodes[name].holders[f"pid {job.name}"] = None

    def _end_job(self, job: Job) -> None:
        self.log(f"{job.name} ends")
        for name in job.runs_on:
            self.nodes[name].holders.pop(f"pid {job.name}", None)
        job.runs_on = frozenset()

    async def _compare(self, job: Job, to: str = "") -> None:
        """A hook that started again asks once more: what it was told stands, whoever is asked."""
        before, lost, running = job.decision, self.lost, bool(job.runs_on) and not job.stop.is_set()
        answered = await self.call("hooks", "POST", "/v1/gates", "wait=0", job.request, to=to)
        if answered is None or before is None or lost != self.lost:
            return
        running = running and bool(job.runs_on) and not job.stop.is_set()
        if answered.status == 409 and running and job.decided_of == lost:
            self.broken(f"{job.name} runs and is told that it is over: {answered.body.decode()}")
        if answered.status != 200:
            return
        now = wire.decode(answered.body, Decision, what="its answer")
        same = dataclasses.replace(now, decided_seconds_ago=before.decided_seconds_ago)  # it grows older, no more
        if job.decided_of == lost and same != before:
            self.broken(f"{job.name} was told {before} and is told {now} now")
        given = {node.node for node in now.nodes}
        if running and now.decision is Verdict.ADMIT and given != set(job.request.nodes):
            self.broken(f"{job.name} runs on {sorted(job.runs_on)} and is told {sorted(given)} now")

    async def _keep_out(self, node: str) -> None:
        self.perhaps_quarantined.add(node)
        body = {"reason": "test", "owner": "ana"}
        answered = await self.call("people", "PUT", f"/v1/nodes/{node}/quarantine", "unseen=true", body)
        if answered is not None and answered.status == 200 and not self.healed:
            self.quarantined[node] = self.loop.now
            self.log(f"{node} is quarantined")

    async def _unquarantine(self, node: str) -> None:
        for _ in range(20):
            answered = await self.call("people", "DELETE", f"/v1/nodes/{node}/quarantine")
            if answered is not None and answered.status == 200:
                self.quarantined.pop(node, None)
                self.perhaps_quarantined.discard(node)
                return
            await asyncio.sleep(2.0)
        self.broken(f"the quarantine of {node} cannot be ended")

    # --- promises -----------------------------------------------------------------------------------------------------

    def broken(self, what: str) -> NoReturn:
        """A promise was not kept: the run ends after this step, whoever catches the error."""
        self.log(f"BROKEN: {what}")
        error = BrokenPromiseError(what)
        self.loop.errors.append(error)
        raise error

    def _after_step(self, process: Process | None) -> None:
        node = None if process is None else self.nodes.get(process.machine.name)
        if node is not None and node.leases is not None and len(node.leases.held) > 1:
            self.broken(f"{node.name} is in two leases: {[one.lease.id for one in node.leases.held]}")
        if self._killed_at is not None and process is (one := self.aggregator).process:
            self._killed_at -= 1
            if self._killed_at <= 0:
                self._killed_at = None
                self.log(f"{one.name} is killed")
                one.kill()

    def _on_commit(self, process: Process | None, leader: int) -> None:
        """No leader of an old term commits. Remembers when leases were granted, whatever becomes of who did it."""
        one = next((one for one in self._aggregators() if one.process is process), None)
        if one is not None and not leader and len(self.addresses) > 1:
            self._check_takeover(one)
        if one is None or not leader:
            return
        (term,) = self.disk.connection.execute("SELECT term FROM leadership").fetchone()
        if leader != term:
            self.broken(f"{one.name} of term {leader} commits in term {term}")
        for lease, granted_at in self.disk.connection.execute("SELECT id, granted_at FROM leases"):
            self.granted_at.setdefault(lease, one.when(granted_at))

    def _check_takeover(self, one: SimulatedAggregator) -> None:
        """
        Nobody takes over while another one may speak as the leader; but for one that was told to step down, and where
        the clock of the database has just jumped.
        """
        holder = self.disk.holder
        if not holder or self.loop.now - self._clock_set_at < LEASE_SECONDS:
            return
        (after,) = self.disk.connection.execute("SELECT holder FROM leadership").fetchone()
        if after == holder:
            return  # it has looked at the schema and taken nothing
        for other in self._aggregators():
            if other is not one and other.leads() and other.holder == holder:
                self.broken(f"{one.name} takes over while {other.name} leads")

    def _on_answer(self, process: Process, led: bool, asked: Asked, status: int) -> None:
        """Only who leads answers nodes. `led`: it did when it was asked."""
        one = next((one for one in self._aggregators() if one.process is process), None)
        if asked.path.endswith("/sync") and status == 200 and not led and one is not None and not one.leads():
            self.broken(f"{one.name} does not lead and answers {asked.source}")

    def _leads(self, process: Process) -> bool:
        return any(one.process is process and one.leads() for one in self._aggregators())

    def _aggregators(self) -> tuple[SimulatedAggregator, ...]:
        return (*self.former, *self.aggregators.values())

    def _check_decided(self, one: SimulatedAggregator, gate: Gate) -> None:
        """No admission without fresh evidence of every node; `gate` is decided and on disk."""
        decision = gate.decision
        assert decision is not None
        self.log(f"{one.name} has decided {gate.request.job}: {decision.decision.value}")
        self.decided_at[gate.request.job] = self.loop.now
        if decision.decision is not Verdict.ADMIT:
            return
        decided_at, max_age = one.when(decision.decided_at), gate.terms.max_age_seconds
        for name, grant in gate.granted.items():
            if self.quarantined.get(name, math.inf) <= decided_at:
                self.broken(f"{name} is quarantined, and {gate.request.job} is admitted there")
            # Evidence is as fresh as asked when the leases are granted, since nodes take a while to store them; a run
            # that the gate itself has ordered stays valid for it.
            since = min(decided_at, self.granted_at[grant.lease_id]) - max_age - SLACK_SECONDS
            if name in gate.ordered:
                since = min(since, self.jobs[gate.request.job].asked_at)
            self._check_evidence(gate.request.job, self.nodes[name], since, decided_at)

    def _check_evidence(self, job: str, node: SimulatedNode, since: float, decided_at: float) -> None:
        told = node.told_before(decided_at)
        for check, declared in CATALOGUE.items():
            last = told.runs.get(check)
            good = [
                run
                for run in node.runs
                if run.check == check
                and run.good
                and since <= run.ended_at <= decided_at
                and run.boot >= told.boot
                and (run.serial >= told.serial or not declared.accelerators)
            ]
            if not good:
                self.broken(f"{job} is admitted on {node.name} without a good {check} since {since:.3f}")
            if last is not None and not last.good and all(run.number < last.number for run in good):
                self.broken(f"{job} is admitted on {node.name}, whose last {check} failed")


def simulate(plan: Plan, *, keep_log: bool = False) -> Outcome:
    """Play a plan."""
    loop = VirtualLoop()
    folder = Path(tempfile.mkdtemp(prefix="healthd-simulation-", dir=_memory()))
    with _quiet():
        try:
            made: list[World] = []

            async def main() -> None:
                made.append(World(plan, loop, folder))
                await made[0].play()

            broken = ""
            try:
                loop.simulate(main(), seed=plan.seed)
            except Exception as error:  # noqa: BLE001  # whatever the product lets out is a finding
                broken = str(error) if isinstance(error, BrokenPromiseError) else f"{type(error).__name__}: {error}"
            world = made[0]
            return Outcome(
                broken=broken,
                digest=world._digest.hexdigest(),
                steps=loop.steps,
                seconds=loop.now,
                log=tuple(world.lines) if keep_log else (),
                admitted=world.admitted,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The product logs what it is made to suffer; who wants to read it replays with `-v`."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
