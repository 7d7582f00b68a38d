"""The rules of evidence as tables: what stands for health, and that not knowing never does."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from checks.contract import Blame, Status, Tier
from healthd.core import wire
from healthd.core.evidence import aged, expired, judge_health, judge_tier
from healthd.core.model import Allocation, CheckResult, CheckSpec, Health, NodeState
from tests.every import every
from tests.node.node_kit import finding, result, specs, state

JOB = (Allocation(by="process", holder="pid 7 (python)"),)
DISK, MATMUL = (spec for spec in specs() if spec.name in ("disk", "matmul"))
BURN = next(spec for spec in specs() if spec.name == "burn")
PASSED = result("disk")
QUICK = result("matmul", tier=Tier.QUICK)
NOT_APPLICABLE = finding(Status.SKIP, "NotApplicable")
BUSY = finding(Status.SKIP, "Busy")


def with_results(*results: CheckResult, **changes: Any) -> NodeState:
    return state(results=results, **changes)


def of(check: str, *findings: Any, **more: Any) -> CheckResult:
    tier = Tier.PASSIVE if check == "disk" else Tier.QUICK
    return result(check, *findings, tier=more.pop("tier", tier), **more)


def none_at_all(check: str) -> CheckResult:
    return dataclasses.replace(of(check), findings=(), status=Status.UNKNOWN)


@every(
    ("now", "health", "codes"),
    [
        # the plain cases
        (with_results(PASSED, QUICK), Health.HEALTHY, []),
        (with_results(PASSED, of("matmul", finding(Status.WARN))), Health.DEGRADED, ["LowMemory"]),
        (with_results(PASSED, of("matmul", finding(Status.FAIL))), Health.UNHEALTHY, ["WrongResult"]),
        (with_results(PASSED, of("matmul", finding(Status.UNKNOWN))), Health.UNKNOWN, ["Timeout"]),
        # only the node's own fault marks the node
        (with_results(PASSED, of("matmul", finding(Status.FAIL, blame=Blame.PATH))), Health.UNKNOWN, ["WrongResult"]),
        (with_results(PASSED, of("matmul", finding(Status.FAIL, "Garbage"))), Health.UNKNOWN, ["Garbage"]),
        # worst first
        (
            with_results(of("disk", finding(Status.WARN)), of("matmul", finding(Status.UNKNOWN), finding(Status.FAIL))),
            Health.UNHEALTHY,
            ["WrongResult", "Timeout", "LowMemory"],
        ),
        # rival faults 1 and 11: nothing, not all, or nothing that measured
        (with_results(), Health.UNKNOWN, ["NotYetRun", "NotYetRun"]),
        (with_results(PASSED), Health.UNKNOWN, ["NotYetRun"]),
        (with_results(checks=()), Health.UNKNOWN, ["NoChecks"]),
        (with_results(of("disk", NOT_APPLICABLE), of("matmul", NOT_APPLICABLE)), Health.UNKNOWN, ["NoChecks"]),
        # rival fault 2: a check that yielded nothing
        (with_results(PASSED, none_at_all("matmul")), Health.UNKNOWN, ["NoData"]),
        (
            with_results(PASSED, dataclasses.replace(none_at_all("matmul"), status=Status.PASS)),
            Health.UNKNOWN,
            ["NoData"],
        ),
        # a skip takes a check out of the set only when it is its nature
        (with_results(PASSED, of("matmul", NOT_APPLICABLE)), Health.HEALTHY, []),
        (with_results(PASSED, of("matmul", BUSY)), Health.UNKNOWN, ["Busy"]),
        # rival fault 15: age
        (with_results(of("disk", age=95.0), QUICK), Health.HEALTHY, []),
        (with_results(of("disk", age=95.1), QUICK), Health.UNKNOWN, ["Stale"]),
        (with_results(of("disk", age=math.nan), QUICK), Health.UNKNOWN, ["Stale"]),
        (with_results(of("disk", finding(Status.FAIL), age=96.0), QUICK), Health.UNHEALTHY, ["WrongResult", "Stale"]),
        # a result whose word is worse than its findings
        (with_results(PASSED, dataclasses.replace(QUICK, status=Status.FAIL)), Health.UNKNOWN, ["NoData"]),
        (
            with_results(PASSED, dataclasses.replace(of("matmul", finding(Status.WARN)), status=Status.UNKNOWN)),
            Health.UNKNOWN,
            ["NoData", "LowMemory"],
        ),
        # heavier tiers count once they have run, and are not missed
        (with_results(PASSED, QUICK, checks=(DISK, MATMUL, BURN)), Health.HEALTHY, []),
        (
            with_results(PASSED, QUICK, result("burn", finding(Status.FAIL)), checks=(DISK, MATMUL, BURN)),
            Health.UNHEALTHY,
            ["WrongResult"],
        ),
        # while a job has the devices
        (with_results(PASSED, of("matmul", age=9e9), allocated=JOB), Health.HEALTHY, []),
        (with_results(PASSED, allocated=JOB), Health.HEALTHY, []),
        (with_results(PASSED, of("matmul", BUSY), allocated=JOB), Health.HEALTHY, []),
        (with_results(PASSED, of("matmul", finding(Status.FAIL)), allocated=JOB), Health.UNHEALTHY, ["WrongResult"]),
        (with_results(of("disk", age=96.0), QUICK, allocated=JOB), Health.UNKNOWN, ["Stale"]),
        (with_results(QUICK, allocated=JOB), Health.UNKNOWN, ["NotYetRun"]),
        (with_results(allocated=JOB, checks=(MATMUL,)), Health.UNKNOWN, ["NoChecks"]),
    ],
)
def test_health(now: NodeState, health: Health, codes: list[str]) -> None:
    found, reasons = judge_health(now)
    assert (found, [reason.code for reason in reasons]) == (health, codes)
    assert all(reason.node == "n1" and reason.message for reason in reasons)


@every(
    ("now", "tier", "max_age", "health", "codes", "age"),
    [
        (with_results(of("disk", age=3.0), of("matmul", age=9.0)), Tier.QUICK, 600, Health.HEALTHY, [], 9.0),
        (with_results(of("disk", age=3.0), of("matmul", age=601.0)), Tier.QUICK, 600, Health.UNKNOWN, ["Stale"], 3.0),
        (with_results(of("disk", age=601.0), QUICK), Tier.QUICK, 600, Health.UNKNOWN, ["Stale"], 0.0),
        (with_results(PASSED, of("matmul", age=math.nan)), Tier.QUICK, 600, Health.UNKNOWN, ["Stale"], 0.0),
        (with_results(PASSED, QUICK), Tier.QUICK, math.nan, Health.UNKNOWN, ["Stale", "Stale"], None),
        (with_results(PASSED), Tier.QUICK, 600, Health.UNKNOWN, ["NotYetRun"], 0.0),
        (with_results(PASSED), Tier.PASSIVE, 600, Health.HEALTHY, [], 0.0),
        (with_results(), Tier.QUICK, 600, Health.UNKNOWN, ["NotYetRun", "NotYetRun"], None),
        (with_results(checks=()), Tier.QUICK, 600, Health.UNKNOWN, ["NoChecks"], None),
        # a lighter run is no evidence of a heavier tier, a heavier one is of a lighter
        (with_results(PASSED, QUICK), Tier.DEEP, 600, Health.UNKNOWN, ["NotYetRun"], 0.0),
        (with_results(PASSED, of("matmul", tier=Tier.DEEP)), Tier.QUICK, 600, Health.HEALTHY, [], 0.0),
        # nobody is excused: a job that has the devices suspends nothing here
        (with_results(PASSED, of("matmul", age=700.0), allocated=JOB), Tier.QUICK, 600, Health.UNKNOWN, ["Stale"], 0.0),
        (with_results(PASSED, of("matmul", BUSY), allocated=JOB), Tier.QUICK, 600, Health.UNKNOWN, ["Busy"], 0.0),
        # passive evidence alone is none of a tier that uses the devices
        (with_results(PASSED, checks=(DISK,)), Tier.QUICK, 600, Health.UNKNOWN, ["NoChecks"], 0.0),
        (with_results(PASSED, of("matmul", NOT_APPLICABLE)), Tier.QUICK, 600, Health.UNKNOWN, ["NoChecks"], 0.0),
        # and a warning in it makes it no more
        (
            with_results(of("disk", finding(Status.WARN)), of("matmul", NOT_APPLICABLE)),
            Tier.QUICK,
            600,
            Health.UNKNOWN,
            ["NoChecks", "LowMemory"],
            0.0,
        ),
        (
            with_results(of("disk", finding(Status.WARN)), checks=(DISK,)),
            Tier.QUICK,
            600,
            Health.UNKNOWN,
            ["NoChecks", "LowMemory"],
            0.0,
        ),
        (
            with_results(PASSED, of("matmul", finding(Status.FAIL))),
            Tier.QUICK,
            600,
            Health.UNHEALTHY,
            ["WrongResult"],
            0.0,
        ),
        (
            with_results(PASSED, of("matmul", finding(Status.WARN))),
            Tier.QUICK,
            600,
            Health.DEGRADED,
            ["LowMemory"],
            0.0,
        ),
    ],
)
def test_strict_answer(
    now: NodeState, tier: Tier, max_age: float, health: Health, codes: list[str], age: float | None
) -> None:
    found, reasons, oldest = judge_tier(now, tier, max_age)
    assert (found, [reason.code for reason in reasons], oldest) == (health, codes, age)


def test_required_check_that_is_not_enabled_is_missed() -> None:
    health, reasons, _ = judge_tier(with_results(PASSED, QUICK), Tier.QUICK, 600, require=("digest",))
    assert (health, reasons[0].code) == (Health.UNKNOWN, "NotYetRun")
    assert "digest" in reasons[0].message
    assert judge_tier(with_results(PASSED, QUICK), Tier.QUICK, 600, require=("matmul",))[0] is Health.HEALTHY


def test_injected_faults_are_marked_in_the_reasons() -> None:
    _, reasons = judge_health(with_results(PASSED, of("matmul", finding(Status.FAIL), injected=True)))
    assert reasons[0].injected
    assert reasons[0].message.endswith("(injected)")


def test_state_grows_older_as_a_whole() -> None:
    later = aged(with_results(of("disk", age=5.0), QUICK), 100.0)
    assert [one.age_seconds for one in later.results] == [105.0, 100.0]
    assert judge_health(later)[0] is Health.UNKNOWN


@pytest.mark.parametrize(("bound", "age", "gone"), [(None, 9e9, False), (10.0, 10.0, False), (10.0, 10.1, True)])
def test_expiry(bound: float | None, age: float, gone: bool) -> None:
    spec: CheckSpec = dataclasses.replace(DISK, expires_seconds=bound)
    assert expired(spec, of("disk", age=age)) is gone


def test_rival_fault_9_the_same_input_has_the_same_verdict_byte_for_byte() -> None:
    now = with_results(of("disk", finding(Status.WARN)), of("matmul", finding(Status.FAIL), finding(Status.UNKNOWN)))
    turned = dataclasses.replace(now, results=tuple(reversed(now.results)), checks=tuple(reversed(now.checks)))
    assert wire.encode(judge_health(now)) == wire.encode(judge_health(turned))
