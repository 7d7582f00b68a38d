"""Many schedules at once, as `make simulate` plays them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUG = """
import sys
from tests.simulation import bugs
from tests.simulation.__main__ import main

with next(bug for bug in bugs.BUGS if bug.name == "a lease is never renewed").planted():
    sys.exit(main())
"""
KILLED = """
import os, signal, sys
from tests.simulation import many
from tests.simulation.__main__ import main

many.simulate = lambda plan: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main())
"""


@pytest.mark.thorough
def test_all_processes_together_play_each_seed_once() -> None:
    lines = {_run("-m", "tests.simulation", "--schedules", "3", "--steps", "3", "--processes", n) for n in ("1", "2")}
    one, other = (re.sub(r"in [\d.]+ s \(.*?\)", "", line) for line in sorted(lines))
    assert one == other
    assert one.startswith("3 of 3 schedules (seeds 0 to 2): every promise kept; ")
    assert "; events: ask " in one


@pytest.mark.thorough
def test_a_broken_promise_is_told_with_the_command_that_replays_it_and_the_events_that_matter() -> None:
    lines = _run(
        "-c", BUG, "--seed", "7", "--schedules", "9", "--steps", "3", "--aggregators", "2", code=1
    ).splitlines()
    seed = lines[0].partition(":")[0].removeprefix("seed ")
    assert lines[1] == f"again: make simulate SEED={seed} STEPS=3 SCHEDULES=1 AGGREGATORS=2"
    assert re.match(r"0 of \d events are enough for: ", lines[2])
    assert "of 9 schedules (seeds 7 to 15): a promise was broken; " in lines[-1]


@pytest.mark.thorough
def test_a_process_that_dies_is_told() -> None:
    done = _ended("-c", KILLED, "--schedules", "6", "--processes", "2", code=1)
    assert re.match(r"a process of the simulation ended with exit code -9 and 3 schedules to go; ", done.stderr)
    assert done.stdout.startswith("0 of 6 schedules")


def _run(*arguments: str, code: int = 0) -> str:
    return _ended(*arguments, code=code).stdout


def _ended(*arguments: str, code: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
