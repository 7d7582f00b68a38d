"""The two-step end of a preflight from the side of one rank: see `healthd.aggregator.gate.handshake`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from healthd.core import wire
from healthd.core.backoff import Backoff
from healthd.core.errors import BadInputError, HealthdError, UnreachableError
from healthd.core.http.gate_client import GateClient
from healthd.core.model import Decision
from healthd.hooks.preflight import Task
from healthd.hooks.preflight.roll_call import call

RETRIES = Backoff(0.1, 2.0)

WITHDRAW_SECONDS = 2.0
"""A launcher that ends a hook kills it some seconds later."""


async def acknowledge(task: Task, decision: Decision) -> tuple[bool, tuple[str, ...]]:
    """Whether all go, and who did not acknowledge. Asked until it is settled: the main node's aggregator lingers."""
    loop = asyncio.get_running_loop()
    end = loop.time() + task.acknowledge_seconds + task.linger_seconds
    included = task.node in {node.node for node in decision.nodes}
    event = "acknowledge" if included and task.probes else "wait"
    while True:
        answer = await handshake(task, decision, event)
        if answer["go"] is not None:
            if task.probes:
                with contextlib.suppress(HealthdError):  # settled is settled
                    await handshake(task, decision, "told")
            return bool(answer["go"]), tuple(answer["missing"])
        if loop.time() > end:
            raise UnreachableError(f"aggregator {task.url} did not settle the start in time")


async def handshake(task: Task, decision: Decision, event: str, *, wait: float = 10.0) -> dict[str, Any]:
    """One step of the handshake, tried again for a while: the line may be cut at any moment."""

    def step(aggregator: GateClient) -> dict[str, Any]:
        path = f"/v1/gates/{decision.id}/handshake"
        body = {"node": task.node, "event": event}
        found = aggregator.call("POST", path, body=body, query={"wait": wait})
        try:
            return wire.decode(found, dict[str, Any], what="its answer")
        except BadInputError as error:
            raise UnreachableError(f"aggregator {task.url}: {error}") from None

    loop = asyncio.get_running_loop()
    end, failures = loop.time() + task.gone_seconds, 0
    while True:
        try:
            return await call(task, step)
        except UnreachableError:
            failures += 1
            pause = RETRIES.after(failures)
            if loop.time() + pause > end:
                raise
            await asyncio.sleep(pause)


async def withdraw(task: Task, decision: Decision) -> None:
    """
    Have nobody start without this node, or this process of it, unless all have been told that they go.

    Unlike the other steps every local rank takes this one: each has a command to start.
    """
    with contextlib.suppress(HealthdError, TimeoutError):
        async with asyncio.timeout(WITHDRAW_SECONDS):
            await handshake(task, decision, "withdraw", wait=0)
