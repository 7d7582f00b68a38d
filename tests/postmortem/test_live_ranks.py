"""Several ranks on gloo, each below `healthd run`, of which one dies or hangs: who was first, and who only waited."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.cli_kit import environment
from tests.patience import PATIENCE
from tests.postmortem.parent_kit import end, read_until
from tests.profile import some

RANK = str(Path(__file__).with_name("gloo_rank.py"))
SECONDS = 60 * PATIENCE

pytest.importorskip("torch", reason="the ranks need torch")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def job(folder: Path, fault: str, size: int) -> Mapping[int, int]:
    """Run a job of `size` ranks to its end: the exit code of each. What hangs is stopped when the others have ended."""
    notes = folder / "notes"
    notes.mkdir()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    command = [sys.executable, "-m", "healthd", "run", "--no-measure", "--notes-dir", str(notes), "--"]
    ranks = [
        subprocess.Popen(
            [*command, sys.executable, RANK, fault],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment(folder, TORCH_FR_DUMP_TEMP_FILE=str(folder / "fr_"), RANK=str(rank), **place),
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            read_until(rank.stdout.fileno(), b"is here\n")
        for rank in ranks[:-1]:
            rank.wait(SECONDS)
        if fault == "hangs":
            ranks[-1].terminate()
        return {number: rank.wait(SECONDS) for number, rank in enumerate(ranks)}
    finally:
        for rank in ranks:
            end(rank)
            rank.communicate()


def verdict(folder: Path) -> Any:
    files = sorted(str(file) for file in (folder / "notes").iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "healthd", "postmortem", "--json", *files],
        capture_output=True,
        text=True,
        env=environment(folder),
        check=False,
        timeout=SECONDS,
    )
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert done.returncode == (3 if said["kind"] == "unknown" else 0)
    return said


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "code", "kind", "suspected"),
    some(
        [
            ("exception", 1, "software", True),
            ("killed", 137, "unknown", False),
            ("early", 0, "software", True),
            ("hangs", 143, "unknown", False),
        ],
        4,
    ),
)
def test_the_rank_that_died_first_is_named_and_the_others_waited(
    fault: str, code: int, kind: str, suspected: bool, tmp_path: Path
) -> None:
    codes = job(tmp_path, fault, 2)
    assert codes == {0: 1, 1: code}
    said = verdict(tmp_path)
    assert (said["kind"], said["suspected"], said["rank"]) == (kind, suspected, 1)
    assert said["waited"] == [0]
    if fault == "hangs":
        assert "it had reached number 3 in group '0' (default_pg), while others waited in number 4" in str(
            said["evidence"]
        )


@pytest.mark.thorough
def test_ranks_below_torchrun_are_told_apart(tmp_path: Path) -> None:
    said = tmp_path / "verdict.json"
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    began = time.time()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "healthd",
            "run",
            "--no-measure",
            "--json-out",
            str(said),
            "--",
            *launcher,
            RANK,
            "exception",
        ],
        capture_output=True,
        env=environment(tmp_path, MASTER_ADDR="127.0.0.1"),
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 1
    told = json.loads(said.read_text())
    assert (told["kind"], told["suspected"], told["rank"]) == ("software", True, 1)
    assert began <= told["at"] <= time.time()
