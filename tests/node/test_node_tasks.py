"""What one task of the daemon cannot handle ends neither it nor the daemon."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import pytest

from healthd.core.http.server import exposition
from healthd.core.model import CheckResult
from healthd.core.tasks import LogOnce, Tasks
from healthd.node.http.metrics import registry_of
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.settings import ActiveSettings, Unprompted
from healthd.runner.settings import Plan
from tests.node.node_collectives_kit import collective
from tests.node.node_kit import World, eventually, lease, lease_order, quiet, run, run_order

ON_ORDER = ActiveSettings(unprompted=Unprompted.OFF)


class Collectives:
    """Stands where the collectives are, and cannot begin any."""

    def order(self, *_: object) -> None:
        raise KeyError("nobody thought of this")


def test_supervised_task_that_fails_or_ends_is_started_again_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        tasks = Tasks(first_restart_seconds=0.001)
        starts = []

        async def work() -> None:
            starts.append(1)
            if len(starts) == 1:
                raise RecursionError("maximum recursion depth exceeded")
            if len(starts) == 2:
                waited_for = asyncio.get_running_loop().create_future()
                waited_for.cancel()
                await waited_for
            if len(starts) > 3:
                await asyncio.Event().wait()

        tasks.supervise("orders", work)
        await eventually(lambda: len(starts) == 4)
        assert tasks.errors == {"orders": 3}
        assert "orders has failed; it is restarted in 0.001 s" in caplog.text
        assert "orders has ended unexpectedly" in caplog.text
        await tasks.stop(1.0)
        async with World(tmp_path) as world:
            text, _ = exposition(registry_of(world.book, tasks.errors), "text/plain")
            assert b'healthd_task_errors_total{task="orders"} 3.0' in text
            later = Tasks()
            transport = httpx.ASGITransport(app=NodeApi(world.book, later.errors))  # type: ignore[arg-type]
            later.supervise("sync", asyncio.Event().wait)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://n1") as client:
                assert 'task_errors_total{task="sync"} 0.0' in (await client.get("/metrics")).text
            await later.stop(1.0)

    run(main())


def test_run_that_raises_ends_its_order_and_the_next_one_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER, first_restart_seconds=0.001) as world:
            await quiet()

            def broken(check: str, plan: Plan) -> CheckResult:
                raise KeyError("nobody thought of this")

            healthy, world.probes.outcome = world.probes.outcome, broken
            await world.take(run_order())
            await eventually(lambda: world.status("R1") == "refused")
            assert "an internal error of healthd ended the run: KeyError" in world.orders.reports()["R1"].message
            assert world.book.running is None
            world.probes.outcome = healthy
            await world.take(run_order("R2"))
            await eventually(lambda: world.status("R2") == "done")
            assert world.book.result("matmul") is not None
            world.forgive()

    run(main())


def test_order_that_cannot_be_begun_is_refused_and_a_lease_beside_it_is_stored(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            world.orders._collectives = Collectives()  # type: ignore[assignment]
            await world.take(collective("C1"), lease_order(lease()))
            await eventually(lambda: world.status("L1") == "accepted")
            assert world.status("C1") == "refused"
            assert "an internal error of healthd: KeyError" in world.orders.reports()["C1"].message

    run(main())


def test_trouble_is_logged_when_it_changes_and_again_after_it_was_over(caplog: pytest.LogCaptureFixture) -> None:
    trouble = LogOnce(logging.getLogger("healthd.test"))
    for text in ("away", "away", "refused", "away"):
        trouble.say(text, logging.ERROR)
    trouble.clear()
    trouble.say("away", logging.ERROR)
    assert [one.getMessage() for one in caplog.records] == ["away", "refused", "away", "away"]
    assert {one.levelno for one in caplog.records} == {logging.ERROR}
