"""
An aggregator of the simulation: the whole one, without its socket. Any number may be started on one disk.

Alone it has the disk for itself, as with SQLite (`SimulatedAggregator`); several share it, and each leads or stands by
(`SharingAggregator`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from healthd.aggregator.api import Parts, SyncEndpoint
from healthd.aggregator.application import make_app
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.forwarding import Front
from healthd.aggregator.gate.records import Gate
from healthd.aggregator.identity.tokens import Guard
from healthd.aggregator.leadership import Course, Leading, Terms, build, leading
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import Leadership, NotVacantError, Store
from healthd.core.errors import HealthdError, StoreError
from healthd.core.tasks import OnEnd, Tasks
from tests.simulation.disk import Disk, SimulatedWatch
from tests.simulation.loop import EPOCH, Machine, Process, VirtualLoop
from tests.simulation.network import Network, Transport

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
SETTINGS = AggregatorSettings(state_dir=Path("/nonexistent"), database="sqlite://", hold_max_seconds=10.0)


class SimulatedAggregator:
    """One start of an aggregator; `ended` is told when it ends by itself. `term` is 0 until it has the database."""

    def __init__(
        self, name: str, address: str, machine: Machine, disk: Disk, *, loop: VirtualLoop, network: Network
    ) -> None:
        self.name, self.address, self.machine, self.disk = name, address, machine, disk
        self.process = Process(name, self.machine)
        self.term = 0
        self.holder = ""
        self.ended = ""
        self._loop, self._network = loop, network
        self._offset = 0.0

    def when(self, at: float) -> float:
        """The time of the simulation at what this aggregator calls `at`: its clock was read as it came to lead."""
        return at - EPOCH - self._offset

    def _note_clock(self, parts: Parts) -> None:
        self._offset = parts.engine.now() - EPOCH - self._loop.now

    def start(self, on_decided: Callable[[SimulatedAggregator, Gate], None]) -> bool:
        """Open the database and serve; false when it cannot be opened."""
        return self.process.call(lambda: self._start(on_decided))

    def _start(self, on_decided: Callable[[SimulatedAggregator, Gate], None]) -> bool:
        try:
            store = self.disk.open(self._loop)
            self.term = store.term
            parts = self._parts(store)
        except (StoreError, OSError) as error:
            self.ended = str(error)
            return False
        self._note_clock(parts)
        parts.engine.on_decided.append(lambda gate: on_decided(self, gate))
        parts.tasks.supervise("engine", parts.engine.run, OnEnd.FATAL)
        parts.tasks.supervise("leadership", store.lead, OnEnd.FATAL)
        parts.tasks.start("end", self._end(parts.tasks))
        endpoint = SyncEndpoint(make_app(parts), fleet=parts.fleet, guard=parts.guard, settings=SETTINGS)
        self._network.listen(self.address, self.process, endpoint)
        return True

    def leads(self) -> bool:
        """Whether it answers as the leader."""
        return self.process.alive

    def _parts(self, store: Store) -> Parts:
        return build(_terms(Tasks()), store)

    async def _end(self, tasks: Tasks) -> None:
        try:
            await tasks.failure()
        except HealthdError as error:
            self.ended = str(error)
            self.kill()

    def stop(self) -> None:
        """SIGTERM."""
        self.kill()

    def kill(self) -> None:
        """SIGKILL, or its own end: who waits for an answer gets none."""
        if self.process.alive:
            self.process.kill()
            self._network.reset(self.address, self.process)


class SharingAggregator(SimulatedAggregator):
    """One of several: it leads or stands by, with the real course of leadership and the real front."""

    def _start(self, on_decided: Callable[[SimulatedAggregator, Gate], None]) -> bool:
        url = f"http://{self.address}"
        self._on_decided = on_decided
        self._store: Store | None = None
        store: Store | None = None
        try:
            row, over = self.disk.first_look(EPOCH + self._loop.now + self.machine.wall_offset)
            with contextlib.suppress(NotVacantError):
                store = self._take(url, row) if over or row.url == url else None
        except (StoreError, OSError) as error:
            self.ended = str(error)
            return False
        self._front = front = Front(
            guard=Guard(None),
            settings=SETTINGS,
            own_url=url,
            trust=None,
            transport=Transport(self._network, self.address),
        )
        self._tasks = tasks = Tasks()

        async def take(seen: Leadership) -> Store:
            await asyncio.sleep(self.disk.delay())
            return self._take(url, seen)

        self._course = course = Course(
            front=front,
            shared=True,
            take=take,
            leading=lambda store: self._leading(store, front, tasks),
        )
        course.note(row)
        SimulatedWatch(self.disk, self.process).start(course.note)
        tasks.supervise("course of leadership", functools.partial(course.run, store), OnEnd.FATAL)
        tasks.supervise("way to the leader", front.probe)
        tasks.start("end", self._end(tasks))
        self._network.listen(self.address, self.process, front)
        return True

    def _take(self, url: str, seen: Leadership) -> Store:
        return self.disk.take(self._loop, seen, url)

    @contextlib.asynccontextmanager
    async def _leading(self, store: Store, front: Front, tasks: Tasks) -> AsyncIterator[Leading]:
        self._store, self.term, self.holder = store, store.term, store.holder
        async with leading(_terms(tasks), store, functools.partial(front.drained, SETTINGS.stop_seconds / 2)) as leader:
            self._note_clock(leader.parts)
            leader.parts.engine.on_decided.append(lambda gate: self._on_decided(self, gate))
            yield leader

    def leads(self) -> bool:
        """As above."""
        return super().leads() and self._store is not None and self._store.leads()

    def stop(self) -> None:
        """As above."""
        if self.process.alive:
            self.process.start(self._stop(), "end")

    async def _stop(self) -> None:
        await self._course.stop(SETTINGS.stop_seconds + 1.0)
        self.kill()


def _terms(tasks: Tasks) -> Terms:
    return Terms(
        settings=SETTINGS,
        policy=POLICY,
        guard=Guard(None),
        actuator=ActuatorSettings(),
        callers_may=frozenset(),
        tasks=tasks,
    )
