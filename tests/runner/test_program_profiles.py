"""Profiles of compiled programs: whose program it is, how a finding gets its profile, and a run that is cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Finding, Missing, Profile, Status, Tier
from checks.profiling.neuron import PROGRAMS, programs_in, programs_of, remember
from healthd.core.model import CheckResult
from healthd.runner.device_checks import ProgramProfiles
from healthd.runner.run_record import RunRecord, RunRequest
from healthd.runner.runner import Runner
from healthd.runner.settings import Plan, RunProgress
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.workers import Unreaped, Workers
from tests.fakes.hollow_torch import make_python
from tests.fakes.neuron import NeuronMachine
from tests.runner.runner_kit import make_runner, run_checks, workers_left

SAID = "in one more run, most time was spent in dot 75 %, add 20 %, SEMAPHORE 5 %"


@pytest.fixture
def trn1(tmp_path: Path) -> NeuronMachine:
    return NeuronMachine(tmp_path / "machine", "trn1.32xlarge")


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "model.neff"
    path.write_bytes(b"a program")
    return str(path)


def spoil(machine: NeuronMachine, kind: str) -> None:
    machine.state["faults"].append({"kind": kind, "target": "neuron-profile", "value": None})
    machine.save()


# --- whose program ----------------------------------------------------------------------------------------------------


def test_programs_of_a_check_are_those_that_it_made_the_largest_first(tmp_path: Path) -> None:
    for name, size in (("MODULE_1", 10), ("MODULE_2", 300), ("MODULE_3", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.neff").write_bytes(b"x" * size)
    assert programs_in(tmp_path) == {f"MODULE_{number}/model.neff" for number in (1, 2, 3)}
    remember(tmp_path, "matmul/quick/1", ["MODULE_1/model.neff"])
    remember(tmp_path, "train_step/quick/1", ["MODULE_3/model.neff", "MODULE_2/model.neff", "MODULE_9/model.neff"])
    found = programs_of(tmp_path, "train_step/quick/1")
    assert found == [tmp_path / "MODULE_2/model.neff", tmp_path / "MODULE_3/model.neff"]
    assert programs_of(tmp_path, "matmul/quick/1") == [tmp_path / "MODULE_1/model.neff"]
    assert programs_of(tmp_path, "memory/quick/1") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": ["../../etc/passwd", "/etc/passwd"]}'])
def test_a_list_of_programs_that_cannot_be_believed_names_none(tmp_path: Path, text: str) -> None:
    (tmp_path / PROGRAMS).write_text(text)
    assert programs_of(tmp_path, "a") == []


# --- the finding ------------------------------------------------------------------------------------------------------


def outcome(program: str | None, status: Status = Status.FAIL, **more: Any) -> Outcome:
    reason = None if status is Status.PASS else "SlowDevice"
    slow = Finding(status=status, reason=reason, message="slow", target="neuroncore:5")
    right = Finding(status=Status.PASS, reason=None, message="right", target="neuroncore:5")
    return Outcome(target="neuroncore:5", findings=[right, slow], program=program, **more)


def profiles(machine: NeuronMachine, *, accelerator: str = "neuron", limit: float | None = None) -> ProgramProfiles:
    settings = dataclasses.replace(make_runner(host_root=machine.root, directories=()).settings, accelerator="neuron")
    workers = Workers(settings, Unreaped(), {}, None)
    workers.inventory = {"accelerator": accelerator, "devices": []}
    plan = Plan(tier=Tier.QUICK, checks=("train_step",), executor="test", timeout_seconds=limit)
    request = RunRequest(
        plan=plan, faults=(), previous={}, on_result=None, on_evidence=lambda *_: None, on_survey=lambda _: None
    )
    return ProgramProfiles(workers, RunRecord(request, settings))


def test_what_is_slow_names_the_profile_that_was_captured_and_says_its_operations(
    trn1: NeuronMachine, program: str
) -> None:
    done = outcome(program)
    asyncio.run(profiles(trn1).add("train_step", done))
    right, slow = done.findings
    (kept,) = done.profiles
    assert isinstance(kept, Profile)
    assert (right.message, right.profile) == ("right", None)
    assert (slow.message, slow.profile) == (f"slow; {SAID}", kept.id)
    assert workers_left() == []


def test_without_a_profile_the_findings_stay_as_they_are(trn1: NeuronMachine) -> None:
    done = outcome("/no/such.neff")
    before = list(done.findings)
    asyncio.run(profiles(trn1).add("train_step", done))
    assert (done.findings, done.profiles) == (before, [])


def test_only_a_slow_check_that_ended_on_such_a_device_is_profiled(trn1: NeuronMachine, program: str) -> None:
    hung = Missing(target="neuroncore:5", reason="Timeout", message="did not end")
    assert profiles(trn1).wants(outcome(program))
    assert not profiles(trn1).wants(outcome(None))
    assert not profiles(trn1).wants(outcome(program, Status.PASS))
    assert not profiles(trn1).wants(outcome(program, missing=hung))
    assert not profiles(trn1, accelerator="xla").wants(outcome(program))
    assert not profiles(trn1, limit=30.0).wants(outcome(program))


# --- a whole run ------------------------------------------------------------------------------------------------------

NATIVE_TORCH = """
import types
__version__ = "2.14"
def device(*words): return "neuron:0"
"""
NATIVE = """
__version__ = "2.14.3.0"
def device_count(): return 1
def synchronize(): pass
def memory_reserved(): return 0
def get_fallback_ops(): return []
def clear_op_tracking(): pass
"""
SLOW = '''
"""Two checks: one compiles a program and is slow, one is slow and has compiled nothing."""
import os
from collections.abc import Iterator
from pathlib import Path
from checks.contract import Context, Finding, NoParams, Status, check

def slow(ctx):
    return Finding(status=Status.FAIL, reason="SlowDevice", message="slow", target=ctx.device.target)

@check(tier="quick", interval_seconds=60, timeout_seconds=60, scope="device")
def compiled(ctx: Context[NoParams]) -> Iterator[Finding]:
    """Compiles, as the binding of a core would, into the folder of the compile cache."""
    folder = Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"]) / "MODULE_1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.neff").write_bytes(b"a program")
    yield slow(ctx)

@check(tier="quick", interval_seconds=60, timeout_seconds=60, scope="device")
def bare(ctx: Context[NoParams]) -> Iterator[Finding]:
    """Compiles nothing."""
    yield slow(ctx)
'''


def slow_runner(machine: NeuronMachine, tmp_path: Path, **changes: Any) -> Runner:
    """A runner on a machine whose cores are slow at both checks."""
    python = make_python(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "torch.py").write_text(NATIVE_TORCH)
    (packages / "torch_neuronx.py").write_text(NATIVE)
    checks = tmp_path / "checks"
    checks.mkdir()
    (checks / "slow.py").write_text(SLOW)
    return make_runner(
        accelerator="auto",
        host_root=machine.root,
        directories=(checks,),
        probe_python=python,
        compile_cache=tmp_path / "cache",
        on_cold_cache="compile",
        **changes,
    )


@pytest.mark.thorough
def test_slow_cores_of_a_machine_are_profiled_after_their_workers_and_others_stay_as_they_are(tmp_path: Path) -> None:
    runner = slow_runner(NeuronMachine(tmp_path / "machine", "trn1.2xlarge"), tmp_path)
    kept: dict[str, Profile] = {}

    def keep(profile: Profile) -> bool:
        kept[profile.id] = profile
        return True

    runner.on_profile = keep
    results = run_checks("compiled", "bare", runner=runner, tier=Tier.QUICK)
    found = {one.target: one for one in results["compiled"].findings}
    assert sorted(found) == ["neuroncore:0", "neuroncore:1"]
    for target, one in found.items():
        assert one.message == f"slow; {SAID}"
        assert kept[str(one.profile)].target == target
    assert {(one.message, one.profile) for one in results["bare"].findings} == {("slow", None)}
    # Once more, compiled: the program is known from before.
    again = run_checks("compiled", runner=runner, tier=Tier.QUICK)
    assert all(one.profile in kept for one in again["compiled"].findings)


def test_a_run_that_is_cancelled_while_a_program_is_captured_has_measured_every_core_and_says_what_is_slow(
    tmp_path: Path,
) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    spoil(machine, "hang")
    runner = slow_runner(machine, tmp_path, max_workers_at_once=1)
    measured: set[str] = set()
    results: list[CheckResult] = []

    async def run() -> None:
        both = asyncio.Event()

        def on_progress(progress: RunProgress) -> None:
            if progress.event == "ended":
                measured.add(progress.target)
            if len(measured) == 2:
                both.set()

        plan = Plan(tier=Tier.QUICK, checks=("compiled",), executor="test")
        running = asyncio.create_task(runner.run(plan, on_result=results.append, on_progress=on_progress))
        await asyncio.wait_for(both.wait(), 60.0)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(run())
    (result,) = results
    assert {(one.target, one.reason) for one in result.findings} == {
        ("neuroncore:0", "SlowDevice"),
        ("neuroncore:1", "SlowDevice"),
    }
    assert workers_left() == []


def test_the_captures_of_a_run_have_one_bound_of_time_together(
    trn1: NeuronMachine, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("healthd.runner.device_checks.RUN_SECONDS", 130.0)
    first, second = outcome(program), outcome(program)

    async def both() -> None:
        programs = profiles(trn1)
        await programs.add("train_step", first)
        await programs.add("train_step", second)

    asyncio.run(both())
    assert (len(first.profiles), len(second.profiles)) == (1, 0)
