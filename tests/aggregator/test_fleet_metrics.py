"""The aggregator's metrics: the names of the contract, bounded, and true."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checks.contract import Blame, Status, Tier
from checks.reasons import action_of
from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.gate.records import Decided, Gate, OrderedRun, Terms
from healthd.aggregator.metrics import FleetMetrics
from healthd.aggregator.validation import records as validations
from healthd.core.model import Decision, ExcludedNode, GateRequest, Health, Mode, Quarantine, Reason, Verdict
from healthd.localize.model import Outcome
from tests.aggregator.metrics_kit import Figures, metrics_of
from tests.aggregator.parts import Clock, Node, fleet, state

CONTRACT = {
    "healthd_fleet_nodes": "gauge",
    "healthd_fleet_nodes_heard": "gauge",
    "healthd_fleet_node_age_max_seconds": "gauge",
    "healthd_gate_decisions": "counter",
    "healthd_gate_duration_seconds": "histogram",
    "healthd_gate_device_seconds": "counter",
    "healthd_gates_holding": "gauge",
    "healthd_nodes_excluded": "counter",
    "healthd_validation_duration_seconds": "histogram",
    "healthd_quarantined_nodes": "gauge",
    "healthd_overrides_active": "gauge",
    "healthd_quarantine_breaker_open": "gauge",
    "healthd_rule_verdicts": "counter",
    "healthd_gate_observed_decisions": "counter",
    "healthd_gates_holding_oldest_seconds": "gauge",
    "healthd_quarantine_oldest_seconds": "gauge",
    "healthd_fleet_recovering": "gauge",
    "healthd_fleet_digests_differing_nodes": "gauge",
    "healthd_fleet_digests_nodes": "gauge",
    "healthd_fleet_step_jobs": "gauge",
    "healthd_fleet_slow_ranks_nodes": "gauge",
    "healthd_store_failures": "counter",
    "healthd_store_failing": "gauge",
    "healthd_internal_errors": "counter",
    "healthd_task_errors": "counter",
    "healthd_repair_seconds": "histogram",
    "healthd_repairs_open": "gauge",
    "healthd_job_outcomes": "counter",
    "healthd_gate_false_alarms": "counter",
    "healthd_gate_misses": "counter",
}


def reason(code: str) -> Reason:
    return Reason(code=code, message="m", status=Status.FAIL, blame=Blame.NODE, action=action_of(code), node="n1")


def decided(code: str, ordered: dict[str, OrderedRun] | None = None) -> Gate:
    decision = Decision(
        id="g",
        decision=Verdict.REJECT,
        reasons=(reason(code),),
        nodes=(),
        excluded=(ExcludedNode(node="n1", reasons=(reason(code),)),),
        policy={},
        retryable=True,
        decided_at=110.0,
        duration_seconds=0.3,
    )
    terms = Terms(
        tier=Tier.QUICK, max_age_seconds=1.0, wait_seconds=1.0, mode=Mode.ENFORCE, wanted=1, needed=1, collective=False
    )
    return Gate(
        id="g",
        request=GateRequest(job="j"),
        terms=terms,
        created_at=100.0,
        deadline=200.0,
        ordered=ordered or {},
        progress=Decided(decision=decision),
    )


def make(registry: Fleet | None = None) -> FleetMetrics:
    return metrics_of(registry or fleet(), Figures(gates=2, forced=1))


def samples(metrics: FleetMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render("")[0].decode()
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


def test_exactly_the_contract_is_there_from_the_start_without_created_series() -> None:
    text = make().render("")[0].decode()
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert families == CONTRACT
    assert "_created" not in text


def test_decisions_are_counted_with_reasons_of_the_catalogue_alone() -> None:
    metrics = make()
    for code in ("WrongResult", "HomemadeReason", "AnotherOne"):
        metrics.gate_decided(decided(code))
    found = samples(metrics)
    key = (("decision", "reject"), ("mode", "enforce"))
    assert found["healthd_gate_decisions_total", (*key, ("reason", "WrongResult"))] == 1
    assert found["healthd_gate_decisions_total", (*key, ("reason", "other"))] == 2
    assert found["healthd_nodes_excluded_total", (("reason", "WrongResult"),)] == 1
    assert found["healthd_gate_duration_seconds_count", ()] == 3
    assert found["healthd_gates_holding", ()] == 2


async def test_the_fleet_is_counted_by_health_age_and_owner_of_quarantine() -> None:
    """Rival fault 10: unknown is visible as itself."""
    clock = Clock()
    registry = fleet(clock)
    for name in ("a", "b"):
        await Node(registry, clock, name=name).join(state(name, status=Status.FAIL if name == "b" else Status.PASS))
    drilled = dataclasses.replace(state("d", status=Status.FAIL), faults=("matmul=fail",))
    await Node(registry, clock, name="d").join(drilled)
    registry.load("never", key_hash=None, pool=None)
    registry.set_quarantine("b", Quarantine(reason="x", owner="o", owner_kind="rule", since=0.0, until=None))
    clock.now += 12
    found = samples(make(registry))
    counts = {
        tuple(label for _, label in labels): value
        for (name, labels), value in found.items()
        if name == "healthd_fleet_nodes"
    }
    assert counts == {
        **{(health.value, injected): 0 for health in Health for injected in ("true", "false")},
        ("healthy", "false"): 1,
        ("unknown", "false"): 1,
        ("unhealthy", "false"): 1,
        ("unhealthy", "true"): 1,
    }
    assert found["healthd_fleet_nodes_heard", (("within_seconds", "10"),)] == 0
    assert found["healthd_fleet_nodes_heard", (("within_seconds", "15"),)] == 3
    assert found["healthd_fleet_node_age_max_seconds", ()] == 12
    assert found["healthd_quarantined_nodes", (("owner_kind", "rule"),)] == 1
    assert found["healthd_quarantined_nodes", (("owner_kind", "person"),)] == 0


def test_what_ordered_runs_cost_is_counted_in_device_seconds() -> None:
    async def run() -> None:
        clock = Clock()
        registry = fleet(clock)
        await Node(registry, clock).join(state(age=2.0))
        metrics = make(registry)
        run = OrderedRun(order_id="o", round=1, ordered_at=105.0, deadline_seconds=9.0)
        metrics.gate_decided(decided("WrongResult", {"n1": run, "gone": run}))
        # matmul ran within the 5 s since the order; memory_free is passive and costs no device.
        assert samples(metrics)["healthd_gate_device_seconds_total", ()] == pytest.approx(0.1)

    asyncio.run(run())


def validation(started_at: float, ended_at: float | None) -> validations.Validation:
    pair = validations.Tested(members=("n1", "n2"), outcome=Outcome.PASS, round=0, seconds=3.0)
    return validations.Validation(
        id="v",
        members=pair.members,
        ranks={"n1": 2, "n2": 2},
        whole={},
        seed=1,
        started_at=started_at,
        deadline=200.0,
        history=(pair,),
        ended_at=ended_at,
    )


def test_validations_of_a_gate_are_counted_with_their_length_and_what_they_cost() -> None:
    metrics = make()
    gate = decided("CollectiveFault")
    past, last = (validation(100.0, 104.0), validation(104.0, 104.5)), validation(105.0, 111.0)
    metrics.gate_decided(dataclasses.replace(gate, ended=(*past, last)))
    metrics.gate_decided(dataclasses.replace(gate, ended=(validation(100.0, None),)))
    metrics.gate_decided(gate)
    found = samples(metrics)
    assert found["healthd_validation_duration_seconds_count", ()] == 3, "one that never ended has no length"
    assert found["healthd_validation_duration_seconds_sum", ()] == pytest.approx(10.5)
    assert found["healthd_validation_duration_seconds_bucket", (("le", "5.0"),)] == 2
    # Each ran four ranks for three seconds; the one without an end has run, too.
    assert found["healthd_gate_device_seconds_total", ()] == pytest.approx(4 * 12.0)


def test_the_scraper_chooses_prometheus_text_or_openmetrics() -> None:
    body, content_type = make().render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert make().render("text/plain")[1].startswith("text/plain")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_is_content() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=make().render("")[0], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
