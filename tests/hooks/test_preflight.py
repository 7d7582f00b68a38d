"""A gate with no standing service: real hooks, sidecars, aggregators and commands, killed at will."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.hooks.launchers import trace_names
from tests.hooks.preflight_kit import Job
from tests.hooks.preflight_launch_kit import BAD, PASSIVE
from tests.patience import PATIENCE
from tests.profile import some


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


OUTSIDE = ("env", *(word for name in trace_names() for word in ("-u", name)))  # of whatever runs these tests


def test_one_bad_device_keeps_all_from_starting_and_all_say_which_and_why(job: Job) -> None:
    job.size = 2
    for rank in range(2):
        job.start(rank, *(("--fault", "matmul@cpu:0=corrupt") if rank == 1 else ()))
    for rank in range(2):
        ended = job.end(rank)
        assert (ended.code, ended.out) == (75, ""), ended.err
        assert "REJECT" in ended.err
        assert f"{socket.gethostname()} (rank 1): WrongResult matmul cpu:0" in " ".join(ended.err.split())
        assert "rank-" not in ended.err.partition("REJECT")[2], "people know the host, not the number"
        assert "cannot be reached" not in ended.err
        assert "open files" not in ended.err
    job.nothing_left()


def test_modules_of_the_job_in_its_working_directory_are_neither_imported_nor_in_the_way(
    job: Job, tmp_path: Path
) -> None:
    place = tmp_path / "repository"
    for name in ("checks", "healthd"):
        (place / name).mkdir(parents=True)
    for name in ("checks/__init__", "healthd/__init__", "secrets", "queue"):
        (place / f"{name}.py").write_text("raise SystemExit('the code of the job was run')\n")
    job.size = 1
    job.start(0, *PASSIVE, folder=place, executed=True)
    ended = job.end(0)
    assert ended.code == 0, ended.err
    assert "the code of the job" not in ended.err
    job.nothing_left()


def test_with_min_nodes_the_good_run_renumbered_and_the_bad_main_node_parks_until_the_end(job: Job) -> None:
    job.start(0, *BAD, "--min-nodes", "2")
    over = job.folder / "over"
    job.start(1, *PASSIVE, "--min-nodes", "2", env={"JOB_UNTIL": str(over)})
    job.start(2, *PASSIVE, "--min-nodes", "2")
    short = job.end(2)
    assert job.ranks[0].poll() is None, "parked for as long as any of the job runs"
    assert job.ranks[1].poll() is None, "its output was closed with its command, not with the job"
    over.touch()
    long, parked = job.end(1), job.end(0)
    assert (short.code, long.code, parked.code) == (0, 0, 0), parked.err
    assert parked.out == ""
    assert "this node was left out; waiting for the job to end" in parked.err
    assert "LimitExceeded" in parked.err or "memory_free" in parked.err
    assert "started 0 2 127.0.0.1" in long.out
    assert "started 1 2 127.0.0.1" in short.out
    assert "hosts ['127.0.0.1', '127.0.0.1']" in short.out
    job.nothing_left()


def test_when_all_are_good_all_run_with_clean_files_and_signals_and_their_codes_come_through(job: Job) -> None:
    secret = job.folder / "secret"
    secret.write_text("a-secret-that-all-nodes-share\n")
    given = (*PASSIVE, "--token-file", str(secret), "--json")
    job.start(0, *given, close_stdin=True)
    job.start(1, *given, env={"JOB_CODE": "7"})
    job.start(2, *given, env={"JOB_CODE": "-9"})
    ended = [job.end(rank) for rank in range(3)]
    assert [one.code for one in ended] == [0, 7, -signal.SIGKILL], ended[0].err
    for rank, one in enumerate(ended):
        assert f"started {rank} 3 127.0.0.1" in one.out
        assert "files [0, 1, 2]" in one.out
        assert one.out.startswith('{"id":')
        # Python itself ignores SIGPIPE and SIGXFSZ; nothing else is but what whoever runs the tests ignores.
        assert f"ignored {inherited() | BY_PYTHON:016x}" in one.out
    job.nothing_left()


@pytest.mark.thorough
def test_a_decision_that_cannot_be_told_starts_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, size=1) as job:
        job.start(0, *PASSIVE, "--json", full_stdout=True, command=("touch", str(tmp_path / "started")))
        ended = job.end(0)
        assert (ended.code, (tmp_path / "started").exists()) == (75, False), ended.err
        assert "healthd: standard output cannot be written: No space left on device\n" in ended.err
        assert "internal error" not in ended.err
        job.nothing_left()


# SIGPIPE (13) and SIGXFSZ (25), as bits of SigIgn.
BY_PYTHON = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)


def inherited() -> int:
    """The signals that this process was started with as ignored."""
    text = Path("/proc/self/status").read_text()
    return int(re.findall(r"^SigIgn:\s*(\w+)", text, flags=re.MULTILINE)[0], 16) & ~BY_PYTHON


def test_what_python_ignores_is_no_longer_ignored_by_the_command(tmp_path: Path) -> None:
    with Job(tmp_path, size=1) as job:
        job.start(0, *PASSIVE, command=("grep", "SigIgn", "/proc/self/status"))
        assert job.end(0).out.split()[-1] == f"{inherited():016x}"
        job.nothing_left()


def test_a_node_that_never_comes_is_named_to_all_others_within_the_wait(job: Job) -> None:
    """The wait counts from the start of the main node's hook, and nobody waits for one that never came to hear it."""
    job.config.write_text(job.config.read_text().replace('linger = "3s"', 'linger = "10m"'))
    wait = 4 * PATIENCE
    for rank in (0, 1):
        job.start(rank, *PASSIVE, "--wait", f"{wait:g}s", "--json")
    for rank in (0, 1):
        ended = job.end(rank)
        assert ended.code == 75
        decision = json.loads(ended.out)
        assert "rank-2" in [node["node"] for node in decision["excluded"]]
        assert 0 <= decision["policy"]["wait_seconds"] < wait
    job.nothing_left()


@pytest.mark.thorough
def test_ranks_that_were_started_with_different_nnodes_are_all_told_which_said_what(job: Job) -> None:
    for rank, size in ((0, 2), (1, 3)):
        place = ("--nnodes", str(size), "--node-rank", str(rank), "--main", f"127.0.0.1:{job.port}")
        job.start(rank, *PASSIVE, place=place)
    for rank in (0, 1):
        ended = job.end(rank)
        assert ended.code == 2, ended.err
        assert "the ranks were not started alike: --nnodes is 2 on rank 0 and 3 on rank 1" in ended.err
        assert "attempt" not in ended.err
    job.nothing_left()


def test_a_hook_that_is_killed_takes_its_sidecar_with_it_and_a_dead_main_node_ends_the_others(job: Job) -> None:
    for rank in (0, 1, 2):
        job.start(rank, *PASSIVE, "--wait", "60s", *(("--fault", "memory_free=hang") if rank == 2 else ()))
    sidecar = job.wait_for("--sidecar", "--node-rank 1")
    for rank in (1, 2):
        job.reported(rank)
    job.ranks[1].kill()
    assert job.end(1).code == -signal.SIGKILL
    until = time.monotonic() + 6 * PATIENCE
    while sidecar in job.left() and time.monotonic() < until:
        time.sleep(0.05)
    assert sidecar not in job.left()
    job.ranks[0].kill()
    job.end(0)
    ended = job.end(2, timeout=15)
    assert ended.code == 75, ended.err
    assert "rank 2: aggregator" in ended.err
    job.nothing_left()


def test_a_sidecar_that_is_killed_is_no_admission_and_leaves_no_aggregator(tmp_path: Path) -> None:
    with Job(tmp_path, size=2) as job:
        job.start(0, *PASSIVE)
        job.wait_for("aggregator --config")
        os.kill(job.wait_for("--sidecar", "--node-rank 0"), signal.SIGKILL)
        ended = job.end(0)
        assert (ended.code, ended.out) == (75, "")
        assert "the sidecar of this node exited without a result" in ended.err
        job.nothing_left()


def test_a_port_that_is_taken_ends_the_main_node_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, size=2) as job, socket.socket() as taken:
        taken.bind(("127.0.0.1", job.port))
        taken.listen()
        job.start(0, *PASSIVE)
        ended = job.end(0, timeout=15)
        assert ended.code == 75
        assert f"cannot listen on 127.0.0.1:{job.port}" in ended.err
        job.nothing_left()


@pytest.mark.parametrize(
    ("options", "command", "said"),
    [
        (PASSIVE, ("no-such-command-here",), "no-such-command-here: no such command here"),
        (PASSIVE, (), "no command to start"),
        (("--min-nodes", "9"), ("true",), "--min-nodes must be between 1 and 1, not 9"),
        (("--main", "127.0.0.1:99999"), ("true",), "--main '127.0.0.1:99999' is not HOST or HOST:PORT"),
        (("--nnodes", "0"), ("true",), "--nnodes must be at least 1, not 0"),
        (("--node-rank", "-1"), ("true",), "--node-rank -1 must be from 0 to 0"),
        (("--tier", "quik"), ("true",), "quik"),
        (("--attempt", "1099511627776"), ("true",), "attempt: must be from 0 to 2147483647, not 1099511627776"),
        (("--token-file", "/nowhere"), ("true",), "/nowhere: the token cannot be read"),
        (("--token-file", "/dev/null"), ("true",), "/dev/null: contains no token"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_exit_code_2(
    tmp_path: Path, options: tuple[str, ...], command: tuple[str, ...], said: str
) -> None:
    with Job(tmp_path, size=1) as job:
        job.start(0, *options, command=command)
        ended = job.end(0)
    assert ended.code == 2, ended.err
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""


def test_a_command_that_cannot_be_executed_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with Job(tmp_path, size=1) as job:
        job.start(0, *PASSIVE, command=(str(script),))
        ended = job.end(0)
        assert ended.code == 2
        assert f"{script}: cannot be started" in ended.err
        job.nothing_left()


@pytest.mark.system("unshare", root=True)
def test_a_container_in_which_nothing_can_be_written_is_told_what_is_missing(tmp_path: Path) -> None:
    script = (
        'for one in /tmp /var/tmp; do mount --bind $one $one; mount -o remount,ro,bind $one; done; cd /proc; exec "$@"'
    )
    with Job(tmp_path, size=1) as job:
        job.start(0, *PASSIVE, within=("unshare", "--mount", "sh", "-ec", script, "sh"))
        ended = job.end(0)
    assert ended.code == 2, ended.err
    assert ended.err.startswith("healthd: no temporary folder can be created: No usable temporary directory found in ")
    assert ended.err.endswith("; set TMPDIR to a writable folder\n")


def test_a_node_with_another_secret_than_the_main_nodes_ends_with_2_since_no_retry_can_help(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"the-{name}-secret-of-this-job\n")
    with Job(tmp_path, size=2) as job:
        job.start(0, *PASSIVE, "--wait", "60s", "--token-file", str(tmp_path / "right"))
        job.start(1, *PASSIVE, "--wait", "60s", "--token-file", str(tmp_path / "wrong"))
        ended = job.end(1)
        assert (ended.code, ended.out) == (2, ""), ended.err
        assert "this token is unknown" in ended.err
        assert "--token-file" in ended.err


def test_one_node_alone_needs_no_address_of_a_main_node(tmp_path: Path) -> None:
    with Job(tmp_path, size=1) as job:
        place = ("--nnodes", "1", "--node-rank", "0")
        job.start(0, *PASSIVE, place=place, command=(sys.executable, "-c", "print('began')"))
        ended = job.end(0)
        assert ended.code == 0, ended.err
        assert "began" in ended.out
        job.nothing_left()


@pytest.mark.thorough
def test_machine_without_a_launcher_is_the_whole_job_and_one_line_says_so(tmp_path: Path) -> None:
    with Job(tmp_path, size=1) as job:
        job.start(0, *PASSIVE, place=(), within=OUTSIDE)
        ended = job.end(0)
        assert ended.code == 0, ended.err
        assert "started 0 1 127.0.0.1" in ended.out
        job.nothing_left()
    said = [line for line in ended.err.splitlines() if "launcher" in line]
    assert said == [
        "healthd: no launcher's variables found, so this machine is the whole job (one node, as with torchrun "
        "--standalone); for several nodes use --nnodes N --node-rank R --main HOST"
    ]


@pytest.mark.thorough
def test_jobs_of_one_node_on_one_machine_do_not_want_the_same_port(tmp_path: Path) -> None:
    """The port of others is never used: here somebody else listens on the default one."""
    with socket.create_server(("127.0.0.1", 0)) as other, Job(tmp_path, size=1) as job:
        job.start(0, *PASSIVE, place=("--nnodes", "1"), env={"HEALTHD_PREFLIGHT_PORT": str(other.getsockname()[1])})
        ended = job.end(0)
        assert ended.code == 0, ended.err
        assert "launcher" not in ended.err
        job.nothing_left()


@pytest.mark.parametrize("trace", some(["KUBERNETES_SERVICE_HOST", "PBS_JOBID", "WORLD_SIZE"], 3))
def test_process_that_may_be_one_of_many_is_not_taken_for_the_whole_job(tmp_path: Path, trace: str) -> None:
    with Job(tmp_path, size=1) as job:
        job.start(0, place=(), command=("touch", str(tmp_path / "started")), within=(*OUTSIDE, f"{trace}=4"))
        ended = job.end(0)
    assert (ended.code, (tmp_path / "started").exists()) == (2, False)
    assert f"no launcher's variables found, but {trace} is set" in ended.err
    assert "use --nnodes N --node-rank R --main HOST, or --nnodes 1 if this machine is the whole job" in ended.err
