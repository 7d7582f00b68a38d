"""
Compilation within a run: who may compile, what is cold, and the step in which one worker compiles for all.

Accelerators that compile take minutes for what then runs in milliseconds. So the graphs of a run are compiled before
its checks' clocks start, under a deadline of their own, by one worker at a time; the others find them in the cache.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from checks.accelerators import compiles
from checks.contract import Scope, Tier
from healthd.core.model import CollectiveOrder
from healthd.runner.settings import CheckInfo, Plan
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, Lane
from healthd.runner.workers.workers import Workers


class Warming:
    """Of one run. Without a cache, or on an accelerator that does not compile, it does nothing."""

    def __init__(self, workers: Workers, plan: Plan) -> None:
        self._workers = workers
        self._plan = plan

    @property
    def active(self) -> bool:
        """Whether this run's devices compile into a cache of ours."""
        return self._workers.settings.compile_cache is not None and compiles(self._workers.inventory.get("accelerator"))

    def announce(self, infos: Sequence[CheckInfo], ranks: int | None = None) -> None:
        """What workers that start from now on will be asked to run; `ranks` is None but for collectives."""
        settings = self._workers.settings
        if not self.active:
            return
        compiles = self._plan.warm or settings.on_cold_cache == "compile" or self._plan.tier.rank >= Tier.DEEP.rank
        self._workers.compile = {
            "root": str(settings.compile_cache),
            "graphs": [self._graphs(info, ranks) for info in infos],
            "cold": "compile" if compiles else "unknown",
            "retry": self._plan.warm,
        }

    async def warm(self, lane: Lane, infos: Sequence[CheckInfo]) -> Outcome | None:
        """
        Have the worker of a lane compile what is cold; its outcome, None where there is nothing to do.

        Where that did not come to its end, none of the checks may run: each would compile on its own clock.
        """
        if not self.active or not any(info.scope is Scope.DEVICE for info in infos):
            return None
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def finish(outcome: Outcome) -> None:
            if not answer.done():
                answer.set_result(outcome)

        lane.submit(
            Job(
                check="warm",
                command={"kind": "warm"},
                timeout_seconds=self._workers.settings.compile_timeout_seconds,
                finish=finish,
                retry=False,
            )
        )
        return await answer

    def allowance_seconds(self, lanes: Sequence[Lane]) -> float:
        """What the deadline of a collective has to grow by, because its ranks compile in the middle of it."""
        cold = self.active and any(lane.cold for lane in lanes)
        return self._workers.settings.compile_timeout_seconds if cold else 0.0

    def _graphs(self, info: CheckInfo, ranks: int | None) -> dict[str, Any]:
        return {
            "check": info.name,
            "tier": self._plan.tier.value,
            "params": dict(self._workers.settings.params.get(info.name, {})),
            "ranks": ranks,
        }


def seconds_of(warmed: Outcome | None) -> Mapping[str, float]:
    """Check -> seconds that its graphs took to compile, as the worker said."""
    found: dict[str, float] = {}
    for answer in warmed.answers if warmed is not None else ():
        seconds = answer.get("seconds")
        if isinstance(seconds, float) and 0.0 < seconds < float("inf"):
            found[str(answer.get("check"))] = seconds
    return found


def lost_like(warmed: Outcome, target: str) -> Outcome:
    """The outcome of a check that could not run because compiling did not come to its end."""
    outcome = Outcome(target=target, attempts=warmed.attempts, crashes=warmed.crashes)
    if warmed.missing is None:
        return outcome
    reason, message = warmed.missing.reason, warmed.missing.message
    if reason == "Timeout":
        message = f"compiling the probes {message}; run 'healthd warm', or set a longer compile_timeout of [probe]"
        reason = "CompileFailed"
    return outcome.lost(reason, message, error=warmed.error, action=warmed.missing.action)


def group_of(targets: Sequence[str]) -> dict[str, Any]:
    """
    What ranks must know before they open their devices: who is who, and where the runtime's own meeting point is.

    The port is free now; who takes it before the first rank does makes the group fail, and another has another port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"size": len(targets), "targets": list(targets), "root_comm": f"127.0.0.1:{port}"}


def compile_over_nodes(order: CollectiveOrder, checks: Sequence[CheckInfo], workers: Workers) -> dict[str, Any] | None:
    """
    What ranks of a group over several nodes are told of compilation; None where nothing is compiled.

    Its size makes other graphs than those of the node alone. They are compiled only where both this node and the order
    allow for the time; else a cold rank says so at once.
    """
    settings = workers.settings
    if settings.compile_cache is None or not compiles(workers.inventory.get("accelerator")):
        return None
    return {
        "root": str(settings.compile_cache),
        "graphs": [
            {
                "check": info.name,
                "tier": info.tier.value,
                "params": dict(settings.params.get(info.name, {})),
                "ranks": order.size,
            }
            for info in checks
        ],
        "cold": "compile" if settings.on_cold_cache == "compile" and order.compile_seconds > 0 else "unknown",
        "retry": False,
    }


def group_over_nodes(order: CollectiveOrder, targets: Sequence[str]) -> dict[str, Any]:
    """
    The same for `targets` as a part of a group over several nodes, whose order says where its rank 0 is.

    The order's own port is that of torch's store, so the runtime's is beside it.
    """
    host = f"[{order.main}]" if ":" in order.main else order.main
    port = order.port + 1 if order.port < 65535 else order.port - 1
    return {
        "size": order.size,
        "first_rank": order.first_rank,
        "targets": list(targets),
        "root_comm": f"{host}:{port}",
    }
