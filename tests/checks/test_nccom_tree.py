"""The guard of a round over several nodes: nothing that comes of the program outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checks.collective import nccom_guard, nccom_tree
from tests.healthd.launch_kit import (
    alive,
    wait_until,
)


def start_tree_of(folder: Path, script: str) -> subprocess.Popen[bytes]:
    """A guard over a shell, started by another process that can be killed."""
    guard = [sys.executable, "-I", "-S", nccom_tree.__file__]
    code = (
        "import os, subprocess, sys\n"
        f"words = [str(os.getpid()), {str(folder)!r}, 'X=1', '--', 'sh', '-c', {script!r}]\n"
        f"guard = subprocess.Popen([*{guard!r}, *words])\n"
        "print(guard.pid, flush=True)\n"
        "sys.exit(guard.wait())\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


@pytest.mark.parametrize("how", ["ends", "terminated", "parent killed"])
def test_nothing_of_a_tree_outlives_it(tmp_path: Path, how: str) -> None:
    """A child in a session of its own, an orphan of one, and one that ignores signals."""
    folder = tmp_path / "healthd-nccom-x"
    folder.mkdir()
    pids = tmp_path / "pids"
    script = (
        f"setsid sleep 300 & echo $! >> {pids}; (setsid sleep 301 & echo $! >> {pids}) ; "
        f"(trap '' TERM; sleep 302 & echo $! >> {pids}; wait) & sleep 0.2; touch {tmp_path}/ready; "
        + ("exit 3" if how == "ends" else "sleep 303")
    )
    with start_tree_of(folder, script) as parent:
        assert parent.stdout is not None
        guard = int(parent.stdout.readline())
        wait_until(lambda: (tmp_path / "ready").exists())
        if how == "terminated":
            os.kill(guard, signal.SIGTERM)
        elif how == "parent killed":
            parent.kill()
        code = parent.wait(10)
    wait_until(lambda: not alive(guard))
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 3
    assert not [pid for pid in left if alive(pid)]
    assert code == {"ends": 3, "terminated": 143, "parent killed": -signal.SIGKILL}[how]
    assert folder.exists() == (how != "parent killed")


def test_tree_drops_what_the_guard_of_one_node_drops() -> None:
    assert nccom_tree.DROPPED_PREFIXES == nccom_guard.DROPPED_PREFIXES
    assert nccom_tree._FOLDER_PREFIX == nccom_guard.FOLDER_PREFIX
