"""
The ranks of one node in a network namespace of its own, driven by lines: an order in, its reports out.

    ip netns exec NAME python -m tests.netns.executor RUN_DIR

Each line in is a `CollectiveOrder`; each line out an `OrderReport`: running ones as they come, a final one, and
accepted when all is ready for the next.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from healthd.core import wire
from healthd.core.errors import HealthdError
from healthd.core.model import CollectiveOrder, OrderReport, RankReport
from healthd.node.interfaces import interface_to
from healthd.runner.runner import Runner
from healthd.runner.settings import RunnerSettings

PARAMS: dict[str, dict[str, Any]] = {"all_reduce": {"sizes_bytes": [1024, 2**20, 8 * 2**20]}}


def say(report: OrderReport) -> None:
    os.write(1, wire.encode(report) + b"\n")


async def main(run_dir: Path) -> None:
    iterations = int(os.environ.get("ITERATIONS", "5"))
    runner = Runner(
        RunnerSettings(
            accelerator="cpu",
            run_dir=run_dir,
            options={"cpu_devices": int(os.environ.get("CPU_DEVICES", "1"))},
            params={name: {**values, "iterations": iterations} for name, values in PARAMS.items()},
        )
    )
    session = runner.session()
    await session.open()
    try:
        await session.warm()
        say(OrderReport(status="accepted"))
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = wire.decode(line.encode(), CollectiveOrder, what="order")

            def heard(ranks: tuple[RankReport, ...]) -> None:
                say(OrderReport(status="running", ranks=ranks))

            try:
                ranks = await session.join(order, heard, interface=interface_to(order.main), deadline_seconds=120.0)
                say(OrderReport(status="done", ranks=ranks))
            except HealthdError as error:
                say(OrderReport(status="refused", message=str(error)))
            await session.warm()
            say(OrderReport(status="accepted"))
    finally:
        await session.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
