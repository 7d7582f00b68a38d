"""
What CI asks of a run of tests: no silent skip, a name for each unstable test, one closing line over all runs.

`.ci/run` sets TESTS_WHOLE=1 once it has installed everything, and names in TESTS_WITHOUT, separated by semicolons, what
could not be had there: a test may be skipped only for a reason that has one of these texts in it. In the directory
TESTS_RESULTS each run of pytest leaves its junit file (see the Makefile) and the names of the tests that failed first
and passed when they were run again. The names of these variables do not begin with HEALTHD_: healthd refuses
variables of that beginning that it does not know.

    python -m tests.ci RESULTS_DIRECTORY

prints the unstable tests and, as its last line, `N passed, N failed, N skipped` over all junit files of the directory.
It exits with 1 when a test failed or none was counted.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from xml.etree import ElementTree

import pytest

WHOLE = os.environ.get("TESTS_WHOLE") == "1"
WITHOUT = [text for text in os.environ.get("TESTS_WITHOUT", "").split(";") if text]
RESULTS = os.environ.get("TESTS_RESULTS")
UNSTABLE = "unstable.txt"


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
    """Where everything is installed, a skip for a reason that nobody named is a failure."""
    if not WHOLE or report.outcome != "skipped" or not isinstance(report.longrepr, tuple):
        return
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not any(text in reason for text in WITHOUT):
        report.outcome = "failed"
        report.longrepr = f"skipped: {reason} (TESTS_WITHOUT does not name it: with TESTS_WHOLE=1 that is a failure)"


class Failures:
    """Shows a failure when it happens, not when all tests are through. Workers have no terminal, and show nothing."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.line("")
            terminal.section(f"{report.nodeid} ({report.when})", sep="_", red=True)
            terminal.line(report.longreprtext)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Note the tests that failed and passed when they were run again (pytest-rerunfailures)."""
    failed = {report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())}
    again = {report.nodeid for report in terminalreporter.stats.get("rerun", ())}
    if RESULTS:
        with Path(RESULTS, UNSTABLE).open("a", encoding="utf-8") as out:
            out.writelines(f"{test}\n" for test in sorted(again - failed))


def count(folder: Path) -> Counter[str]:
    """`passed`, `failed` and `skipped` tests of all junit files of a directory; a test in error has failed."""
    kinds: dict[tuple[str, str, str], set[str]] = {}
    for file in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):  # two of a test that was run again, the first one empty
            test = (file.name, case.get("classname", ""), case.get("name", ""))
            kinds.setdefault(test, set()).update(child.tag for child in case)
    return Counter(
        "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        for found in kinds.values()
    )


def main(folder: Path) -> int:
    """See the module."""
    unstable = folder / UNSTABLE
    if unstable.exists() and (names := unstable.read_text(encoding="utf-8")):
        print(f"unstable: failed at first, passed when run again\n{names}")
    counts = count(folder)
    if not counts["passed"] + counts["failed"]:
        print(f"no test was counted in {folder}/*.xml")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 0 if counts["passed"] and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
