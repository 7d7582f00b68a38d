"""Nodes for tests of collectives over several nodes: a runner each, all on this machine, and orders for their ranks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from checks.worker.faults import parse_fault
from healthd.core.model import CollectiveOrder, RankReport
from healthd.runner.collective.ranks import Session
from healthd.runner.runner import Runner
from tests.aggregator.service import free_port
from tests.patience import PATIENCE
from tests.runner.runner_kit import make_runner, workers_left

SMALL = {name: {"sizes_bytes": [1024, 65536], "iterations": 2} for name in ("all_reduce", "all_gather")}

_numbers = itertools.count(os.getpid())


def orders(*ranks: int, checks: Sequence[str] = ("all_reduce",), **changes: Any) -> list[CollectiveOrder]:
    """The orders for one group whose nodes have so many ranks each."""
    main = changes.get("main", "127.0.0.1")
    first = [sum(ranks[:index]) for index in range(len(ranks))]
    common: dict[str, Any] = {
        "validation": "v1",
        "group": f"g{next(_numbers)}",
        "checks": tuple(checks),
        "size": sum(ranks),
        "main": main,
        "port": free_port(main),
        "seed": 7,
        "join_seconds": 10.0 * PATIENCE,
        "timeout_seconds": 10.0 * PATIENCE,
    }
    return [
        CollectiveOrder(**{**common, "first_rank": rank, "whole_rank": rank, "ranks": count, **changes})
        for rank, count in zip(first, ranks, strict=True)
    ]


class Nodes:
    """Sessions side by side. `heard[i]` is all that node i reported."""

    def __init__(self, sessions: list[Session], runners: list[Runner]) -> None:
        self.sessions = sessions
        self.runners = runners
        self.heard: list[list[tuple[RankReport, ...]]] = [[] for _ in sessions]

    def seen(self, rank: int) -> str:
        """Where a rank was when it was last heard of."""
        latest = [reports[-1] for reports in self.heard if reports]
        return next((report.last for reports in latest for report in reports if report.rank == rank), "")

    async def warm(self) -> None:
        """Have all ranks ready, so that an order's seconds are for meeting alone and none imports torch in them."""
        await asyncio.gather(*(session.warm() for session in self.sessions))

    async def join(
        self,
        wanted: Sequence[CollectiveOrder | None],
        *,
        deadline_seconds: float = 30.0 * PATIENCE,
        interface: str | None = "lo",
    ) -> list[RankReport]:
        """Let all that have an order join at once; the reports of all nodes, in the order of the ranks."""
        joining = [
            session.join(order, heard.append, interface=interface, deadline_seconds=deadline_seconds)
            for session, order, heard in zip(self.sessions, wanted, self.heard, strict=True)
            if order is not None
        ]
        return [report for reports in await asyncio.gather(*joining) for report in reports]


@contextlib.asynccontextmanager
async def nodes(folder: Path, *devices: int, faults: Sequence[str] = (), **changes: Any) -> AsyncIterator[Nodes]:
    """So many nodes, with so many devices each; afterwards no rank is left of them."""
    parsed = [parse_fault(text) for text in faults]
    runners = [
        make_runner(
            **{
                "run_dir": folder / f"node{index}",
                "options": {"cpu_devices": count},
                "params": SMALL,
                "retry_backoff_seconds": 0.01,
                **changes,
            }
        )
        for index, count in enumerate(devices)
    ]
    sessions = [runner.session(parsed) for runner in runners]
    try:
        await asyncio.gather(*(session.open() for session in sessions))
        yield Nodes(sessions, runners)
    finally:
        await asyncio.gather(*(session.close() for session in sessions))
    assert workers_left() == []


def lost(reports: Sequence[RankReport]) -> dict[int, str | None]:
    """Rank -> why it gave nothing."""
    return {report.rank: report.reason for report in reports if report.reason is not None}


def blank(order: CollectiveOrder, **changes: Any) -> CollectiveOrder:
    return dataclasses.replace(order, **changes)
