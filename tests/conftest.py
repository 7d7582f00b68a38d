"""How the tests run: what a missing program means, how long an example may take, and what runs one after the other."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checks.host import running
from healthd.runner.workers import launch
from tests import prepared
from tests.ci import (
    Failures,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from tests.collecting import can_be_chosen, pytest_ignore_collect
from tests.hosts.temporary import memory_folder
from tests.limits import heed_interrupts, pytest_collection_modifyitems, pytest_runtest_teardown
from tests.profile import examples
from tests.system import pytest_runtest_setup

__all__ = [
    "anyio_backend",
    "forked_programs",
    "no_authorities",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_make_collect_report",
    "pytest_pycollect_makeitem",
    "pytest_runtest_logstart",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_terminal_summary",
]

known_modules = [0]
NO_AUTHORITY = Path(__file__).parent / "fakes" / "no_authority.pem"

with contextlib.suppress(ModuleNotFoundError):  # a bare GPU machine has torch and pytest alone
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's matter; where a test wants something quick it says so itself.
    settings.register_profile(
        "patient", max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """`tmp_path` is in memory, unless --basetemp or PYTEST_DEBUG_TEMPROOT says where."""
    if (folder := memory_folder()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))
    heed_interrupts()
    config.pluginmanager.register(Failures(config))
    if not config.option.markexpr or can_be_chosen(config.option.markexpr, "kubernetes"):
        config.pluginmanager.import_plugin("tests.kubernetes.fixtures")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj: object) -> None:
    """Coroutines are run by anyio's plug-in. Not by its setting, which pytest refuses where anyio is missing."""
    if inspect.iscoroutinefunction(obj):
        pytest.mark.anyio(obj)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: let the garbage collector not look through it each time."""
    gc.freeze()


def pytest_runtest_logstart() -> None:
    """So does what a test has imported meanwhile; an aggregator that ends in this process collects all garbage."""
    if len(sys.modules) > known_modules[-1]:
        gc.freeze()
        known_modules.append(len(sys.modules))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio, as the product does."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def no_authorities() -> Iterator[None]:
    """Clients of tests trust one certificate that signs nothing: reading the 140 of certifi takes 20 ms each time."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("certifi") is not None:
            patch.setattr("certifi.where", lambda: str(NO_AUTHORITY))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_programs() -> Iterator[None]:
    """Workers and guards that are started in the process of the tests are forked, not executed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "Popen", prepared.Popen)
        patch.setattr(launch, "Popen", prepared.Popen)
        yield
