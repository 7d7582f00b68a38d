"""What the tests of rules engine, and those beside them, are made with."""

from __future__ import annotations

import dataclasses

from checks.contract import Status
from healthd.aggregator.store.reading import read_history
from healthd.core.model import CheckResult, Quarantine
from tests.aggregator.engine_kit import Running
from tests.aggregator.world import good_results, result


def measured(run: Running, name: str, results: tuple[CheckResult, ...], *, after: float = 60.0, **more: object) -> None:
    """A minute later the node has run its checks again."""
    run.world.now += after
    fresh = tuple(dataclasses.replace(r, started_at=run.world.now) for r in results)
    run.world.renew(name, results=fresh, **more)
    for daemon in run.world.daemons.values():
        daemon.heard_at = run.world.now
    run.world.tell(name)


async def kinds(run: Running, name: str) -> list[str]:
    found = await run.store.run(lambda c: read_history(c, name, limit=100, before=None, since=0.0))
    return [event.kind for event in found]


def slow_results() -> tuple[CheckResult, ...]:
    good = good_results(1.0)
    slow = result("matmul", age=1.0, status=Status.FAIL, code="SlowDevice", message="12 GFLOP/s, at least 20")
    return (good[0], slow, good[2])


def kept(run: Running, name: str) -> Quarantine | None:
    return run.world.daemons[name].quarantine
