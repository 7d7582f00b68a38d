"""
A machine of the fleet and its daemon: the daemon's logic is the real one, the checks look at what is true here.

What is true: whether the device is good, which jobs have it, and every run of a check with what it saw.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checks.contract import Scope, Status, Tier
from checks.worker.faults import Fault
from healthd.core import wire
from healthd.core.errors import BadInputError, UnreachableError
from healthd.core.http.client import problem_in
from healthd.core.model import CheckResult, DeviceRecord, Inventory, SyncAnswer, SyncRequest
from healthd.core.tasks import Tasks
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import system_clock
from healthd.node.orders.leases import LeaseStore
from healthd.node.orders.orders import Orders
from healthd.node.settings import ActiveSettings, LeaseSettings, NodeSettings, SyncSettings, Unprompted
from healthd.node.state import files
from healthd.node.state.saving import StateFile, StateSaver
from healthd.node.state.store import NodeStore
from healthd.node.sync import NOT_LEADER, SLACK_SECONDS, ElsewhereError, SyncClient
from healthd.runner.settings import OnResult, Plan, Survey
from tests.node.node_kit import finding, info
from tests.simulation.loop import EPOCH, Machine, Process, VirtualLoop
from tests.simulation.network import Asked, Network, NetworkError

CATALOGUE = {
    "disk": info("disk", interval=30.0),
    "matmul": dataclasses.replace(info("matmul", Tier.QUICK, scope=Scope.DEVICE), accelerators=True),
}
DEVICE = "cuda:0"
SYNC_SECONDS = 10.0
"""How long a sync is held. Short, so that a simulation sees many."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a check that has ended, as it truly was: `good` says whether the device was, all the time."""

    number: int
    check: str
    boot: int
    serial: int
    ended_at: float
    good: bool


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the daemon knew when it composed a sync: the newest run of each check in this boot, and the device seen."""

    boot: int = 0
    serial: int = 0
    runs: Mapping[str, Run] = field(default_factory=dict)


class SimulatedNode:
    """See the module. `start` and `kill` are those of the daemon; `reboot` is the machine's."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        loop: VirtualLoop,
        network: Network,
        aggregators: tuple[str, ...],
        chance: random.Random,
        log: Callable[[str], None],
    ) -> None:
        self.name, self.machine = name, Machine(name)
        self.loop, self.network, self.chance = loop, network, chance
        self._aggregators, self._log = aggregators, log
        self._folder = folder
        folder.mkdir()
        self.process: Process | None = None
        self.boots = 1
        self.bad = False
        self.serial = 1
        self.since: float | None = None  # when the device appeared, in seconds since boot; None: with the machine
        self.holders: dict[str, None] = {}
        self.runs: list[Run] = []
        self.seen_serial = 0
        self._told = [(-math.inf, Known())]  # what aggregators have confirmed to have heard, and when
        self.leases: LeaseStore | None = None
        self.changed_at = 0.0  # when the device last turned bad, or good

    # --- the machine --------------------------------------------------------------------------------------------------

    def set_bad(self, bad: bool) -> None:
        """The device breaks, or is mended. Nobody is told."""
        if bad != self.bad:
            self.bad, self.changed_at = bad, self.loop.now
            self._log(f"{self.name} is {'bad' if bad else 'good'}")

    def swap(self) -> None:
        """Another device is in its place, which is good or bad as the one before."""
        self.serial += 1
        self.since = 1000.0 + self.loop.now

    def reboot(self) -> None:
        """The machine goes down with all that runs on it; its disk stays."""
        self.kill()
        self.boots += 1
        self.holders.clear()

    # --- the daemon ---------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def start(self) -> None:
        """A new daemon; what the one before had in memory is gone."""
        if self.process is None:
            self.process = Process(self.name, self.machine)
            self.process.call(self._start)

    def _start(self) -> None:
        process = self.process
        assert process is not None
        settings = NodeSettings(
            name=self.name,
            state_dir=self._folder,
            run_dir=self._folder,
            labels={"pool": "p"},
            host_root=self._folder,
            look_seconds=5.0,
            active=ActiveSettings(unprompted=Unprompted.IDLE, interval_seconds=60.0, retry_seconds=10.0),
            lease=LeaseSettings(settle_seconds=5.0, watch_seconds=2.0),
            sync=SyncSettings(
                aggregators=tuple(f"http://{name}" for name in self._aggregators),
                wait_seconds=SYNC_SECONDS,
                full_seconds=30.0,
                backoff_max_seconds=4.0,
            ),
        )
        clock, boot_id = system_clock(), f"{self.name}-boot-{self.boots}"
        store = NodeStore(settings, enabled_checks(CATALOGUE, settings), clock=clock, boot_id=boot_id)
        StateFile(store, self._folder / "state.json").restore()
        tasks = Tasks()
        scheduler = Scheduler(store, Probes(self), settings, clock=clock, tasks=tasks, seed=self.chance.getrandbits(32))
        leases = LeaseStore(self._folder / "orders.json", clock=clock, boot_id=boot_id)
        orders = Orders(store, scheduler, leases, settings, clock=clock, tasks=tasks)

        async def connect(url: str) -> SimulatedConnection:
            return SimulatedConnection(self, url, key)

        key = files.node_key(self._folder)
        client = SyncClient(
            store,
            orders,
            settings.sync,
            key=key,
            clock=clock,
            seed=self.chance.getrandbits(32),
            on_error=self._unforeseen,
            connect=connect,
        )
        store.listen(client.notify)
        orders.on_change = client.notify
        self.leases = leases
        saver = StateSaver(store, settings, lambda: None)

        async def run() -> None:
            tasks.supervise("passive checks", scheduler.run_passive)
            tasks.supervise("active checks", scheduler.run_active)
            tasks.supervise("watch over orders and leases", orders.watch)
            tasks.supervise("held sync", client.run_held)
            tasks.supervise("urgent sync", client.run_urgent)
            await saver.run()

        process.start(run(), f"daemon of {self.name}")

    def _unforeseen(self, error: Exception) -> None:
        self.loop.errors.append(error)

    def known(self) -> Known:
        """What the daemon knows now."""
        runs = {run.check: run for run in self.runs[-50:] if run.boot == self.boots}
        return Known(boot=self.boots, serial=self.seen_serial, runs=runs)

    def note_told(self, known: Known) -> None:
        """An aggregator has confirmed that it has heard this; answers may come in another order."""
        before = self._told[-1][1]
        runs = dict(before.runs)
        for check, run in known.runs.items():
            if check not in runs or runs[check].number < run.number:
                runs[check] = run
        told = Known(boot=max(before.boot, known.boot), serial=max(before.serial, known.serial), runs=runs)
        if told != before:
            self._told.append((self.loop.now, told))

    def told_before(self, at: float) -> Known:
        """What aggregators had confirmed to have heard by then."""
        return next(known for when, known in reversed(self._told) if when <= at)


class SimulatedConnection:
    """The way from a node to one aggregator."""

    def __init__(self, node: SimulatedNode, url: str, key: str) -> None:
        self.url, self._node, self._key = url, node, key
        self.peer_address: str | None = "10.0.0.1"

    async def post(self, request: SyncRequest, wait_seconds: float) -> SyncAnswer:
        """As of an AggregatorConnection."""
        node = self._node
        known = node.known()
        asked = Asked(
            source=node.name,
            method="POST",
            path=f"/v1/nodes/{node.name}/sync",
            query=f"wait={wait_seconds:g}",
            headers=(("X-Healthd-Node-Key", self._key),),
            body=wire.encode(request),
        )
        to = self.url.removeprefix("http://")
        try:
            answered = await node.network.ask(to, asked, seconds=wait_seconds + SLACK_SECONDS)
        except NetworkError as error:
            raise UnreachableError(f"aggregator {self.url} cannot be reached: {error}") from None
        if answered.status != 200:
            said = f"aggregator {self.url} refuses: HTTP {answered.status}: {problem_in(answered.body)}"
            if answered.status == NOT_LEADER:
                raise ElsewhereError(said, dict(answered.headers)[b"leader"].decode())
            raise UnreachableError(said)
        node.note_told(known)
        try:
            return wire.decode(answered.body, SyncAnswer, what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {self.url}: {error}") from None

    async def close(self) -> None:
        """Nothing is to be closed."""


class Probes:
    """The runner of the daemon: what it finds is what is true of the machine."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self.latest: Survey | None = None
        self.probe_device_seconds = 0.0

    async def survey(self) -> Survey:
        """Look at the machine."""
        node = self._node
        looked_at = 1000.0 + node.loop.now
        await asyncio.sleep(node.chance.uniform(0.01, 0.2))
        device = DeviceRecord(
            target=DEVICE, kind="H100", serial=f"{node.name}-{node.serial}", cores=1, memory_bytes=1 << 36,
            since=node.since,
        )  # fmt: skip
        node.seen_serial = max(node.seen_serial, int(str(device.serial).rpartition("-")[2]))
        self.latest = Survey(
            inventory=Inventory(
                accelerator="cuda", device_count=1, core_count=1, memory_bytes=1 << 36, efa_count=0, devices=(device,)
            ),
            boot_id=f"{node.name}-boot-{node.boots}",
            instance_id=None,
            instance_type=None,
            versions={},
            holders=tuple(sorted(node.holders)),
            looked_at=looked_at,
        )
        return self.latest

    async def run(
        self, plan: Plan, *, faults: Sequence[Fault] = (), on_result: OnResult | None = None
    ) -> tuple[CheckResult, ...]:
        """One result for each check of the plan."""
        assert not faults
        node = self._node
        await self.survey()
        results = []
        for check in plan.checks:
            began, serial = node.loop.now, node.serial
            bad = node.bad
            active = CATALOGUE[check].tier is not Tier.PASSIVE
            await asyncio.sleep(node.chance.uniform(0.5, 2.0) if active else 0.05)
            good = not (active and (bad or node.bad or node.changed_at >= began))
            run = Run(
                number=len(node.runs),
                check=check,
                boot=node.boots,
                serial=serial if serial == node.serial else -1,
                ended_at=node.loop.now,
                good=good,
            )
            node.runs.append(run)
            found = finding() if good else finding(Status.FAIL, "WrongResult", DEVICE)
            results.append(
                CheckResult(
                    check=check,
                    tier=plan.tier,
                    status=found.status,
                    findings=(found,),
                    age_seconds=0.0,
                    started_at=EPOCH + began,
                    duration_seconds=node.loop.now - began,
                    attempts=1,
                    error=None,
                    injected=False,
                    executor=plan.executor,
                    devices=(DEVICE,) if active else (),
                    began_at=1000.0 + began,
                )
            )
            if on_result is not None:
                on_result(results[-1])
        if plan.tier is not Tier.PASSIVE:
            await self.survey()
        return tuple(results)
