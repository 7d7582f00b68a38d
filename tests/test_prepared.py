"""A process that is forked from a prepared one is what it would have been, had it been executed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checks.host import running
from checks.worker.worker import NICE
from healthd.runner.workers.launch import WORKER
from tests import prepared
from tests.runner.runner_kit import below_guard

POPENS = pytest.mark.parametrize("popen", [subprocess.Popen, prepared.Popen], ids=["executed", "forked"])


def worker(popen: type[subprocess.Popen[bytes]], end: int, folder: Path) -> subprocess.Popen[bytes]:
    return popen(
        [sys.executable, "-I", WORKER, str(end), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PATH": os.defpath, "MARK": "of this test"},
        cwd=folder,
        pass_fds=(end,),
        start_new_session=True,
    )


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@POPENS
def test_a_worker_is_a_child_with_its_own_session_folder_variables_and_command_line(
    popen: type[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    results, end = os.pipe()
    with worker(popen, end, tmp_path) as process:
        os.close(end)
        assert process.stdin is not None
        process.stdin.write(b'{"kind": "setup", "id": 1}\n')  # it lacks what a setup holds
        process.stdin.flush()
        assert b'"kind":"raised"' in os.read(results, 65536).replace(b" ", b"")
        pid = below_guard(process.pid)
        proc = Path(f"/proc/{pid}")
        assert parent_of(process.pid) == os.getpid()
        assert os.getsid(pid) == os.getpgid(pid) == process.pid
        assert proc.joinpath("cwd").resolve() == tmp_path
        assert b"MARK=of this test\0" in proc.joinpath("environ").read_bytes()
        words = proc.joinpath("cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert [os.fsdecode(word) for word in words] == process.args
        assert {int(name) for name in os.listdir(proc / "fd")} >= {0, 1, 2, end}
        process.stdin.close()
        assert process.wait() == 0
    os.close(results)


@POPENS
def test_a_worker_that_is_killed_ends_by_the_signal(popen: type[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    results, end = os.pipe()
    with worker(popen, end, tmp_path) as process:
        os.close(end)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    os.close(results)


@POPENS
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler], ids=["ignored", "handled"])
def test_a_worker_ignores_the_signals_that_its_parent_ignores_now(
    popen: type[subprocess.Popen[bytes]], tmp_path: Path, handler: Any
) -> None:
    results, end = os.pipe()
    before = signal.signal(signal.SIGINT, handler)
    try:
        process = worker(popen, end, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        os.close(end)
        assert process.stdin is not None
        process.stdin.write(b'{"kind": "setup", "id": 1}\n')
        process.stdin.flush()
        os.read(results, 65536)  # it runs
        status = Path(f"/proc/{process.pid}/status").read_text().partition("SigIgn:")[2].split()[0]
        assert bool(int(status, 16) >> (signal.SIGINT - 1) & 1) is (handler is signal.SIG_IGN)
        process.kill()
    os.close(results)


@POPENS
def test_a_command_says_its_answer_and_its_code(popen: type[subprocess.Popen[bytes]]) -> None:
    line = [sys.executable, "-m", "healthd", "checkk"]
    with popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert "did you mean 'check'?" in err


def test_any_other_command_is_executed() -> None:
    with prepared.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE) as process:
        assert process.communicate()[0] == b"1\n"
    with prepared.Popen("exit 3", shell=True) as process:
        assert process.wait() == 3
    with pytest.raises(FileNotFoundError):
        prepared.Popen(["/nowhere/python", "-m", "healthd"])


SHOWS_ITSELF = """
import json, os, resource, signal, sys
print(json.dumps([
    sys.argv, dict(os.environ), os.getcwd(), resource.getrlimit(resource.RLIMIT_FSIZE)[0],
    os.path.exists("/proc/self/fd/" + sys.argv[1]),
    signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN, os.getppid() != int(sys.argv[2]),
]))
sys.exit(7)
"""


@POPENS
def test_a_text_under_a_guard_has_limits_variables_and_folder_and_no_descriptor_of_others(
    popen: type[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "Popen", popen)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    results, end = os.pipe()
    words = [str(end), str(os.getpid())]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        code, out, err = running.run_program(
            [sys.executable, "-I", "-c", SHOWS_ITSELF, *words],
            environment={"MARK": "of this test", "LC_CTYPE": "C.UTF-8"},
            timeout_seconds=60.0,
            max_bytes=10_000,
            folder=str(tmp_path),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(results)
        os.close(end)
    assert (code, err) == (7, b"")
    environment = {"MARK": "of this test", "LC_CTYPE": "C.UTF-8"}
    assert json.loads(out) == [["-c", *words], environment, str(tmp_path), 1 << 20, False, True, True]


def one_step_nicer() -> None:
    os.nice(1)


@POPENS
def test_what_is_to_be_done_first_is_done(popen: type[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    results, end = os.pipe()
    line = [sys.executable, "-I", WORKER, str(end), str(os.getpid())]
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with popen(line, stdin=subprocess.PIPE, pass_fds=(end,), preexec_fn=one_step_nicer) as process:
        os.close(end)
        assert process.stdin is not None
        process.stdin.write(b'{"kind": "setup", "id": 1}\n')
        process.stdin.flush()
        assert os.read(results, 1)  # the worker has become nicer still, by five
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == before + 1
        assert os.getpriority(os.PRIO_PROCESS, below_guard(process.pid)) == before + 1 + NICE
    os.close(results)
