"""Steps of jobs on a node: from the ranks of a real gloo job over the daemon's socket to /metrics and a finding."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Context, Finding, Status, Tier
from checks.host.machine import Host
from checks.system.job_steps import Params, job_steps
from healthd.core.tasks import Tasks
from healthd.integrations.steps import reports as step_reports
from healthd.integrations.steps.detector import WINDOW_STEPS, JobSteps
from healthd.integrations.steps.reports import FILE, MAX_JOBS, MAX_RANK_SERIES, MAX_RANKS, StepReports
from tests import prepared
from tests.job import IN_A_JOB

RANKS = 4
RANK = (
    IN_A_JOB
    + """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from torch import distributed
from healthd_steps import StepReporter
rank, size, path, slow, steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method="file://" + sys.argv[6], rank=rank, world_size=size)
reporter = StepReporter(job="gloo", rank=rank, size=size, path=path)
gradients = torch.ones(1024)
for step in range(steps):
    reporter.begin()
    time.sleep(0.033 if rank == slow else 0.030)
    gradients[0] = os.path.exists(sys.argv[7])
    with reporter.waiting:
        distributed.all_reduce(gradients)
    reporter.end(step)
    if gradients[0]:  # all see it after the same step
        break
distributed.destroy_process_group()
"""
)


def context(file: Path, **params: Any) -> Context[Params]:
    return Context(
        host=Host(None),
        params=Params(file=str(file), **params),
        tier=Tier.PASSIVE,
        device=None,
        group=None,
        previous=None,
        inventory={},
        limits={},
    )


def findings(file: Path, **params: Any) -> list[Finding]:
    return [one for one in job_steps(context(file, **params)) if isinstance(one, Finding)]


async def follow(run_dir: Path, until: Callable[[StepReports], bool], seconds: float) -> StepReports:
    """The daemon's task over a real socket, until something is true of it."""
    reports = StepReports(run_dir, boot_seconds=lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    tasks = Tasks()
    tasks.supervise("step reports of jobs", reports.run)
    async with asyncio.timeout(seconds):
        while not until(reports):  # noqa: ASYNC110  other processes make it true
            await asyncio.sleep(0.02)
    await tasks.stop(5)
    return reports


@pytest.mark.thorough
@pytest.mark.parametrize("slow", [2, -1])
def test_rank_of_a_gloo_job_that_is_a_tenth_slower_is_named(slow: int, tmp_path: Path) -> None:
    """
    Four real processes that wait for each other in every step, so that all steps take as long as the slow one's.

    Five windows are enough on a quiet machine; a busy one may take several times as many.
    """
    windows = 5 if slow < 0 else 80
    seen: list[tuple[int, tuple[int, ...]]] = []

    def watch(reports: StepReports) -> bool:
        job = reports.jobs.get("gloo", JobSteps())
        if job.windows and (not seen or len(job.windows) > seen[-1][0]):
            seen.append((len(job.windows), tuple(one.rank for one in job.slow)))
        return bool(seen) and (bool(seen[-1][1]) or seen[-1][0] >= windows)

    steps = (windows + 1) * WINDOW_STEPS
    enough = tmp_path / "enough"
    arguments = [str(RANKS), str(tmp_path / "steps.sock"), str(slow), str(steps), str(tmp_path / "meet"), str(enough)]
    ranks = [
        prepared.ScriptPopen([sys.executable, "-c", RANK, str(rank), *arguments], stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        reports = asyncio.run(follow(tmp_path, watch, 300))
        time.sleep(0.1)  # some steps without a daemon
    finally:
        enough.touch()
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors  # nothing is lost for the job when the daemon goes in the middle
    named = {who for _, who in seen}
    assert named <= {(), (slow,)}
    if slow < 0:
        assert named == {()}
        return
    assert (slow,) in named, [(dict(w.excess), sorted(w.late)) for w in reports.jobs["gloo"].windows]
    reports.write()
    step, finding = findings(tmp_path / FILE)
    assert step.status is Status.PASS
    assert (finding.status, finding.reason, finding.target) == (Status.WARN, "SlowRank", f"rank:{slow}")
    assert "% longer in" in finding.message


def test_without_reports_the_check_does_not_concern_the_node_and_old_ones_do_not_count(tmp_path: Path) -> None:
    assert [one.reason for one in findings(tmp_path / FILE)] == ["NotApplicable"]
    reports = StepReports(tmp_path, boot_seconds=lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    for step in range(3 * WINDOW_STEPS):
        for rank in range(2):
            reports.take(f"step1 j {rank} 2 {step} 0.1 0.0".encode())
    reports.write()
    (finding,) = findings(tmp_path / FILE)
    assert finding.status is Status.PASS
    assert finding.measurements[0].value == pytest.approx(0.1)
    assert [one.reason for one in findings(tmp_path / FILE, max_age_seconds=-1.0)] == ["NotApplicable"]
    (tmp_path / FILE).write_text(json.dumps({"jobs": 3}))
    assert [one.reason for one in findings(tmp_path / FILE)] == ["NoData"]


def test_as_many_jobs_and_ranks_as_are_followed_have_twelve_series(tmp_path: Path) -> None:
    """tests/test_metrics_bound.py has the other series of a node, and how many there may be in all."""
    reports = StepReports(tmp_path, boot_seconds=lambda: 1.0)
    for step in range(3 * WINDOW_STEPS):
        for job in range(MAX_JOBS + 1):
            for rank in range(MAX_RANKS + 1):
                reports.take(f"step1 job-{job} {rank} 128 {step} 0.1 0.1".encode())
    counts = {family.name: len(family.samples) for family in reports.metrics()}
    assert counts == {"healthd_job_step_seconds": MAX_JOBS, "healthd_job_rank_own_seconds": MAX_RANK_SERIES}
    assert sum(counts.values()) == 12


def test_what_strangers_write_is_bounded(tmp_path: Path) -> None:
    now = [1000.0]
    reports = StepReports(tmp_path, boot_seconds=lambda: now[0])
    for number in range(1000):
        reports.take(f"step1 job{number} 0 1 1 0.1 0.0".encode())
        reports.take(f"step1 job0 {number} 1000 1 0.1 0.0".encode())
        reports.take(b"\xff" * number)
    assert len(reports.jobs) == MAX_JOBS
    assert len(reports._ranks["job0"]) == MAX_RANKS
    assert reports.refused > 2900 - MAX_RANKS
    now[0] += 3600.0
    reports.take(b"step1 new 0 1 1 0.1 0.0")
    assert set(reports.jobs) == {"new"}


async def test_a_job_that_says_nothing_more_is_forgotten_although_no_other_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_reports, "FORGET_SECONDS", 0.05)
    sent: list[bool] = []

    def is_over(reports: StepReports) -> bool:
        if not sent and (tmp_path / "steps.sock").is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as job:
                job.sendto(b"step1 train 0 1 1 0.1 0.0", str(tmp_path / "steps.sock"))
            sent.append(True)
        return (tmp_path / FILE).exists() and not reports.jobs

    await follow(tmp_path, is_over, 30)


STEP = (
    IN_A_JOB
    + """
import sys
from healthd_steps import StepReporter
reporter = StepReporter(job="train", rank=int(sys.argv[1]), size=4, path=sys.argv[2])
reporter.report(1, 0.1, 0.0)
sys.stdin.read()  # for ever
"""
)


def test_a_job_is_over_when_its_last_process_is_and_nothing_of_it_stays(tmp_path: Path) -> None:
    """All ranks are killed: none says a word of its end. The slow one is named until then, and not after."""
    ranks: list[prepared.ScriptPopen] = []
    seen: list[str] = []

    def kill(rank: prepared.ScriptPopen) -> None:
        rank.kill()
        rank.wait()

    def is_over(reports: StepReports) -> bool:
        job = reports.jobs.get("train")
        if not ranks and reports.path.is_socket():
            for rank in range(4):
                command = [sys.executable, "-c", STEP, str(rank), str(reports.path)]
                ranks.append(prepared.ScriptPopen(command, stdin=subprocess.PIPE))
        elif not seen and job is not None and len(reports._senders["train"]) == len(ranks):
            for step in range(100, 100 + 6 * WINDOW_STEPS):
                for rank in range(4):
                    own = 0.1 * (1.2 if rank == 2 else 1) * (1 + (step * 7 + rank * 3) % 5 / 500)
                    reports.take(f"step1 train {rank} 4 {step} {own} 0.0".encode(), ranks[rank].pid)
            reports.write()
            seen.append(" ".join(str(one.reason) for one in findings(tmp_path / FILE)))
            for rank in range(3):
                kill(ranks[rank])
        elif len(seen) == 1 and reports._senders["train"] == {(ranks[3].pid, 3)}:
            seen.append("goes on")
            kill(ranks[3])
        return len(seen) == 2 and not reports.jobs and json.loads((tmp_path / FILE).read_text())["jobs"] == []

    try:
        asyncio.run(follow(tmp_path, is_over, 60))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert seen == ["None SlowRank", "goes on"]


def test_only_the_rank_itself_says_that_it_is_done(tmp_path: Path) -> None:
    """A rank in a container of its own: its process is not to be seen, and it says when it is done."""
    reports = StepReports(tmp_path, boot_seconds=lambda: 1.0)
    for rank in range(2):
        reports.take(f"step1 j {rank} 2 1 0.1 0.0".encode())
    assert not reports.take(b"end1 j 0", process=4711)  # any process of the host may write there
    assert not reports.take(b"end1 j 5")
    assert not reports.take(b"end1 k 0")
    assert not reports.take(b"end1 j 0")
    assert "j" in reports.jobs
    assert reports.take(b"end1 j 1")
    assert not reports.jobs
    assert reports.refused == 0


def test_socket_that_cannot_be_made_leaves_the_daemon_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "steps.sock").mkdir()

    async def work() -> None:
        reports = StepReports(tmp_path, boot_seconds=time.monotonic)
        task = asyncio.create_task(reports.run())
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()

    asyncio.run(work())
    assert "jobs cannot report their steps" in caplog.text


def test_socket_is_for_every_user_and_goes_with_the_daemon(tmp_path: Path) -> None:
    def is_there(_: StepReports) -> bool:
        path = tmp_path / "steps.sock"
        if not path.is_socket():
            return False
        assert path.stat().st_mode & 0o777 == 0o666
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as job:
            job.sendto(b"nonsense", str(path))
        return True

    asyncio.run(follow(tmp_path, is_there, 10))
    assert not (tmp_path / "steps.sock").exists()
