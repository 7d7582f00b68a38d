"""Many schedules over the processors of this machine: each process plays every n-th seed and tells what came of it."""

from __future__ import annotations

import collections
import multiprocessing
import signal
from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from tests.simulation.plan import drawn
from tests.simulation.world import simulate

END_SECONDS = 5.0
"""How long a process that is told to end may take."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """What came of one schedule. `broken` is empty where every promise was kept; `events` counts each kind."""

    seed: int
    broken: str
    steps: int
    events: collections.Counter[str]


class WorkerError(Exception):
    """A process ended before its schedules did."""


def play_many(seeds: range, *, steps: int, aggregators: int | None, processes: int) -> Generator[Played, None, None]:
    """All seeds, in the order in which they are done. Closing the iterator ends the processes. WorkerError."""
    context = multiprocessing.get_context("fork")
    shares = [share for share in (seeds[number::processes] for number in range(processes)) if share]
    workers: dict[Connection, multiprocessing.context.ForkProcess] = {}
    try:
        for share in shares:
            reader, writer = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(reader, writer, share, steps, aggregators), daemon=True)
            worker.start()
            writer.close()
            workers[reader] = worker
        left = dict(zip(workers, map(len, shares), strict=True))
        while left:
            ready = wait(list(left))
            for reader in [one for one in left if one in ready]:
                try:
                    played: Played = reader.recv()
                except EOFError:
                    workers[reader].join(END_SECONDS)
                    raise WorkerError(
                        f"a process of the simulation ended with exit code {workers[reader].exitcode} and "
                        f"{left[reader]} schedules to go; is there enough memory? PROCESSES= says how many there are"
                    ) from None
                left[reader] -= 1
                if not left[reader]:
                    del left[reader]
                yield played
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.join(END_SECONDS)


def _work(reader: Connection, writer: Connection, seeds: range, steps: int, aggregators: int | None) -> None:
    """Play them. Ends with its parent: nobody reads then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    reader.close()
    for seed in seeds:
        try:
            writer.send(_play(seed, steps, aggregators))
        except BrokenPipeError:
            return


def _play(seed: int, steps: int, aggregators: int | None) -> Played:
    plan = drawn(seed, steps, aggregators)
    outcome = simulate(plan)
    events = collections.Counter(event.kind for event in plan.events)
    return Played(seed=seed, broken=outcome.broken, steps=outcome.steps, events=events)
