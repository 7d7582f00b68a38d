"""The entry point for hosts with a standing aggregator, with stand-ins for the gate and for ECS."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.cli.hooks.gate import gate
from tests.patience import PATIENCE

SCRIPT = Path(__file__).parents[3] / "deploy/batch/gated.sh"
ARN = "arn:aws:ecs:us-east-1:123456789012:task/batch/0123456789abcdef"


@pytest.fixture
def ecs() -> Iterator[str]:
    """What ECS gives a container to ask about itself."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"TaskARN": ARN, "Family": "train"}).encode()
            self.send_response(200 if self.path == "/v4/x/task" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v4/x"
        server.shutdown()


def run(folder: Path, ends: int, *, ecs: str) -> subprocess.CompletedProcess[str]:
    with started(folder, f"exit {ends}", ecs=ecs) as job:
        out, err = job.communicate(timeout=4 * PATIENCE)
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def started(folder: Path, gate: str, *, ecs: str, within: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The entry point, with a stand-in for `healthd` that runs this line of shell."""
    healthd = folder / "healthd"
    healthd.write_text(f'#!/bin/bash\necho "$@" >{folder}/arguments\n{gate}\n', encoding="ascii")
    healthd.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "HOST_DIR": str(folder),
        "AWS_BATCH_JOB_ID": "ba5e#1",
        "ECS_CONTAINER_METADATA_URI_V4": ecs,
    }
    command = [*within, str(SCRIPT), "bash", "-c", 'echo "trains $1"; exit 7', "train", "a b"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_admitted_job_starts_and_its_end_is_its_own(tmp_path: Path, ecs: str) -> None:
    (tmp_path / "name").write_text("ip-10-0-0-1.ec2.internal\n")
    done = run(tmp_path, 0, ecs=ecs)
    assert (done.returncode, done.stdout) == (7, "trains a b\n")
    words = (tmp_path / "arguments").read_text().split()
    # The name of the workload is the one that the daemon of the host gives the task of ECS.
    assert words == [
        *("gate", "--join", "ba5e", "--node", "ip-10-0-0-1.ec2.internal", "--workload", f"ecs:{ARN}", "--execute")
    ]
    options = {option for parameter in gate.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("code", [75, 1, 2])
def test_a_gate_that_says_no_ends_the_container_by_its_code(tmp_path: Path, ecs: str, code: int) -> None:
    (tmp_path / "name").write_text("n1\n")
    done = run(tmp_path, code, ecs=ecs)
    assert (done.returncode, done.stdout) == (code, "")


def test_without_the_hosts_name_or_the_tasks_nothing_starts_and_the_reason_is_said(tmp_path: Path, ecs: str) -> None:
    done = run(tmp_path, 0, ecs=ecs)
    assert (done.returncode, done.stdout) == (75, "")
    assert "name cannot be read: mount it" in done.stderr
    (tmp_path / "name").write_text("n1\n")
    done = run(tmp_path, 0, ecs=ecs + "/elsewhere")
    assert (done.returncode, done.stdout) == (75, "")
    assert "ECS does not say which task this is" in done.stderr
    assert not (tmp_path / "arguments").exists()


def until_there(file: Path) -> str:
    """What the file holds, once it holds a whole line."""
    end = time.monotonic() + 4 * PATIENCE
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < end, f"no {file}"
        time.sleep(0.02)
    return file.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ends", [75, 0])
def test_a_stop_while_the_gate_asks_reaches_the_gate_and_no_job_starts(
    tmp_path: Path, ecs: str, number: signal.Signals, ends: int
) -> None:
    """Also where the gate was just about to say yes."""
    (tmp_path / "name").write_text("n1\n")
    trap = f"trap 'echo withdrawn >{tmp_path}/end; exit {ends}' TERM"
    gate = f"{trap}; echo $$ >{tmp_path}/pid; while :; do sleep 0.05; done"
    with started(tmp_path, gate, ecs=ecs) as job:
        pid = until_there(tmp_path / "pid").strip()
        job.send_signal(number)
        out, err = job.communicate(timeout=4 * PATIENCE)
    assert (job.returncode, out) == (75, ""), err
    assert (tmp_path / "end").read_text() == "withdrawn\n"
    assert not Path(f"/proc/{pid}").exists()


def test_a_stop_before_the_gate_asks_starts_neither(tmp_path: Path) -> None:
    (tmp_path / "name").write_text("n1\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(4 * PATIENCE)
        with started(tmp_path, "exit 0", ecs=f"http://127.0.0.1:{silent.getsockname()[1]}") as job:
            held, _ = silent.accept()
            with held:
                job.send_signal(signal.SIGTERM)
                out, err = job.communicate(timeout=4 * PATIENCE)
    assert (job.returncode, out) == (75, ""), err
    assert not (tmp_path / "arguments").exists()


@pytest.mark.system("unshare", root=True)
def test_a_stop_is_heard_by_the_first_process_of_the_container(tmp_path: Path, ecs: str) -> None:
    (tmp_path / "name").write_text("n1\n")
    gate = f"trap 'exit 75' TERM; echo $PPID >{tmp_path}/pid; while :; do sleep 0.05; done"
    with started(tmp_path, gate, ecs=ecs, within=("unshare", "--pid", "--fork", "--kill-child")) as job:
        assert until_there(tmp_path / "pid") == "1\n"
        (script,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(script), signal.SIGTERM)
        out, err = job.communicate(timeout=4 * PATIENCE)
    assert (job.returncode, out) == (75, ""), err
