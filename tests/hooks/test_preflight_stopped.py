"""A preflight that a signal ends before its command has started: the launcher is to try again, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aggregator.service import until
from tests.hooks.hook_answers_kit import Answer, serving
from tests.hooks.preflight_kit import Job
from tests.hooks.preflight_launch_kit import BAD, PASSIVE
from tests.hooks.preflight_stopped_kit import main_node
from tests.profile import some

PID_1 = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
IGNORING = ("sh", "-c", "trap '' INT TERM; exec \"$@\"", "sh")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, size=2) as job:
        yield job


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], 2))
@pytest.mark.parametrize("within", [(), IGNORING], ids=["plain", "ignoring"])
def test_a_hook_that_is_stopped_while_it_waits_says_try_again(
    job: Job, number: signal.Signals, within: tuple[str, ...]
) -> None:
    hook = job.start(1, *PASSIVE, within=within)
    job.wait_for("--sidecar", "--node-rank 1")
    hook.send_signal(number)
    ended = job.end(1)
    assert (ended.code, ended.out) == (75, ""), ended.err
    assert f"healthd: stopped by {number.name}; not admitted\n" in ended.err
    job.nothing_left()


@pytest.mark.system("unshare", root=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_hook_that_is_the_first_process_of_its_container_hears_signals_too(job: Job, number: signal.Signals) -> None:
    """The kernel gives such a process no signal that it has not asked for."""
    job.start(1, *PASSIVE, within=PID_1)
    job.wait_for("--sidecar", "--node-rank 1")
    os.kill(first_process(job), number)
    ended = job.end(1)
    assert (ended.code, ended.out) == (75, ""), ended.err
    job.nothing_left()


def test_a_parked_hook_that_is_stopped_ends_alone(job: Job) -> None:
    over = job.folder / "over"
    job.start(0, *PASSIVE, "--min-nodes", "1", env={"JOB_UNTIL": str(over)})
    parked = job.start(1, *BAD, "--min-nodes", "1")
    assert parked.stderr is not None
    while "waiting for the job to end" not in (line := parked.stderr.readline()):
        assert line, "it ended before it was parked"
    parked.send_signal(signal.SIGTERM)
    assert job.end(1).code == 75
    assert job.ranks[0].poll() is None
    over.touch()
    assert job.end(0).code == 0
    job.nothing_left()


@pytest.mark.thorough
def test_the_command_is_started_with_the_signals_that_the_hook_was_started_with(tmp_path: Path) -> None:
    with Job(tmp_path, size=1) as job:
        job.start(0, *PASSIVE, within=IGNORING, command=("grep", "-E", "SigIgn|SigBlk", "/proc/self/status"))
        masks = dict(line.split() for line in job.end(0).out.splitlines() if line.startswith("Sig"))
        wanted = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGTERM - 1)
        assert (int(masks["SigIgn:"], 16) & wanted, int(masks["SigBlk:"], 16)) == (wanted, 0)
        job.nothing_left()


def first_process(job: Job) -> int:
    """The process id of the hook that was started within PID_1."""
    lines = {pid: line for pid, line in job.left().items() if " preflight " in line}
    return next(pid for pid, line in lines.items() if "--sidecar" not in line and "unshare" not in line)


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGKILL], 2))
def test_a_hook_that_ends_after_it_has_confirmed_takes_that_back(job: Job, number: signal.Signals) -> None:
    with serving(main_node(go=None)) as main:
        place = ("--nnodes", "2", "--node-rank", "1", "--main", main.url.removeprefix("http://"))
        hook = job.start(1, *PASSIVE, place=place)
        until(lambda: any(b'"acknowledge"' in body for body in main.bodies))
        hook.send_signal(number)
        assert job.end(1).code == (75 if number == signal.SIGTERM else -number)
        until(lambda: any(b'"withdraw"' in body for body in main.bodies))
        job.nothing_left()


SYSTEM = pytest.mark.system("unshare", root=True)


@pytest.mark.parametrize("again", ["sidecar", "hook", "failed hook", pytest.param("first process", marks=SYSTEM)])
def test_signals_that_come_while_a_confirmation_is_taken_back_do_not_end_that(job: Job, again: str) -> None:
    """A launcher may signal every process, and more than once; the first try to take it back is answered with 503."""
    answers, signalled = main_node(go=None), threading.Event()
    settled = answers["/handshake"]
    assert isinstance(settled, tuple)
    tries: list[bytes] = []

    def handshake(_: str) -> Answer:
        tries[:] = [body for body in main.bodies if b'"withdraw"' in body]
        if len(tries) == 1:
            signalled.wait(20)
        return (503, "application/json", b"{}") if len(tries) == 1 else settled

    if again == "failed hook":
        (job.temporary / f"healthd-hosts-{os.geteuid()}").touch()
    with serving({**answers, "/handshake": handshake}) as main:
        place = ("--nnodes", "2", "--node-rank", "1", "--main", main.url.removeprefix("http://"))
        started = job.start(1, *PASSIVE, place=place, within=PID_1 if again == "first process" else ())
        sidecar = job.wait_for("--sidecar", "--node-rank 1")
        hook = first_process(job) if again == "first process" else started.pid
        if again != "failed hook":
            until(lambda: any(b'"acknowledge"' in body for body in main.bodies))
            os.kill(hook, signal.SIGTERM)
        until(lambda: len(tries) == 1)
        os.kill(sidecar if again == "sidecar" else hook, signal.SIGTERM)
        if again != "sidecar":
            with pytest.raises(subprocess.TimeoutExpired):
                started.wait(0.3)  # it waits for the sidecar
        signalled.set()
        ended = job.end(1)
        assert (ended.code, len(tries)) == (75, 2), ended.err
        job.nothing_left()


@pytest.mark.parametrize("full", some(["stdout", "hosts"], 2))
def test_a_hook_that_cannot_tell_its_admission_does_not_confirm_it(job: Job, full: str) -> None:
    (job.temporary / f"healthd-hosts-{os.geteuid()}").touch()
    with serving(main_node(go=True)) as main:
        place = ("--nnodes", "2", "--node-rank", "1", "--main", main.url.removeprefix("http://"))
        job.start(1, *PASSIVE, "--json", place=place, full_stdout=full == "stdout")
        ended = job.end(1)
        why = "standard output cannot be written" if full == "stdout" else "the host file cannot be written"
        assert (ended.code, why in ended.err) == (75 if full == "stdout" else 2, True), ended.err
        assert not any(b'"acknowledge"' in body for body in main.bodies)
        until(lambda: any(b'"withdraw"' in body for body in main.bodies))
        job.nothing_left()


@pytest.mark.thorough
def test_the_main_node_does_not_wait_for_one_that_has_withdrawn(job: Job) -> None:
    job.config.write_text(job.config.read_text().replace('linger = "3s"', 'linger = "10m"'))
    job.start(0, *PASSIVE)
    job.start(1, *PASSIVE, "--json", full_stdout=True)
    ended = job.end(0, timeout=15)
    assert (ended.code, ended.out) == (75, ""), ended.err
    assert "(rank 1) did not" in " ".join(ended.err.split())
    assert job.end(1).code == 75
    job.nothing_left()
