"""
Compiles the graphs of a run where they are cold, in one worker for all.

Accelerators that compile take minutes for what then runs in milliseconds. So the graphs of a run are compiled before
the clocks of its checks start, under a deadline of their own, by one worker at a time; the others find them in the
cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checks.accelerators import compiles
from checks.contract import CheckInfo, Scope, Tier
from healthd.core.model import CollectiveOrder
from healthd.runner.settings import Plan
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, WorkerLane
from healthd.runner.workers.workers import Workers


class Compilation:
    """The compilation of one run. Without a cache, or on an accelerator that does not compile, it does nothing."""

    def __init__(self, workers: Workers, plan: Plan) -> None:
        self._workers = workers
        self._plan = plan

    @property
    def active(self) -> bool:
        """Whether the devices of this run compile into healthd's cache."""
        return uses_cache(self._workers)

    def announce(self, infos: Sequence[CheckInfo], ranks: int | None = None) -> None:
        """Set which checks workers that start from now on will run; `ranks` is None except for collectives."""
        settings = self._workers.settings
        if not self.active:
            return
        compile_ = self._plan.warm or settings.on_cold_cache == "compile" or self._plan.tier.rank >= Tier.DEEP.rank
        self._workers.compile = _setup(
            self._workers,
            [(info, self._plan.tier, ranks) for info in infos],
            cold="compile" if compile_ else "unknown",
            retry=self._plan.warm,
        )

    async def run(self, lane: WorkerLane, infos: Sequence[CheckInfo]) -> Outcome | None:
        """
        Let the worker of a lane compile what is cold; its outcome, None where there is nothing to do.

        Where that fails, none of the checks may run: each would compile on its own clock.
        """
        if not self.active or not any(info.scope is Scope.DEVICE for info in infos):
            return None
        seconds = self._workers.settings.compile_timeout_seconds
        return await lane.ask(Job(check="warm", command={"kind": "warm"}, timeout_seconds=seconds, retry=False))

    def allowance_seconds(self, lanes: Sequence[WorkerLane]) -> float:
        """By how much the deadline of a collective is extended, because its ranks compile in the middle of it."""
        cold = self.active and any(lane.cold for lane in lanes)
        return self._workers.settings.compile_timeout_seconds if cold else 0.0


def uses_cache(workers: Workers) -> bool:
    """Whether the devices compile into healthd's cache."""
    return workers.settings.compile_cache is not None and compiles(workers.inventory.get("accelerator"))


def compile_over_nodes(order: CollectiveOrder, checks: Sequence[CheckInfo], workers: Workers) -> dict[str, Any] | None:
    """
    The setup of compilation for ranks of a group over several nodes; None where nothing is compiled.

    Its size makes other graphs than those of the node alone. They are compiled only where both this node and the order
    allow for the time; else a cold rank reports that at once.
    """
    if not uses_cache(workers):
        return None
    allowed = workers.settings.on_cold_cache == "compile" and order.compile_seconds > 0
    graphs = [(info, info.tier, order.size) for info in checks]
    return _setup(workers, graphs, cold="compile" if allowed else "unknown", retry=False)


def _setup(
    workers: Workers, graphs: Sequence[tuple[CheckInfo, Tier, int | None]], *, cold: str, retry: bool
) -> dict[str, Any]:
    """The member `compile` of a worker's setup (see `checks.worker.commands`); None ranks: not a collective."""
    params = workers.settings.params
    return {
        "root": str(workers.settings.compile_cache),
        "graphs": [
            {"check": info.name, "tier": tier.value, "params": dict(params.get(info.name, {})), "ranks": ranks}
            for info, tier, ranks in graphs
        ],
        "cold": cold,
        "retry": retry,
    }


def seconds_by_check(compiled: Outcome | None) -> Mapping[str, float]:
    """How long the graphs of each check took to compile, as the worker reported."""
    found: dict[str, float] = {}
    for answer in compiled.answers if compiled is not None else ():
        seconds = answer.get("seconds")
        if isinstance(seconds, float) and 0.0 < seconds < float("inf"):
            found[str(answer.get("check"))] = seconds
    return found


def failed_like(compiled: Outcome, target: str) -> Outcome:
    """The outcome of a check that could not run because compilation failed."""
    outcome = Outcome(target=target, attempts=compiled.attempts, crashes=compiled.crashes)
    if compiled.missing is None:
        return outcome
    reason, message = compiled.missing.reason, compiled.missing.message
    if reason == "Timeout":
        message = f"compiling the probes {message}; run 'healthd warm', or set a longer compile_timeout of [probe]"
        reason = "CompileFailed"
    return outcome.fail(reason, message, error=compiled.error, action=compiled.missing.action)
