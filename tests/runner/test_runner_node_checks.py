"""Node checks that use the devices: afterwards the workers get them only once they are free."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from checks.contract import Status, Tier
from tests.runner.runner_kit import run_checks, wait_gone

# It has somebody else open the file of a device, as a service on its behalf may: what it starts itself ends with it.
CHECK = """
from __future__ import annotations
import time
from pathlib import Path
from collections.abc import Iterator
from dataclasses import dataclass
from checks.contract import Context, Finding, Status, check

@dataclass(frozen=True)
class Params:
    folder: str = ""
    skip: bool = False

@check(tier="quick", interval_seconds=60, timeout_seconds=10)
def uses_devices(ctx: Context[Params]) -> Iterator[Finding]:
    folder = Path(ctx.params.folder)
    (folder / "wanted").touch()
    while not (folder / "pid").exists():
        time.sleep(0.01)
    status = Status.SKIP if ctx.params.skip else Status.PASS
    yield Finding(status=status, reason="Busy" if ctx.params.skip else None, message="done", target="node")

@check(tier="quick", interval_seconds=60, timeout_seconds=10, scope="device")
def opens(ctx: Context[Params]) -> Iterator[Finding]:
    yield Finding(status=Status.PASS, reason=None, message="here", target=ctx.device.target)
"""


HOLDER = """cd {folder}
(while [ ! -e wanted ]; do sleep 0.01; done
mkdir -p devices; touch devices/cpu0; exec 3< devices/cpu0
sleep {seconds} & echo $! > pid.new; mv pid.new pid) > /dev/null 2>&1 &"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/uses.py").write_text(CHECK)
    return tmp_path


def run(folder: Path, seconds: float) -> dict[str, tuple[Status, str | None]]:
    # Not below this process, whose descendants count as its own.
    subprocess.run(["sh", "-c", HOLDER.format(folder=folder, seconds=seconds)], start_new_session=True, check=True)
    results = run_checks(
        "uses_devices",
        "opens",
        tier=Tier.QUICK,
        directories=(folder / "checks",),
        run_dir=folder,
        params={"uses_devices": {"folder": str(folder)}},
        retry_backoff_seconds=0.5,
        retries=3,
    )
    return {name: (result.status, result.findings[0].reason) for name, result in results.items()}


def test_workers_wait_until_what_a_node_check_left_is_gone(folder: Path) -> None:
    assert run(folder, 0.7) == {"uses_devices": (Status.PASS, None), "opens": (Status.PASS, None)}


def test_workers_are_not_started_on_devices_that_stay_held(folder: Path) -> None:
    """It would fail for want of a device, and the node would be blamed for what the check before left behind."""
    try:
        assert run(folder, 60.0) == {"uses_devices": (Status.PASS, None), "opens": (Status.SKIP, "Busy")}
    finally:
        pid = int((folder / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(pid)
