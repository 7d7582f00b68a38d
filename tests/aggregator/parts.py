"""What the tests of the aggregator's front share: a clock that stands still, states, and a node that speaks sync."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checks.contract import Finding, Measurement, Scope, Status, Tier
from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.identity.tokens import key_hash
from healthd.core.evidence import judge_health
from healthd.core.model import (
    CheckResult,
    CheckSpec,
    Health,
    NodeState,
    OrderReport,
    SyncAnswer,
    SyncRequest,
    Use,
)

KEY = "0123456789abcdef-node-key"


class Clock:
    """Time that moves when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def enrol_anybody(_node: str, key: str) -> str:
    """A store that knows nobody yet."""
    return key


def fleet(clock: Clock | None = None, **changes: Any) -> Fleet:
    settings: dict[str, Any] = {"issuer": "db-1", "enrol": enrol_anybody, "silent_seconds": 60.0, "max_nodes": 100}
    return Fleet(**(settings | {"clock": clock or Clock()} | changes))


def result(check: str, *, age: float = 1.0, status: Status = Status.PASS, tier: Tier = Tier.QUICK) -> CheckResult:
    reason = None if status is Status.PASS else "WrongResult"
    finding = Finding(
        status=status,
        reason=reason,
        message=f"{check} measured 1.5",
        target="cpu:0",
        measurements=(Measurement(name=f"{check}_flops_per_second", value=1.5, lower=None, upper=None, origin="none"),),
    )
    return CheckResult(
        check=check,
        tier=tier,
        status=status,
        findings=(finding,),
        age_seconds=age,
        started_at=0.0,
        duration_seconds=0.1,
        attempts=1,
        error=None,
        injected=False,
        executor="daemon",
    )


def spec(check: str, *, tier: Tier = Tier.QUICK, expires: float | None = 3600.0) -> CheckSpec:
    return CheckSpec(
        name=check,
        tier=tier,
        interval_seconds=60.0,
        timeout_seconds=5.0,
        expires_seconds=expires,
        scope=Scope.DEVICE,
        doc="",
    )


def state(
    node: str = "n1", *, pool: str = "train", age: float = 1.0, status: Status = Status.PASS, **changes: Any
) -> NodeState:
    """A node with one passive and one quick check."""
    made = NodeState(
        node=node,
        aliases=(),
        instance_id=None,
        boot_id="boot",
        labels={"pool": pool},
        instance_type="t1.large",
        inventory=None,
        versions={},
        health=Health.UNKNOWN,
        reasons=(),
        checks=(spec("memory_free", tier=Tier.PASSIVE, expires=90.0), spec("matmul")),
        results=(result("memory_free", age=age, tier=Tier.PASSIVE), result("matmul", age=age, status=status)),
        allocated=(),
        leases=(),
        quarantine=None,
        faults=(),
        running=None,
        address="10.0.0.1:8080",
        observed_at=0.0,
    )
    made = dataclasses.replace(made, **changes)
    health, reasons = judge_health(made)
    return dataclasses.replace(made, health=health, reasons=reasons)


@dataclasses.dataclass
class Node:
    """
    The other side of the line, without a network between.

    `received_at` is when the last answer came, by the node's own clock; it runs as the test's does.
    """

    fleet: Fleet
    clock: Clock
    name: str = "n1"
    key: str = KEY
    incarnation: str = "i1"
    seq: int = 0
    answer: SyncAnswer | None = None
    received_at: float = 0.0

    def request(
        self,
        state: NodeState | None = None,
        *,
        digest: str = "d1",
        ages: Mapping[str, float] | None = None,
        orders: Mapping[str, OrderReport] | None = None,
        issuer: str | None = None,
        use: Use | None = None,
    ) -> SyncRequest:
        self.seq += 1
        return SyncRequest(
            protocol=1,
            incarnation=self.incarnation,
            seq=self.seq,
            last_answer=self.answer.answer if self.answer else None,
            since_answer_seconds=self.clock() - self.received_at if self.answer else None,
            state=state,
            digest=digest,
            ages=ages or {},
            orders=orders or {},
            issuer=issuer,
            use=use,
        )

    async def send(self, request: SyncRequest, *, wait: float = 0.0) -> SyncAnswer:
        answer = await self.fleet.sync(self.name, key_hash(self.key), request, wait)
        self.answer, self.received_at = answer, self.clock()
        return answer

    async def say(self, state: NodeState | None = None, *, wait: float = 0.0, **changes: Any) -> SyncAnswer:
        return await self.send(self.request(state, **changes), wait=wait)

    async def join(self, state: NodeState | None = None) -> None:
        """First contact and the one that confirms it."""
        await self.say(state)
        await self.say(None)
