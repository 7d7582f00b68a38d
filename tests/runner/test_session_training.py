"""Training steps of ranks on several nodes: real workers, real gloo over TCP, faults as an operator sets them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.collective.judges import judge_of
from checks.contract import Evidence, Missing, Status
from healthd.core.model import RankReport
from tests.patience import PATIENCE
from tests.runner.ranks_kit import lost, nodes, orders

NAME = "data_parallel_step"
HANG_SECONDS = 4.0 * PATIENCE  # what the test of a hang takes


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def accused(reports: Sequence[RankReport]) -> list[tuple[str, str | None]]:
    evidence = [
        Evidence(target=f"rank:{one.rank}", key=one.key, data=one.data)
        for one in reports
        if one.key is not None and one.data is not None
    ]
    missing = [
        Missing(target=f"rank:{one.rank}", reason=one.reason, message=one.message)
        for one in reports
        if one.reason is not None
    ]
    found = judge_of(NAME)(evidence, missing)
    return [(finding.target, finding.reason) for finding in found if finding.status is not Status.PASS]


def test_ranks_of_two_nodes_train_together_after_a_collective(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 2, 1) as two:
            await two.warm()
            reports = await two.join(orders(2, 1, checks=("all_reduce", NAME)))
            assert lost(reports) == {}
            steps = [one for one in reports if one.check == NAME]
            assert {one.last for one in steps} == {f"{NAME}/4 left"}
            assert accused(steps) == []
            digests = [one.data["training"]["digests"] for one in steps if one.data is not None]
            assert len(digests) == 3
            assert digests[0] == digests[1] == digests[2]

    run(main())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (".block1.gelu_grad@rank:2=corrupt:0.001", "SilentCorruption"),
        (".block1.up_weight_reduced@rank:2=corrupt:0.001", "SilentCorruption"),
        (".block1.gelu_grad@rank:2=corrupt:0.001/1", "SilentCorruption"),
        ("@rank:2=corrupt", "WrongResult"),
        ("@rank:2=crash", "RankDied"),
    ],
)
def test_faulty_rank_is_named(tmp_path: Path, fault: str, reason: str) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 2, 1, faults=[f"{NAME}{fault}"]) as two:
            await two.warm()
            reports = await two.join(orders(2, 1, checks=(NAME,)))
            assert [one.rank for one in reports if one.injected] == [2]
            assert accused(reports) == [("rank:2", reason)]

    run(main())


def test_rank_that_hangs_is_behind_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, faults=[f"{NAME}@rank:1=hang"]) as two:
            await two.warm()
            reports = await two.join(orders(1, 1, checks=(NAME,), timeout_seconds=HANG_SECONDS))
            assert lost(reports)[1] == "Timeout"
            assert [one.last for one in reports] == [f"{NAME}/1 entered", "rendezvous left"]

    run(main())


def test_slow_rank_comes_late_by_its_own_work(tmp_path: Path) -> None:
    async def main() -> None:
        async with nodes(tmp_path, 1, 1, faults=[f"{NAME}@rank:1=slow:20"]) as two:
            await two.warm()
            sizes = [one.data["sizes"][0] for one in await two.join(orders(1, 1, checks=(NAME,))) if one.data]
            assert sizes[1]["ready_seconds"] > 3 * sizes[0]["ready_seconds"]
            assert sizes[0]["seconds"] > sizes[1]["ready_seconds"] / 6  # it waited, in each of three timed steps

    run(main())
