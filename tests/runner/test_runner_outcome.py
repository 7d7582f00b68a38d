"""What is made of the outcomes of workers and judge: pure."""

from __future__ import annotations

import dataclasses
import time
from typing import cast

import pytest

from checks.accelerators.cpu import DEVICE_COUNT_MAX
from checks.contract import CheckInfo, Evidence, Finding, Scope, Status, Tier
from healthd.core.model import CheckResult
from healthd.runner.device_claim import busy_by
from healthd.runner.run_record import RunRecord, RunRequest, compose
from healthd.runner.settings import Plan, RunnerSettings
from healthd.runner.workers.outcome import Outcome, explain_raised
from healthd.runner.workers.workers import Unreaped, WorkerProcess, Workers

INFO = CheckInfo(
    name="digest",
    tier=Tier.QUICK,
    scope=Scope.DEVICE,
    interval_seconds=60,
    timeout_seconds=5,
    judged=True,
    doc="",
    accelerators=False,
    accelerator_faults=(),
    collective=False,
    series=(),
    origin="built-in",
)
PLAN = Plan(tier=Tier.QUICK, checks=("digest",), executor="check")


def measured(target: str) -> Outcome:
    passed = Finding(status=Status.PASS, reason=None, message="its repeats agree", target=target)
    return Outcome(target=target, findings=[passed], evidence=[Evidence(target=target, key="k", data={})])


def test_a_judge_that_says_nothing_is_no_pass_although_every_worker_passed() -> None:
    outcomes = [measured("cpu:0"), measured("cpu:1")]
    result = compose(INFO, PLAN, outcomes, judgement=Outcome(target="node"), injected=False)
    assert result.status is Status.UNKNOWN
    assert result.findings[-1].reason == "NoData"


def test_a_judge_that_speaks_lets_it_pass() -> None:
    outcomes = [measured("cpu:0"), measured("cpu:1")]
    said = [Finding(status=Status.PASS, reason=None, message="the same on both", target="node")]
    judgement = Outcome(target="node", findings=said)
    assert compose(INFO, PLAN, outcomes, judgement=judgement, injected=False).status is Status.PASS


def test_a_collective_on_a_single_device_leaves_its_judge_nothing_to_say() -> None:
    info = dataclasses.replace(INFO, name="all_reduce", scope=Scope.GROUP)
    skipped = Finding(status=Status.SKIP, reason="NotApplicable", message="it needs at least 2 ranks", target="node")
    alone = Outcome(target="rank:0", findings=[skipped])
    result = compose(info, PLAN, [alone], judgement=Outcome(target="node"), injected=False)
    assert result.findings == (skipped,)


def test_a_rank_without_a_word_is_unknown_although_there_is_nothing_to_judge() -> None:
    info = dataclasses.replace(INFO, name="all_reduce", scope=Scope.GROUP)
    result = compose(info, PLAN, [Outcome(target="rank:0")], judgement=Outcome(target="node"), injected=False)
    assert result.status is Status.UNKNOWN


def test_one_process_may_give_the_evidence_of_all_ranks_of_a_node() -> None:
    outcome, nobody = Outcome(target="node"), cast("WorkerProcess", None)
    for rank in range(DEVICE_COUNT_MAX):
        evidence = {"target": f"rank:{rank}", "key": "k", "data": {}}
        assert not outcome.add_event({"kind": "evidence", "id": 1, "evidence": evidence}, 1, nobody, lambda *_: None)
    assert len(outcome.evidence) == DEVICE_COUNT_MAX


def test_a_look_at_the_devices_that_failed_is_told_as_it_failed_and_not_as_a_lack_of_rights() -> None:
    surveyed = Outcome(target="node").fail("Timeout", "did not end within 10 s")
    assert busy_by(surveyed) == "the holders of the devices are unknown: did not end within 10 s"


def test_devices_that_could_not_be_looked_at_are_unknown_beside_those_that_pass() -> None:
    info = dataclasses.replace(INFO, judged=False)
    taken = Outcome(target="cpu:1").fail("Busy", "another process has the core")
    result = compose(info, PLAN, [measured("cpu:0"), taken], judgement=None, injected=False)
    found = {one.target: (one.status, one.reason) for one in result.findings}
    assert found == {"cpu:0": (Status.PASS, None), "cpu:1": (Status.UNKNOWN, "Busy")}
    assert result.status is Status.UNKNOWN
    both = [Outcome(target=f"cpu:{n}").fail("Busy", "another process has the core") for n in range(2)]
    assert compose(info, PLAN, both, judgement=None, injected=False).status is Status.SKIP


def test_a_result_is_as_old_as_the_oldest_of_its_parts() -> None:
    info, now = dataclasses.replace(INFO, judged=False), time.monotonic()
    early, late = measured("cpu:0"), measured("cpu:1")
    early.started_at, early.began, early.ended = time.time() - 400, now - 400, now - 300
    late.started_at, late.began, late.ended = time.time() - 100, now - 100, now
    result = compose(info, PLAN, [late, early], judgement=None, injected=False)
    assert 300 <= result.age_seconds < 300 + time.monotonic() - now + 1


def test_a_result_that_was_kept_back_is_older_when_it_is_published() -> None:
    info, published = dataclasses.replace(INFO, judged=False), list[CheckResult]()
    record = RunRecord(
        RunRequest(
            plan=PLAN,
            faults=(),
            previous={},
            on_result=published.append,
            on_evidence=lambda *_: None,
            on_survey=lambda _: None,
        ),
        RunnerSettings(),
    )
    outcome = measured("cpu:0")
    outcome.started_at = time.time()
    result = record.compose(info, [outcome])
    record.defer(result)
    record.publish_deferred()
    assert published[0].age_seconds > result.age_seconds


def test_digests_carry_hardware_and_versions_of_their_run() -> None:
    outcome = measured("gpu:0")
    data = {"dtype": "fp32", "stable": True, "digests": {"block0.qkv": "a" * 16}}
    outcome = dataclasses.replace(outcome, evidence=[Evidence(target="gpu:0", key="cuda", data=data)])
    libraries: dict[str, str] = {}
    workers = Workers(RunnerSettings(), Unreaped(), libraries, None)

    def keys() -> list[str]:
        composed = compose(
            INFO, PLAN, [outcome], judgement=Outcome(target="node"), injected=False, machine=workers.machine
        )
        return [one.key for one in composed.digests]

    def survey(versions: dict[str, str]) -> None:
        devices = {"accelerator": "cuda", "devices": [{"target": "gpu:0", "kind": "H100"}]}
        workers.note_survey(
            {"inventory": devices, "holders": [], "instance_type": "p5", "versions": versions, "boot_id": "b"}
        )

    assert keys() == []
    libraries["torch"] = "2.9"
    survey({"python": "3.12"})
    assert keys() == []  # the driver is not known
    survey({"nvidia_driver": "570.1"})
    (old,) = keys()
    assert old.startswith("p5 x1, cuda, torch 2.9, nvidia_driver 570.1 | cuda | places ")
    survey({"nvidia_driver": "580.2"})
    assert keys() != [old]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 32.00 MiB"),
        ("MemoryError", ""),
        ("OSError", "[Errno 12] Cannot allocate memory"),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        ("AcceleratorError", "CUDA error: out of memory"),
    ],
)
def test_error_for_want_of_memory_says_so(kind: str, message: str) -> None:
    assert explain_raised(kind, message, None, "")[:2] == ("CannotAllocate", f"{kind}: {message}")


@pytest.mark.parametrize(
    ("kind", "message", "reason"),
    [
        ("DistBackendError", "NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'", "CheckError"),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered; out of memory", "DeviceLost"),
        ("KeyError", "'seconds'", "CheckError"),
    ],
)
def test_error_of_a_communicator_or_a_device_is_no_want_of_memory(kind: str, message: str, reason: str) -> None:
    assert explain_raised(kind, message, None, "")[0] == reason
