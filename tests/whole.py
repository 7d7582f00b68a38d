"""
Whether a test may be skipped because something "is not installed": not where everything has been installed.

`.ci/run` sets TESTS_WHOLE=1 once it has, and names in TESTS_WITHOUT what could not be had. The names do not begin with
HEALTHD_: healthd refuses variables of that beginning that it does not know.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

WHOLE = os.environ.get("TESTS_WHOLE") == "1"
WITHOUT = os.environ.get("TESTS_WITHOUT", "").split()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse(report)
    return report


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Every test that skips for want of a program or a package says that it "is not installed"."""
    reason = report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
    if WHOLE and "not installed" in reason and not any(name in reason for name in WITHOUT):
        report.outcome = "failed"
        report.longrepr = f"{reason.removeprefix('Skipped: ')} (with TESTS_WHOLE=1 that is a failure: {__name__})"
