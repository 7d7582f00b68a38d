"""The guard: nothing that comes of a program or a worker outlives it, and nothing else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from checks.host import control_group, guard, running
from checks.host.running import TimeUpError, run_program
from tests.runner.runner_kit import alive, wait_until

PATH = {"PATH": os.environ["PATH"]}


@pytest.fixture(autouse=True)
def executed_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a real worker."""
    monkeypatch.setattr(running, "Popen", subprocess.Popen)


def start_tree_of(folder: Path, script: str) -> subprocess.Popen[bytes]:
    """A guard over a shell, started by another process that can be killed."""
    command = [sys.executable, "-I", "-S", guard.__file__]
    code = (
        "import os, subprocess, sys\n"
        f"words = [str(os.getpid()), '-1', {str(folder)!r}, '--', 'sh', '-c', {script!r}]\n"
        f"guard = subprocess.Popen([*{command!r}, *words])\n"
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
        pid = int(parent.stdout.readline())
        wait_until(lambda: (tmp_path / "ready").exists())
        if how == "terminated":
            os.kill(pid, signal.SIGTERM)
        elif how == "parent killed":
            parent.kill()
        code = parent.wait(10)
    wait_until(lambda: not alive(pid))
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 3
    assert not [pid for pid in left if alive(pid)]
    assert code == {"ends": 3, "terminated": 143, "parent killed": -signal.SIGKILL}[how]
    assert folder.exists() == (how != "parent killed")


ESCAPES = {
    "a session of its own": "setsid sleep 300 & echo $! >> {pids}",
    "a double fork": "(setsid sh -c 'sleep 300 & echo $! >> {pids}' &)",
    "a session in a session": "setsid sh -c 'setsid sleep 300 & echo $! >> {pids}' & sleep 0.1",
    "signals ignored, environment cleared": "(trap '' HUP INT TERM; env -i setsid sleep 300 & echo $! >> {pids})",
}


@pytest.mark.parametrize("how", sorted(ESCAPES))
def test_program_that_ends_well_leaves_nothing_however_it_tries(tmp_path: Path, how: str) -> None:
    pids = tmp_path / "pids"
    script = ESCAPES[how].format(pids=pids) + f"; while [ ! -s {pids} ]; do sleep 0.01; done; echo well"
    code, out, _ = run_program(["sh", "-c", script], environment=PATH, timeout_seconds=30, max_bytes=100)
    assert (code, out) == (0, b"well\n")
    (left,) = (int(pid) for pid in pids.read_text().split())
    assert not alive(left)


def test_program_that_hangs_is_ended_with_what_it_has_put_into_other_sessions(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"setsid sleep 300 & echo $! >> {pids}; touch {tmp_path}/ready; sleep 301"
    with pytest.raises(TimeUpError) as caught:
        run_program(["sh", "-c", script], environment=PATH, timeout_seconds=1.0, max_bytes=100)
    assert caught.value.killed
    (left,) = (int(pid) for pid in pids.read_text().split())
    assert not alive(left)


def test_program_that_forks_without_end_is_outrun(tmp_path: Path) -> None:
    """Each process starts the next one, in a session of its own, and ends: none lives long enough to be found."""
    code = (
        "import os, time\n"
        f"end = time.monotonic() + 60\n"
        "while time.monotonic() < end:\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    os.setsid()\n"
        f"    open({str(tmp_path / 'last')!r}, 'w').write(str(os.getpid()))\n"
    )
    script = f'{sys.executable} -I -S -c "$0" & while [ ! -e {tmp_path}/last ]; do sleep 0.01; done'
    run_program(["sh", "-c", script, code], environment=PATH, timeout_seconds=30, max_bytes=100)
    last = (tmp_path / "last").read_text()
    time.sleep(0.1)
    assert (tmp_path / "last").read_text() == last


def test_processes_beside_a_program_are_never_touched(tmp_path: Path) -> None:
    """A job's: started by others, by us before, and by another thread meanwhile."""
    with subprocess.Popen(["setsid", "sleep", "300"]) as job:
        beside: list[subprocess.Popen[bytes]] = []
        thread = threading.Thread(target=lambda: beside.append(subprocess.Popen(["setsid", "sleep", "300"])))
        thread.start()
        run_program(["sh", "-c", "setsid sleep 300 & exit 0"], environment=PATH, timeout_seconds=30, max_bytes=100)
        thread.join()
        for one in (job, *beside):
            assert one.poll() is None
            one.kill()
            one.wait()


def test_signal_and_code_of_a_program_are_its_own() -> None:
    for script, code in (("kill -SEGV $$", -signal.SIGSEGV), ("kill -9 $$", -signal.SIGKILL), ("exit 7", 7)):
        assert run_program(["sh", "-c", script], environment=PATH, timeout_seconds=30, max_bytes=9)[0] == code


def test_end_of_a_program_is_heard_where_ends_are_ignored() -> None:
    """What ignores them, as a supervisor may, leaves it so to all that it starts."""
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv)"
    guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "-1", "", "--", "sh", "-c", "exit 7"]
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ignore, *guarded[1:]]) as program:
        try:
            assert program.wait(20) == 7
        finally:
            program.kill()


def test_group_is_ours_only_where_it_is_delegated() -> None:
    """Everywhere else the kernel's tree of processes has to do: root could write any group, and would break systemd."""
    own = control_group.delegated_group()
    assert own is None or control_group._is_marked(own) or Path(own, "cgroup.events").exists()


@pytest.mark.system(root=True)  # to make control groups
def test_delegated_control_group_takes_the_program_and_is_ended_as_a_whole(tmp_path: Path) -> None:
    """Also what a guard that was killed has left: the next one ends it."""
    mounts = [
        line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line
    ]
    if not mounts:
        pytest.skip("no control groups of version 2 are mounted here; mount -t cgroup2 none /sys/fs/cgroup")
    group = Path(mounts[0]) / f"healthd-test-{os.getpid()}"
    group.mkdir()
    try:
        os.setxattr(group, "trusted.delegate", b"1")
        code = (
            "import os, sys, time\n"
            f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
            f"sys.path.insert(0, {str(Path(guard.__file__).parent.parent)!r})\n"
            "from checks.host.running import run_program\n"
            "script = 'cat /proc/self/cgroup; setsid sleep 300 & echo $!; kill -9 $PPID; sleep 300'\n"
            "print(*run_program(['sh', '-c', script], environment=os.environ, timeout_seconds=30, max_bytes=999))\n"
            "print(*run_program(['sh', '-c', 'exit 3'], environment=os.environ, timeout_seconds=30, max_bytes=999))\n"
        )
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        first, second = said.stdout.splitlines()
        assert first.startswith("-9 "), said
        assert f"/{group.name}/healthd-" in first
        assert second.startswith("3 ")
        escaped = int(first.split("\\n")[-2].split("'")[0])
        wait_until(lambda: not alive(escaped))
        assert not [path for path in group.iterdir() if path.is_dir()]
    finally:
        (group / "cgroup.kill").write_text("1")
        wait_until(lambda: "populated 0" in (group / "cgroup.events").read_text())
        for path in group.iterdir():
            if path.is_dir():
                path.rmdir()
        group.rmdir()
