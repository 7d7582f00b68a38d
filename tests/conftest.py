"""
Which tests want the machine for themselves.

Whole fleets of processes, a Slurm, a Prometheus, a browser: what they wait for comes in time on a machine of two cores,
and may not beside another such test. `make test` runs them one after the other, after all others.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.whole import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_collection_modifyitems", "pytest_make_collect_report", "pytest_runtest_makereport"]

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
    "test_benchmarks.py",
    "watch/test_live.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        if any(place == one or place.startswith(f"{one}/") for one in ALONE):
            item.add_marker(pytest.mark.alone)
