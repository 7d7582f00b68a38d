"""
A fleet for tests of the gate: nodes as data, and a registry whose nodes do what real daemons do with their orders.

`World` is the edge of the machine: it stands for the registry and for the daemons behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from checks.contract import Blame, Finding, Scope, Status, Tier
from healthd.aggregator.engine.admission import new_gate
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate import machine as gates
from healthd.aggregator.gate.records import Claim, Effect, Gate, Override, Snapshot
from healthd.aggregator.gate.transitions import Move
from healthd.aggregator.policy import Policy, Tuning
from healthd.core.model import (
    Allocation,
    CheckResult,
    CheckSpec,
    DeviceRecord,
    GateRequest,
    Health,
    Inventory,
    Lease,
    NodeState,
    Order,
    OrderReport,
    Quarantine,
)

NOW = 1_000_000.0
POLICY = Policy(tuning=Tuning(settle_seconds=0.0), collective=False)


def spec(name: str, tier: Tier) -> CheckSpec:
    return CheckSpec(
        name=name,
        tier=tier,
        interval_seconds=30,
        timeout_seconds=5,
        expires_seconds=3600,
        scope=Scope.NODE,
        doc="what for",
    )


CHECKS = (spec("disk", Tier.PASSIVE), spec("matmul", Tier.QUICK), spec("all_reduce", Tier.QUICK))


def result(
    check: str,
    tier: Tier = Tier.QUICK,
    *,
    age: float = 5.0,
    status: Status = Status.PASS,
    code: str | None = None,
    blame: Blame | None = None,
    message: str = "as it should be",
) -> CheckResult:
    finding = Finding(status=status, reason=code, message=message, target="cpu:0", blame=blame)
    return CheckResult(
        check=check,
        tier=tier,
        status=status,
        findings=(finding,),
        age_seconds=age,
        started_at=NOW - age,
        duration_seconds=1.0,
        attempts=1,
        error=None,
        injected=False,
        executor="daemon",
    )


def good_results(age: float = 5.0) -> tuple[CheckResult, ...]:
    return (result("disk", Tier.PASSIVE, age=age), result("matmul", age=age), result("all_reduce", age=age))


WRONG = result("matmul", status=Status.FAIL, code="WrongResult", message="element 7 is 3.0, not 2.0")


def state(
    name: str,
    results: Sequence[CheckResult] | None = None,
    *,
    pool: str = "a",
    leases: tuple[Lease, ...] = (),
    allocated: tuple[Allocation, ...] = (),
    quarantine: Quarantine | None = None,
) -> NodeState:
    return NodeState(
        node=name,
        aliases=(),
        instance_id=None,
        boot_id="boot",
        labels={"pool": pool},
        instance_type=None,
        inventory=None,
        versions={},
        health=Health.HEALTHY,
        reasons=(),
        checks=CHECKS,
        results=tuple(good_results() if results is None else results),
        allocated=allocated,
        leases=leases,
        quarantine=quarantine,
        faults=(),
        running=None,
        address=f"{name}.example:8080",
        observed_at=NOW,
    )


def with_wrong(age: float = 5.0) -> tuple[CheckResult, ...]:
    return (good_results(age)[0], WRONG, good_results(age)[2])


def neuron(ranks: int = 2, accelerator: str = "neuron") -> Inventory:
    """One Trainium chip of so many cores, or something else of as many."""
    record = DeviceRecord(target="neuron:0", kind="Trainium", serial=None, cores=ranks, memory_bytes=None)
    return Inventory(
        accelerator=accelerator,
        device_count=1,
        core_count=ranks,
        memory_bytes=None,
        efa_count=None,
        devices=(record,),
        workers=tuple(f"neuroncore:{i}" for i in range(ranks)),
    )


def node(name: str, node_state: NodeState | None = None, **changed: object) -> FleetNode:
    plain = FleetNode(
        node=name,
        state=node_state or state(name),
        version=1,
        behind_seconds=0.0,
        heard_seconds=1.0,
        confirmed=True,
        duplicate=False,
        quarantine=None,
        orders={},
        issuer=None,
    )
    return dataclasses.replace(plain, **changed)  # type: ignore[arg-type]


def view(
    *nodes: FleetNode,
    claims: dict[str, Claim] | None = None,
    overrides: dict[str, Override] | None = None,
    recovering: str | None = None,
    settling: str | None = None,
    doubted: Collection[str] = (),
) -> Snapshot:
    pools: dict[str, list[str]] = {}
    for one in sorted(nodes, key=lambda one: one.node):
        if one.state is not None and "pool" in one.state.labels:
            pools.setdefault(one.state.labels["pool"], []).append(one.node)
    return Snapshot(
        now=NOW,
        called={},
        nodes={n.node: n for n in nodes},
        pools=pools,
        claims=claims or {},
        overrides=overrides or {},
        recovering=recovering,
        settling=settling,
        doubted=frozenset(doubted),
    )


MOVES: set[Move] = set()
"""All changes of phase that were seen in this process."""


def step(now: float, before: Gate, seen: Snapshot, policy: Policy) -> tuple[Gate, tuple[Effect, ...]]:
    """A step of the gate at this time."""
    after, effects, moves = gates.step(before, dataclasses.replace(seen, now=now), policy)
    MOVES.update(moves)
    return after, effects


def gate(policy: Policy = POLICY, **request: object) -> Gate:
    asked = GateRequest(**{"job": "train", **request})  # type: ignore[arg-type]
    return new_gate("g-1", asked, policy, NOW)


def lease(
    lease_id: str, *, job: str = "train", attempt: int = 0, issuer: str = "elsewhere", gate_id: str = "g-0"
) -> Lease:
    return Lease(
        id=lease_id,
        gate=gate_id,
        job=job,
        attempt=attempt,
        issuer=issuer,
        workload=None,
        grace_seconds=900,
        max_seconds=1e6,
        age_seconds=3.0,
    )


@dataclasses.dataclass
class Daemon:
    """One node as a daemon keeps it: on `sync` it obeys the newest orders it was given. `deaf` ones hear nothing."""

    state: NodeState
    heard_at: float
    received_at: float
    version: int = 1
    confirmed: bool = True
    duplicate: bool = False
    deaf: bool = False
    result_of_runs: Callable[[], tuple[CheckResult, ...]] = good_results
    refuses_leases: bool = False
    issuer: str | None = None
    quarantine: Quarantine | None = None
    orders: tuple[Order, ...] | None = None
    reports: dict[str, OrderReport] = dataclasses.field(default_factory=dict)
    done: set[str] = dataclasses.field(default_factory=set)
    runs: list[str] = dataclasses.field(default_factory=list)


class World:
    """A `Registry` and its nodes; time is what `now` says."""

    def __init__(self, *names: str, pool: str = "a", now: float = NOW) -> None:
        self.now = now
        self.issuer: str | None = None
        self.pools: dict[str, str] = {}
        self.daemons: dict[str, Daemon] = {}
        self.without_daemon: set[str] = set()  # a hook alone spoke for them
        self.callbacks: list[Callable[[str], None]] = []
        for name in names:
            self.add(name, pool=pool)

    def add(self, name: str, *, pool: str = "a", **state_of: object) -> Daemon:
        daemon = Daemon(state=state(name, pool=pool, **state_of), heard_at=self.now, received_at=self.now)  # type: ignore[arg-type]
        self.daemons[name] = daemon
        self.pools[name] = pool
        self.tell(name)
        return daemon

    def clock(self) -> float:
        return self.now

    # --- as a registry ---

    def node(self, name: str, now: float | None = None) -> FleetNode | None:
        daemon = self.daemons.get(name)
        if daemon is None:
            return None
        return FleetNode(
            node=name,
            state=daemon.state,
            version=daemon.version,
            behind_seconds=(now or self.now) - daemon.received_at,
            heard_seconds=(now or self.now) - daemon.heard_at,
            confirmed=daemon.confirmed,
            duplicate=daemon.duplicate,
            quarantine=daemon.quarantine,
            orders=dict(daemon.reports),
            issuer=daemon.issuer,
        )

    def names(self) -> Sequence[str]:
        return sorted(self.daemons)

    def lease_ids(self, name: str) -> Sequence[str]:
        return [held.id for held in self.daemons[name].state.leases] if name in self.daemons else []

    def former_names(self, name: str) -> Sequence[str]:
        return ()

    def called(self, name: str) -> Sequence[str]:
        if name in self.daemons:
            return (name,)
        return sorted(own for own, daemon in self.daemons.items() if name in daemon.state.aliases)

    def pool(self, pool: str) -> Sequence[str]:
        return sorted(name for name, where in self.pools.items() if where == pool)

    def set_orders(self, node: str, orders: tuple[Order, ...]) -> None:
        if node in self.daemons:
            self.daemons[node].orders = orders

    def set_quarantine(self, node: str, quarantine: Quarantine | None) -> None:
        if node in self.daemons:
            self.daemons[node].quarantine = quarantine

    def set_executors(self, members: Mapping[str, str]) -> None:
        self.executors = dict(members)

    def has_daemon(self, node: str) -> bool:
        return node in self.daemons and node not in self.without_daemon

    def acknowledge(self, node: str, order_ids: Sequence[str]) -> None:
        for order_id in order_ids:
            self.daemons[node].reports.pop(order_id, None)

    def forget(self, name: str) -> None:
        if self.daemons.pop(name, None) is not None:
            del self.pools[name]

    def listen(self, callback: Callable[[str], None], *, quiet: Callable[[str], None] | None = None) -> None:
        """What is told here is never quiet."""
        self.callbacks.append(callback)

    # --- as the nodes ---

    def tell(self, name: str) -> None:
        for callback in self.callbacks:
            callback(name)

    def renew(self, name: str, **changed: object) -> None:
        """A new state of the node arrives: ages in it are as of now."""
        daemon = self.daemons[name]
        behind = self.now - daemon.received_at
        results = tuple(dataclasses.replace(r, age_seconds=r.age_seconds + behind) for r in daemon.state.results)
        daemon.state = dataclasses.replace(daemon.state, **{"results": results, **changed})  # type: ignore[arg-type]
        daemon.version += 1
        daemon.heard_at = daemon.received_at = self.now

    def sync(self, name: str) -> None:
        """The node hears its orders, does them all, and says so."""
        daemon = self.daemons[name]
        if daemon.deaf:
            return
        self.renew(name)
        if daemon.orders is not None:
            self._obey(name, daemon, daemon.orders)
        self.tell(name)

    def _obey(self, name: str, daemon: Daemon, orders: tuple[Order, ...]) -> None:
        listed = {order.id for order in orders}
        kept = daemon.state.leases
        held = {le.id for le in kept}
        for key in [key for key in daemon.reports if key not in listed and key not in held]:
            if daemon.reports[key].status == "accepted":
                del daemon.reports[key]
        for order in orders:
            if order.withdrawn:
                kept = tuple(le for le in kept if le.id != order.id)
                daemon.reports[order.id] = OrderReport(status="cancelled", message="the aggregator released it")
                continue
            if order.id in daemon.done:
                continue
            daemon.done.add(order.id)
            if any(le.id == order.id for le in kept):
                daemon.reports[order.id] = OrderReport(status="accepted")
            elif order.run is not None:
                daemon.runs.append(order.id)
                daemon.reports[order.id] = OrderReport(status="done")
                self.renew(name, results=daemon.result_of_runs())
            elif daemon.refuses_leases or kept:
                daemon.reports[order.id] = OrderReport(status="refused", message="somebody has the devices")
            elif order.lease is not None:
                kept = (*kept, order.lease)
                daemon.reports[order.id] = OrderReport(status="accepted")
        daemon.issuer = self.issuer
        self.renew(name, leases=kept)

    def end_job(self, name: str) -> None:
        """The workload is gone: the node ends its leases."""
        daemon = self.daemons[name]
        for held in daemon.state.leases:
            daemon.reports[held.id] = OrderReport(status="done", message="the workload is gone")
        self.renew(name, leases=())
        self.tell(name)
