"""What a check or a plug-in has started ends with it, wherever it went."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.contract import Program
from tests.runner.runner_kit import run_checks, wait_gone


@pytest.mark.parametrize("then", ["end", "hang", "crash"])
def test_process_that_left_its_check_ends_with_the_worker(tmp_path: Path, then: str) -> None:
    run_checks("escapes", params={"escapes": {"folder": str(tmp_path), "then": then}}, retries=0)
    assert wait_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("then", ["exit 1", "sleep 300", "kill -9 $$"])
def test_process_that_left_its_plugin_ends_with_it(tmp_path: Path, then: str) -> None:
    script = f"(setsid sleep 300 & echo $! > {tmp_path}/pid); echo said; {then}"
    program = Program(command=("/bin/sh", "-c", script), timeout_seconds=2.0)
    run_checks("late", programs={"late": program}, retries=0)
    assert wait_gone(int((tmp_path / "pid").read_text()), 0.2)
