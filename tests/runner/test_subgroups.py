"""Which rank of a node is at fault when a collective of all of them fails and none shows itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Finding, Limit, Missing, Status, Tier
from checks.reasons import REASONS
from checks.worker.faults import parse_fault
from healthd.core.model import CheckResult
from healthd.localize.model import Outcome
from healthd.runner.collective.node_collective import NodeCollective, Subgroups, is_unresolved, outcome_of
from healthd.runner.settings import OnProgress, Plan, RunProgress
from healthd.runner.workers.outcome import Outcome as RankOutcome
from healthd.runner.workers.workers import Unreaped, Workers
from tests import prepared
from tests.patience import PATIENCE
from tests.runner.runner_kit import make_runner, workers_left

CHECKS = Path(__file__).parent / "subgroup_checks"
TINY = {"sizes_bytes": [1024], "iterations": 1, "warmup": 0}


def run(
    *names: str,
    devices: int = 4,
    tier: Tier = Tier.DEEP,
    localize: bool = False,
    faults: Sequence[str] = (),
    within: float | None = None,
    on_progress: OnProgress | None = None,
    **changes: Any,
) -> dict[str, CheckResult]:
    """Results by name; no worker may be left."""
    runner = make_runner(**{"directories": (CHECKS,), "options": {"cpu_devices": devices}, **changes})
    plan = Plan(tier=tier, checks=names, executor="test", localize=localize, timeout_seconds=within)
    results = asyncio.run(runner.run(plan, faults=[parse_fault(text) for text in faults], on_progress=on_progress))
    assert workers_left() == []
    return {result.check: result for result in results}


def uneasy(*ends: str, how: str = "fail", devices: int = 4, **more: Any) -> CheckResult:
    params = {"uneasy": {"ends": list(ends), "how": how, "pair_seconds": more.pop("pair_seconds", 0.0)}}
    return run("uneasy", devices=devices, params=params, **more)["uneasy"]


def bad(result: CheckResult) -> dict[str | None, Finding]:
    """Findings that are no pass, by reason."""
    return {finding.reason: finding for finding in result.findings if finding.status is not Status.PASS}


@pytest.fixture(scope="module")
def whole_seconds() -> float:
    """How long four ranks take here that fail and are not searched."""
    prepared.line(alone=False)  # what it takes to start is not theirs
    began = time.monotonic()
    uneasy("cpu:1", tier=Tier.QUICK)
    return time.monotonic() - began


# --- real ranks ---------------------------------------------------------------------------------------------------


def test_a_slow_rank_that_does_not_show_itself_is_named_with_its_device() -> None:
    result = run(
        "all_reduce",
        faults=["all_reduce@rank:1=slow:100"],
        params={"all_reduce": {**TINY, "sizes_bytes": [2**23]}},  # some 10 ms, so that no stall is many times as long
        limits={"all_reduce_duration_seconds": Limit(lower=None, upper=0.5, origin="config")},
        timeouts_seconds={"all_reduce": 300.0},
        search_seconds=400.0,
    )["all_reduce"]
    found = bad(result)
    assert found["SlowLink"].target == "node"
    assert (found["SlowRank"].status, found["SlowRank"].target) == (Status.FAIL, "rank:1")
    assert found["SlowRank"].message.startswith("rank:1 (cpu:1) is slow in all_reduce with rank:")
    assert "which pass without it" in found["SlowRank"].message
    assert result.injected
    assert set(found) == {"SlowLink", "SlowRank"}


def test_a_rank_that_holds_wrong_values_is_named_at_once_and_no_group_is_needed() -> None:
    result = run("all_reduce", faults=["all_reduce@rank:1=corrupt"], params={"all_reduce": TINY})["all_reduce"]
    (finding,) = bad(result).values()
    assert (finding.reason, finding.target) == ("CollectiveMismatch", "rank:1")
    assert "rank:1 (cpu:1)" in finding.message


# --- ranks of a check that fails for certain devices ----------------------------------------------------------------


def test_a_device_that_fails_with_everybody_is_named() -> None:
    finding = bad(uneasy("cpu:2"))["RankFault"]
    assert (finding.status, finding.target) == (Status.FAIL, "rank:2")
    assert finding.message.startswith("rank:2 (cpu:2) fails in uneasy with ")


def test_a_bad_link_between_two_devices_is_named_and_neither_rank_is_accused() -> None:
    result = uneasy("cpu:0", "cpu:1")
    found = bad(result)
    assert found["DeviceLinkFault"].target == "path:cpu:0-cpu:1"
    assert "both pass with others" in found["DeviceLinkFault"].message
    assert not any(finding.target.startswith("rank:") for finding in result.findings)


def test_of_two_ranks_alone_it_is_one_of_both_and_neither_is_accused() -> None:
    result = uneasy("cpu:1", devices=2)
    finding = bad(result)["RanksAmbiguous"]
    assert finding.target == "node"
    assert "one of rank:0 (cpu:0), rank:1 (cpu:1) is at fault" in finding.message
    assert not any(one.target.startswith("rank:") for one in result.findings)


def test_a_rank_with_which_a_group_hangs_is_named_though_all_stand_at_the_same_place() -> None:
    # Long enough that two healthy ranks answer within it on a busy machine.
    result = uneasy("cpu:2", how="hang", devices=3, timeouts_seconds={"uneasy": 5.0}, search_seconds=400.0)
    found = bad(result)
    assert found["Timeout"].status is Status.UNKNOWN
    assert (found["RankFault"].target, result.status) == ("rank:2", Status.FAIL)


def test_a_probe_that_failed_on_a_device_alone_counts_and_is_told() -> None:
    params = {"uneasy": {"ends": ["cpu:3"]}, "sick": {"ends": ["cpu:3"]}}
    finding = bad(run("sick", "uneasy", params=params)["uneasy"])["RankFault"]
    assert finding.target == "rank:3"
    assert "its device failed sick WrongResult: 2 and 2 are 5" in finding.message


def test_a_fault_that_needs_all_ranks_accuses_nobody() -> None:
    result = uneasy("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert not any(finding.target.startswith(("rank:", "path:")) for finding in result.findings)
    assert "passes with" in bad(result)["RanksAmbiguous"].message


def test_the_quick_tier_does_not_search_unless_it_is_asked_to() -> None:
    assert set(bad(uneasy("cpu:1", tier=Tier.QUICK))) == {"CollectiveMismatch"}
    assert "RankFault" in bad(uneasy("cpu:1", tier=Tier.QUICK, localize=True))


def test_a_collective_that_passes_is_not_searched() -> None:
    steps: list[RunProgress] = []
    result = uneasy("cpu:9", pair_seconds=300.0, on_progress=steps.append)
    assert (result.status, bad(result)) == (Status.PASS, {})
    started = [step.target for step in steps if (step.check, step.event) == ("uneasy", "started")]
    assert sorted(started) == [f"cpu:{index}" for index in range(4)], "each rank once"


@pytest.mark.parametrize("name", ["search_seconds", "within"])
def test_when_the_time_is_up_what_is_known_is_told(name: str, whole_seconds: float) -> None:
    seconds = 1.0 if name == "search_seconds" else 3 * whole_seconds + 1.0
    began = time.monotonic()
    result = uneasy("cpu:1", pair_seconds=300.0, timeouts_seconds={"uneasy": 300.0}, **{name: seconds})
    found = bad(result)
    assert time.monotonic() - began < 10 * whole_seconds + 15 * PATIENCE
    assert found["CollectiveMismatch"].status is Status.FAIL
    assert "RankFault" not in found
    assert {"RanksAmbiguous", "Undecided"} & set(found)


def test_a_run_that_is_called_off_in_the_search_has_told_what_the_whole_has_shown() -> None:
    heard: list[CheckResult] = []

    async def main() -> None:
        ended, searching = 0, asyncio.Event()

        def watch(progress: RunProgress) -> None:
            nonlocal ended
            if progress.check == "uneasy":
                ended += progress.event == "ended"
                if progress.event == "started" and ended >= 4:  # a rank of a pair, after all four of the whole
                    searching.set()

        params = {"uneasy": {"ends": ["cpu:1"], "pair_seconds": 300.0}}
        runner = make_runner(directories=(CHECKS,), options={"cpu_devices": 4}, params=params)
        plan = Plan(tier=Tier.DEEP, checks=("uneasy",), executor="test")
        task = asyncio.create_task(runner.run(plan, on_result=heard.append, on_progress=watch))
        await asyncio.wait_for(searching.wait(), 60 * PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert workers_left() == []
    assert [(result.check, result.status) for result in heard] == [("uneasy", Status.FAIL)]


def test_ranks_that_are_not_kept_say_that_nothing_was_searched() -> None:
    async def nobody(*_: object) -> RankOutcome:
        raise AssertionError("there is nothing to judge")

    def no_group(*_: object) -> NodeCollective:
        raise AssertionError("there is no group to make")

    workers = Workers(make_runner().settings, Unreaped(), {}, None)
    workers.inventory = {"accelerator": "neuron", "ranks": "fresh"}
    groups = Subgroups(workers, [], no_group, command=lambda *_: {}, judge=nobody)
    (finding,) = asyncio.run(groups.search((), (), deadline=0.0))
    assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")
    assert "neuron" in finding.message


# --- what findings come to ------------------------------------------------------------------------------------------


def one(status: Status, reason: str | None, target: str = "node") -> Finding:
    return Finding(status=status, reason=reason, message="m", target=target)


PASSED = one(Status.PASS, None)


@pytest.mark.parametrize(
    ("findings", "outcome"),
    [
        ([PASSED], Outcome.PASS),
        ([], Outcome.UNKNOWN),
        ([one(Status.SKIP, "NotApplicable")], Outcome.UNKNOWN),
        ([PASSED, one(Status.FAIL, "SlowLink")], Outcome.SLOW),
        ([one(Status.FAIL, "SlowLink"), one(Status.FAIL, "CollectiveMismatch")], Outcome.FAIL),
        ([one(Status.UNKNOWN, "Timeout")], Outcome.FAIL),
        ([one(Status.UNKNOWN, "CheckError", "rank:0")], Outcome.UNKNOWN),
        ([PASSED, one(Status.UNKNOWN, "NoData")], Outcome.UNKNOWN),
    ],
)
def test_not_measured_is_no_pass_and_no_failure(findings: list[Finding], outcome: Outcome) -> None:
    assert outcome_of(findings) is outcome


@pytest.mark.parametrize(
    ("findings", "searched"),
    [
        ([one(Status.FAIL, "SlowLink")], True),
        ([one(Status.UNKNOWN, "Timeout")], True),
        ([PASSED], False),
        ([], False),
        ([one(Status.FAIL, "RankDied", "rank:1")], False),
        ([one(Status.FAIL, "SlowLink"), one(Status.FAIL, "CollectiveMismatch", "rank:1")], False),
        ([one(Status.UNKNOWN, "NoData")], False),
    ],
)
def test_only_a_failure_without_a_name_is_searched(findings: list[Finding], searched: bool) -> None:
    judgement = RankOutcome(target="node")
    judgement.findings = findings
    assert is_unresolved(judgement) is searched


def test_a_judge_that_gave_nothing_starts_no_search() -> None:
    judgement = RankOutcome(target="node")
    judgement.findings = [one(Status.FAIL, "SlowLink")]
    judgement.missing = Missing(target="node", reason="Timeout", message="m")
    assert not is_unresolved(judgement)


def test_every_reason_that_a_search_gives_is_in_the_catalogue() -> None:
    assert {"RankFault", "SlowRank", "DeviceLinkFault", "RanksAmbiguous", "Undecided"} <= set(REASONS)
