"""A gate that knows how long its job runs leaves out nodes that AWS will stop or reboot before the job would end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from checks.contract import Status, Tier
from checks.system.scheduled_events import MAINTENANCE, scheduled_events
from healthd.aggregator.engine.admission import check_request
from healthd.aggregator.fleet.node_record import CompactState, joined
from healthd.aggregator.fleet.records import FleetNode, ScheduledEvent
from healthd.aggregator.gate.records import WakeAt
from healthd.aggregator.policy import Policy
from healthd.core.errors import BadInputError
from healthd.core.model import CheckResult, GateRequest, Verdict
from tests.aggregator.gate_kit import admit, decided
from tests.aggregator.world import NOW, POLICY, gate, good_results, node, result, state, step, view
from tests.checks.identity_kit import make_ec2
from tests.checks.scheduled_events_kit import NOW as READ_AT
from tests.checks.scheduled_events_kit import REBOOT
from tests.hosts.machine import Machine

HOUR = 3600.0
REBOOTS = "EC2 will reboot the host of this instance"


def checked(machine: Machine, age: float = 30.0) -> CheckResult:
    """The result of the real check on this machine."""
    findings = tuple(machine.findings(scheduled_events))
    blank = result("scheduled_events", Tier.PASSIVE, age=age)
    return dataclasses.replace(blank, findings=findings, status=findings[0].status)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """An instance whose host will be rebooted in 61,243 s, which is about 17 hours."""
    found = Machine(tmp_path / "machine")
    make_ec2(found)
    found.write("/host.json", json.dumps({"time": READ_AT, "metadata": {MAINTENANCE: json.dumps([REBOOT])}}))
    return found


def reported(checks_result: CheckResult | None, name: str = "n1") -> FleetNode:
    """The node as the aggregator sees it ten seconds after it has reported this."""
    results = (*good_results(), *(() if checks_result is None else (checks_result,)))
    kept = CompactState(state(name, results), at=100.0)
    return node(name, kept.open(), event=kept.event(110.0))


def test_job_that_ends_before_the_event_is_admitted_with_a_warning_and_one_that_does_not_is_not(
    machine: Machine,
) -> None:
    seen = reported(checked(machine))
    assert seen.event is not None
    assert seen.event.seconds == 61243.0 - 30.0 - 10.0
    short, _ = step(NOW, gate(nodes=("n1",), runtime_seconds=12 * HOUR), view(seen), POLICY)
    assert admit(short, seen).decision is Verdict.ADMIT
    long, _ = step(NOW, gate(nodes=("n1",), runtime_seconds=24 * HOUR), view(seen), POLICY)
    decision = decided(long)
    assert decision.decision is Verdict.REJECT
    (excluded,) = decision.excluded
    assert [(why.code, why.status) for why in excluded.reasons] == [("ScheduledEvent", Status.WARN)]
    assert REBOOTS in excluded.reasons[0].message
    assert decision.policy["runtime_seconds"] == 24 * HOUR


def test_gate_that_was_not_told_how_long_its_job_runs_admits_with_a_warning(machine: Machine) -> None:
    seen = reported(checked(machine))
    after, _ = step(NOW, gate(nodes=("n1",)), view(seen), POLICY)
    assert admit(after, seen).decision is Verdict.ADMIT


def test_policy_says_how_long_jobs_run_where_the_request_does_not(machine: Machine) -> None:
    policy = dataclasses.replace(POLICY, runtime_seconds=24 * HOUR)
    seen = reported(checked(machine))
    after, _ = step(NOW, gate(policy, nodes=("n1",)), view(seen), policy)
    assert decided(after).decision is Verdict.REJECT
    after, _ = step(NOW, gate(policy, nodes=("n1",), runtime_seconds=0.0), view(seen), policy)
    assert admit(after, seen).decision is Verdict.ADMIT


def test_spare_of_the_pool_takes_the_place_of_a_node_with_an_event(machine: Machine) -> None:
    machine.say("metadata", **{MAINTENANCE: "[]"})
    good = reported(checked(machine), "n2")
    assert good.event is None
    machine.say("metadata", **{MAINTENANCE: json.dumps([REBOOT])})
    after, _ = step(
        NOW, gate(pool="a", count=1, runtime_seconds=24 * HOUR), view(reported(checked(machine)), good), POLICY
    )
    assert after.reserved == ("n2",)


def test_node_whose_events_are_not_known_is_left_out_where_they_are_asked_for(machine: Machine) -> None:
    machine.unsay("metadata")
    for seen in (reported(checked(machine)), reported(None)):
        assert seen.event is not None
        assert seen.event.seconds is None
        after, _ = step(NOW, gate(nodes=("n1",), runtime_seconds=HOUR), view(seen), POLICY)
        assert "must be known" in decided(after).excluded[0].reasons[0].message
        after, _ = step(NOW, gate(nodes=("n1",)), view(seen), POLICY)
        assert admit(after, seen).decision is Verdict.ADMIT


def test_machine_that_is_not_on_ec2_has_no_event(tmp_path: Path) -> None:
    seen = reported(checked(Machine(tmp_path / "elsewhere")))
    after, _ = step(NOW, gate(nodes=("n1",), runtime_seconds=24 * HOUR), view(seen), POLICY)
    assert admit(after, seen).decision is Verdict.ADMIT


def test_waiting_gate_looks_again_when_the_event_comes_into_the_time_of_its_job() -> None:
    event = ScheduledEvent(seconds=HOUR + 60.0, message=REBOOTS)
    asked = gate(nodes=("n1", "n2"), runtime_seconds=HOUR, wait_seconds=600.0)
    busy = node("n2", confirmed=False)
    after, effects = step(NOW, asked, view(node("n1", event=event, heard_seconds=0.0), busy), POLICY)
    assert after.decision is None
    assert min(one.at for one in effects if isinstance(one, WakeAt)) <= NOW + 60.0
    later = dataclasses.replace(event, seconds=HOUR - 1.0)
    after, _ = step(NOW + 61.0, after, view(node("n1", event=later), busy), POLICY)
    assert decided(after).excluded[0].reasons[0].code == "ScheduledEvent"


def test_granted_node_is_not_given_back_for_the_time_that_others_take() -> None:
    event = ScheduledEvent(seconds=HOUR + 5.0, message=REBOOTS)
    after, _ = step(NOW, gate(nodes=("n1",), runtime_seconds=HOUR), view(node("n1", event=event)), POLICY)
    assert "n1" in after.granted
    later = dataclasses.replace(event, seconds=HOUR - 5.0)
    after, _ = step(NOW + 10.0, after, view(node("n1", event=later)), POLICY)
    assert "n1" in after.granted


def test_daemon_speaks_for_the_events_of_a_node_whose_checks_a_hook_runs() -> None:
    event = ScheduledEvent(seconds=60.0, message=REBOOTS)
    unknown = ScheduledEvent(seconds=None, message="behind a hop limit")
    assert joined(node("n1", event=event), node("n1", event=unknown)).event == event


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e12])
def test_runtime_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(BadInputError, match="runtime_seconds"):
        check_request(GateRequest(job="train", nodes=("n1",), runtime_seconds=seconds))
    with pytest.raises(ValueError, match="runtime"):
        Policy(runtime_seconds=seconds)
