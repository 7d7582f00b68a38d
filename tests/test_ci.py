"""What CI does not forgive, what it runs again and names, and the line with which it closes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="no-such-program is not installed: apt-get install it")
def test_by_mark(): pass

def test_inside(): pytest.skip("other-program is not installed")

@pytest.mark.skipif(True, reason="no NVIDIA GPU")
def test_for_hardware(): pass
"""
MODULE = 'import pytest\npytest.importorskip("no_such_module", reason="no-such-module is not installed")\n'
SECOND = """
from pathlib import Path
import pytest

def second_time(name):
    mark = Path(__file__).parent / name
    here = mark.exists()
    mark.touch()
    return here

def test_good(): pass

def test_second_time(): assert second_time("call")

@pytest.fixture
def late():
    assert second_time("setup")

def test_second_setup(late): pass
"""
NEVER = "def test_never(): assert False\n"


def run(folder: Path, text: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code of pytest on a file of its own, and the last line of its output."""
    (folder / "test_it.py").write_text(text, encoding="utf-8")
    # Other plug-ins take longer to import than such a run.
    words = [
        "-q",
        "-p",
        "no:warnings",
        "-p",
        "tests.ci",
        "-p",
        "pytest_rerunfailures",
        "-p",
        "xdist.plugin",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-c", os.devnull, "--rootdir", str(folder), *arguments, str(folder)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith(("TESTS_", "PYTEST_"))}
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, re.sub(r" in [\d.]+s.*", "", done.stdout.strip().splitlines()[-1])


def closing(folder: Path) -> tuple[int, list[str]]:
    """Exit code and lines of `python -m tests.ci`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ci", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "3 skipped"),
        ({"TESTS_WHOLE": "1"}, "1 failed, 2 errors"),
        ({"TESTS_WHOLE": "1", "TESTS_WITHOUT": "NVIDIA GPU;other-program"}, "2 skipped, 1 error"),
    ],
)
def test_a_skip_that_nobody_named_fails_where_all_is_installed(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    assert run(tmp_path, SKIPS, **variables)[1] == said


def test_module_that_would_skip_as_a_whole_is_an_error_where_all_is_installed(tmp_path: Path) -> None:
    assert run(tmp_path, MODULE)[1] == "1 skipped"
    assert "1 error" in run(tmp_path, MODULE, TESTS_WHOLE="1")[1]


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["one process", "workers"])
def test_what_passes_when_run_again_is_good_and_is_named(tmp_path: Path, workers: tuple[str, ...]) -> None:
    junit = ("--reruns", "1", f"--junitxml={tmp_path}/one.xml")
    code, last = run(tmp_path, SECOND, *junit, *workers, TESTS_RESULTS=str(tmp_path))
    assert (code, last) == (0, "3 passed, 2 rerun")
    code, lines = closing(tmp_path)
    assert code == 0
    assert lines[0] == "unstable: failed at first, passed when run again"
    assert lines[1:3] == ["test_it.py::test_second_setup", "test_it.py::test_second_time"]
    assert lines[-1] == "3 passed, 0 failed, 0 skipped"


@pytest.mark.thorough
def test_what_fails_twice_has_failed_and_all_runs_are_counted_together(tmp_path: Path) -> None:
    for name, text in (("one", NEVER), ("two", SECOND + SKIPS)):
        run(tmp_path, text, "--reruns", "1", f"--junitxml={tmp_path}/{name}.xml", TESTS_RESULTS=str(tmp_path))
    code, lines = closing(tmp_path)
    assert (code, lines[-1]) == (1, "3 passed, 1 failed, 3 skipped")
    assert not any("test_never" in line for line in lines)


@pytest.mark.parametrize("text", [None, "", SKIPS], ids=["no run", "no tests", "all skipped"])
def test_no_test_counted_is_a_failure(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        run(tmp_path, text, f"--junitxml={tmp_path}/one.xml")
    code, lines = closing(tmp_path)
    assert code == 1
    assert lines[0].startswith("no test was counted")
