"""
Runs collectives inside one node: one check on all workers at once, as ranks of one group.

The group stays open over consecutive collectives as long as all ranks are well. After anything else all ranks are
started anew, because a group that has lost a member is of no use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checks.contract import CheckInfo
from checks.worker.faults import Fault
from healthd.runner.collective.rank_group import BEYOND_DEADLINE_SECONDS, Deadline, Rank, RankGroup, group_of
from healthd.runner.collective.silence_limits import Silence, SilenceLimits, longest_silence, waited_seconds
from healthd.runner.compilation import Compilation
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import WorkerLane
from healthd.runner.workers.workers import Workers

LOOK_SECONDS = 0.5
"""How often silent ranks are looked at."""

Command = Callable[[CheckInfo, Sequence[str], dict[str, Any] | None], dict[str, Any]]


class NodeCollective:
    """
    The ranks of one run: rank R is the R-th device of the inventory.

    The inventory says how ranks become a group: their workers are `kept`, or start `fresh` for each group, or one
    process drives all devices `together`.
    """

    def __init__(
        self,
        workers: Workers,
        lanes: Sequence[WorkerLane],
        folder: Path,
        compilation: Compilation | None = None,
        *,
        numbers: Sequence[int] | None = None,
        learns: bool = False,
    ) -> None:
        """
        `numbers` are the ranks by which faults refer to the lanes, where these are not all lanes of the node.

        With `learns`, good runs teach how long ranks may be silent, and a collective that has run before is held to it.
        """
        self._workers = workers
        self._lanes = lanes
        self._folder = folder
        self._compilation = compilation
        self._numbers = tuple(range(len(lanes)) if numbers is None else numbers)
        self._learns = learns
        self._limits: SilenceLimits | None = None
        self._generation = 0
        self._seed = secrets.randbits(31)

    async def run(
        self, info: CheckInfo, timeout_seconds: float, command: Command, faults: Sequence[Fault]
    ) -> tuple[list[Outcome], bool]:
        """
        The outcomes of all ranks, and whether they were a whole group, which a judge can compare.

        A rank that crashes without an injected fault is a transient failure: all run again, and the crash is reported.
        """
        kind = self._workers.inventory.get("ranks", "kept")
        if self._compilation is not None:
            self._compilation.announce([info], len(self._lanes))
        if kind != "kept":  # no worker may have a device any more
            self._generation += 1
            await asyncio.gather(*(lane.retire() for lane in self._lanes))
        group = RankGroup(self._workers, self._ranks(together=kind == "together"))
        attempt = 0
        crashes: dict[str, tuple[str, ...]] = {}
        try:
            while True:
                attempt += 1
                if kind == "fresh":
                    self._workers.group = group_of([lane.target for lane in self._lanes])
                if lost := await self._start(group, info, faults):
                    return lost, False
                outcomes = await self._attempt(group, info, timeout_seconds, command, faults)
                for outcome in outcomes:
                    outcome.attempts, outcome.crashes = attempt, crashes.get(outcome.target, ())
                crashed = {o.target: o.missing.message for o in outcomes if o.missing and o.crashed}
                if not crashed or faults or attempt > self._workers.settings.retries:
                    # One process for all ranks that gives nothing tells nothing about any rank.
                    return outcomes, kind != "together" or outcomes[0].missing is None
                for target, message in crashed.items():
                    crashes[target] = (*crashes.get(target, ()), message)
                await self._workers.back_off(attempt)
        finally:
            if kind == "together":
                await group.retire()

    def _ranks(self, *, together: bool) -> list[Rank]:
        targets = tuple(lane.target for lane in self._lanes)
        names = [(target, f"rank:{number}") for target, number in zip(targets, self._numbers, strict=True)]
        if together:
            lane = WorkerLane(self._workers, ",".join(targets))
            return [Rank(lane=lane, first=0, targets=targets, names=tuple(name for pair in names for name in pair))]
        return [
            Rank(lane=lane, first=rank, targets=(lane.target,), names=names[rank])
            for rank, lane in enumerate(self._lanes)
        ]

    async def _start(self, group: RankGroup, info: CheckInfo, faults: Sequence[Fault]) -> list[Outcome]:
        """Make all workers ready; the outcomes of those that cannot take part, when the group cannot be whole."""
        lost: list[Outcome] = []
        for rank, missing in zip(group.ranks, await group.start(info, faults), strict=True):
            if missing is not None:
                text = f"{missing.target}: {missing.message}; without it the {len(self._lanes)} ranks cannot start"
                number = rank.first + (rank.targets.index(missing.target) if missing.target in rank.targets else 0)
                lost.append(Outcome(target=f"rank:{number}").fail(missing.reason, text, action=missing.action))
        return lost

    async def _attempt(
        self, group: RankGroup, info: CheckInfo, timeout_seconds: float, command: Command, faults: Sequence[Fault]
    ) -> list[Outcome]:
        """One attempt of all ranks; afterwards all are well, or all are gone."""
        lanes = [rank.lane for rank in group.ranks]
        together = len(group.ranks) < len(self._lanes)
        compile_seconds = self._compilation.allowance_seconds(lanes) if self._compilation is not None else 0.0
        seconds = timeout_seconds + compile_seconds
        limits = self._silence_limits() if self._learns and not compile_seconds and not together else None
        name = self._name(info)
        began = time.monotonic()
        silence = Silence(limits.silence_seconds(name) if limits else None, began)
        rendezvous = (self._folder / f"rendezvous-{self._generation}").as_uri()
        common = {
            "size": len(self._lanes),
            "rendezvous": f"in-process-{self._generation}" if together else rendezvous,
            "interface": "lo",
            "seed": self._seed,
            "timeout_seconds": seconds + BEYOND_DEADLINE_SECONDS,
            "targets": [lane.target for lane in self._lanes],
        }
        outcomes = await group.run(
            info,
            lambda rank: command(info, rank.names, {"rank": rank.first, **common}),
            Deadline(seconds, f"did not end within {seconds:g} s"),
            _SilenceWatch(silence, lanes).look,
        )
        for rank, outcome in zip(group.ranks, outcomes, strict=True):
            outcome.target = "node" if together else f"rank:{rank.first}"
            if outcome.missing is not None:
                outcome.missing = dataclasses.replace(outcome.missing, target=outcome.target)
        if any(outcome.missing is not None for outcome in outcomes):
            self._generation += 1
            await group.kill(info.name)
        elif limits and not faults:
            limits.learn(name, longest_silence(_report_times(began, outcomes)))
        return outcomes

    def _silence_limits(self) -> SilenceLimits | None:
        """Known once all workers are ready, since then their libraries are. None where the boot is not known."""
        workers = self._workers
        if self._limits is None and workers.boot_id is not None:
            identity = {"boot": workers.boot_id, "machine": workers.identity, "libraries": dict(workers.versions)}
            settings = workers.settings
            floor_seconds = settings.silence_floor_seconds
            self._limits = SilenceLimits(settings.times_file, identity, floor_seconds=floor_seconds)
        return self._limits

    def _name(self, info: CheckInfo) -> str:
        """What takes the same time: the check with its parameters and its number of ranks."""
        params = json.dumps(self._workers.settings.params.get(info.name, {}), sort_keys=True, default=str)
        return f"{info.name} {len(self._lanes)} {zlib.crc32(params.encode()):08x}"


class _SilenceWatch:
    """Ends a collective whose ranks are silent for too long."""

    def __init__(self, silence: Silence, lanes: Sequence[WorkerLane]) -> None:
        self._silence = silence
        self._lanes = lanes
        self._overdue = False

    def look(self, deadline: Deadline, _: Mapping[int, Outcome]) -> float:
        """See `Watch`."""
        if self._silence.limit_seconds is None:
            return deadline.at - time.monotonic()
        left = self._silence.left_seconds(time.monotonic(), *signs_of_life(self._lanes))
        if left <= 0 and self._overdue:
            limit = self._silence.limit_seconds
            deadline.shorten(0.0, f"was silent for {limit:.3g} s, far longer than in runs that went well here")
        self._overdue = left <= 0  # a report may have arrived and not been read yet: look once more
        return LOOK_SECONDS if self._overdue else min(left, LOOK_SECONDS)


def signs_of_life(lanes: Sequence[WorkerLane]) -> tuple[float, dict[int, float]]:
    """When a rank last reported, and how long the threads of the ranks and of this process waited for a processor."""
    processes = [lane.process for lane in lanes if lane.process is not None]
    waited = waited_seconds([os.getpid(), *(process.worker_pid for process in processes)])
    return max((process.last_event_at for process in processes), default=0.0), waited


def _report_times(began: float, outcomes: Sequence[Outcome]) -> list[float]:
    """When ranks reported in a run that is over, by the clock of this host, which all share."""
    ended = max(outcome.ended for outcome in outcomes)
    reports = (progress.monotonic_seconds for outcome in outcomes for progress in outcome.progress)
    return [began, *(at for at in reports if began <= at <= ended), *(outcome.ended for outcome in outcomes)]
