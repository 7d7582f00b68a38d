"""Programs are bounded in time and output, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checks.host import running
from checks.host.running import TimeUpError, run_program
from tests.patience import PATIENCE

ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture(autouse=True)
def executed_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a real worker."""
    monkeypatch.setattr(running, "Popen", subprocess.Popen)


def sh(script: str, *, timeout_seconds: float = 10.0, max_bytes: int = 1000) -> tuple[int, bytes, bytes]:
    return run_program(
        ["/bin/sh", "-c", script], environment=ENVIRONMENT, timeout_seconds=timeout_seconds, max_bytes=max_bytes
    )


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def gone_within(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not is_alive(pid):
            return True
        time.sleep(0.01)
    return False


def test_exit_code_and_both_outputs_are_told_apart() -> None:
    assert sh("echo out; echo err >&2; exit 3") == (3, b"out\n", b"err\n")


def test_a_signal_is_a_negative_code() -> None:
    assert sh("kill -9 $$")[0] == -signal.SIGKILL


def test_input_is_empty_so_that_nothing_waits_for_a_person() -> None:
    assert sh("cat; echo done", timeout_seconds=5) == (0, b"done\n", b"")


def test_output_beyond_the_bound_is_dropped_and_the_program_still_ends() -> None:
    code, out, err = sh("head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2; exit 2", max_bytes=1000)
    assert (code, len(out), len(err)) == (2, 1000, 1000)


def test_what_was_written_last_is_not_lost() -> None:
    code, out, _ = sh("head -c 60000 /dev/zero", max_bytes=100_000)
    assert (code, len(out)) == (0, 60_000)


def test_hung_program_is_killed_with_its_children_at_the_time_out(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TimeUpError) as caught:
        sh(f"sleep 60 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/own; wait", timeout_seconds=0.3)
    assert caught.value.killed
    assert time.monotonic() - start < 5 * PATIENCE
    for name in ("child", "own"):
        assert gone_within(int((tmp_path / name).read_text()), 6)


def test_what_a_hung_program_had_said_is_kept_within_the_bound() -> None:
    with pytest.raises(TimeUpError) as caught:
        sh("head -c 3000 /dev/zero; echo RX >&2; exec sleep 60", timeout_seconds=1.0, max_bytes=1000)
    assert (len(caught.value.out), caught.value.err) == (1000, b"RX\n")


def test_program_that_closed_its_output_and_hangs_is_killed_too() -> None:
    with pytest.raises(TimeUpError):
        sh("exec >&- 2>&-; sleep 60", timeout_seconds=0.3)


def test_grandchild_that_holds_the_pipe_is_not_waited_for_and_ends_with_the_program(tmp_path: Path) -> None:
    start = time.monotonic()
    assert sh(f"sleep 60 & echo $! > {tmp_path}/child; echo here")[:2] == (0, b"here\n")
    assert time.monotonic() - start < 5 * PATIENCE
    assert gone_within(int((tmp_path / "child").read_text()), 6)


def test_grandchild_that_left_the_group_and_babbles_on_does_not_keep_us(tmp_path: Path) -> None:
    start = time.monotonic()
    code, out, _ = sh(f"setsid sh -c 'echo $$ > {tmp_path}/child; exec yes' & sleep 0.2; exit 0")
    assert code == 0
    assert len(out) == 1000
    assert time.monotonic() - start < 5 * PATIENCE
    assert gone_within(int((tmp_path / "child").read_text()), 6)  # by SIGPIPE: nobody reads any more


def test_program_dies_with_the_process_that_runs_it(tmp_path: Path) -> None:
    script = (
        "from checks.host.running import run_program\n"
        f"run_program(['/bin/sh', '-c', 'echo $$ > {tmp_path}/own.new && mv {tmp_path}/own.new {tmp_path}/own;"
        " exec sleep 60'], environment={}, timeout_seconds=60, max_bytes=10)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    own = tmp_path / "own"
    while not own.exists():
        assert process.poll() is None
        time.sleep(0.01)
    pid = int(own.read_text())
    assert is_alive(pid)
    process.kill()
    process.wait()
    assert gone_within(pid, 6)


def test_what_cannot_be_started_is_an_os_error(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(OSError, match="No such file"):
        run_program([str(program)], environment={}, timeout_seconds=1, max_bytes=10)


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sh("true")
    assert len(os.listdir("/proc/self/fd")) == before
