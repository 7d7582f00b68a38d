"""
Which tests want the machine for themselves.

Whole fleets of processes, a Slurm, a Prometheus, a browser: what they wait for comes in time on a machine of two cores,
and may not beside another such test. `make test` runs them one after the other, after all others.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.hosts.temporary import memory_folder
from tests.whole import pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
]

with contextlib.suppress(ModuleNotFoundError):  # a bare GPU machine has torch and pytest alone
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's matter; where a test wants something quick it says so itself.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")

HERE = Path(__file__).parent
ALONE = (
    "netns",
    "page",
    "slurm",
    "deploy/test_systemd_order.py",
    "fleet/test_hostile_network.py",
    "fleet/test_main_job.py",
    "fleet/test_under_fire.py",
    "healthd/test_allocations_slurm.py",
    "healthd/test_cli_gate.py",
    "healthd/test_cli_join.py",
    "healthd/test_cli_outcome.py",
    "healthd/test_daemon_under_fire.py",
    "healthd/test_preflight.py",
    "healthd/test_preflight_collective.py",
    "healthd/test_preflight_launchers.py",
    "healthd/test_session.py",
    "healthd/test_subgroups.py",
    "test_benchmarks.py",
    "watch/test_live.py",
)


def pytest_configure() -> None:
    """`tmp_path` is in memory, unless --basetemp or PYTEST_DEBUG_TEMPROOT says where."""
    if (folder := memory_folder()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        if any(place == one or place.startswith(f"{one}/") for one in ALONE):
            item.add_marker(pytest.mark.alone)
