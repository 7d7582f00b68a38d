"""How the tests run: what a missing program means, how long an example may take, and what runs one after the other."""

from __future__ import annotations

import contextlib
import os

from tests.hosts.temporary import memory_folder
from tests.system import pytest_runtest_setup
from tests.whole import pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
]

with contextlib.suppress(ModuleNotFoundError):  # a bare GPU machine has torch and pytest alone
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's matter; where a test wants something quick it says so itself.
    settings.register_profile("patient", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_configure() -> None:
    """`tmp_path` is in memory, unless --basetemp or PYTEST_DEBUG_TEMPROOT says where."""
    if (folder := memory_folder()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))
