"""
Runs worker processes as ranks of one group: makes them ready, gives them one check at a time, ends them together.

The collectives inside a node (`node_collective`) and this node's part of a group over several nodes (`order_ranks`)
both run on it. They differ in their deadlines and in what they report meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import CheckInfo, Missing
from checks.worker.faults import Fault
from healthd.core.model import CollectiveOrder
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, WorkerLane
from healthd.runner.workers.workers import Workers

# Beyond our own deadline: the operation must not give up before we have looked which rank is where.
BEYOND_DEADLINE_SECONDS = 30.0


@dataclass(kw_only=True)
class Rank:
    """One worker of a group: one rank, or several where one process drives several devices."""

    lane: WorkerLane
    first: int
    """Its first rank in the group."""
    targets: tuple[str, ...]
    """Its devices, one for each of its ranks."""
    names: tuple[str, ...]
    """The names by which injected faults can refer to it, a device and a rank for each target: `cpu:1`, `rank:1`."""

    def target_of(self, name: str | None) -> str:
        """The device that one of its names stands for; all of its devices for None or a name that is not its own."""
        return self.targets[self.names.index(name) // 2] if name in self.names else self.lane.target


class Deadline:
    """When the ranks that are still running are killed (monotonic), and the reason that is given for it."""

    def __init__(self, seconds: float, why: str) -> None:
        self.restart(seconds, why)

    def restart(self, seconds: float, why: str) -> None:
        """Replace it by one that counts from now."""
        self.at, self.why = time.monotonic() + seconds, why

    def shorten(self, seconds: float, why: str) -> None:
        """Replace it by one that counts from now, if that one is earlier."""
        if time.monotonic() + seconds < self.at:
            self.restart(seconds, why)


Watch = Callable[[Deadline, Mapping[int, Outcome]], float]
"""Called with the outcomes of the workers that have ended, by index: first, after each end, and whenever the seconds
that it returns have passed. It can move the deadline."""


class RankGroup:
    """The ranks of one group on this node, in the order of their numbers."""

    def __init__(self, workers: Workers, ranks: Sequence[Rank]) -> None:
        self._grace_seconds = workers.settings.peer_grace_seconds
        self.ranks = ranks

    async def start(self, info: CheckInfo, faults: Sequence[Fault]) -> list[Missing | None]:
        """Make all workers ready; for each rank None, or why it cannot take part."""

        async def start(rank: Rank) -> Missing | None:
            for fault in faults:
                if fault.kind == "missing" and fault.hits(info.name, rank.names):
                    target = rank.target_of(fault.target)
                    return Missing(target=target, reason="MissingDevice", message=f"no such device: {target}")
            return await rank.lane.start()

        return list(await asyncio.gather(*(start(rank) for rank in self.ranks)))

    async def run(
        self, info: CheckInfo, command: Callable[[Rank], dict[str, Any]], deadline: Deadline, watch: Watch
    ) -> list[Outcome]:
        """The outcomes of one check on all ranks, in their order. Ranks that are late are killed."""
        jobs = [Job(check=info.name, command=command(rank), timeout_seconds=math.inf) for rank in self.ranks]
        tasks = [
            asyncio.create_task(rank.lane.run_now(job), name=f"rank {rank.first} of {info.name}")
            for rank, job in zip(self.ranks, jobs, strict=True)
        ]
        try:
            await self._supervise(tasks, deadline, watch)
            return await self._end_late(tasks, deadline.why)
        finally:
            for task in tasks:
                task.cancel()

    async def _supervise(self, tasks: Sequence[asyncio.Task[Outcome]], deadline: Deadline, watch: Watch) -> None:
        """Wait for all until the deadline, which comes soon once a rank has failed: the others wait for it in vain."""
        failed = False
        while pending := [task for task in tasks if not task.done()]:
            ended = {index: task.result() for index, task in enumerate(tasks) if task.done()}
            look_seconds = watch(deadline, ended)
            left = deadline.at - time.monotonic()
            if left <= 0:
                return
            done, _ = await asyncio.wait(pending, timeout=min(left, look_seconds), return_when=asyncio.FIRST_COMPLETED)
            if not failed and any(task.result().missing is not None for task in done):
                failed = True
                why = f"was still waiting {self._grace_seconds:g} s after another rank of its node had ended"
                deadline.shorten(self._grace_seconds, why)

    async def _end_late(self, tasks: Sequence[asyncio.Task[Outcome]], why: str) -> list[Outcome]:
        """
        Kill the ranks that have not ended; the outcomes of all, late ones with their last known position.

        All that are late are noted before the first is killed, so that the kill of one is not taken for the failure of
        another.
        """
        late = [index for index, task in enumerate(tasks) if not task.done()]
        output: dict[int, str] = {}
        for index in late:
            process = self.ranks[index].lane.process
            if process is not None:
                output[index] = process.last_output()
                process.kill()
        outcomes = [await task for task in tasks]
        for index in late:
            outcome = outcomes[index]
            seen = f"; last seen: {outcome.last_step}" if outcome.progress else "; it never joined"
            error = f"{why}{seen}\n{output.get(index, '')}".strip()
            outcome.fail_with_worker("Timeout", why + seen, error=error)
        return outcomes

    async def kill(self, check: str) -> None:
        """Kill all workers."""
        await asyncio.gather(*(rank.lane.kill(check) for rank in self.ranks))

    async def retire(self) -> None:
        """Let all workers end by themselves."""
        await asyncio.gather(*(rank.lane.retire() for rank in self.ranks))


def group_of(targets: Sequence[str]) -> dict[str, Any]:
    """
    What ranks inside a node must know before they open their devices: who is who, and the runtime's meeting point.

    The port is free now. Where another process takes it before the first rank does, the group fails, and the next one
    has another port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"size": len(targets), "targets": list(targets), "root_comm": f"127.0.0.1:{port}"}


def group_over_nodes(order: CollectiveOrder, targets: Sequence[str]) -> dict[str, Any]:
    """
    The same for `targets` as a part of a group over several nodes, whose order says where its rank 0 is.

    The order's own port is that of torch's store; the runtime's port is next to it.
    """
    port = order.port + 1 if order.port < 65535 else order.port - 1
    return {
        "size": order.size,
        "first_rank": order.first_rank,
        "targets": list(targets),
        "root_comm": f"{url_host(order.main)}:{port}",
    }


def url_host(address: str) -> str:
    """An IP address as it is written before a port."""
    return f"[{address}]" if ":" in address else address
