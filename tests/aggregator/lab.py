"""A gate whose nodes answer its collective orders as real ones would, with faults in nodes and between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from checks.contract import Tier
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate.records import Accuse, Claim, ClaimKind, Effect, Gate, WakeAt
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.validation.groups import orders_of
from healthd.core.model import RANK_READY, CollectiveOrder, Decision, DeviceRecord, Inventory, OrderReport, RankReport
from tests.aggregator.world import (
    CHECKS,
    NOW,
    gate,
    lease,
    node,
    result,
    spec,
    state,
    step,
    view,
)

POLICY = Policy(tuning=Tuning(settle_seconds=0.0), collective_checks=("all_reduce",))
RANKS = 2
TOOL_FAILURES = {
    "raised": (3, "CheckError", "KeyError: 'seconds'"),
    "raised before it joined": (0, "CheckError", "ImportError: no module named checks"),
    "no data": (3, "NoData", "it ended without evidence"),
    "garbage": (3, "Garbage", "not a line of JSON"),
    "no tool": (0, "MissingTool", "no module named torch"),
    "no torch": (0, "StartFailed", "/usr/bin/python3: No module named 'torch'; name the interpreter that has it"),
    "no tool in the middle": (3, "MissingTool", "no such program"),
    "no permission": (0, "NoPermission", "/dev/infiniband: permission denied"),
    "internal error": (1, "InternalError", "IndexError in the probe"),
    "exits": (3, "Crashed", "exited with code 1 in the middle: ModuleNotFoundError"),
    "exits at once": (0, "Crashed", "exited with code 2 in the middle"),
    "no memory": (3, "CannotAllocate", "killed by SIGKILL when memory ran out"),
    "told to end": (3, "Crashed", "killed by SIGTERM: (no words)"),
    "guard told to end": (3, "Crashed", "exited with code 143 in the middle"),
}
"""What healthd's own tool does in the ranks of a node: signs of life before it, reason, message."""
VICTIMS_WORDS = {
    "ncclSystemError": (
        "CheckError",
        "DistBackendError: NCCL error, ncclSystemError: System call (e.g. socket) failed",
    ),
    "unhandled system error": (
        "CheckError",
        "RuntimeError: NCCL error in ProcessGroupNCCL.cpp: unhandled system error",
    ),
    "ncclInternalError": (
        "CheckError",
        "DistBackendError: ncclInternalError: Internal check failed: Socket recv failed",
    ),
    "EFA": ("CheckError", "RuntimeError: NET/OFI Request completed with error. RC: 113. Error: Host unreachable"),
    "CUDA": ("CheckError", "DistBackendError: ncclUnhandledCudaError: Cuda failure 719 'unspecified launch failure'"),
    "Neuron": ("CheckError", "RuntimeError: nrt_execute failed"),
    "an error of its own": ("CheckError", "RuntimeError: something that nobody knows"),
    "an abort": ("Crashed", "killed by SIGABRT: NCCL error: ncclSystemError: System call (e.g. socket) failed"),
    "an exit": ("Crashed", "exited with code 1 in the middle: NET/OFI Unresponsive receiver"),
    "an exit without words": ("Crashed", "exited with code 1 in the middle"),
}
"""What ranks whose peer fails in silence say, and how they end: the peer itself waits until its time is up."""


def inventory(ranks: int = RANKS) -> Inventory:
    return Inventory(
        accelerator="cpu",
        device_count=ranks,
        core_count=None,
        memory_bytes=None,
        efa_count=None,
        devices=tuple(
            DeviceRecord(target=f"cpu:{i}", kind="cpu", serial=None, cores=1, memory_bytes=None) for i in range(ranks)
        ),
    )


@dataclasses.dataclass
class Lab:
    """
    `bad` nodes: corrupt, hang, die, slow, absent (its ranks never join), silent (its daemon is gone), refuse, once
    (the first group with it fails), a key of `TOOL_FAILURES`, or one of `VICTIMS_WORDS`, which its peers say. `cut`
    pairs cannot talk. `labels` are those of topology. `doubted` nodes were named by a validation before. `knows` are
    checks of a node besides those of every node; an order with others is refused.
    """

    names: Sequence[str]
    pool: str = "a"
    bad: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cut: Sequence[frozenset[str]] = ()
    labels: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    doubted: Sequence[str] = ()
    knows: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    policy: Policy = POLICY
    now: float = NOW
    groups: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    effects: list[Effect] = dataclasses.field(default_factory=list)
    claims: dict[str, Claim] = dataclasses.field(default_factory=dict)
    told: dict[str, dict[str, OrderReport]] = dataclasses.field(default_factory=dict)
    ran: set[str] = dataclasses.field(default_factory=set)
    failed_once: set[str] = dataclasses.field(default_factory=set)

    def ask(self, **request: object) -> Gate:
        return gate(self.policy, **request)

    def decide(self, asked: Gate, *, most_steps: int = 400) -> Decision:
        """Step the gate until it is decided, the nodes obeying after each step."""
        current = asked
        for _ in range(most_steps):
            current = self.step(current)
            if current.decision is not None:
                self.last = current
                return current.decision
        raise AssertionError(f"not decided after {most_steps} steps: {current.waiting}")

    def step(self, current: Gate) -> Gate:
        after, effects = step(self.now, current, self.view(current), self.policy)
        again, nothing = step(self.now, after, self.view(after), self.policy)
        assert again == after or after.validation != again.validation or nothing or again.decision is not None
        self.effects.extend(effects)
        for name in set(after.held).difference(current.held):
            assert name not in self.claims, f"{name} was reserved twice"
            self.claims[name] = Claim(kind=ClaimKind.RESERVED, gate=current.id, job="train", attempt=0)
        for name in set(current.held).difference(after.held):
            del self.claims[name]
        self.obey(after)
        wake = [effect.at for effect in effects if isinstance(effect, WakeAt)]
        busy = after.validation is not None and after.validation.groups
        # Reports come within a second; what nobody reports is waited for.
        self.now = (
            min([self.now + 1.0, *wake]) if busy or not wake else max(self.now + 0.01, min(wake[0], self.now + 1))
        )
        return after

    def view(self, current: Gate) -> Any:
        nodes = (self._node(name, current) for name in self.names)
        return view(*nodes, claims=self.claims, doubted=self.doubted)

    def accused(self) -> set[str]:
        return {effect.node for effect in self.effects if isinstance(effect, Accuse)}

    def _node(self, name: str, current: Gate) -> FleetNode:
        leases = tuple(
            lease(grant.lease_id, gate_id=current.id) for who, grant in current.granted.items() if who == name
        )
        known = self.knows.get(name, ())
        results = tuple(result(check, Tier.DEEP) for check in (*(one.name for one in CHECKS), *known))
        stored = dataclasses.replace(
            state(name, results, pool=self.pool, leases=leases),
            inventory=inventory(),
            peer_address="10.0.0.1",
            checks=(*CHECKS, *(spec(check, Tier.DEEP) for check in known)),
            labels={"pool": self.pool, **self.labels.get(name, {})},
        )
        orders = dict(self.told.get(name, {}))
        orders.update({one.id: OrderReport(status="accepted") for one in leases})
        return node(name, stored, orders=orders)

    def obey(self, current: Gate) -> None:
        """Every group that all its members were ordered to runs, and ends as its members make it end."""
        validation = current.validation
        if validation is None:
            return
        for group in validation.groups:
            if group.id in self.ran or group.closed:
                continue
            self.ran.add(group.id)
            self.groups.append(group.members)
            orders = {}
            for seat in group.seats:
                (order,) = orders_of(validation, seat.node, self.policy, workload="train")
                assert order.collective is not None
                orders[seat.node] = (order.id, order.collective)
            for name, (order_id, collective) in orders.items():
                report = self.report(name, collective, group.members)
                if report is not None:
                    self.told.setdefault(name, {})[order_id] = report

    def report(self, name: str, order: CollectiveOrder, members: tuple[str, ...]) -> OrderReport | None:
        kinds = {self.bad[one] for one in members if one in self.bad}
        mine = self.bad.get(name)
        if mine == "silent":
            return None
        if mine == "refuse":
            return OrderReport(status="refused", message="the devices are taken: pid 77 (python)")
        unknown = [check for check in order.checks if check not in ("all_reduce", *self.knows.get(name, ()))]
        if unknown:
            return OrderReport(status="refused", message=f"no such check here: {unknown[0]!r}")
        for one in members:
            if self.bad.get(one) == "once":
                kinds.discard("once")
                if one not in self.failed_once:
                    kinds.add("corrupt")
        if members[-1] == name:
            self.failed_once.update(one for one in members if self.bad.get(one) == "once")
        if any(pair <= set(members) for pair in self.cut):
            kinds.add("cut")
        ranks = tuple(
            self._rank(rank, order.size, kinds, mine, check)
            for check in order.checks
            for rank in range(order.first_rank, order.first_rank + order.ranks)
        )
        return OrderReport(status="done", ranks=ranks)

    def _rank(self, rank: int, size_of_group: int, kinds: set[str], mine: str | None, check: str) -> RankReport:
        base = RankReport(rank=rank, target="cpu:0", check=check, events=4, last="all_reduce/1024 left")
        if mine == "die":
            return dataclasses.replace(
                base, events=3, last="all_reduce/1024 entered", reason="Crashed", message="killed by SIGKILL"
            )
        if mine in TOOL_FAILURES:
            events, why, message = TOOL_FAILURES[mine]
            return dataclasses.replace(base, events=events, last=RANK_READY, reason=why, message=message)
        told = [VICTIMS_WORDS[kind] for kind in kinds if kind in VICTIMS_WORDS]
        if told and mine not in VICTIMS_WORDS:
            return dataclasses.replace(
                base, events=3, last="all_reduce/1024 entered", reason=told[0][0], message=told[0][1]
            )
        if told:
            return dataclasses.replace(
                base, events=3, last="all_reduce/1024 entered", reason="Timeout", message="did not end"
            )
        if "die" in kinds or not kinds.isdisjoint(TOOL_FAILURES):
            return dataclasses.replace(
                base,
                events=3,
                last="all_reduce/1024 entered",
                reason="CheckError",
                message="Connection closed by peer",
            )
        if "absent" in kinds or "silent" in kinds or "refuse" in kinds or "cut" in kinds:
            events = 0 if mine == "absent" else 1
            last = "rendezvous joined" if events else RANK_READY
            return dataclasses.replace(base, events=events, last=last, reason="Timeout", message="did not end")
        if "hang" in kinds:
            events, last = (2, "rendezvous left") if mine == "hang" else (3, "all_reduce/1024 entered")
            return dataclasses.replace(base, events=events, last=last, reason="Timeout", message="did not end")
        wrong = 7 if "corrupt" in kinds else 0
        lower = 1e9 if "slow" in kinds else None
        size = {
            "size_bytes": 1024,
            "bytes": 1024,
            "seconds": 1e-3,
            "limits": {
                "busbw_bytes_per_second": [lower, None, "config"],
                "algbw_bytes_per_second": [None, None, "none"],
                "duration_seconds": [None, None, "none"],
            },
            "mismatches": wrong,
            "first": "element 3 is 1 instead of 2" if wrong else None,
            "sources": {},
        }
        data = {"rank": rank, "ranks": size_of_group, "device": "cpu:0", "targets": [], "seed": 1, "sizes": [size]}
        return dataclasses.replace(base, key="cpu", data=data)
