"""The aggregator's application around an engine of a test: everything but its sockets and its tasks."""

from __future__ import annotations

from pathlib import Path

from healthd.aggregator.api.handling import Parts
from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.engine.preflights import Handshakes
from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.fleet.slow import Stragglers
from healthd.aggregator.identity.tokens import Guard
from healthd.aggregator.jobs.postmortems import Postmortems
from healthd.aggregator.jobs.ungated import UngatedJobs
from healthd.aggregator.metrics import FleetMetrics
from healthd.aggregator.quarantine.accusations import Accusations
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store.store import Store


async def always_gated(_: str) -> bool:
    return True


def parts_of_test(folder: Path, *, store: Store, fleet: Fleet, engine: Engine, guard: Guard | None = None) -> Parts:
    """`guard` None: no tokens."""
    metrics = FleetMetrics(fleet, engine, store)
    return Parts(
        settings=AggregatorSettings(state_dir=folder),
        fleet=fleet,
        engine=engine,
        guard=guard or Guard(None),
        metrics=metrics,
        handshakes=Handshakes(1.0),
        stragglers=Stragglers(fleet),
        ungated=UngatedJobs(always_gated, clock=lambda: 0.0),
        accusations=Accusations(keep_seconds=3600.0, clock=lambda: 0.0),
        postmortems=Postmortems(engine, store, on_outcome=metrics.job_ended),
    )
