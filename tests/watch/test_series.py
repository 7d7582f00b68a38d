"""The series that alerts and dashboards want beside those of the contract: what they count, and their bounds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checks.contract import Blame, Finding, Measurement, Status, Tier
from checks.reasons import action_of
from healthd.aggregator.gate.records import Decided, Gate, Terms
from healthd.aggregator.store.store import Store
from healthd.core.errors import StoreError
from healthd.core.http.server import exposition
from healthd.core.model import Decision, GateRequest, Mode, Quarantine, Reason, Verdict
from healthd.node.http.metrics import MAX_READINGS, registry_of
from healthd.node.state.store import NodeStore
from tests.aggregator.metrics_kit import Figures, metrics_of
from tests.aggregator.parts import Clock, fleet
from tests.node.node_kit import BOOT, CATALOGUE, MovedClock, measured, result, settings, specs, survey

Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: bytes) -> Found:
    found = (sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


def node(book: NodeStore) -> Found:
    return parsed(exposition(registry_of(book, {}), "text/plain")[0])


@pytest.fixture
def book(tmp_path: Path) -> NodeStore:
    made = NodeStore(settings(tmp_path), specs(tmp_path), clock=MovedClock().clock, boot_id=BOOT)
    made.set_survey(survey())
    return made


def bounded(name: str, value: float, target: str, lower: float | None, upper: float | None) -> Finding:
    one = Measurement(name=name, value=value, lower=lower, upper=upper, origin="config", labels={})
    return Finding(status=Status.PASS, reason=None, message="m", target=target, measurements=(one,))


def test_reading_is_the_worst_of_its_targets_by_the_side_of_its_limit(book: NodeStore) -> None:
    room = (bounded("disk_available_bytes", free, path, 1.0, None) for path, free in (("/", 9.0), ("/tmp", 5.0)))
    busy = (bounded("disk_errors_count", seen, path, None, 10.0) for path, seen in (("/", 2.0), ("/tmp", 3.0)))
    book.record(result("disk", *room, *busy))
    found = node(book)
    assert found["healthd_reading", (("check", "disk"), ("measurement", "disk_available_bytes"))] == 5.0
    assert found["healthd_reading", (("check", "disk"), ("measurement", "disk_errors_count"))] == 3.0


def test_active_checks_have_no_readings(book: NodeStore) -> None:
    assert CATALOGUE["matmul"].tier is Tier.QUICK
    book.record(result("matmul", measured("matmul_flops_per_second", 1e9, "cpu:0"), tier=Tier.QUICK))
    assert not [key for key in node(book) if key[0] == "healthd_reading"]


def test_readings_are_bounded(book: NodeStore) -> None:
    book.record(result("disk", *(measured(f"disk_{number}_bytes", 1.0) for number in range(3 * MAX_READINGS))))
    assert sum(1 for key in node(book) if key[0] == "healthd_reading") == MAX_READINGS


def test_node_says_whether_it_is_in_quarantine(book: NodeStore) -> None:
    assert node(book)["healthd_node_quarantined", ()] == 0.0


def watched(would: Verdict | None, *codes: str) -> Gate:
    reasons = tuple(
        Reason(code=code, message="m", status=Status.FAIL, blame=Blame.NODE, action=action_of(code), node="n1")
        for code in codes
    )
    decision = Decision(
        id="g",
        decision=Verdict.ADMIT,
        reasons=reasons,
        nodes=(),
        excluded=(),
        policy={},
        retryable=False,
        decided_at=110.0,
        duration_seconds=0.3,
        would=would,
    )
    terms = Terms(
        tier=Tier.QUICK, max_age_seconds=1.0, wait_seconds=1.0, mode=Mode.OBSERVE, wanted=1, needed=1, collective=False
    )
    return Gate(
        id="g",
        request=GateRequest(job="j"),
        terms=terms,
        created_at=100.0,
        deadline=200.0,
        ordered={},
        progress=Decided(decision=decision),
    )


def test_what_observe_mode_or_a_person_let_pass_is_counted_by_the_reason_that_would_have_stopped_it() -> None:
    metrics = metrics_of(fleet())
    metrics.gate_decided(watched(Verdict.REJECT, "Observed", "SlowDevice"))
    metrics.gate_decided(watched(Verdict.REJECT, "Override", "SlowDevice"))
    metrics.gate_decided(watched(Verdict.REJECT, "Observed", "Homemade"))
    metrics.gate_decided(watched(Verdict.ADMIT, "Observed"))
    metrics.gate_decided(watched(None, "SlowDevice"))
    found = {
        key[1]: value
        for key, value in parsed(metrics.render("")[0]).items()
        if key[0] == "healthd_gate_observed_decisions_total"
    }
    assert found == {
        (("reason", "SlowDevice"), ("would", "reject")): 2,
        (("reason", "other"), ("would", "reject")): 1,
        (("reason", "none"), ("would", "admit")): 1,
    }


def test_the_longest_waits_and_what_ails_the_aggregator_are_told() -> None:
    registry = fleet(Clock())
    registry.load("n1", key_hash=None, pool=None)
    kept = Quarantine(reason="x", owner="o", owner_kind="person", since=time.time() - 5000, until=None)
    registry.set_quarantine("n1", kept)
    metrics = metrics_of(registry, Figures(gates=2, waited=(3.0, 40.0), recovery="lost", failures=7, failing=True))
    found = parsed(metrics.render("")[0])
    assert found["healthd_gates_holding_oldest_seconds", ()] == 40.0
    assert found["healthd_quarantine_oldest_seconds", (("owner_kind", "person"),)] == pytest.approx(5000, abs=5)
    assert found["healthd_quarantine_oldest_seconds", (("owner_kind", "rule"),)] == 0
    assert found["healthd_fleet_recovering", ()] == 1
    assert found["healthd_store_failures_total", ()] == 7
    assert found["healthd_store_failing", ()] == 1


def test_store_counts_what_it_could_not_write_and_says_when_it_can_again(tmp_path: Path) -> None:
    file = tmp_path / "healthd.db"
    store = Store.open(f"sqlite:///{file}")

    async def run() -> None:
        await store.run(lambda _: None)
        assert (store.failures, store.failing) == (0, False)
        aside = file.rename(tmp_path / "aside")
        for _ in range(2):
            with pytest.raises(StoreError):
                await store.run(lambda _: None)
        assert (store.failures, store.failing) == (2, True)
        aside.rename(file)
        await store.run(lambda _: None)
        assert (store.failures, store.failing) == (2, False)

    try:
        asyncio.run(run())
    finally:
        store.close()
