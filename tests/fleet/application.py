"""The aggregator's application around an engine of a test: everything but its sockets and its tasks."""

from __future__ import annotations

from pathlib import Path

from healthd.baselines.settings import BaselineSettings
from healthd.fleet.auth import Guard
from healthd.fleet.baselines import Learner
from healthd.fleet.engine import Engine
from healthd.fleet.handling import Parts
from healthd.fleet.handshakes import Handshakes
from healthd.fleet.metrics import FleetMetrics
from healthd.fleet.registry import Fleet
from healthd.fleet.settings import AggregatorSettings
from healthd.fleet.store import Store
from healthd.fleet.ungated import UngatedJobs


async def always_gated(_: str) -> bool:
    return True


def parts_of_test(folder: Path, *, store: Store, fleet: Fleet, engine: Engine, guard: Guard | None = None) -> Parts:
    """`guard` None: no tokens."""
    return Parts(
        settings=AggregatorSettings(state_dir=folder),
        fleet=fleet,
        store=store,
        engine=engine,
        guard=guard or Guard(None),
        metrics=FleetMetrics(fleet, holding=lambda: 0, overrides=lambda: 0, errors=engine.internal_errors),
        handshakes=Handshakes(1.0),
        learner=Learner(fleet, store, BaselineSettings()),
        ungated=UngatedJobs(always_gated, clock=lambda: 0.0),
    )
