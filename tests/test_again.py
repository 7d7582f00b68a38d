"""What CI runs again, what it says of it, and what it does not forgive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
SIX = "import pytest\n@pytest.mark.parametrize('n', range(6))\ndef test_six(n): assert False\n"
LOST = """
from pathlib import Path
import pytest
first = not (mark := Path(__file__).parent / "mark").exists()

@pytest.mark.parametrize("name", ["lost", "here"] if first else ["here"])
def test_name(name):
    mark.touch()
    assert not first
"""


def run(folder: Path, text: str, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, output, and the tests that were named as unstable."""
    (folder / "test_it.py").write_text(text, encoding="utf-8")
    unstable = folder / "unstable"
    words = [
        "-q",
        "-p",
        "xdist.plugin",
        "-p",
        "no:warnings",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        *arguments,
        str(folder),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.again", *words],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith(("TESTS_", "PYTEST_"))}
        # Other plug-ins take longer to import than such a run.
        | {"TESTS_UNSTABLE": str(unstable), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, unstable.read_text().splitlines() if unstable.exists() else []


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["one process", "workers"])
def test_what_passes_when_run_again_is_good_and_is_named(tmp_path: Path, workers: tuple[str, ...]) -> None:
    code, out, unstable = run(tmp_path, SECOND, *workers)
    assert code == 0, out
    assert unstable == ["test_it.py::test_second_setup", "test_it.py::test_second_time"]
    assert "2 passed" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "code", "runs"),
    [
        (SECOND + NEVER, 1, 2),
        (SIX, 1, 1),
        ("no python", 2, 1),
        ("", 5, 1),
        ("import os\ndef test_crash(): os._exit(3)\n", 3, 1),
        (LOST, 1, 2),
    ],
    ids=["fails twice", "too many", "not collected", "no tests", "a crash", "not found again"],
)
def test_all_else_is_refused(tmp_path: Path, text: str, code: int, runs: int) -> None:
    got, out, unstable = run(tmp_path, text)
    assert (got, unstable) == (code, []), out
    assert 1 + out.count("Run again") == runs, out
