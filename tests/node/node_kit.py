"""Parts for tests of the node daemon: a clock that is moved by hand, records, and probes that do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from checks.contract import CheckInfo, Finding, Measurement, Scope, Status, Tier, worst
from checks.discover import builtin_checks
from checks.worker.faults import Fault
from healthd.core.model import (
    CheckResult,
    CheckSpec,
    DeviceRecord,
    Health,
    Inventory,
    Lease,
    NodeState,
    Order,
    RunOrder,
)
from healthd.core.tasks import Tasks
from healthd.node.checks.active_run import SchedulerReader
from healthd.node.checks.catalogue import enabled_checks
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock
from healthd.node.orders.leases import LeaseStore
from healthd.node.orders.orders import Orders
from healthd.node.settings import ActiveSettings, LeaseSettings, NodeSettings
from healthd.node.state.store import NodeStore
from healthd.runner.settings import OnResult, Plan, Survey
from tests.patience import PATIENCE

T = TypeVar("T")

BOOT = "boot-1"


class MovedClock:
    """Time stands still unless a test moves it."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at = at
        self.wall_offset = 1_700_000_000.0
        self.clock = Clock(boot=lambda: self.at, wall=lambda: self.at + self.wall_offset)

    def move(self, seconds: float) -> None:
        self.at += seconds


DECLARED = builtin_checks()


def info(name: str, tier: Tier = Tier.PASSIVE, *, interval: float = 30.0, scope: Scope = Scope.NODE) -> CheckInfo:
    return CheckInfo(
        name=name,
        tier=tier,
        scope=scope,
        interval_seconds=interval,
        timeout_seconds=5.0,
        judged=False,
        doc=f"\n    What {name} is.\n\n    More of it.\n",
        accelerators=name in DECLARED and DECLARED[name].accelerators,
        accelerator_faults=DECLARED[name].accelerator_faults if name in DECLARED else (),
        collective=name in DECLARED and DECLARED[name].collective,
        series=DECLARED[name].series if name in DECLARED else (),
        origin="built-in",
    )


CATALOGUE = {
    "disk": info("disk"),
    "load": info("load", interval=60.0),
    "matmul": info("matmul", Tier.QUICK, scope=Scope.DEVICE),
    "burn": info("burn", Tier.DEEP, scope=Scope.DEVICE),
}


def settings(folder: Path, **changes: Any) -> NodeSettings:
    values: dict[str, Any] = {"name": "n1", "state_dir": folder, "run_dir": folder, "listen": "127.0.0.1:0"}
    return NodeSettings(**{**values, **changes})


def specs(folder: Path | None = None, **active: Any) -> tuple[CheckSpec, ...]:
    where = folder or Path("/nonexistent")
    return enabled_checks(CATALOGUE, settings(where, active=ActiveSettings(**active)))


def finding(status: Status = Status.PASS, reason: str | None = None, target: str = "node", **more: Any) -> Finding:
    if reason is None and status is not Status.PASS:
        reason = {Status.FAIL: "WrongResult", Status.WARN: "LowMemory", Status.UNKNOWN: "Timeout"}.get(status, "Busy")
    return Finding(status=status, reason=reason, message=f"it is {status.value}", target=target, **more)


def result(
    check: str,
    *findings: Finding,
    age: float = 0.0,
    tier: Tier = Tier.PASSIVE,
    injected: bool = False,
    started_at: float = 1_700_000_900.0,
) -> CheckResult:
    found = findings or (finding(),)
    return CheckResult(
        check=check,
        tier=tier,
        status=worst(f.status for f in found),
        findings=found,
        age_seconds=age,
        started_at=started_at,
        duration_seconds=0.1,
        attempts=1,
        error=None,
        injected=injected,
        executor="daemon",
        devices=("cpu:0",),
    )


def measured(name: str, value: float, target: str = "node", **labels: str) -> Finding:
    one = Measurement(name=name, value=value, lower=None, upper=None, origin="none", labels=labels)
    return Finding(status=Status.PASS, reason=None, message="measured", target=target, measurements=(one,))


def survey(holders: tuple[str, ...] | None = (), looked_at: float = math.inf, *, since: float | None = None) -> Survey:
    """As of `looked_at`; else as of when it is recorded."""
    device = DeviceRecord(target="cpu:0", kind="cpu", serial=None, cores=1, memory_bytes=1 << 30, since=since)
    return Survey(
        inventory=Inventory(
            accelerator="cpu", device_count=1, core_count=1, memory_bytes=1 << 30, efa_count=0, devices=(device,)
        ),
        boot_id=BOOT,
        instance_id=None,
        instance_type=None,
        versions={"torch": "2"},
        holders=holders,
        looked_at=looked_at,
    )


def state(**changes: Any) -> NodeState:
    """A node with one passive and one quick check, both passed just now."""
    values: dict[str, Any] = {
        "node": "n1",
        "aliases": (),
        "instance_id": None,
        "boot_id": BOOT,
        "labels": {},
        "instance_type": None,
        "inventory": None,
        "versions": {},
        "health": Health.UNKNOWN,
        "reasons": (),
        "checks": tuple(spec for spec in specs() if spec.name in ("disk", "matmul")),
        "results": (result("disk"), result("matmul", tier=Tier.QUICK)),
        "allocated": (),
        "leases": (),
        "quarantine": None,
        "faults": (),
        "running": None,
        "address": None,
        "observed_at": 1_700_001_000.0,
    }
    return NodeState(**{**values, **changes})


def lease(name: str = "L1", **changes: Any) -> Lease:
    values: dict[str, Any] = {
        "id": name,
        "gate": "g1",
        "job": "train",
        "attempt": 0,
        "issuer": "db1",
        "workload": None,
        "grace_seconds": 900.0,
        "max_seconds": 86400.0,
        "age_seconds": 0.0,
    }
    return Lease(**{**values, **changes})


def lease_order(one: Lease) -> Order:
    return Order(id=one.id, kind="lease", deadline_seconds=30.0, lease=one)


def run_order(name: str = "R1", tier: Tier = Tier.QUICK, *, deadline: float = 300.0, past: str | None = None) -> Order:
    return Order(id=name, kind="run", deadline_seconds=deadline, run=RunOrder(tier=tier, past=past))


class ScriptedProbes:
    """The edge to the machine: runs take as long as `gate` is closed, looks as long as `look_gate` is."""

    def __init__(self) -> None:
        self.holders: tuple[str, ...] | None = ()
        self.since: float | None = None  # since when the device is there
        self.plans: list[Plan] = []
        self.faults: list[tuple[str, ...]] = []
        self.cancelled: list[Plan] = []
        self.surveys = 0
        self.latest: Survey | None = None
        self.boot: Callable[[], float] = lambda: math.inf
        self.look_fails: list[str] = []  # why the next looks fail, one each
        self.probe_device_seconds = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.look_gate = asyncio.Event()
        self.look_gate.set()
        self.outcome: Callable[[str, Plan], CheckResult] = lambda check, plan: result(check, tier=plan.tier)

    async def survey(self) -> Survey:
        self.surveys += 1
        looked_at = self.boot()
        await self.look_gate.wait()
        failed = self.look_fails.pop(0) if self.look_fails else ""
        seen = survey(None if failed else self.holders, looked_at, since=self.since)
        self.latest = dataclasses.replace(seen, failed=failed)
        return self.latest

    async def run(
        self, plan: Plan, *, faults: Sequence[Fault] = (), on_result: OnResult | None = None
    ) -> tuple[CheckResult, ...]:
        self.plans.append(plan)
        self.faults.append(tuple(str(fault) for fault in faults))
        await self.survey()
        try:
            if plan.tier is not Tier.PASSIVE:
                await self.gate.wait()
                self.probe_device_seconds += 1.0
        except asyncio.CancelledError:
            self.cancelled.append(plan)
            raise
        results = tuple(self.outcome(check, plan) for check in plan.checks)
        for one in results:
            if on_result is not None:
                on_result(one)
        return results

    def active_plans(self) -> list[Plan]:
        return [plan for plan in self.plans if plan.tier is not Tier.PASSIVE]


class World:
    """A node without sockets: book, scheduler and orders around scripted probes, with a clock moved by hand."""

    def __init__(
        self,
        folder: Path,
        *,
        active: ActiveSettings | None = None,
        boot_id: str | None = BOOT,
        schedulers: SchedulerReader | None = None,
        first_restart_seconds: float = 1.0,
    ) -> None:
        self.time = MovedClock()
        self.settings = settings(
            folder, active=active or ActiveSettings(), lease=LeaseSettings(settle_seconds=60.0, watch_seconds=0.01)
        )
        self.tasks = Tasks(first_restart_seconds=first_restart_seconds)
        self._forgiven = False
        self.probes = ScriptedProbes()
        self.probes.boot = self.time.clock.boot
        self.book = NodeStore(
            self.settings, enabled_checks(CATALOGUE, self.settings), clock=self.time.clock, boot_id=boot_id
        )
        self.scheduler = Scheduler(
            self.book,
            self.probes,
            self.settings,
            clock=self.time.clock,
            tasks=self.tasks,
            schedulers=schedulers,
            seed=1,
        )
        self.ledger = LeaseStore(folder / "orders.json", clock=self.time.clock, boot_id=boot_id)
        self.orders = Orders(
            self.book, self.scheduler, self.ledger, self.settings, clock=self.time.clock, tasks=self.tasks
        )

    async def __aenter__(self) -> World:
        self.tasks.supervise("passive", self.scheduler.run_passive)
        self.tasks.supervise("active", self.scheduler.run_active)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.tasks.stop(1.0)
        assert self._forgiven or not any(self.tasks.errors.values()), self.tasks.errors

    def forgive(self) -> None:
        """A task has failed, and that was the test."""
        self._forgiven = True

    async def passed(self, seconds: float) -> None:
        """Time goes by, and everybody notices."""
        self.time.move(seconds)
        self.scheduler._passive.wake.set()
        self.scheduler._wake.set()
        await quiet()

    async def take(self, *orders: Order, issuer: str = "db1", acknowledged: tuple[str, ...] = ()) -> None:
        """An answer of the aggregator to what the node reports now."""
        self.orders.apply(orders, issuer=issuer, acknowledged=acknowledged, carried=self.orders.reports())
        await quiet()

    def status(self, order_id: str) -> str | None:
        report = self.orders.reports().get(order_id)
        return report.status if report is not None else None


async def quiet() -> None:
    """Let everything happen that needs no time."""
    for _ in range(50):
        await asyncio.sleep(0)


async def eventually(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that takes real time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds * PATIENCE):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert true()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
