"""
A collective: one check on all workers at once, as ranks of one group, under one deadline.

The group stays open over consecutive collectives as long as all ranks are well; after anything else all ranks are
started anew, because a group that has lost a member is of no use to anybody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checks.contract import Missing
from checks.worker.faults import Fault
from healthd.runner.collective.shown_times import ShownTimes, Silence, longest_silence, waited_seconds
from healthd.runner.settings import CheckInfo
from healthd.runner.warm import Warming, group_of
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, Lane
from healthd.runner.workers.workers import Workers

# Beyond our own deadline: the operation must not give up before we have looked at who is where.
BEYOND_DEADLINE_SECONDS = 30.0
LOOK_SECONDS = 0.5  # at what silent ranks wait for

Command = Callable[[CheckInfo, Sequence[str], dict[str, Any]], dict[str, Any]]


class Collective:
    """
    The ranks of one run: rank R is the R-th device of the inventory.

    `numbers` are the ranks by which faults may mean them, where these lanes are not all of the node's. `learns`: good
    runs teach how long ranks may be silent, and a collective that has run before is held to it.
    """

    def __init__(
        self,
        workers: Workers,
        lanes: Sequence[Lane],
        folder: Path,
        warming: Warming | None = None,
        *,
        numbers: Sequence[int] | None = None,
        learns: bool = False,
    ) -> None:
        self._learns = learns
        self._times: ShownTimes | None = None
        self._numbers = tuple(range(len(lanes)) if numbers is None else numbers)
        self._workers = workers
        self._lanes = lanes
        self._folder = folder
        self._warming = warming
        self._generation = 0
        self._seed = secrets.randbits(31)

    async def run(
        self, info: CheckInfo, timeout_seconds: float, command: Command, faults: Sequence[Fault]
    ) -> tuple[list[Outcome], bool]:
        """
        The outcomes of all ranks, and whether the group was whole, so that a judge can speak about it.

        A rank that dies without an injected fault is a transient cause: all run again, and the death is remembered.
        """
        kind = self._workers.inventory.get("ranks", "kept")
        if self._warming is not None:
            self._warming.announce([info], len(self._lanes))
        if kind == "together":
            return await self._together(info, timeout_seconds, command, faults)
        if kind == "fresh":
            await self._let_go()
        attempt = 0
        crashes: dict[str, tuple[str, ...]] = {}
        while True:
            attempt += 1
            if kind == "fresh":
                self._workers.group = group_of([lane.target for lane in self._lanes])
            not_whole = await self._gather(info, faults)
            if not_whole:
                return not_whole, False
            compiling = self._warming.allowance_seconds(self._lanes) if self._warming is not None else 0.0
            times = self._shown_times() if self._learns and not compiling else None
            name = self._name(info)
            began = time.monotonic()
            silence = Silence(times.silence_seconds(name) if times else None, began)
            outcomes = await self._attempt(info, timeout_seconds + compiling, command, silence)
            if times and not faults and all(outcome.missing is None for outcome in outcomes):
                times.learn(name, longest_silence(_moments(began, outcomes)))
            for outcome in outcomes:
                outcome.attempts, outcome.crashes = attempt, crashes.get(outcome.target, ())
            dead = [o for o in outcomes if o.missing is not None and o.missing.reason == "Crashed"]
            if not dead or faults or attempt > self._workers.settings.retries:
                return outcomes, True
            for outcome in dead:
                if outcome.missing is not None:
                    crashes[outcome.target] = (*crashes.get(outcome.target, ()), outcome.missing.message)
            await self._workers.back_off(attempt)

    def _shown_times(self) -> ShownTimes | None:
        """Once all workers are ready, since then their libraries are known. None where it is not known which boot."""
        workers = self._workers
        if self._times is None and workers.boot_id is not None:
            identity = {"boot": workers.boot_id, "machine": workers.identity, "libraries": dict(workers.versions)}
            settings = workers.settings
            floor_seconds = settings.silence_floor_seconds
            self._times = ShownTimes(settings.times_file, identity, floor_seconds=floor_seconds)
        return self._times

    def _name(self, info: CheckInfo) -> str:
        """What has the same times: the check with its parameters and its number of ranks."""
        params = json.dumps(self._workers.settings.params.get(info.name, {}), sort_keys=True, default=str)
        return f"{info.name} {len(self._lanes)} {zlib.crc32(params.encode()):08x}"

    async def _gather(self, info: CheckInfo, faults: Sequence[Fault]) -> list[Outcome]:
        """Have all workers ready; the outcomes of those that cannot be, when the group cannot be whole."""
        waiting = [
            self._absent(lane) if _is_missing(info, faults, number, lane) else lane.ensure()
            for number, lane in zip(self._numbers, self._lanes, strict=True)
        ]
        lost: list[Outcome] = []
        for rank, missing in enumerate(await asyncio.gather(*waiting)):
            if missing is not None:
                target = self._lanes[rank].target
                text = f"{target}: {missing.message}; a group of {len(self._lanes)} cannot be whole without it"
                lost.append(Outcome(target=f"rank:{rank}").lost(missing.reason, text))
        return lost

    async def _let_go(self) -> None:
        """No worker has a device any more, and the next ranks start in a group of their own."""
        self._generation += 1
        await asyncio.gather(*(lane.retire() for lane in self._lanes))

    async def _together(
        self, info: CheckInfo, timeout_seconds: float, command: Command, faults: Sequence[Fault]
    ) -> tuple[list[Outcome], bool]:
        """
        One process is all ranks. When it gives nothing the group is not whole: no rank can be told from another.
        """
        for rank, lane in enumerate(self._lanes):
            if _is_missing(info, faults, rank, lane):
                missing = await self._absent(lane)
                return [Outcome(target=f"rank:{rank}").lost(missing.reason, missing.message)], False
        await self._let_go()
        lane = Lane(self._workers, ",".join(other.target for other in self._lanes))
        names = [name for rank, other in enumerate(self._lanes) for name in (other.target, f"rank:{rank}")]
        group = self._group(0, f"in-process-{self._generation}", timeout_seconds)
        outcomes: list[Outcome] = []
        lane.submit(
            Job(
                check=info.name,
                command=command(info, names, group),
                timeout_seconds=timeout_seconds,
                finish=outcomes.append,
                retry=not faults,
            )
        )
        lane.close()
        await lane.serve()
        (outcome,) = outcomes
        outcome.target = "node"
        if outcome.missing is not None:
            outcome.missing = dataclasses.replace(outcome.missing, target="node")
        return outcomes, outcome.missing is None

    def _group(self, rank: int, rendezvous: str, timeout_seconds: float) -> dict[str, Any]:
        return {
            "rank": rank,
            "size": len(self._lanes),
            "rendezvous": rendezvous,
            "interface": "lo",
            "seed": self._seed,
            "timeout_seconds": timeout_seconds + BEYOND_DEADLINE_SECONDS,
            "targets": [other.target for other in self._lanes],
        }

    async def _absent(self, lane: Lane) -> Missing:
        return Missing(target=lane.target, reason="MissingDevice", message=f"no such device: {lane.target}")

    async def _attempt(
        self, info: CheckInfo, timeout_seconds: float, command: Command, silence: Silence
    ) -> list[Outcome]:
        """One round of all ranks; afterwards all are well, or all are gone."""
        rendezvous = (self._folder / f"rendezvous-{self._generation}").as_uri()
        jobs = []
        for rank, lane in enumerate(self._lanes):
            group = self._group(rank, rendezvous, timeout_seconds)
            jobs.append(
                Job(
                    check=info.name,
                    command=command(info, (lane.target, f"rank:{self._numbers[rank]}"), group),
                    timeout_seconds=timeout_seconds,
                    finish=_nobody,
                )
            )
        tasks = [
            asyncio.create_task(self._rank(lane, job), name=f"rank {rank} of {info.name}")
            for rank, (lane, job) in enumerate(zip(self._lanes, jobs, strict=True))
        ]
        try:
            outcomes = await self._supervise(tasks, timeout_seconds, silence)
        finally:
            for task in tasks:
                task.cancel()
        for rank, outcome in enumerate(outcomes):
            outcome.target = f"rank:{rank}"
            if outcome.missing is not None:
                outcome.missing = dataclasses.replace(outcome.missing, target=outcome.target)
        if any(outcome.missing is not None for outcome in outcomes):
            self._generation += 1
            await asyncio.gather(*(lane.bury(info.name) for lane in self._lanes))
        return outcomes

    async def _rank(self, lane: Lane, job: Job) -> Outcome:
        if lane.child is not None:
            lane.child.send(lane.line(job, lane.child))
        return await lane.collect(job, None)

    async def _supervise(
        self, tasks: Sequence[asyncio.Task[Outcome]], timeout_seconds: float, silence: Silence
    ) -> list[Outcome]:
        """
        Wait for all; when the time is up, or nothing was heard of any for too long, or a rank has ended badly and the
        others have had their grace, kill the rest.

        All that are late are noted before the first is killed, so that the kill of one does not pass for what ailed
        another.
        """
        deadline = time.monotonic() + timeout_seconds
        pending = set(tasks)
        why = f"did not end within {timeout_seconds:g} s"
        ended_badly = doubted = False
        while pending and (left := deadline - time.monotonic()) > 0:
            if silence.limit_seconds is not None:
                still = silence.left_seconds(time.monotonic(), *self._signs_of_life())
                if still <= 0 and doubted:
                    why = f"was silent for {silence.limit_seconds:.3g} s, far longer than in runs that went well here"
                    break
                doubted = still <= 0  # what was said just now may be still unread: look once more
                left = min(left, LOOK_SECONDS if doubted else min(still, LOOK_SECONDS))
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not ended_badly and any(task.result().missing is not None for task in done):
                ended_badly = True
                grace_seconds = self._workers.settings.peer_grace_seconds
                if time.monotonic() + grace_seconds < deadline:
                    deadline = time.monotonic() + grace_seconds
                    why = f"was still waiting {grace_seconds:g} s after another rank had ended"
        return await end_late(self._lanes, tasks, why)

    def _signs_of_life(self) -> tuple[float, dict[int, float]]:
        """When a rank was last heard of, and how long the threads of the ranks and of this process waited to run."""
        pids = [os.getpid(), *(lane.child.worker_pid for lane in self._lanes if lane.child is not None)]
        return max(lane.heard_at for lane in self._lanes), waited_seconds(pids)


async def end_late(lanes: Sequence[Lane], tasks: Sequence[asyncio.Task[Outcome]], why: str) -> list[Outcome]:
    """Kill the ranks that have not ended; the outcomes of all, late ones with where they were last seen."""
    words: dict[int, str] = {}
    late = [rank for rank, task in enumerate(tasks) if not task.done()]
    for rank in late:
        child = lanes[rank].child
        if child is not None:
            words[rank] = child.last_words()
            child.kill()
    outcomes = [await task for task in tasks]
    for rank in late:
        last = outcomes[rank].progress[-1] if outcomes[rank].progress else None
        seen = f"; last seen: {last.event} {last.step}" if last else "; it never joined"
        outcomes[rank].worker_gone("Timeout", why + seen, error=f"{why}{seen}\n{words.get(rank, '')}".strip())
    return outcomes


def _moments(began: float, outcomes: Sequence[Outcome]) -> list[float]:
    """When something was heard of any rank in a run that is over: by the clock of this host, which all share."""
    ended = max(outcome.ended for outcome in outcomes)
    said = (progress.monotonic_seconds for outcome in outcomes for progress in outcome.progress)
    return [began, *(at for at in said if began <= at <= ended), *(outcome.ended for outcome in outcomes)]


def _is_missing(info: CheckInfo, faults: Sequence[Fault], rank: int, lane: Lane) -> bool:
    return any(fault.kind == "missing" and fault.hits(info.name, (lane.target, f"rank:{rank}")) for fault in faults)


def _nobody(_: Outcome) -> None:
    """The outcome of a rank is awaited, not announced."""
