"""
A node daemon on a stand-in Neuron machine that changes under it: faults show in `/health` and `/metrics`, and go.

Real checks in real children and real HTTP; the clock of the scheduler alone is moved by hand, so that half a minute
between two looks needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from checks.contract import Tier
from checks.discover import builtin_checks
from healthd.core.http import server as web
from healthd.core.tasks import Tasks
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.checks.scheduler import Scheduler
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.settings import NodeSettings
from healthd.node.state.store import NodeStore
from healthd.runner.runner import Runner
from healthd.runner.settings import RunnerSettings
from tests.fakes.neuron import NeuronMachine, parse_fault
from tests.hosts.tree import Tree, read_tree
from tests.node.node_kit import MovedClock
from tests.patience import PATIENCE

WAIT_SECONDS = 15.0 * PATIENCE
Seen = set[tuple[str, str, str]]  # check, code, target
FINDING = re.compile(
    r'healthd_finding\{check="(.*?)",injected="false",reason="(.*?)",status="fail",target="(.*?)"\} 1\.0'
)


class Daemon:
    """The parts of `healthd node` that check and answer, on a machine that is a directory."""

    def __init__(self, machine: NeuronMachine, folder: Path) -> None:
        self.machine = machine
        self._settings = NodeSettings(name="n1", state_dir=folder, run_dir=folder, host_root=machine.root)
        self._time = MovedClock()
        names = {name: info for name, info in builtin_checks().items() if info.tier is Tier.PASSIVE}
        specs = enabled_checks(names, self._settings)
        self.longest_seconds = max(spec.interval_seconds for spec in specs if spec.name in ("efa", "neuron_counters"))
        self.book = NodeStore(self._settings, specs, clock=self._time.clock, boot_id=machine.host.boot_id())
        self._runner = Runner(RunnerSettings(host_root=machine.root, run_dir=folder))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Daemon]:
        sock, tasks = web.bind("127.0.0.1:0"), Tasks()
        clock = self._time.clock
        self._scheduler = Scheduler(self.book, self._runner, self._settings, clock=clock, tasks=tasks, seed=1)
        server = web.Server(NodeApi(self.book), [sock], limits=web.Limits(stop_seconds=0.1))
        tasks.supervise("passive", self._scheduler.run_passive)
        address = f"http://{web.address_of(sock)}"
        try:
            async with server, httpx.AsyncClient(base_url=address, trust_env=False, verify=False) as http:
                self.http = http
                yield self
        finally:
            await tasks.stop(1.0)
            assert not any(tasks.errors.values()), tasks.errors

    async def health(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get("/health")).json()
        return found

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    async def told(self) -> Seen:
        return {(r["check"], r["code"], r["target"]) for r in (await self.health())["reasons"]}

    async def until(self, true: Callable[[Seen], bool]) -> Seen:
        """Wait for what takes real time: a round of checks in its child."""
        seen: Seen = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                while not true(seen := await self.told()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert true(seen), seen
        return seen

    async def passes(self, seconds: float) -> None:
        """Time goes by."""
        self._time.move(seconds)
        self._scheduler._passive.wake.set()


FAULTS: dict[str, Seen] = {
    "missing_core@neuron:7": {("neuron_cores", "MissingDevice", "neuron:7")},
    "ecc@neuron:2": {("neuron_counters", "EccErrors", "neuron:2")},
    "efa_down@efa:rdmap16s26": {("efa", "LinkDown", "efa:rdmap16s26")},
    "hw_error_line@neuron:4=HBM_UNCORRECTABLE_ERROR": {("kernel_log", "KernelFault", "neuron:4")},
    "stuck_core@neuron:3": {("neuron_cores", "StuckCores", "neuron:3")},
}


async def test_faults_of_a_machine_appear_within_their_interval_and_go(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    healthy = read_tree(machine.root)
    daemon = Daemon(machine, tmp_path / "node")
    expected: Seen = set().union(*FAULTS.values())

    async with daemon.serving():
        await daemon.until(lambda seen: not seen)
        health = await daemon.health()
        assert (health["status"], health["health"]) == ("pass", "healthy")
        assert 'healthd_node_health{health="healthy"} 1.0' in await daemon.metrics()
        for fault in FAULTS:
            machine.fault(*parse_fault(fault))
        assert await daemon.told() == set()  # nobody has looked
        await daemon.passes(daemon.longest_seconds)
        await daemon.until(lambda seen: seen >= expected)
        assert await daemon.told() == expected
        answer = await daemon.http.get("/health")
        assert (answer.status_code, answer.json()["health"]) == (503, "unhealthy")
        metrics = await daemon.metrics()
        assert set(FINDING.findall(metrics)) == expected
        assert 'healthd_check_status{check="efa",status="fail"} 1.0' in metrics
        assert "healthd_node_allocated 0.0" in metrics
        put_back(machine.root, healthy)
        await daemon.passes(daemon.longest_seconds)
        damage = ("kernel_log", "KernelFault", "neuron:4")
        counted = ("neuron_counters", "EccErrors", "neuron:2")
        await daemon.until(lambda seen: not seen & (expected - {counted, damage}))
        # What was counted is not forgotten because the counter is: it is a warning until the next boot. What the
        # kernel has logged is not forgotten because the log is.
        async with asyncio.timeout(WAIT_SECONDS):
            while set(FINDING.findall(await daemon.metrics())) != {damage}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await daemon.told() == {counted, damage}
        assert (await daemon.health())["health"] == "unhealthy"


def put_back(root: Path, healthy: Tree) -> None:
    """The machine as it was: each file that is gone or says something else, and whole, so that nobody reads half."""
    for path, content, _ in healthy.files:
        target = root / path
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f"{target.name}.new")
            draft.write_bytes(content)
            draft.replace(target)


async def test_job_on_the_devices_makes_the_node_allocated_and_its_end_frees_it(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    daemon = Daemon(machine, tmp_path / "node")

    async def allocated(value: str) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while f"healthd_node_allocated {value}" not in await daemon.metrics():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async with daemon.serving():
        await daemon.until(lambda seen: not seen)
        await allocated("0.0")
        machine.fault("busy", "all", "900")
        await daemon.passes(daemon.longest_seconds)
        await allocated("1.0")
        assert (await daemon.health())["health"] == "healthy"
        shutil.rmtree(machine.root / "proc/900")
        machine.state["processes"].clear()
        machine.save()
        await daemon.passes(daemon.longest_seconds)
        await allocated("0.0")
