"""What checks remember outlives the daemon, and no boot."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from checks.contract import Evidence, Status, Tier
from healthd.core.model import CheckResult
from healthd.node.state.saving import SavedEvidence
from healthd.runner.runner import LastEvidence, Runner
from healthd.runner.settings import Plan
from tests.hosts.machine import Machine
from tests.runner.runner_kit import CHECKS, make_runner


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def look(runner: Runner) -> CheckResult:
    (result,) = asyncio.run(runner.run(Plan(tier=Tier.PASSIVE, checks=("kernel_log",), executor="test")))
    return result


def runner_of(machine: Machine) -> Runner:
    return make_runner(host_root=machine.root, directories=())


def test_restarted_daemon_remembers_the_damage_that_the_kernel_log_has_forgotten(
    machine: Machine, tmp_path: Path
) -> None:
    path, boot_id = tmp_path / "evidence.json", machine.host.boot_id()
    machine.write("/dev/kmsg", "[ 100.0] EDAC MC0: 1 UE memory read error\n")
    first = runner_of(machine)
    kept = SavedEvidence(path, first, boot_id)
    assert look(first).status is Status.FAIL
    kept.save()
    machine.write("/dev/kmsg", "[ 4999.0] chatter\n")
    second = runner_of(machine)
    assert look(second).status is Status.PASS, "without the file"
    third = runner_of(machine)
    SavedEvidence(path, third, boot_id)
    result = look(third)
    assert result.status is Status.FAIL
    assert "uncorrected ECC: 1 line" in result.findings[0].message
    machine.write("/proc/sys/kernel/random/boot_id", "another\n")
    fourth = runner_of(machine)
    SavedEvidence(path, fourth, "another")
    assert look(fourth).status is Status.PASS


@pytest.mark.parametrize(("member", "value"), [("version", "0.0.0"), ("boot_id", None), ("boot_id", "another")])
def test_file_of_another_version_or_boot_is_not_used(
    member: str, value: object, machine: Machine, tmp_path: Path
) -> None:
    path = tmp_path / "evidence.json"
    machine.write("/dev/kmsg", "[ 100.0] EDAC MC0: 1 UE memory read error\n")
    runner = runner_of(machine)
    look(runner)
    SavedEvidence(path, runner, machine.host.boot_id()).save()
    saved = json.loads(path.read_text())
    assert [one["check"] for one in saved["remembered"]] == ["kernel_log"]
    path.write_text(json.dumps({**saved, member: value}))
    again = runner_of(machine)
    SavedEvidence(path, again, machine.host.boot_id())
    asyncio.run(again.catalogue())
    assert again.last_evidence() == ()


def test_checks_of_other_people_are_not_kept_and_stamps_ahead_of_the_clock_are_none_of_this_boot() -> None:
    runner = make_runner(directories=(CHECKS,))
    asyncio.run(runner.catalogue())
    evidence = (Evidence(target="node", key="k", data={}),)
    runner.restore_evidence(
        [
            LastEvidence(check="silent", evidence=evidence, measured_at=0.0, boot_id="b"),
            LastEvidence(check="processes", evidence=evidence, measured_at=1e12, boot_id="b"),
            LastEvidence(check="kernel_log", evidence=evidence, measured_at=0.0, boot_id="b"),
        ]
    )
    assert [one.check for one in runner.last_evidence()] == ["kernel_log"]


def test_full_disk_is_one_line_and_the_daemon_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    kept = SavedEvidence(Path("/dev/full/evidence.json"), make_runner(), "b")
    caplog.clear()
    for _ in range(3):
        kept.save()
    assert len(caplog.messages) == 1
    assert "a restart loses its counts" in caplog.messages[0]
