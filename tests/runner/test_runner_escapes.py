"""What a check or a plug-in has started ends with it, wherever it went."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.contract import Program, Status
from tests.runner.runner_kit import run_checks, wait_gone


@pytest.mark.parametrize("then", ["end", "hang", "crash"])
def test_process_that_left_its_check_ends_with_the_worker(tmp_path: Path, then: str) -> None:
    run_checks("escapes", params={"escapes": {"folder": str(tmp_path), "then": then}}, retries=0)
    assert wait_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("then", "seconds"), [("exit 1", 30.0), ("sleep 300", 4.0), ("kill -9 $$", 30.0)])
def test_process_that_left_its_plugin_ends_with_it(tmp_path: Path, then: str, seconds: float) -> None:
    script = f"(setsid sleep 300 & echo $! > {tmp_path}/pid); echo said; {then}"
    program = Program(command=("/bin/sh", "-c", script), timeout_seconds=seconds)
    run_checks("late", programs={"late": program}, retries=0)
    assert wait_gone(int((tmp_path / "pid").read_text()), 0.2)


@pytest.mark.parametrize("child", ["first", "last"])
def test_check_whose_forked_child_gives_a_result_too_is_unknown(tmp_path: Path, child: str) -> None:
    """The child's pass is not the result, and the parent's fail is not lost."""
    params = {"forks": {"folder": str(tmp_path), "child": child}}
    results = run_checks("forks", "fine", params=params, retries=0)
    result, pid = results["forks"], (tmp_path / "child").read_text()
    last = result.findings[-1]
    assert (result.status, last.reason) == (Status.FAIL if child == "last" else Status.UNKNOWN, "Garbage")
    assert last.message.startswith(f"a process forked by the check (pid {pid}) also sent results")
    assert "the child's" not in [finding.message for finding in result.findings]
    assert results["fine"].status is Status.PASS, "in a worker of its own"


def test_result_of_a_check_that_is_over_stands_when_its_forked_child_comes_late(tmp_path: Path) -> None:
    params = {name: {"folder": str(tmp_path), "child": "late"} for name in ("forks", "late_fork")}
    results = run_checks("forks", "late_fork", "fine", params=params, retries=0)
    assert [finding.message for finding in results["forks"].findings] == ["the parent's"]
    assert (results["late_fork"].status, results["fine"].status) == (Status.PASS, Status.PASS)


@pytest.mark.parametrize("script", ["(echo OK; exit 0); echo CRITICAL", "(sleep 300; echo OK) & echo CRITICAL"])
def test_result_of_a_plugin_is_that_of_the_process_that_was_started(script: str) -> None:
    program = Program(command=("/bin/sh", "-c", f"{script}; exit 2"), timeout_seconds=60.0)
    result = run_checks("late", programs={"late": program}, retries=0)["late"]
    assert (result.status, result.findings[0].reason) == (Status.FAIL, "ProgramFailed")
