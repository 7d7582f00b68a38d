"""The sidecar's loop against a main node that answers as told, with an executor that ends at a moment of the test."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

from healthd.core.errors import HealthdError
from healthd.core.model import GateRequest
from healthd.hooks.preflight.hook import Outcome, Task
from healthd.hooks.preflight.sidecar import keep
from tests.aggregator.service import until
from tests.hooks.hook_answers_kit import Answers, serving
from tests.hooks.preflight_stopped_kit import main_node


def task_of(url: str) -> Task:
    """Rank 1 of 2, whose hook is whatever has started this test."""
    return Task(
        rank=1,
        size=2,
        main="127.0.0.1",
        port=urlsplit(url).port or 0,
        local_rank=0,
        local_size=1,
        request=GateRequest(job="train", nodes=("rank-0", "rank-1"), wait_seconds=60.0),
        wait_seconds=60.0,
        began=time.monotonic(),
        acknowledge_seconds=60.0,
        gone_seconds=0.2,
        linger_seconds=1.0,
        token=None,
        parent=os.getppid(),
    )


def said(main: Answers, event: str) -> bool:
    return any(f'"{event}"'.encode() in body for body in main.bodies)


def test_checks_that_end_after_the_start_was_confirmed_take_that_back(tmp_path: Path) -> None:
    reported: list[Outcome] = []
    with serving(main_node(go=None)) as main:

        async def executor() -> None:
            await asyncio.to_thread(until, lambda: said(main, "acknowledge"))
            raise HealthdError("no device answers any more")

        asyncio.run(keep(task_of(main.url), executor, lambda _: True, reported.append, tmp_path))
        assert said(main, "withdraw")
    (outcome,) = reported
    assert (outcome.kind, outcome.code, outcome.message) == ("exit", 75, "no device answers any more")


def test_a_confirmation_that_is_not_answered_in_time_is_taken_back(tmp_path: Path) -> None:
    reported: list[Outcome] = []
    answers = main_node(go=None)

    def handshake(_: str) -> tuple[int, str, bytes]:
        return (200 if said(main, "withdraw") else 503), "application/json", b"{}"

    with serving({**answers, "/handshake": handshake}) as main:
        asyncio.run(keep(task_of(main.url), forever, lambda _: True, reported.append, tmp_path))
        assert said(main, "withdraw")
    assert [(one.kind, one.code) for one in reported] == [("exit", 75)]


async def forever() -> None:
    await asyncio.Event().wait()


def test_the_others_are_told_before_the_checks_are_stopped(tmp_path: Path) -> None:
    """A launcher gives a hook seconds to end, and the end of a check may take them all."""
    known: list[bool] = []
    with serving(main_node(go=None)) as main:

        async def executor() -> None:
            try:
                await forever()
            finally:
                known.append(said(main, "withdraw"))

        asyncio.run(keep(task_of(main.url), executor, lambda _: False, lambda _: None, tmp_path))
    assert known == [True]
