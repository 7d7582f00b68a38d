"""What the tests of the runner share: a runner on the misbehaving checks, and a look for processes that are left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Tier
from checks.worker.faults import parse_fault
from healthd.core.model import CheckResult
from healthd.runner.runner import Runner
from healthd.runner.settings import OnProgress, OnResult, Plan, RunnerSettings
from tests import prepared
from tests.patience import PATIENCE

CHECKS = Path(__file__).parent / "runner_checks"


def make_runner(*, executed: bool = False, **changes: Any) -> Runner:
    """A runner on the misbehaving checks. Its workers have torch imported already, unless they are to be executed."""
    values: dict[str, Any] = {
        "probe_python": prepared.EXECUTED if executed else None,
        "accelerator": "cpu",
        "directories": (CHECKS,),
        "retry_backoff_seconds": 0.01,
        "lock_wait_seconds": 0.2,
        "start_timeout_seconds": 60.0 * PATIENCE,
    }
    return Runner(RunnerSettings(**{**values, **changes}))


def run_checks(
    *names: str,
    runner: Runner | None = None,
    faults: Sequence[str] = (),
    tier: Tier = Tier.PASSIVE,
    on_result: OnResult | None = None,
    on_progress: OnProgress | None = None,
    timeout_seconds: float | None = None,
    **changes: Any,
) -> Mapping[str, CheckResult]:
    """Results by name; afterwards no worker may be left."""
    runner = runner or make_runner(**changes)
    plan = Plan(tier=tier, checks=names, executor="test", timeout_seconds=timeout_seconds)
    parsed = [parse_fault(text) for text in faults]
    results = asyncio.run(runner.run(plan, faults=parsed, on_result=on_result, on_progress=on_progress))
    assert [result.check for result in results] == list(dict.fromkeys(names))
    assert workers_left() == []
    return {result.check: result for result in results}


def workers_left() -> list[str]:
    """Workers of this process that still run, by their command lines."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                line = Path(f"/proc/{name}/cmdline").read_text(errors="replace").replace("\0", " ")
                if stat[0] != "Z" and int(stat[1]) == os.getpid() and "worker.py" in line:
                    found.append(f"{name} {line}")
    return found


def servers_left() -> list[str]:
    """Those of them that fork workers: the guard of a forked worker has the same command line, and the worker below."""

    def has_children(line: str) -> bool:
        pid = line.split()[0]
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    return [line for line in workers_left() if "worker.py fork" in line and not has_children(line)]


def ranks_left() -> list[str]:
    """Workers that still run, without what forks them, which a session has until its end."""
    servers = servers_left()
    return [line for line in workers_left() if line not in servers]


def below_guard(pid: int) -> int:
    """The process of a worker by that of its guard, which is the one that was started."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(stat[1]) == pid and "worker.py" in Path(f"/proc/{name}/cmdline").read_text(errors="replace"):
                    return int(name)
    raise LookupError(f"process {pid} guards no worker")


# PTRACE_SEIZE, and never a wait.
_TRACER = """
import ctypes, os, sys, time
folder, libc = sys.argv[1], ctypes.CDLL(None)
while True:
    for name in os.listdir(folder):
        if name.isdigit() and not os.path.exists(f"{folder}/{name}.seized"):
            done = libc.ptrace(0x4206, int(name), None, None)
            with open(f"{folder}/{name}.new", "w") as file:
                file.write(str(done))
            os.rename(f"{folder}/{name}.new", f"{folder}/{name}.seized")
    time.sleep(0.01)
"""


@contextlib.contextmanager
def tracer(folder: Path) -> Iterator[None]:
    """
    Once killed, a process that has put a file named by its number there stays a corpse that nobody can reap, until this
    ends. It finds `NUMBER.seized` when that is so. The test is skipped where this user may not trace its own processes.
    """
    with subprocess.Popen([sys.executable, "-S", "-c", _TRACER, str(folder)]) as process:
        try:
            yield
        finally:
            process.kill()
    if any(file.read_text() != "0" for file in folder.glob("*.seized")):
        pytest.skip("this user may not trace its own processes here")


def wait_gone(pid: int, within_seconds: float = 2.0 * PATIENCE) -> bool:
    """Whether a process that is not ours ends within that time."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds * PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
