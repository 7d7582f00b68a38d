"""A collective that has run before and hangs is known to hang by the times that this machine has shown."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Status, Tier
from healthd.core.model import CheckResult
from healthd.runner.collective.node_collective import (
    FACTOR,
    KEPT_RUNS,
    Silence,
    SilenceLimits,
    longest_silence,
    waited_seconds,
)
from healthd.runner.settings import SILENCE_FLOOR_SECONDS
from tests.fakes.hollow_torch import make_python
from tests.runner.runner_kit import run_checks

BOOT = {"boot": "b1", "libraries": {"torch": "2.13"}}


def test_nothing_is_known_before_the_first_run(tmp_path: Path) -> None:
    assert SilenceLimits(tmp_path / "times.json", BOOT).silence_seconds("all_reduce 2") is None
    assert SilenceLimits(None, BOOT).silence_seconds("all_reduce 2") is None


@pytest.mark.parametrize(
    ("shown", "limit"),
    [
        ((0.001,), SILENCE_FLOOR_SECONDS),  # a quiet machine: what a stall of a moment costs is left
        ((0.2, 3.0, 0.1), 3.0 * FACTOR),  # a machine that was once slow may be so again
        ((3.0, *([0.1] * KEPT_RUNS)), SILENCE_FLOOR_SECONDS),  # and not for ever
    ],
)
def test_what_good_runs_have_shown_is_the_limit_and_outlives_the_process(
    tmp_path: Path, shown: tuple[float, ...], limit: float
) -> None:
    file = tmp_path / "state/times.json"
    for seconds in shown:
        SilenceLimits(file, BOOT).learn("all_reduce 2", seconds)
    assert SilenceLimits(file, BOOT).silence_seconds("all_reduce 2") == limit
    assert SilenceLimits(file, BOOT).silence_seconds("all_reduce 4") is None


@pytest.mark.parametrize("other", [{**BOOT, "boot": "b2"}, {**BOOT, "libraries": {"torch": "2.14"}}])
def test_another_boot_or_library_begins_anew(tmp_path: Path, other: dict[str, Any]) -> None:
    file = tmp_path / "times.json"
    SilenceLimits(file, BOOT).learn("all_reduce 2", 0.1)
    fresh = SilenceLimits(file, other)
    assert fresh.silence_seconds("all_reduce 2") is None
    fresh.learn("all_gather 2", 0.1)
    assert json.loads(file.read_text())["silences"].keys() == {"all_gather 2"}


@pytest.mark.parametrize("text", ["", "[]", '{"identity": 1}', "{", '{"identity": %s, "silences": {"a": [-1]}}'])
def test_a_damaged_file_is_no_knowledge(tmp_path: Path, text: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(text.replace("%s", json.dumps(BOOT)))
    times = SilenceLimits(file, BOOT)
    assert times.silence_seconds("a") is None
    times.learn("a", math.nan)
    times.learn("a", 0.1)
    assert SilenceLimits(file, BOOT).silence_seconds("a") == SILENCE_FLOOR_SECONDS


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file, where the directory should be")
    times = SilenceLimits(tmp_path / "state/times.json", BOOT)
    times.learn("a", 0.1)
    assert times.silence_seconds("a") == SILENCE_FLOOR_SECONDS


def test_the_longest_silence_is_between_signs_of_any_rank() -> None:
    assert longest_silence([10.0, 13.0, 10.5, 11.5]) == 1.5
    assert longest_silence([10.0]) == 0.0


def test_slow_ranks_that_say_something_do_not_hang() -> None:
    silence = Silence(8.0, began=100.0)
    for now in range(101, 160, 7):  # far longer than the limit in all
        assert silence.left_seconds(now, reported_at=now - 1.0, waited={}) > 0
    assert silence.left_seconds(171.0, reported_at=164.0, waited={}) == 1.0
    assert silence.left_seconds(172.5, reported_at=164.0, waited={}) < 0


def test_ranks_that_wait_for_a_processor_are_not_silent() -> None:
    silence = Silence(8.0, began=100.0)
    assert silence.left_seconds(100.0, reported_at=100.0, waited={7: 1.0, 8: 50.0}) == 8.0
    # For 18 of 20 seconds one of them was ready and not served.
    assert silence.left_seconds(120.0, reported_at=100.0, waited={7: 19.0, 8: 50.0}) == 6.0
    # Nobody is served late, and nobody says anything: they hang.
    assert silence.left_seconds(128.0, reported_at=100.0, waited={7: 19.0, 8: 50.0}) == -2.0


def test_without_a_limit_silence_has_no_end() -> None:
    assert Silence(None, began=0.0).left_seconds(1e6, reported_at=0.0, waited={}) == math.inf


def test_what_the_kernel_says_of_waiting_threads() -> None:
    waited = waited_seconds([os.getpid(), 2**31 - 1])
    assert os.getpid() in waited
    assert all(seconds >= 0 for seconds in waited.values())


# --- with real ranks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with a torch that does nothing: these ranks meet by files."""
    return make_python(tmp_path_factory.mktemp("python") / "venv")


def meets(python: Path, folder: Path, *faults: str, **changes: Any) -> CheckResult:
    settings = {"probe_python": python, "times_file": folder / "times.json", "options": {"cpu_devices": 2}}
    return run_checks("meets", faults=faults, tier=Tier.QUICK, **{**settings, **changes})["meets"]


def test_a_collective_that_has_run_before_and_hangs_is_told_before_its_time_is_up(python: Path, tmp_path: Path) -> None:
    assert meets(python, tmp_path).status is Status.PASS
    # The first run has taught the second one, which is another runner. Its own time limit would be ten minutes.
    file = tmp_path / "times.json"
    content = json.loads(file.read_text())
    (shown,) = content["silences"].values()
    assert len(shown) == 1
    assert 0 < shown[0] < 60
    # How long that was is the matter of the machine that the test runs on.
    file.write_text(json.dumps({**content, "silences": {name: [0.02] for name in content["silences"]}}))
    hung = meets(
        python,
        tmp_path,
        "meets@rank:1=hang",
        silence_floor_seconds=0.2,
        timeouts_seconds={"meets": 600.0},
    )
    assert hung.status is Status.FAIL
    assert all("Timeout" in finding.message for finding in hung.findings)
    assert hung.error is not None
    assert "was silent for" in hung.error
    # What hung has taught nothing.
    assert list(json.loads(file.read_text())["silences"].values()) == [[0.02]]


def test_a_collective_that_never_ran_here_has_its_own_time(python: Path, tmp_path: Path) -> None:
    hung = meets(
        python,
        tmp_path,
        "meets@rank:1=hang",
        silence_floor_seconds=0.2,
        timeouts_seconds={"meets": 1.5},
    )
    assert hung.error is not None
    assert "did not end within 1.5 s" in hung.error
    assert not (tmp_path / "times.json").exists()
