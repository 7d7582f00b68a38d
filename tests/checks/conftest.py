"""Fixtures for tests of checks: a machine, a CPU device with real torch, a context, and ranks as real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import cpu
from checks.contract import Check, Context, Evidence, Limit, Missing, Profiling, Progress, Tier, load_params
from checks.host.machine import Host
from tests import prepared

# A bare GPU machine has torch and pytest alone: all but the tests for it are left out there.
BARE = any(importlib.util.find_spec(name) is None for name in ("hypothesis", "msgspec"))
collect_ignore_glob = ["test_[!g]*.py"] if BARE else []

LAUNCHER = Path(__file__).with_name("launch_ranks.py")


@pytest.fixture(scope="session")
def cpu_device() -> cpu.CpuDevice:
    """The first of two CPU devices, in this process; the cores of the test run stay as they were."""
    cores = os.sched_getaffinity(0)
    try:
        return cpu.bind("cpu:0", cpu.find(Host(None), {"cpu_devices": 2}), {})
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture
def context() -> Callable[..., Context[Any]]:
    """Make the context of a check: `context(matmul, device=..., seed=1)`; what it does not know is a parameter."""

    def make(
        check: Check,
        *,
        device: Any = None,
        group: Any = None,
        host: Host | None = None,
        tier: Tier = Tier.QUICK,
        inventory: Mapping[str, Any] | None = None,
        limits: Mapping[str, Limit] | None = None,
        previous: Any = None,
        profiling: Profiling | None = None,
        **params: Any,
    ) -> Context[Any]:
        return Context(
            host=host or Host(None),
            params=load_params(check.params_type, params),
            tier=tier,
            device=device,
            group=group,
            previous=previous,
            inventory=inventory or {},
            limits=limits or {},
            profiling=profiling,
        )

    return make


class Tampering:
    """A device that shows the host something else than it holds, as `change(tensor, number of the read)` says."""

    def __init__(self, device: Any, change: Callable[[Any, int], Any], **others: Any) -> None:
        self._device, self._change, self._others, self._reads = device, change, others, 0

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._device, name)

    def read(self, tensor: Any) -> Any:
        self._reads += 1
        return self._change(self._device.read(tensor).clone(), self._reads)


@pytest.fixture
def tampering(cpu_device: cpu.CpuDevice) -> Callable[..., Tampering]:
    def make(change: Callable[[Any, int], Any] = lambda tensor, _: tensor, **others: Any) -> Tampering:
        return Tampering(cpu_device, change, **others)

    return make


@pytest.fixture(scope="session")
def rank_process() -> Iterator[subprocess.Popen[str]]:
    """One process with torch imported, which forks the ranks of every test."""
    with prepared.Popen(
        [sys.executable, str(LAUNCHER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def run_with_torch() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a process of its own that has imported torch: `run_with_torch(code, "argument")`."""

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", code, *arguments]
        with prepared.ScriptPopen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(line, process.returncode, out, err)

    return run


def ask(process: subprocess.Popen[str], order: Mapping[str, Any]) -> dict[str, Any]:
    """An order to `launch_ranks.py`, and its answer."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


@pytest.fixture
def run_ranks(
    rank_process: subprocess.Popen[str], tmp_path: Path
) -> Callable[..., tuple[list[list[Any]], list[Missing]]]:
    """
    Run checks over real ranks: `run_ranks(["all_reduce"], size=2)` -> (evidence of each check, missing ranks).

    `faults` maps a rank to what it does: {"event": [step, event], "kind": "hang" | "crash" | "raise" | "absent" |
    "corrupt" | "slow"}; "places" are those of a training step to corrupt, with magnitudes, and "factor" is how slow.
    `waits_at` is the [step, event] at which sound ranks wait for one that hangs or is absent: once all of
    them are there, the deadline is not waited for.
    """

    def run(
        checks: list[str],
        *,
        size: int,
        params: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        faults: Mapping[int, Any] | None = None,
        fresh_groups: bool = False,
        waits_at: list[str] | None = None,
        timeout_seconds: float = 60.0,
        deadline_seconds: float = 75.0,
    ) -> tuple[list[list[Any]], list[Missing]]:
        order = {
            "checks": checks,
            "size": size,
            "rendezvous": f"file://{tmp_path}/{uuid.uuid4().hex}",
            "params": params or {},
            "limits": limits or {},
            "faults": faults or {},
            "fresh_groups": fresh_groups,
            "waits_at": waits_at,
            "timeout_seconds": timeout_seconds,
            "deadline_seconds": deadline_seconds,
        }
        answer = ask(rank_process, order)
        evidence = [[Evidence(**item) for item in items] for items in answer["evidence"]]
        missing = [
            Missing(**{**item, "progress": tuple(Progress(**progress) for progress in item["progress"])})
            for item in answer["missing"]
        ]
        return evidence, missing

    return run
