"""An aggregator of the simulation: the whole one, without its socket. Any number may be started on one disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from healthd.aggregator.api import Parts, ShardList, SyncEndpoint
from healthd.aggregator.application import make_app
from healthd.aggregator.auth import Guard
from healthd.aggregator.drain import ActuatorSettings
from healthd.aggregator.leading import Terms, build
from healthd.aggregator.model.gates import Gate
from healthd.aggregator.model.policy import Policy, Tuning
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store.store import Store
from healthd.core.errors import HealthdError, StoreError
from healthd.core.tasks import OnEnd, Tasks
from tests.simulation.disk import Disk
from tests.simulation.loop import EPOCH, Machine, Process, VirtualLoop
from tests.simulation.network import Network

POLICY = Policy(
    collective=False,
    rules=False,
    max_age_seconds=60.0,
    wait_seconds=40.0,
    silent_seconds=15.0,
    node_grace_seconds=15.0,
    recovery_seconds=10.0,
    lease_grace_seconds=1e6,
    tuning=Tuning(settle_seconds=4.0, lease_ack_seconds=8.0),
)
"""Shorter times than in a fleet, so that a simulation sees more; no lease ends because nobody has seen its job."""
SETTINGS = AggregatorSettings(state_dir=Path("/nonexistent"), database="sqlite://", hold_seconds=10.0)


class SimulatedAggregator:
    """One start of an aggregator; `ended` is told when it ends by itself. `term` is 0 until it has the database."""

    def __init__(
        self, name: str, address: str, machine: Machine, disk: Disk, *, loop: VirtualLoop, network: Network
    ) -> None:
        self.name, self.address, self.machine, self.disk = name, address, machine, disk
        self.process = Process(name, self.machine)
        self.term = 0
        self.ended = ""
        self._loop, self._network = loop, network
        self._offset = 0.0

    def when(self, at: float) -> float:
        """The time of the simulation at what this aggregator calls `at`: its clock was read once, at its start."""
        return at - EPOCH - self._offset

    def start(self, on_decided: Callable[[SimulatedAggregator, Gate], None]) -> bool:
        """Open the database and serve; false when it cannot be opened."""
        return self.process.call(lambda: self._start(on_decided))

    def _start(self, on_decided: Callable[[SimulatedAggregator, Gate], None]) -> bool:
        self._offset = self.machine.wall_offset
        try:
            store = self.disk.open(self._loop)
            self.term = store.term
            parts = self._parts(store)
        except (StoreError, OSError) as error:
            self.ended = str(error)
            return False
        parts.engine.on_decided.append(lambda gate: on_decided(self, gate))
        parts.tasks.supervise("engine", parts.engine.run, OnEnd.FATAL)
        parts.tasks.supervise("leadership", store.lead, OnEnd.FATAL)
        parts.tasks.start("end", self._end(parts))
        endpoint = SyncEndpoint(make_app(parts), fleet=parts.fleet, guard=parts.guard, settings=SETTINGS)
        self._network.listen(self.address, self.process, endpoint)
        self.parts = parts
        return True

    def _parts(self, store: Store) -> Parts:
        terms = Terms(
            settings=SETTINGS,
            policy=POLICY,
            guard=Guard(None),
            actuator=ActuatorSettings(),
            callers_may=frozenset(),
            tasks=Tasks(),
            shards=lambda: ShardList(aggregator=self.address, shards=()),
        )
        return build(terms, store)

    async def _end(self, parts: Parts) -> None:
        try:
            await parts.tasks.failure()
        except HealthdError as error:
            self.ended = str(error)
            self.kill()

    def kill(self) -> None:
        """SIGKILL, or its own end: who waits for an answer gets none."""
        if self.process.alive:
            self.process.kill()
            self._network.reset(self.address, self.process)
