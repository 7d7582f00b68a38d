"""Whatever jobs come and go: screening delays no gate, takes no more than its share, and reaches every node in time."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from typing import Any

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from checks.contract import Tier
from healthd.aggregator.screening import plan
from healthd.aggregator.screening.records import Standing, Start
from healthd.aggregator.screening.settings import ScreeningSettings
from healthd.core.model import GateRequest, Order, OrderReport, Verdict
from tests.aggregator.screening_kit import Idle, deep_results, site
from tests.aggregator.world import NOW, Daemon
from tests.profile import examples

HOUR = 3600.0
DAY = 24 * HOUR
STEP = HOUR / 2
"""How often is planned; a run begins and ends at such a step."""
YIELD_SECONDS = 5.0


@dataclasses.dataclass
class Pool:
    """
    Nodes that are all idle in some hours of each day, and by chance in others. A run takes `run_steps`; `risky` have a
    high risk for ever.
    """

    name: str
    size: int
    first_hour: int
    hours: int
    run_steps: int
    risky: int
    chance: random.Random

    def idle(self, node: str, now: float) -> bool:
        hour = int(now % DAY // HOUR)
        return (hour - self.first_hour) % 24 < self.hours or self.chance.random() < 0.02


def in_time(pool: Pool, limit: int, every: float) -> bool:
    """Whether its idle hours suffice: two runs a node where links are screened, in three quarters of `every`."""
    starts_a_day = limit * (pool.hours * 2 // (pool.run_steps + 1))
    wanted = pool.size * (2 if limit > 1 and pool.size > 1 else 1)
    return starts_a_day * (0.75 * every / DAY - 1) >= wanted + limit


pools = st.builds(
    Pool,
    name=st.sampled_from(["a", "b"]),
    size=st.integers(1, 16),
    first_hour=st.integers(0, 23),
    hours=st.integers(3, 12),
    run_steps=st.integers(1, 5),
    risky=st.integers(0, 16),
    chance=st.integers(0, 2**32).map(random.Random),
)


# One start a day: those at risk would take all of them if the others did not come first in the end.
TIGHT = Pool(name="a", size=13, first_hour=22, hours=3, run_steps=5, risky=10, chance=random.Random(1))


@settings(max_examples=examples(200), deadline=None)
@example(pool=TIGHT, share=0.05, days=21, window=True)
@given(pool=pools, share=st.sampled_from([0.05, 0.2, 1.0]), days=st.integers(8, 14), window=st.booleans())
def test_each_node_is_reached_within_every_and_no_more_than_the_share_at_a_time(
    pool: Pool, share: float, days: int, window: bool
) -> None:
    chosen = ScreeningSettings(
        tier="deep",
        every_seconds=days * DAY,
        share=share,
        windows=(f"{pool.first_hour}-{(pool.first_hour + pool.hours) % 24}",) if window else (),
    )
    limit = max(1, math.floor(pool.size * share + 1e-9))
    assume(in_time(pool, limit, chosen.every_seconds))
    names = [f"n{number:02}" for number in range(pool.size)]
    begin = NOW - NOW % DAY
    tier_at, pair_at = dict.fromkeys(names, -math.inf), dict.fromkeys(names, -math.inf)
    running: dict[str, tuple[Start, float]] = {}
    now = begin
    while now < begin + 1.6 * chosen.every_seconds:
        idle = {name for name in names if pool.idle(name, now)}
        for one, began in {id(one): (one, began) for one, began in running.values()}.values():
            members = [name for name in (one.node, one.partner) if name is not None]
            if not idle.issuperset(members):  # a job takes the node: it is free at once, and this run gave nothing
                running = {name: kept for name, kept in running.items() if name not in members}
            elif now - began >= pool.run_steps * STEP:
                at = tier_at if one.partner is None else pair_at
                at.update(dict.fromkeys(members, now))
                running = {name: kept for name, kept in running.items() if name not in members}
        standings = [
            Standing(
                node=name,
                pool=pool.name,
                risk=1000.0 if number < pool.risky else number / 100,
                tier_at=tier_at[name],
                pair_at=pair_at[name],
                kind="cuda",
            )
            for number, name in enumerate(names)
        ]
        busy = dict.fromkeys(running, pool.name)
        for start in plan.plan(now, {pool.name: pool.size}, standings, busy, chosen, idle.__contains__):
            for name in filter(None, (start.node, start.partner)):
                assert name not in running, "it runs already"
                assert name in idle, "somebody has it"
                running[name] = (start, now)
            assert start.partner is None or limit > 1, "a pair counts as two nodes"
            assert not window or pool.idle(start.node, now)
        assert len(running) <= limit
        for name in names:
            assert now - max(tier_at[name], begin) <= chosen.every_seconds, f"{name}: its devices"
            if limit > 1:
                assert now - max(pair_at[name], begin) <= chosen.every_seconds, f"{name}: its links"
        now += STEP


class Slow(Idle):
    """Daemons whose checks take 10 s each, and that need some seconds to free the devices."""

    stop_seconds = 3.0

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.begun: dict[str, tuple[str, float]] = {}  # order and since when
        self.free_at: dict[str, float] = {}

    def _obey(self, name: str, daemon: Daemon, orders: tuple[Order, ...]) -> None:
        ours = [one for one in orders if one.id.startswith("screening:")]
        began = self.begun.get(name)
        if began is not None and began[0] not in {one.id for one in ours}:
            del self.begun[name]
            self.free_at[name] = self.now + self.stop_seconds
            daemon.reports[began[0]] = OrderReport(status="cancelled")
        for order in ours:
            self._run(name, daemon, order)
        blocked = self.now < self.free_at.get(name, 0.0)
        rest = tuple(one for one in orders if not one.id.startswith("screening:"))
        super()._obey(name, daemon, () if blocked else rest)

    def _run(self, name: str, daemon: Daemon, order: Order) -> None:
        assert order.run is not None
        if order.id in daemon.done:
            return
        _, since = self.begun.setdefault(name, (order.id, self.now))
        checks = order.run.checks[: int((self.now - since) // 10)]
        done = {one.check for one in daemon.state.results if one.tier is Tier.DEEP}
        self.renew(name, results=deep_results(*{*done, *checks}))
        over = len(checks) == len(order.run.checks)
        daemon.reports[order.id] = OrderReport(status="done" if over else "running")
        if over:
            daemon.done.add(order.id)
            del self.begun[name]


moves = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(1, 40)),
        st.tuples(st.just("gate"), st.sets(st.sampled_from(["n1", "n2", "n3", "n4"]), min_size=1, max_size=3)),
        st.tuples(st.just("pool"), st.integers(1, 3)),
    ),
    min_size=3,
    max_size=10,
)


@settings(max_examples=examples(100), deadline=None)
@given(moves=moves, share=st.sampled_from([0.05, 0.5, 1.0]))
def test_no_gate_waits_longer_than_five_seconds_for_a_screening(moves: list[tuple[str, Any]], share: float) -> None:
    asyncio.run(play(moves, ScreeningSettings(tier="deep", share=share)))


async def play(moves: list[tuple[str, Any]], chosen: ScreeningSettings) -> None:
    world = Slow("n1", "n2", "n3", "n4")
    limit = max(1, int(4 * chosen.share))
    async with site(world, chosen) as here:
        await here.turn()
        for number, (kind, what) in enumerate(moves):
            if kind == "pass":
                for _ in range(what // 5 + 1):
                    await here.obey(5.0)
                    assert len(world.begun) <= limit
                continue
            asked = {"nodes": tuple(sorted(what))} if kind == "gate" else {"pool": "a", "count": what}
            gate = await here.run.engine.ask(GateRequest(job=f"job-{number}", **asked))
            began = world.now
            while (decision := here.run.engine.answer(await here.run.engine.get(gate.id))).decision is Verdict.HOLD:
                assert world.now - began <= YIELD_SECONDS, [why.message for why in decision.reasons]
                await here.obey(1.0)
            assert decision.decision is Verdict.ADMIT
            names = [one.node for one in decision.nodes]
            assert not {name for name in names if name in world.begun}, "it is off the devices"
            for name in names:
                world.end_job(name)
