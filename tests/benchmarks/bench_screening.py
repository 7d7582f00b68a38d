"""What one turn of the planner of screenings costs the aggregator of a large fleet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from healthd.aggregator.screening import plan
from healthd.aggregator.screening.records import Candidate, Standing
from healthd.aggregator.screening.risk import risk
from healthd.aggregator.screening.settings import ScreeningSettings
from tests.benchmarks.figures import Bench, Figure, Reading, Scale, spread

NODES, POOLS, ROUNDS = 20_000, 20, 30
DAY_SECONDS = 86400.0
NOW = 400 * DAY_SECONDS

PLAN = Figure(
    name="screening_plan", what="a turn of the planner of screenings, 20,000 nodes", unit="seconds", upper=0.05
)


def measure(scale: Scale) -> Iterator[Reading]:
    """All nodes are due and nine of ten are busy, so the planner looks at all that it may."""
    size = scale.of(NODES, 1000)
    pools = {f"pool-{number}": size // POOLS for number in range(POOLS)}
    candidates = [
        Candidate(
            node=f"n{number:05}",
            pool=f"pool-{number % POOLS}",
            days_since_pass=10.0 + number % 30,
            failures=number % 3,
            age_days=float(number % 700),
            changed=number % 50 == 0,
        )
        for number in range(size)
    ]
    began = time.perf_counter()
    risks = [risk(one).total for one in candidates]
    of_risks = time.perf_counter() - began
    nodes = [
        Standing(
            node=one.node,
            pool=one.pool or "",
            risk=total,
            tier_at=NOW - (one.days_since_pass or 0.0) * DAY_SECONDS,
            pair_at=NOW - 20 * DAY_SECONDS,
            kind="cuda",
            changed=bool(one.changed),
        )
        for one, total in zip(candidates, risks, strict=True)
    ]
    settings = ScreeningSettings(tier="deep")
    rounds = []
    for _ in range(scale.of(ROUNDS, 3)):
        began = time.perf_counter()
        started = plan.plan(NOW, pools, nodes, {}, settings, lambda name: name.endswith("7"))
        rounds.append(time.perf_counter() - began)
    if not started:
        raise RuntimeError("nothing was planned")
    yield Reading(
        figure=PLAN.name,
        value=statistics.median(rounds),
        note=f"{len(started)} started; {spread(PLAN, rounds)}; risks of all nodes, computed once an hour: "
        f"{PLAN.shown(of_risks)}",
    )


BENCHES = (Bench(name="screening", figures=(PLAN,), run=measure, limit_seconds=60),)
