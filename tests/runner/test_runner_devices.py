"""The runner on devices and ranks: real workers with real torch on CPU devices, real collectives, real faults."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pwd
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from checks.contract import Program, Status, Tier
from checks.discover import builtin_checks
from healthd.core.model import CheckResult
from healthd.runner.device_claim import lock_file, write_leases_file
from healthd.runner.run_record import RunRequest
from healthd.runner.runner import Execution
from healthd.runner.settings import Plan, RunProgress
from healthd.runner.workers.workers import Unreaped, WorkerProcess, Workers
from tests.aggregator.service import until
from tests.patience import PATIENCE
from tests.runner.runner_kit import make_runner, run_checks, tracer, workers_left

SMALL = {
    "matmul": {"sizes": [64, 64], "repeats": 1},
    "memory": {"max_bytes": 2**20, "repeats": 1},
    "transfer": {"size_bytes": 2**16, "repeats": 1},
}


def run_quick(
    *names: str, faults: Sequence[str] = (), params: Mapping[str, Any] | None = None, **changes: Any
) -> Mapping[str, CheckResult]:
    if "runner" not in changes:
        changes["params"] = {**SMALL, **(params or {})}
    return run_checks(*names, faults=faults, tier=Tier.QUICK, **changes)


def by_target(result: CheckResult) -> dict[str, tuple[str, str | None]]:
    return {finding.target: (finding.status.value, finding.reason) for finding in result.findings}


@pytest.mark.thorough
def test_real_quick_checks_and_collectives_pass_in_one_run(tmp_path: Path) -> None:
    names = ("matmul", "memory", "digest", "transfer", "train_step", "all_gather", "all_reduce", "reduce_scatter")
    steps: list[RunProgress] = []
    answered: list[str] = []
    runner = make_runner(run_dir=tmp_path, executed=True)
    results = run_quick(
        *names, runner=runner, on_progress=steps.append, on_result=lambda result: answered.append(result.check)
    )
    assert {name: result.status for name, result in results.items()} == dict.fromkeys(names, Status.PASS)
    assert all(result.findings and not result.injected for result in results.values())
    assert sorted(answered) == sorted(names)
    assert {step.target for step in steps if step.check == "matmul"} == {"cpu:0", "cpu:1"}
    assert runner.probe_device_seconds > 0
    assert runner.latest is not None
    assert runner.latest.versions["torch"]
    assert runner.latest.holders == ()
    assert lock_file(tmp_path, "cpu").read_text() == ""


def test_one_device_hangs_and_the_others_are_still_measured() -> None:
    """A rival's fault 16."""
    results = run_quick(
        "present", "hangs_there", "matmul", options={"cpu_devices": 3}, params={"hangs_there": {"target": "cpu:1"}}
    )
    assert by_target(results["hangs_there"]) == {
        "cpu:0": ("pass", None),
        "cpu:1": ("unknown", "Timeout"),
        "cpu:2": ("pass", None),
    }
    assert results["present"].status is Status.PASS
    assert by_target(results["matmul"]) == {f"cpu:{index}": ("pass", None) for index in range(3)}


def test_more_devices_than_workers_at_once_are_all_measured() -> None:
    running = 0
    most = 0

    def progress(event: RunProgress) -> None:
        nonlocal running, most
        if event.check == "present" and event.event in ("started", "ended"):
            running += 1 if event.event == "started" else -1
            most = max(most, running)

    results = run_quick("present", "meets", options={"cpu_devices": 3}, max_workers_at_once=1, on_progress=progress)
    assert most == 1
    assert len(by_target(results["present"])) == 3
    assert by_target(results["meets"]) == {f"rank:{rank}": ("pass", None) for rank in range(3)}


def test_killed_device_worker_is_tried_again_and_told(tmp_path: Path) -> None:
    """A rival's fault 3, on one device."""
    results = run_quick("dies_once", params={"dies_once": {"target": "cpu:1", "folder": str(tmp_path)}})
    result = results["dies_once"]
    assert (result.status, result.attempts) == (Status.WARN, 2)
    assert [finding.target for finding in result.findings if finding.status is Status.WARN] == ["cpu:1"]


def test_every_sudden_fault_of_a_device_check_at_once() -> None:
    """Double faults: each is found where it is, and what has none goes on."""
    results = run_quick(
        "matmul",
        "present",
        "transfer",
        "memory",
        faults=("matmul=crash", "present@cpu:1=garbage", "transfer@cpu:0=missing", "transfer@rank:1=corrupt"),
    )
    assert by_target(results["matmul"]) == {"cpu:0": ("unknown", "Crashed"), "cpu:1": ("unknown", "Crashed")}
    assert results["matmul"].attempts == 1  # what an operator wants to crash is not tried again
    assert by_target(results["present"]) == {"cpu:0": ("pass", None), "cpu:1": ("unknown", "Garbage")}
    assert by_target(results["transfer"])["cpu:0"] == ("fail", "MissingDevice")
    assert ("fail", "WrongResult") in [
        (f.status.value, f.reason) for f in results["transfer"].findings if f.target == "cpu:1"
    ]
    assert results["memory"].status is Status.PASS
    assert [name for name, result in results.items() if not result.injected] == ["memory"]


def test_corrupt_bit_in_one_of_three_is_named() -> None:
    result = run_quick("digest", faults=("digest@cpu:1=corrupt",), options={"cpu_devices": 3})["digest"]
    assert result.status is Status.FAIL
    assert {f.target for f in result.findings if f.status is Status.FAIL} == {"cpu:1"}
    assert {f.reason for f in result.findings if f.status is Status.FAIL} == {"SilentCorruption"}
    assert result.injected


def test_slow_device_is_really_slow_and_a_failure_fails() -> None:
    def flops(result: CheckResult, target: str) -> float:
        return next(
            m.value or 0.0
            for f in result.findings
            if f.target == target
            for m in f.measurements
            if m.name == "matmul_flops_per_second"
        )

    whole = {"matmul": {"dtypes": ["fp32"]}}  # of a size at which the operation takes the time
    results = run_quick("matmul", "present", faults=("matmul@cpu:1=slow:100", "present@cpu:0=fail"), params=whole)
    assert flops(results["matmul"], "cpu:1") < flops(results["matmul"], "cpu:0") / 3
    assert results["matmul"].injected
    assert by_target(results["present"]) == {"cpu:0": ("fail", "InjectedFault"), "cpu:1": ("pass", None)}


def accused(result: CheckResult) -> set[tuple[str, str | None]]:
    return {(finding.target, finding.reason) for finding in result.findings if finding.status is Status.FAIL}


def test_fault_of_a_rank_is_named_and_no_other_is_blamed() -> None:
    """A rival's fault 25: who only reports it is not blamed. Each fault leaves the next collective a fresh group."""
    results = run_quick(
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "meets",
        faults=("all_reduce@rank:1=hang", "all_gather@cpu:0=absent", "reduce_scatter@rank:1=corrupt"),
        timeouts_seconds={"all_reduce": 6.0, "all_gather": 6.0},  # for the ranks to meet in
    )
    assert accused(results["all_reduce"]) == {("rank:1", "RankHung")}
    assert accused(results["all_gather"]) == {("rank:0", "RankAbsent")}
    assert accused(results["reduce_scatter"]) == {("rank:1", "CollectiveMismatch")}
    assert results["meets"].status is Status.PASS
    assert [name for name, result in results.items() if not result.injected] == ["meets"]


def test_rank_that_dies_is_named_and_the_next_collective_is_well() -> None:
    results = run_quick("all_reduce", "all_gather", faults=("all_reduce@cpu:1=crash",))
    assert accused(results["all_reduce"]) == {("rank:1", "RankDied")}
    assert results["all_reduce"].attempts == 1
    assert results["all_gather"].status is Status.PASS


def test_group_stays_open_while_all_are_well_and_is_new_after_a_death() -> None:
    results = run_quick("meets", "present", "meets_again", "meets_later", faults=("meets_again@rank:0=crash",))
    met = [finding.message.split(" of ") for finding in results["meets"].findings]
    lost = {finding.target: finding.message for finding in results["meets_again"].findings}
    later = [finding.message.split(" of ") for finding in results["meets_later"].findings]
    assert [targets for _, targets in met] == ["cpu:0 cpu:1", "cpu:0 cpu:1"]
    assert {where.split()[0] for where, _ in met} == {"0"}
    assert {where.split()[0] for where, _ in later} == {"1"}
    # The device workers are the ranks, and the ranks stay the same processes until one dies.
    pids = [finding.message.split()[-1] for finding in results["present"].findings]
    assert [where.split()[-1] for where, _ in met] == pids
    assert not {where.split()[-1] for where, _ in later} & set(pids)
    assert lost["rank:0"] == "Crashed; order 0; seen joined again"
    assert lost["rank:1"] == "Timeout; order None; seen joined again, entered again"


def test_group_that_got_through_after_a_death_is_no_pass(tmp_path: Path) -> None:
    """A rival's fault 3, in a group."""
    params = {"rank_dies_once": {"target": "cpu:1", "folder": str(tmp_path)}}
    result = run_quick("rank_dies_once", params=params)["rank_dies_once"]
    assert (result.status, result.attempts) == (Status.WARN, 2)
    assert [f.target for f in result.findings if f.reason == "Crashed"] == ["rank:1"]


def test_hang_after_many_steps_is_told_with_the_first_and_the_last() -> None:
    result = run_quick("walks", timeouts_seconds={"walks": 3.0})["walks"]
    assert {f.target for f in result.findings} == {"rank:0", "rank:1"}
    for finding in result.findings:
        assert "seen joined step 0, entered step" in finding.message
    assert result.error
    assert "did not end within 3 s; last seen: entered step 999" in result.error


def test_device_whose_worker_cannot_be_reaped_is_stuck_and_the_other_is_measured(tmp_path: Path) -> None:
    params = {"traced_device": {"target": "cpu:1", "folder": str(tmp_path)}}
    runner = make_runner(params=params, kill_grace_seconds=0.2, timeouts_seconds={"traced_device": 3.0})
    plan = Plan(tier=Tier.QUICK, checks=("traced_device", "present", "meets"), executor="test")
    with tracer(tmp_path):
        results = {result.check: result for result in asyncio.run(runner.run(plan))}
        stuck = runner.stuck()
    until(lambda: runner.stuck() == ())
    assert stuck == ("cpu:1",)
    assert by_target(results["traced_device"]) == {"cpu:0": ("pass", None), "cpu:1": ("unknown", "Timeout")}
    assert by_target(results["present"]) == {"cpu:0": ("pass", None), "cpu:1": ("fail", "Stuck")}
    assert by_target(results["meets"]) == {"rank:1": ("fail", "Stuck")}


def test_group_that_lacks_a_device_is_not_run() -> None:
    result = run_quick("meets", faults=("meets@cpu:1=missing",))["meets"]
    assert by_target(result) == {"rank:1": ("fail", "MissingDevice")}
    assert "without it the 2 ranks cannot start" in result.findings[0].message


# --- who has the devices ----------------------------------------------------------------------------------------------


def test_device_that_a_job_holds_is_not_probed(tmp_path: Path) -> None:
    """A rival's fault 22."""
    (tmp_path / "devices").mkdir()
    device = tmp_path / "devices" / "cpu0"
    device.touch()
    job = subprocess.Popen(
        [sys.executable, "-c", f"f = open({str(device)!r}); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    # A descendant of ours would not count as somebody else's: the runner is put into a process of its own.
    script = (
        "import sys, tests.runner.runner_kit as kit; from pathlib import Path\n"
        "results = kit.run_checks('present', 'fine', executed=True, run_dir=Path(sys.argv[1]))\n"
        "for result in results.values(): print(result.status.value, result.findings[0].message)\n"
    )
    try:
        assert job.stdout is not None
        job.stdout.readline()
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=90 * PATIENCE,
            check=True,
        )
    finally:
        job.communicate(b"\n")
    assert done.stdout.splitlines() == [f"skip in use by cpu:0: pid {job.pid} (python)", "pass all is well"]


@contextlib.contextmanager
def locked(run_dir: Path, *, written: str = "") -> Iterator[None]:
    """This process has the lock."""
    path = lock_file(run_dir, "cpu")
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(written)
        file.flush()
        yield


def test_lock_of_another_healthd_is_respected_by_name(tmp_path: Path) -> None:
    with locked(tmp_path, written=f"{os.getpid()}\n"):
        results = run_quick("present", "fine", run_dir=tmp_path)
    assert (results["present"].status, results["present"].findings[0].reason) == (Status.SKIP, "Busy")
    message = results["present"].findings[0].message
    assert re.fullmatch(rf"another healthd \(pid {os.getpid()}, .+, user \w+\) is running active checks", message)
    assert results["fine"].status is Status.PASS


def test_lock_that_another_program_holds_is_said_with_process_and_user(tmp_path: Path) -> None:
    path = lock_file(tmp_path, "cpu")
    run_quick("present", run_dir=tmp_path)
    with subprocess.Popen(
        ["flock", str(path), "sh", "-c", "echo locked; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        result = run_quick("present", run_dir=tmp_path)["present"]
        program.communicate()
    assert (result.status, result.findings[0].reason) == (Status.SKIP, "Busy")
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert result.findings[0].message == (
        f"pid {program.pid}, flock, user {user} holds {path} and is not healthd: "
        "active checks can only run after it exits"
    )


@pytest.mark.parametrize("made", [False, True], ids=["anew", "by somebody who let all in"])
def test_lock_can_be_opened_by_its_owner_alone(tmp_path: Path, made: bool) -> None:
    """Who can open a file can keep a lock on it, and so all active checks from running."""
    path = lock_file(tmp_path, "cpu")
    if made:
        path.parent.mkdir(mode=0o755)
        path.touch(mode=0o644)
    assert run_quick("present", run_dir=tmp_path)["present"].status is Status.PASS
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_other_users_cannot_hold_the_lock() -> None:
    """As any user of the host could keep the node from every active check."""

    def as_nobody(*argv: str) -> str:
        done = subprocess.run(argv, user=65534, group=65534, capture_output=True, text=True, check=False)
        return done.stderr.strip() if done.returncode else "done"

    with tempfile.TemporaryDirectory(prefix="healthd-run-", dir="/tmp") as name:
        run_dir = Path(name)
        run_dir.chmod(0o755)
        run_quick("present", run_dir=run_dir)
        assert as_nobody("cat", str(run_dir / "devices" / "cpu0")) == "done", "a job of any user can hold a device"
        assert "Permission denied" in as_nobody("flock", "--nonblock", str(lock_file(run_dir, "cpu")), "true")
        lock_file(run_dir, "cpu").parent.chmod(0o755)  # the file alone is closed too
        assert "Permission denied" in as_nobody("flock", "--nonblock", str(lock_file(run_dir, "cpu")), "true")


def test_lock_that_cannot_be_made_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_quick("present", run_dir=tmp_path / "file" / "run")["present"]
    assert (result.status, result.findings[0].reason) == (Status.UNKNOWN, "NoPermission")
    assert "cannot lock" in result.findings[0].message


def test_lock_leads_to_no_other_file(tmp_path: Path) -> None:
    """In a directory that somebody else has made a link may stand in its place."""
    (tmp_path / "thesis").write_text("three years of work")
    path = lock_file(tmp_path, "cpu")
    path.parent.mkdir()
    path.symlink_to(tmp_path / "thesis")
    result = run_quick("present", run_dir=tmp_path)["present"]
    assert (result.status, result.findings[0].reason) == (Status.UNKNOWN, "NoPermission")
    assert (tmp_path / "thesis").read_text() == "three years of work"


def test_devices_that_cannot_be_found_are_unknown_never_a_pass() -> None:
    """A rival's fault 13."""
    result = run_quick("present", options={"cpu_devices": 0})["present"]
    assert (result.status, result.findings[0].reason) == (Status.UNKNOWN, "CheckError")
    assert "cpu_devices must be a whole number" in result.findings[0].message


def test_cancelled_active_run_leaves_nothing_and_frees_the_lock(tmp_path: Path) -> None:
    async def cancel() -> float:
        runner = make_runner(run_dir=tmp_path, params={"hangs_there": {"target": "cpu:1"}}, kill_grace_seconds=60.0)
        begun = asyncio.Event()
        plan = Plan(tier=Tier.QUICK, checks=("hangs_there",), executor="test", timeout_seconds=600)
        run = asyncio.create_task(
            runner.run(plan, on_progress=lambda event: begun.set() if event.event == "started" else None)
        )
        await asyncio.wait_for(begun.wait(), 30 * PATIENCE)
        start = time.monotonic()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return time.monotonic() - start

    assert asyncio.run(cancel()) < 10 * PATIENCE  # a worker that does not vanish is waited for 60 s
    assert workers_left() == []
    with lock_file(tmp_path, "cpu").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.listdir(tmp_path / "devices")


class CountingWorkers(Workers):
    """Says how devices become ranks, as an accelerator other than the CPU may, and counts who was started."""

    started: Counter[str]

    async def spawn(self, target: str | None) -> WorkerProcess:
        self.started[target or "node"] += 1
        return await super().spawn(target)


@pytest.mark.parametrize(("ranks", "starts"), [("kept", 1), ("fresh", 2)])
def test_ranks_stay_or_start_anew_for_each_group_as_the_accelerator_says(ranks: str, starts: int) -> None:
    workers = CountingWorkers(make_runner().settings, Unreaped(), {}, None)
    workers.started = Counter()
    plan = Plan(tier=Tier.QUICK, checks=("all_gather", "all_reduce"), executor="test")

    def say_ranks(_: object) -> None:
        workers.inventory["ranks"] = ranks

    execution = Execution(
        RunRequest(
            plan=plan,
            faults=(),
            previous={},
            on_result=None,
            on_evidence=lambda *_: None,
            on_survey=say_ranks,
        ),
        workers,
    )

    async def run() -> None:
        try:
            await execution.perform(builtin_checks())
        finally:
            await execution.clean_up()

    asyncio.run(run())
    assert [result.status for result in execution.results()] == [Status.PASS, Status.PASS]
    assert workers.started == {"node": 1, "cpu:0": starts, "cpu:1": starts}
    assert workers_left() == []


def test_a_cancellation_that_comes_as_a_worker_ends_is_not_forgotten() -> None:
    async def run() -> None:
        workers = Workers(make_runner().settings, Unreaped(), {}, None)
        process = await workers.spawn(None)
        try:
            waiting = asyncio.create_task(process.wait_gone(60.0))
            await asyncio.sleep(0)
            process.reaped.set()  # as its end does, in the same turn of the loop
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        finally:
            process.reaped.clear()
            await workers.kill_all()

    asyncio.run(run())
    assert workers_left() == []


def test_killed_worker_of_several_devices_that_does_not_vanish_is_stuck_on_each() -> None:
    class Undead:
        worker_pid = 4242

        def is_gone(self) -> bool:
            return False

        def close_pipes(self) -> None:
            pass

    workers = Workers(make_runner().settings, Unreaped(), {}, None)
    workers.add_unreaped("xla:0,xla:1", cast("WorkerProcess", Undead()))
    for target in ("xla:0", "xla:1", "xla:1,xla:2"):
        lost = workers.stuck(target)
        assert lost is not None
        assert lost.reason == "Stuck"
        assert "pid 4242" in lost.message
    assert workers.stuck("xla:2") is None


def burning(folder: Path, **changes: Any) -> tuple[Mapping[str, CheckResult], bool]:
    """The results with an active program and a passive one; whether the active one ran."""
    program = Program(command=("/bin/sh", "-c", f"touch {folder}/ran; echo OK"), tier=Tier.QUICK)
    quiet = Program(command=("/bin/sh", "-c", "echo OK"))
    results = run_quick("burn", "quiet", run_dir=folder, programs={"burn": program, "quiet": quiet}, **changes)
    return results, (folder / "ran").exists()


def test_active_program_runs_only_on_free_devices_and_a_passive_one_always(tmp_path: Path) -> None:
    # As above: a descendant of ours would not count.
    script = (
        "import sys; from pathlib import Path; from tests.runner.test_runner_devices import burning\n"
        "results, ran = burning(Path(sys.argv[1]), executed=True)\n"
        "print(ran, *(f'{result.check} {result.status.value}' for result in results.values()), sep=', ')\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path)]
    with _held_device(tmp_path):
        held = subprocess.run(argv, capture_output=True, text=True, timeout=90 * PATIENCE, check=True)
    free = subprocess.run(argv, capture_output=True, text=True, timeout=90 * PATIENCE, check=True)
    assert held.stdout == "False, burn skip, quiet pass\n"
    assert free.stdout == "True, burn pass, quiet pass\n"


def test_active_program_runs_only_under_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        results, ran = burning(tmp_path)
    assert not ran
    assert (results["burn"].status, results["burn"].findings[0].reason) == (Status.SKIP, "Busy")
    assert results["quiet"].status is Status.PASS


def test_passive_checks_alone_make_no_lock(tmp_path: Path) -> None:
    run_quick("fine", run_dir=tmp_path)
    assert not lock_file(tmp_path, "cpu").exists()


@contextlib.contextmanager
def _held_device(folder: Path) -> Iterator[None]:
    path = folder / "devices" / "cpu0"
    path.parent.mkdir()
    path.touch()
    script = "import sys; f = open(sys.argv[1]); print(1, flush=True); input()"
    argv = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        yield
        job.kill()


def test_node_that_is_leased_is_not_probed_though_nobody_holds_devices(tmp_path: Path) -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    write_leases_file(tmp_path, boot_id, ["job L\n2 (gate g)"])
    results = run_quick("present", "fine", run_dir=tmp_path)
    assert (results["present"].status, results["present"].findings[0].reason) == (Status.SKIP, "Busy")
    assert results["present"].findings[0].message == f"leased to job L 2 (gate g) ({tmp_path}/leased)"
    assert results["fine"].status is Status.PASS
    assert run_quick("present", run_dir=tmp_path, heed_leases=False)["present"].status is Status.PASS
    write_leases_file(tmp_path, "another boot", ["job L"])
    assert run_quick("present", run_dir=tmp_path)["present"].status is Status.PASS
    write_leases_file(tmp_path, None, ["job L"])  # what cannot be told apart counts
    assert run_quick("present", run_dir=tmp_path)["present"].status is Status.SKIP
    write_leases_file(tmp_path, boot_id, [])
    assert run_quick("present", run_dir=tmp_path)["present"].status is Status.PASS
