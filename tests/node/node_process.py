"""A node daemon as a process, for tests: `python node_process.py FOLDER LISTEN CHECKS [AGGREGATOR ...]`."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from healthd.core.errors import HealthdError
from healthd.node.daemon import run_node
from healthd.node.settings import ActiveSettings, LeaseSettings, NodeSettings, SyncSettings
from healthd.runner.settings import RunnerSettings


def main(folder: Path, listen: str, checks: tuple[str, ...], aggregators: tuple[str, ...]) -> None:
    settings = NodeSettings(
        name="n1",
        state_dir=folder / "state",
        run_dir=folder / "run",
        listen=listen,
        checks=checks,
        labels={"pool": "a"},
        active=ActiveSettings(retry_seconds=1.0),
        lease=LeaseSettings(watch_seconds=0.1),
        sync=SyncSettings(aggregators=aggregators, backoff_max_seconds=0.2),
    )
    directories = (folder / "checks",) if (folder / "checks").is_dir() else ()
    runner = RunnerSettings(
        run_dir=folder / "run",
        directories=directories,
        options={"cpu_devices": 2},
        params={"matmul": {"sizes": [64, 64], "repeats": 1}},
    )
    asyncio.run(run_node(settings, runner))


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        main(Path(sys.argv[1]), sys.argv[2], tuple(filter(None, sys.argv[3].split(","))), tuple(sys.argv[4:]))
    except HealthdError as error:
        sys.exit(f"{error}")
