"""Tests side by side in forked processes: each runs once, a failure is shown, and a process that dies is replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULE = """
import os, pathlib, pytest

@pytest.fixture(scope="module", autouse=True)
def made():
    yield
    pathlib.Path(f"ended-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(40))
def test_one(number, tmp_path):
    with pathlib.Path("ran").open("a") as file:
        file.write(f"{os.getpid()} {number} {tmp_path}\\n")
    if number == 7:
        os._exit(3)
    assert number != 9
"""


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Pytest on the files of a folder, in it, with no plug-in but ours."""
    words = ["-q", "-p", "tests.forks", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, *more],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_each_test_runs_once_whatever_happens_to_its_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(MODULE)
    done = run(tmp_path, "--forks", "3", f"--junitxml={tmp_path}/one.xml")
    assert done.returncode == 1, done.stderr
    assert re.search(r"2 failed, 38 passed", done.stdout)
    assert "the process that ran this test ended with 3" in done.stdout
    assert "assert 9 != 9" in done.stdout
    rows = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(int(number) for _, number, _ in rows) == list(range(40))
    processes = {pid for pid, _, _ in rows}
    assert len(processes) >= 3
    assert len({path for _, _, path in rows}) == 40
    ended = {path.name.removeprefix("ended-") for path in tmp_path.glob("ended-*")}
    (died,) = {pid for pid, number, _ in rows if number == "7"}
    assert ended == processes - {died}
    assert (tmp_path / "one.xml").read_text().count("<testcase ") == 40


def test_the_first_failure_ends_all_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(MODULE.replace("os._exit(3)", "assert False"))
    done = run(tmp_path, "--forks", "2", "-x")
    assert done.returncode == 1
    assert len((tmp_path / "ran").read_text().splitlines()) < 40


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, time, pytest\n"
        "@pytest.mark.parametrize('number', range(2))\n"
        "def test_it(number):\n"
        "    pathlib.Path(f'runs-{os.getpid()}').touch()\n"
        "    time.sleep(300)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.forks", "--forks", "2", "-c", os.devnull]
    with subprocess.Popen(
        [*command, "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        while len(found := list(tmp_path.glob("runs-*"))) < 2:
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 2, out
    for path in found:
        assert not Path(f"/proc/{path.name.removeprefix('runs-')}").exists()
