"""A leader that screens, over a real engine and its database: nodes are data, and time is what the world says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

from checks.contract import Status, Tier
from healthd.aggregator.screening.records import Listed
from healthd.aggregator.screening.service import Screening
from healthd.aggregator.screening.settings import ScreeningSettings
from healthd.core.model import CheckResult, Order, OrderReport
from tests.aggregator.engine_kit import Running, running
from tests.aggregator.lab import Lab
from tests.aggregator.world import CHECKS, POLICY, World, good_results, result, spec

DAY = 86400.0
SETTINGS = ScreeningSettings(tier="deep")
DEEP = ("matmul", "all_reduce", "memory")


def deep_results(*names: str, bad: str = "") -> tuple[CheckResult, ...]:
    """What a node has once these checks have run in the deep tier; others are as the quick tier left them."""
    found = [result(n, Tier.DEEP, age=0.0) for n in names if n != bad]
    if bad:
        found.append(result(bad, Tier.DEEP, age=0.0, status=Status.FAIL, code="WrongResult", message="not 2.0"))
    return (*(one for one in good_results() if one.check not in names), *found)


class Idle(World):
    """Nodes with a deep tier, whose runs take until `finish`."""

    def __init__(self, *names: str, **more: float) -> None:
        super().__init__(*names, **more)  # type: ignore[arg-type]
        for name in names:
            self.renew(name, checks=(*CHECKS, spec("memory", Tier.DEEP)))

    def version(self, name: str) -> int | None:
        return self.daemons[name].version if name in self.daemons else None

    def orders(self, name: str) -> tuple[str, ...]:
        """The checks that the node is to run for its screening now."""
        found = [one.run for one in self.daemons[name].orders or () if one.id.startswith("screening:")]
        return found[0].checks if found and found[0] is not None else ()

    def screened(self) -> set[str]:
        return {name for name in self.daemons if self.orders(name)}

    def part(self, name: str, *checks: str) -> None:
        """Some checks of the screening have passed; the run goes on."""
        for order in self.daemons[name].orders or ():
            self.daemons[name].done.add(order.id)
            self.daemons[name].reports[order.id] = OrderReport(status="running")
        self.renew(name, results=deep_results(*checks))
        self.tell(name)

    def link(self, lab: Lab) -> None:
        """The nodes can run collectives together, and do at once what they are ordered, as in the lab."""
        groups: dict[str, list[tuple[str, Order]]] = {}
        for name, daemon in self.daemons.items():
            for order in daemon.orders or ():
                if order.collective is not None and order.id not in daemon.done:
                    groups.setdefault(order.collective.group, []).append((name, order))
        for orders in groups.values():
            members = tuple(name for name, _ in sorted(orders, key=lambda one: _first_rank(one[1])))
            for name, order in orders:
                assert order.collective is not None
                report = lab.report(name, order.collective, members)
                self.daemons[name].done.add(order.id)
                if report is not None:
                    self.daemons[name].reports[order.id] = report
                self.tell(name)

    def finish(self, name: str, *, bad: str = "") -> None:
        """The run of its screening is over."""
        (order,) = self.daemons[name].orders or ()
        assert order.run is not None
        self.daemons[name].done.add(order.id)
        self.daemons[name].reports[order.id] = OrderReport(status="done", message="deep: 3 pass")
        kept = {one.check for one in self.daemons[name].state.results if one.tier is Tier.DEEP}
        self.renew(name, results=deep_results(*{*kept, *order.run.checks}, bad=bad))
        self.tell(name)


def _first_rank(order: Order) -> int:
    return 0 if order.collective is None else order.collective.first_rank


@dataclasses.dataclass
class Site:
    """A leader with its screening."""

    run: Running
    screening: Screening
    world: Idle

    async def turn(self, seconds: float = 31.0) -> None:
        """Time passes, and all nodes report."""
        self.world.now += seconds
        for name in self.world.daemons:
            if not self.world.daemons[name].deaf:
                self.world.renew(name)
                self.world.tell(name)
        for _ in range(2):  # what has ended, and what begins instead
            await self.screening.turn()
            await self.run.engine.run_once()

    async def obey(self, seconds: float) -> None:
        """Time passes, and all nodes do what they were told."""
        self.world.now += seconds
        for _ in range(2):
            for name in self.world.daemons:
                self.world.sync(name)
            await self.run.engine.run_once()
            await self.screening.turn()

    async def screen_all(self) -> None:
        for _ in range(len(self.world.daemons)):
            await self.turn()
            for name in self.world.screened():
                self.world.finish(name)
        await self.turn()

    def listed(self) -> dict[str, Listed]:
        return {one.candidate.node: one for one in self.screening.listed()}

    async def kinds(self, node: str) -> list[str]:
        return [event.kind for event in await self.run.engine.history(node, limit=50)]


@contextlib.asynccontextmanager
async def site(
    world: Idle, settings: ScreeningSettings = SETTINGS, *, url: str = "sqlite://", rules: bool = False
) -> AsyncIterator[Site]:
    policy = dataclasses.replace(POLICY, rules=rules, recovery_seconds=0.0, collective_checks=("all_reduce",))
    async with running(world, url, policy) as run:
        screening = Screening(run.engine, world, run.store, policy, settings)  # type: ignore[arg-type]
        await screening.load()
        for name in world.daemons:
            world.tell(name)
        yield Site(run, screening, world)
