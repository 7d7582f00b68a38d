"""The host file of a preflight, in a folder that hosts and containers may share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from healthd.hooks.preflight.hook import write_hostfile


def ended() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_files_of_processes_that_are_gone_here_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    mine = write_hostfile(("n1", "n2"), folder=tmp_path)
    assert mine.read_text() == "n1\nn2\n"
    number, gone = str(os.getpid()), str(ended())
    assert mine.name.endswith(f"-{number}.txt")
    left = mine.with_name(mine.name.replace(f"-{number}.txt", f"-{gone}.txt"))
    others = [tmp_path / f"other-host-4026531836-{gone}.txt", tmp_path / f"{gone}.txt", tmp_path / f"x{left.name}"]
    for file in (left, *others):
        file.write_text("n3\n")
    assert write_hostfile(("n1",), folder=tmp_path) == mine
    assert mine.read_text() == "n1\n"
    assert not left.exists()
    assert all(file.exists() for file in others)
