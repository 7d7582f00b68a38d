"""SageMaker's entry point: the training's own end, or as the job's reason the gate's no or what a retry can do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.aws_kit import complaints, load_settings

FOLDER = Path(__file__).parents[3] / "deploy/sagemaker"
ENTRY = FOLDER / "entrypoint.sh"


SCREEN = """
echo 'healthd: why it died: HARDWARE (confidence: high)' >&2
echo '  hardware: n2 fails now: WrongResult cpu:1' >&2
"""


def start(folder: Path, preflight: str, **more: str) -> subprocess.Popen[str]:
    """The entry point, with a stand-in for `healthd` that runs this line of shell. `more`: variables besides."""
    healthd = folder / "healthd"
    healthd.write_text(f'#!/bin/bash\necho "$@" >{folder}/arguments\n{preflight}\n', encoding="ascii")
    healthd.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "FAILURE_FILE": str(folder / "output/failure")}
    environment |= {"TMPDIR": str(folder / "kept"), **more}
    (folder / "kept").mkdir()
    command = [str(ENTRY), "python", "train.py", "--lr", "1"]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)


def test_a_rejected_job_says_why_where_sagemaker_looks(tmp_path: Path) -> None:
    job = start(tmp_path, "echo 'node 2: WrongResult matmul neuron:3' >&2; exit 75")
    _, words = job.communicate(timeout=20)
    assert job.returncode == 75
    assert "WrongResult" in words
    reason = (tmp_path / "output/failure").read_text()
    assert reason.startswith("not admitted")
    assert "node 2: WrongResult matmul neuron:3" in reason
    assert (tmp_path / "arguments").read_text() == "preflight -- python train.py --lr 1\n"


def test_the_reason_is_no_longer_than_sagemaker_shows(tmp_path: Path) -> None:
    job = start(tmp_path, "for i in $(seq 500); do echo 'node 2: WrongResult' >&2; done; exit 75")
    job.communicate(timeout=20)
    assert (tmp_path / "output/failure").stat().st_size == 1024


def test_the_reason_does_not_wait_for_who_else_holds_the_output(tmp_path: Path) -> None:
    job = start(tmp_path, f"echo 'node 2: WrongResult' >&2; sleep 60 & echo $! >{tmp_path}/pid; exit 75")
    assert job.wait(timeout=20) == 75
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    job.communicate(timeout=20)
    assert "WrongResult" in (tmp_path / "output/failure").read_text()


def test_what_the_training_says_is_passed_on_and_not_kept(tmp_path: Path) -> None:
    job = start(tmp_path, "head -c 5000000 /dev/zero | tr '\\0' 'x' >&2; exit 3")
    _, words = job.communicate(timeout=20)
    assert (job.returncode, len(words)) == (3, 5_000_000)
    assert sum(file.stat().st_size for file in (tmp_path / "kept").iterdir()) <= 65536


@pytest.mark.parametrize(
    ("code", "outlook"), [(75, "retry elsewhere"), (76, "retry here"), (70, "do not retry"), (79, "stopped")]
)
@pytest.mark.parametrize("before", ["", "head -c 5000000 /dev/zero | tr '\\0' 'x' >&2; echo >&2"])
def test_a_job_that_ran_and_died_says_what_a_retry_can_do_and_not_that_it_was_not_admitted(
    tmp_path: Path, before: str, code: int, outlook: str
) -> None:
    job = start(tmp_path, f"{before}{SCREEN}exit {code}", HEALTHD_PREFLIGHT_EXIT_STYLE="verdict")
    job.communicate(timeout=20)
    assert job.returncode == code
    reason = (tmp_path / "output/failure").read_text()
    assert reason.startswith(outlook)
    assert "why it died: HARDWARE" in reason
    assert "WrongResult cpu:1" in reason


def test_a_gate_that_says_no_is_not_admitted_also_where_the_verdict_gives_the_codes(tmp_path: Path) -> None:
    job = start(tmp_path, "echo 'node 2: WrongResult' >&2; exit 75", HEALTHD_PREFLIGHT_EXIT_STYLE="verdict")
    job.communicate(timeout=20)
    assert (tmp_path / "output/failure").read_text().startswith("not admitted")


def test_a_code_of_the_training_itself_is_no_verdict(tmp_path: Path) -> None:
    job = start(tmp_path, f"{SCREEN}exit 75", HEALTHD_PREFLIGHT_EXIT_STYLE="command")
    job.communicate(timeout=20)
    assert job.returncode == 75
    assert not (tmp_path / "output/failure").exists()


@pytest.mark.parametrize("code", [0, 1, 3, 139])
def test_the_end_of_the_training_is_its_own(tmp_path: Path, code: int) -> None:
    job = start(tmp_path, f"exit {code}")
    job.communicate(timeout=20)
    assert job.returncode == code
    assert not (tmp_path / "output/failure").exists()


@pytest.mark.parametrize("code", [7, 75])
def test_a_stop_reaches_what_runs_and_gives_nobody_a_reason_to_submit_again(tmp_path: Path, code: int) -> None:
    ready = tmp_path / "ready"
    job = start(tmp_path, f"trap 'sleep 0.2; exit {code}' TERM; touch {ready}; while :; do sleep 0.05; done")
    until = time.monotonic() + 15
    while not ready.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=20)
    assert job.returncode == code
    assert not (tmp_path / "output/failure").exists()


def test_the_training_job_is_one_that_the_service_model_takes() -> None:
    body = json.loads((FOLDER / "training-job.json").read_text(encoding="utf-8"))
    assert complaints("sagemaker", "CreateTrainingJob", body) == ""
    asked = load_settings(body["Environment"]).preflight
    assert (asked.wait_seconds, asked.run, asked.exit_style) == (1800, True, "verdict")
