"""The batch script that goes back into the queue where the verdict on its job says that a retry can help."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from healthd.cli.run import run
from healthd.integrations.slurm.jobs import SlurmJob
from healthd.postmortem import EXIT_CODES

SCRIPT = Path(__file__).parents[3] / "deploy/slurm/train.sbatch"


def batch(folder: Path, code: int, *, restarts: str | None = None) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the script with programs of Slurm that write down what they are asked; what was written."""
    asked = folder / "asked"
    for name, ends in (("srun", code), ("scontrol", 0)):
        program = folder / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {asked}\nexit {ends}\n')
        program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    if restarts is not None:
        environment["SLURM_RESTART_COUNT"] = restarts
    done = subprocess.run(
        [SCRIPT, "python", "train.py", "a b"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return done, asked.read_text()


@pytest.mark.parametrize(("outlook", "code"), EXIT_CODES.items())
def test_the_job_is_put_back_where_a_retry_can_help(outlook: str, code: int, tmp_path: Path) -> None:
    done, asked = batch(tmp_path, code)
    assert ("scontrol requeue 42" in asked) == outlook.startswith("retry")
    assert done.returncode == (0 if outlook.startswith("retry") else code)


@pytest.mark.parametrize("code", [0, 1, 137])
def test_other_ends_are_the_commands_own(code: int, tmp_path: Path) -> None:
    done, asked = batch(tmp_path, code)
    assert (done.returncode, "requeue" in asked) == (code, False)


def test_restarts_have_a_bound_and_are_the_attempts_of_the_gate(tmp_path: Path) -> None:
    done, asked = batch(tmp_path, 75, restarts="5")
    assert (done.returncode, "requeue" in asked) == (75, False)
    assert "given up" in done.stderr
    words = asked.split("healthd run ")[1].split()
    options = run.make_context("run", [*words[: words.index("--")], "--", "x"]).params
    name = SlurmJob(id="42", attempt=5, nodes=(), workload="").name
    assert (options["job"], options["attempt"], options["exit_style"]) == (name, 5, "verdict")
