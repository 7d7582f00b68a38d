"""The runner on node checks that do what a check must not do: whatever happens, a result comes, bounded and true."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from checks.contract import CheckInfo, Previous, Program, Status, Tier
from healthd.core.errors import ConfigError
from healthd.core.model import CheckResult
from healthd.runner.run_record import compose
from healthd.runner.settings import Plan, RunnerSettings
from healthd.runner.workers.launch import environment
from healthd.runner.workers.node_lane import in_order_of_end
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.workers import WorkerProcess
from tests.aggregator.service import until
from tests.patience import PATIENCE
from tests.runner.runner_kit import CHECKS, make_runner, run_checks, tracer, wait_gone, workers_left


def only(result: CheckResult) -> tuple[Status, str | None]:
    """Status and reason of the last finding, which is what the runner adds."""
    return result.findings[-1].status, result.findings[-1].reason


def test_plain_check_passes_with_times_and_executor() -> None:
    result = run_checks("fine")["fine"]
    assert result.status is Status.PASS
    assert result.executor == "test"
    assert abs(result.started_at - time.time()) < 60
    assert 0 < result.duration_seconds < 5 * PATIENCE
    assert (result.attempts, result.error, result.injected) == (1, None, False)
    assert 0 <= result.age_seconds < 5 * PATIENCE


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("raises", "CheckError", "KeyError: 'no such thing'"),
        ("wants_memory", "CannotAllocate", "MemoryError"),
        ("denied", "NoPermission", "/dev/kmsg: permission denied; run as root"),
        ("leaves", "CheckError", "SystemExit: 0"),
        ("vanishes", "Crashed", "exited with code 0 in the middle"),
        ("aborts", "Crashed", "killed by SIGABRT: Fatal Python error: Aborted"),
        ("segfaults", "Crashed", "killed by SIGSEGV: Fatal Python error: Segmentation fault"),
        ("killed", "Crashed", "killed by SIGKILL"),
        ("long_line", "Garbage", "a line of more than 65536 bytes"),
        ("forges", "Garbage", "an answer to command 999"),
        ("closes_results", "Garbage", "closed its results but kept running"),
        ("yields_text", "CheckError", "TypeError: yielded str; a check yields Finding, Evidence, Progress or Profile"),
        ("judged_badly", "CheckError", "ZeroDivisionError: no evidence to divide by"),
    ],
)
def test_whatever_a_check_does_is_unknown_with_its_last_words_and_the_rest_runs(
    name: str, reason: str, words: str
) -> None:
    results = run_checks("fine", name, "fine_too", retries=0)
    assert only(results[name]) == (Status.UNKNOWN, reason)
    assert words in results[name].findings[-1].message
    assert results[name].error
    assert results["fine"].status is results["fine_too"].status is Status.PASS


def test_findings_before_the_error_stand() -> None:
    findings = run_checks("raises", retries=0)["raises"].findings
    assert [finding.message.partition(" (")[0] for finding in findings] == ["before", "KeyError: 'no such thing'"]


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ('raise ValueError("the shelf is empty")', 5, "ValueError: the shelf is empty ("),
        ("next(iter(()))", 5, "StopIteration: ("),
        ("help_with(ctx)", 8, "ZeroDivisionError: division by zero ("),
    ],
)
def test_own_check_that_raises_says_what_and_in_which_line_of_its_file(
    body: str, line: int, words: str, tmp_path: Path
) -> None:
    """Also one whose function has no annotations."""
    file = tmp_path / "own.py"
    file.write_text(
        "from checks.contract import check\n"
        'def own(ctx):\n    "The shelf is full."\n    yield from ()\n'
        f"    {body}\n"
        "def help_with(ctx):\n    # divides\n    1 / 0\n"
        'own = check(tier="passive", interval_seconds=60, timeout_seconds=5)(own)\n'
    )
    (finding,) = run_checks("own", retries=0, directories=(tmp_path,))["own"].findings
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "CheckError")
    assert words in finding.message
    assert finding.message.endswith(f" ({file}:{line})")


@pytest.mark.parametrize("name", ["hangs", "ignores_sigterm", "stops_itself"])
def test_hung_check_is_answered_in_time_by_name_and_the_rest_runs(name: str) -> None:
    """Also a rival's fault 16: the whole is bounded."""
    answered: dict[str, float] = {}
    began = time.monotonic()
    results = run_checks(
        name, "fine", on_result=lambda result: answered.setdefault(result.check, time.monotonic() - began)
    )
    assert answered[name] < 20.0 * PATIENCE  # the check sleeps for ten minutes
    assert only(results[name]) == (Status.UNKNOWN, "Timeout")
    assert results[name].findings[-1].message == "did not end within 0.5 s"
    assert results[name].findings[-1].target == "node"
    assert results["fine"].status is Status.PASS


def test_operators_timeout_beats_the_checks_own() -> None:
    result = run_checks("hangs", timeouts_seconds={"hangs": 0.1})["hangs"]
    assert result.findings[-1].message == "did not end within 0.1 s"


def test_what_a_check_prints_gets_among_the_results_in_no_way() -> None:
    result = run_checks("babbles")["babbles"]
    assert [finding.message for finding in result.findings] == ["said what it had to say"]


def test_check_cannot_read_the_commands_of_others() -> None:
    results = run_checks("reads_input", "fine")
    assert results["reads_input"].findings[0].message == "read 0 characters"
    assert results["fine"].status is Status.PASS


def test_ten_megabytes_in_one_line_are_not_kept_in_memory() -> None:
    script = (
        "import resource, tests.runner.runner_kit as kit\n"
        "kit.run_checks('fine', executed=True); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert kit.run_checks('long_line', executed=True)['long_line'].findings[-1].reason == 'Garbage'\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=CHECKS.parents[2],
        timeout=90 * PATIENCE,
    )
    assert int(done.stdout) < 4096  # KiB


def test_nobody_waits_for_a_pipe_that_a_grandchild_holds(tmp_path: Path) -> None:
    start = time.monotonic()
    folder = {"folder": str(tmp_path)}
    results = run_checks("leaves_grandchild", "fine", params={"leaves_grandchild": folder}, retries=0)
    assert only(results["leaves_grandchild"]) == (Status.UNKNOWN, "Crashed")
    assert results["leaves_grandchild"].findings[0].message == "before"
    assert results["fine"].status is Status.PASS
    assert time.monotonic() - start < 15 * PATIENCE  # the grandchild lives for two minutes
    assert wait_gone(int((tmp_path / "grandchild").read_text()))


def test_hung_checks_own_children_go_with_it() -> None:
    run_checks("leaves_family")
    deadline = time.monotonic() + 2 * PATIENCE
    while _orphans() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _orphans() == []


def _orphans() -> list[str]:
    found = subprocess.run(["ps", "-eo", "ppid,stat,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in found.splitlines()]
    marker = str(os.getpid())  # the last argument of our own workers
    return [
        line[2] for line in lines if line[2].endswith(f" {marker}") and "worker.py" in line[2] and "Z" not in line[1]
    ]


@pytest.mark.parametrize("name", ["not_a_number", "infinite", "no_number"])
def test_pass_without_a_real_number_is_unknown(name: str) -> None:
    """A rival's fault 2: the probe ends well and gives no number."""
    result = run_checks(name)[name]
    assert result.status is Status.UNKNOWN
    assert result.findings[0].measurements[0].value is None
    assert "speed_flops_per_second" in result.findings[0].message


def test_silent_check_is_unknown_never_a_pass() -> None:
    assert only(run_checks("silent")["silent"]) == (Status.UNKNOWN, "NoData")


def test_flood_of_findings_is_bounded_and_the_worst_is_kept() -> None:
    result = run_checks("floods")["floods"]
    assert len(result.findings) <= 256
    assert result.status is Status.FAIL
    assert result.error
    assert "1744 findings beyond 256 were dropped" in result.error


def test_killed_probe_that_gets_through_the_second_time_is_no_pass(tmp_path: Path) -> None:
    """A rival's fault 3: killed (137), then passed."""
    result = run_checks("killed_once", params={"killed_once": {"folder": str(tmp_path)}}, retries=1)["killed_once"]
    assert result.status is Status.WARN
    assert result.attempts == 2
    assert result.findings[-1].reason == "Crashed"
    assert result.findings[-1].message == "attempt 1: killed by SIGKILL; attempt 2 succeeded"


def test_wrong_result_is_never_tried_again(tmp_path: Path) -> None:
    """A rival's fault 4, in one run: what was wrong is wrong."""
    result = run_checks("fails_once", params={"fails_once": {"folder": str(tmp_path)}}, retries=3)["fails_once"]
    assert (result.status, result.attempts) == (Status.FAIL, 1)


def test_probe_killed_in_every_attempt_is_unknown_with_the_attempts() -> None:
    result = run_checks("killed", retries=2)["killed"]
    assert (result.status, result.attempts) == (Status.UNKNOWN, 3)


def test_corpse_that_cannot_be_reaped_is_stuck_until_it_is_gone(tmp_path: Path) -> None:
    runner = make_runner(params={"traced": {"folder": str(tmp_path)}}, kill_grace_seconds=0.2)
    with tracer(tmp_path):
        first = _run_with_corpse(runner)
        stuck = runner.stuck()
        again = _run_with_corpse(runner)
    until(lambda: runner.stuck() == ())
    assert only(first["traced"]) == (Status.UNKNOWN, "Timeout")
    assert first["fine"].status is Status.PASS
    assert stuck == ("node/traced",)
    assert only(again["traced"]) == (Status.FAIL, "Stuck")
    assert "a killed probe (pid " in again["traced"].findings[0].message
    assert again["fine"].status is Status.PASS


def test_a_look_that_cannot_be_killed_is_not_begun_again_until_it_is_gone() -> None:
    """Else a device that hangs in the kernel would collect one more process with every round of a daemon."""

    class Undead:
        worker_pid = 4242
        gone = False

        def is_gone(self) -> bool:
            return self.gone

        def close_pipes(self) -> None:
            pass

    runner, undead = make_runner(), Undead()
    runner._unreaped.add("node/survey", cast("WorkerProcess", undead))
    survey = asyncio.run(runner.survey())
    assert "a killed probe (pid 4242) does not exit" in survey.failed
    assert survey.holders is None
    results = run_checks("fine", "matmul", runner=runner, tier=Tier.QUICK)
    assert only(results["fine"]) == (Status.PASS, None)
    assert only(results["matmul"]) == (Status.UNKNOWN, "Stuck")
    undead.gone = True
    assert asyncio.run(runner.survey()).failed == ""


def _run_with_corpse(runner: object) -> dict[str, CheckResult]:
    from checks.contract import Tier
    from healthd.runner.runner import Runner

    assert isinstance(runner, Runner)
    plan = Plan(tier=Tier.PASSIVE, checks=("traced", "fine"), executor="test")
    return {result.check: result for result in asyncio.run(runner.run(plan))}


def test_judge_that_hangs_is_unknown_and_keeps_what_it_said() -> None:
    result = run_checks("judged_for_ever", judge_timeout_seconds=0.5)["judged_for_ever"]
    assert [finding.message for finding in result.findings] == [
        "before",
        "comparing what was measured: did not end within 0.5 s",
    ]
    assert result.status is Status.UNKNOWN


def test_cancelled_run_kills_its_workers_at_once() -> None:
    async def cancel() -> float:
        runner = make_runner(timeouts_seconds={"hangs": 600.0}, kill_grace_seconds=60.0)
        from checks.contract import Tier

        plan = Plan(tier=Tier.PASSIVE, checks=("hangs",), executor="test")
        begun = asyncio.Event()
        run = asyncio.create_task(runner.run(plan, on_progress=lambda event: begun.set()))
        await begun.wait()
        start = time.monotonic()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return time.monotonic() - start

    assert asyncio.run(cancel()) < 10 * PATIENCE  # a worker that does not vanish is waited for 60 s
    assert workers_left() == []


def test_whole_run_past_its_time_is_unknown_with_what_was_done_before() -> None:
    runner = make_runner(timeouts_seconds={"hangs": 60.0})
    asyncio.run(runner.catalogue())  # a child of its own, which takes its time too
    results = run_checks("fine", "hangs", "fine_too", runner=runner, timeout_seconds=1.0 * PATIENCE)
    assert results["fine"].status is Status.PASS
    assert [only(results[name]) for name in ("hangs", "fine_too")] == [(Status.UNKNOWN, "Timeout")] * 2


def test_worker_dies_with_its_runner() -> None:
    script = (
        "import tests.runner.runner_kit as kit, os\n"
        "kit.run_checks('hangs', executed=True, timeouts_seconds={'hangs': 60.0},\n"
        "    on_progress=lambda event: print(kit.workers_left()[0].split()[0], flush=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=CHECKS.parents[2])
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_gone(worker)


def test_unknown_name_in_a_plan_is_unknown_not_skipped() -> None:
    """A rival's fault 7, at run time."""
    results = run_checks("no_such_check", "fine")
    assert only(results["no_such_check"]) == (Status.UNKNOWN, "CheckError")
    assert results["fine"].status is Status.PASS


def test_listener_that_fails_undoes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(result: CheckResult) -> None:
        raise RuntimeError(result.check)

    assert run_checks("fine", on_result=fail)["fine"].status is Status.PASS
    assert "a listener failed on the result of fine" in caplog.text


def test_interpreter_that_is_not_there_is_unknown_for_every_check() -> None:
    runner = make_runner(probe_python=Path("/nowhere/python"), directories=(), retries=1)
    runner._catalogue = {"fine": _info("fine")}
    result = run_checks("fine", runner=runner)["fine"]
    assert only(result) == (Status.UNKNOWN, "StartFailed")
    assert result.findings[0].message == (
        "cannot start /nowhere/python: No such file or directory; name another interpreter with python under [probe] "
        "or HEALTHD_PROBE_PYTHON (attempt 2)"
    )


def test_interpreter_that_is_no_python_is_unknown() -> None:
    runner = make_runner(probe_python=Path("/bin/false"), directories=(), retries=0)
    runner._catalogue = {"fine": _info("fine")}
    assert only(run_checks("fine", runner=runner)["fine"]) == (Status.UNKNOWN, "StartFailed")


def test_interpreter_that_never_gets_ready_is_unknown_in_time(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    runner = make_runner(probe_python=slow, directories=(), start_timeout_seconds=0.2)
    runner._catalogue = {"fine": _info("fine")}
    result = run_checks("fine", runner=runner)["fine"]
    assert (only(result), result.findings[0].message) == ((Status.UNKNOWN, "StartFailed"), "not ready within 0.2 s")


def _info(name: str, scope: str = "node") -> CheckInfo:
    from checks.contract import Scope, Tier

    return CheckInfo(
        name=name,
        tier=Tier.PASSIVE,
        scope=Scope(scope),
        interval_seconds=60,
        timeout_seconds=1,
        judged=False,
        doc="",
        accelerators=False,
        accelerator_faults=(),
        collective=False,
        series=(),
        origin="",
    )


def foreign_interpreters() -> Iterator[Path]:
    for version in ("3.10", "3.12", "3.13"):
        yield from sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))[:1]
        yield from [path for path in [Path(f"/usr/bin/python{version}")] if path.exists()]


def test_checks_run_under_another_interpreter() -> None:
    found = list(foreign_interpreters())[:2]
    if not found:
        pytest.skip("no Python 3.10, 3.12 or 3.13 beside this one (looked in ~/.pyenv/versions and /usr/bin)")
    for python in found:
        result = run_checks("surroundings", probe_python=python)["surroundings"]
        assert result.status is Status.PASS, result.findings
        assert result.findings[3].message in python.resolve().as_posix()


def test_hostile_python_path_does_not_shadow_the_checks(tmp_path: Path) -> None:
    (tmp_path / "checks").mkdir()
    for name in ("checks/__init__.py", "sitecustomize.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')\n")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "json.py")}
    result = run_checks("surroundings", env=env, executed=True)
    assert result["surroundings"].status is Status.PASS
    assert result["surroundings"].findings[0].message == str(CHECKS.parents[2] / "checks" / "__init__.py")


def test_environment_of_workers_is_clean_and_finds_the_interpreters_tools() -> None:
    own = {"PATH": "/usr/bin", "PYTHONPATH": "/x", "LD_PRELOAD": "/y.so", "RANK": "3", "HOME": "/root"}
    numeric = dict.fromkeys(
        ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG", "ATEN_CPU_CAPABILITY"), "avx2"
    )
    kept = {"LD_LIBRARY_PATH": "/opt/lib", "HOME": "/root"}
    chosen = {"NEURON_RT_LOG_LEVEL": "ERROR", "MKL_THREADING_LAYER": "GNU"}
    env = environment("/venv/bin/python", chosen, {**own, **numeric, **kept})
    assert env == {"PATH": "/venv/bin:/usr/bin", **kept, **chosen}


def test_previous_evidence_comes_back_to_a_counting_check() -> None:
    runner = make_runner()
    assert run_checks("counts", runner=runner)["counts"].findings[0].message == "count 1, again after False"
    assert run_checks("counts", runner=runner)["counts"].findings[0].message == "count 2, again after True"


def test_the_time_since_previous_evidence_goes_on_while_a_check_waits_for_its_turn() -> None:
    """A rate over a time that is too short would be a fault that is not there."""
    before = Previous(evidence=(), elapsed_seconds=10.0, boot_id=None)
    plan = Plan(tier=Tier.PASSIVE, checks=("hangs", "tells_elapsed"), executor="test")
    results = asyncio.run(make_runner().run(plan, previous={"tells_elapsed": before}))
    assert results[0].findings[-1].reason == "Timeout", "it took half a second"
    assert float(results[1].findings[0].message) >= 10.5


def test_evidence_is_as_old_as_the_beginning_of_its_check() -> None:
    runner, ages = make_runner(), list[tuple[float, float]]()

    def on_result(result: CheckResult) -> None:
        (last,) = runner._evidence.values()
        ages.append((time.clock_gettime(time.CLOCK_BOOTTIME) - last.measured_at, result.duration_seconds))

    run_checks("tells_elapsed", runner=runner, on_result=on_result)
    ((age, duration),) = ages
    assert age >= duration > 0.0


def test_survey_tells_inventory_identity_and_holders(tmp_path: Path) -> None:
    runner = make_runner(options={"cpu_devices": 3}, run_dir=tmp_path)
    survey = asyncio.run(runner.survey())
    assert [device.target for device in survey.inventory.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert survey.holders == ()
    assert survey.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert survey.versions["python"] == sys.version.split()[0]
    assert runner.latest == survey


def test_survey_is_stamped_when_it_looks_and_the_last_one_is_that_which_looked_last() -> None:
    runner = make_runner()
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    survey = asyncio.run(runner.survey())
    assert before <= survey.looked_at <= time.clock_gettime(time.CLOCK_BOOTTIME)
    answer = {**survey.raw, "holders": ["cpu:0: pid 7 (python)"], "looked_at": before}
    late = runner._note_survey(Outcome(target="node", answers=[answer]), ())
    assert (late.holders, late.looked_at) == (("cpu:0: pid 7 (python)",), before)
    assert runner.latest is survey


def test_survey_that_fails_says_that_nothing_is_known() -> None:
    survey = asyncio.run(make_runner(probe_python=Path("/bin/false"), retries=0).survey())
    assert (survey.inventory.device_count, survey.holders) == (None, None)
    assert "StartFailed" not in survey.raw["error"]
    assert "exited with code 1" in survey.raw["error"]


def test_catalogue_tells_every_check_and_where_it_is_from() -> None:
    catalogue = asyncio.run(make_runner().catalogue())
    assert catalogue["hangs"].origin == str(CHECKS / "misbehaving.py")
    assert catalogue["hangs"].timeout_seconds == 0.5
    assert catalogue["counts"].doc == "Compares with what it saw the last time."
    assert (catalogue["meets"].scope.value, catalogue["meets"].judged) == ("group", True)
    assert catalogue["matmul"].origin == "built-in"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", ":1: "),
        ("x = 1\n", "has no check"),
        ("import no_such_module\n", "ModuleNotFoundError"),
        ("from checks.contract import *\n@check(tier='passive', interval_seconds=1, timeout_seconds=1)\n"
         "def matmul(ctx): yield\n", "two checks have the name matmul"),
        ("from checks.contract import *\n@check(tier='passive', interval_seconds=1, timeout_seconds=1, "
         "accelerators=1)\n"
         "def own(ctx): yield\n", "check own of"),
    ],
)  # fmt: skip
def test_check_file_that_cannot_be_loaded_is_an_error_with_its_name(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError) as error:
        asyncio.run(make_runner(directories=(tmp_path,)).catalogue())
    assert str(tmp_path / "own.py") in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_third_party_name_that_matches_nothing_is_an_error() -> None:
    """A rival's fault 7."""
    with pytest.raises(ConfigError, match="no_such_entry"):
        asyncio.run(make_runner(third_party=("no_such_entry",)).catalogue())


def test_program_is_a_check() -> None:
    program = Program(command=("/bin/sh", "-c", "echo all quiet"))
    result = run_checks("my_program", programs={"my_program": program})["my_program"]
    assert result.status is Status.PASS
    assert "all quiet" in result.findings[0].message


def test_default_settings_need_nothing() -> None:
    assert RunnerSettings().retries == 1


# --- pure composition -------------------------------------------------------------------------------------------------


def test_group_whose_judge_accuses_nobody_does_not_pass_without_a_rank() -> None:
    from checks.contract import Finding, Tier

    there, gone = Outcome(target="rank:0"), Outcome(target="rank:1").fail_with_worker("Timeout", "too late")
    judgement = Outcome(target="node")
    judgement.findings.append(Finding(status=Status.PASS, reason=None, message="fine", target="node"))
    plan = Plan(tier=Tier.QUICK, checks=("g",), executor="test")
    result = compose(_info("g", "group"), plan, [there, gone], judgement=judgement, injected=False)
    assert result.status is Status.UNKNOWN
    assert [(finding.target, finding.reason) for finding in result.findings] == [
        ("rank:0", "NoData"),
        ("node", None),
        ("rank:1", "Timeout"),
    ]


def test_rank_that_died_comes_before_those_that_raised_because_of_it() -> None:
    dead = Outcome(target="rank:1").fail_with_worker("Crashed", "killed")
    victim = Outcome(target="rank:0").fail("CheckError", "connection closed by peer")
    late = Outcome(target="rank:2").fail_with_worker("Timeout", "was still waiting")
    dead.ended, victim.ended = 10.02, 10.0  # a death is heard of later than what it does to others
    order = {item.target: item.order for item in in_order_of_end([victim, dead, late])}
    assert order == {"rank:1": 0, "rank:0": 1, "rank:2": None}
    dead.ended = 11.0
    order = {item.target: item.order for item in in_order_of_end([victim, dead, late])}
    assert order == {"rank:0": 0, "rank:1": 1, "rank:2": None}
