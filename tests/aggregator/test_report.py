"""The figures on the gate itself: what jobs' ends say of it, with small numbers said to be small."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection

from checks.contract import Status
from checks.reasons import action_of, blame_of
from healthd.aggregator.engine.admission import new_gate
from healthd.aggregator.gate.records import Decided, Gate, OrderedRun, Override, Waiting
from healthd.aggregator.jobs.calibration import (
    ExitRule,
    counts_of,
    exit_of,
    facts_of,
    needed,
    quantile,
    report_of,
    share,
    way_of,
    wilson,
    word_of,
)
from healthd.aggregator.jobs.outcome_records import Counts, DecisionRow, Ended, EndRow, GateEnding
from healthd.aggregator.store.reading import prune, read_facts, read_facts_since
from healthd.aggregator.store.rows import Change, Kind, PutGate, PutOutcome, PutRecord
from healthd.aggregator.store.store import Store
from healthd.core.model import AdmittedNode, Decision, ExcludedNode, GateRequest, Inventory, Mode, Reason, Verdict
from tests.aggregator.engine_kit import running
from tests.aggregator.metrics_kit import metrics_of
from tests.aggregator.parts import fleet
from tests.aggregator.world import NOW, POLICY, World, state, with_wrong
from tests.every import every
from tests.patience import PATIENCE

# --- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (1, 100, 0.0018, 0.0545)],
)
def test_the_interval_is_wilsons(count: int, of: int, low: float, high: float) -> None:
    assert wilson(count, of) == pytest.approx((low, high), abs=1e-4)


@given(of=st.integers(1, 10**6), data=st.data())
def test_an_interval_holds_its_share_and_stays_between_nought_and_one(of: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, of))
    low, high = wilson(count, of)
    assert 0.0 <= low <= count / of <= high <= 1.0


def test_there_is_no_share_of_nothing() -> None:
    assert share(0, 0) is None
    assert wilson(0, 0) == (0.0, 1.0)


def test_quantiles_are_values_that_were_seen() -> None:
    assert [quantile([1.0, 2.0, 3.0, 40.0], q) for q in (0.0, 0.5, 0.95, 1.0)] == [1.0, 2.0, 40.0, 40.0]
    with pytest.raises(ValueError, match="empty list"):
        quantile([], 0.5)


# --- the figures ----------------------------------------------------------------------------------------------------


def end(status: str, count: int, way: GateEnding = GateEnding.OBSERVED, **changes: Any) -> EndRow:
    row = EndRow(status=status, way=way, would=Verdict.ADMIT, alarmed=False, clean=True, count=count)
    return dataclasses.replace(row, **changes)


STOPPED = {"would": Verdict.REJECT, "clean": False}
ALARM = {**STOPPED, "alarmed": True}
EMPTY = Counts(since=None, ends=(), decisions=(), failed=(), excluded=(), out={}, waits={})


def counts(*ends: EndRow, **changes: Any) -> Counts:
    decisions = [DecisionRow(way=e.way, would=e.would, count=e.count, device_seconds=2.0 * e.count) for e in ends]
    return dataclasses.replace(EMPTY, **{"since": NOW, "ends": ends, "decisions": decisions, **changes})


def test_of_nothing_no_share_is_given_and_observe_goes_on() -> None:
    report = report_of(EMPTY, days=28)
    given = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    assert {name for name, value in given.items() if value is None} == {
        *("since", "success", "success_without_infra", "false_alarms", "false_alarms_observed"),
        *("false_alarms_overridden", "misses", "infra_after_clean", "stopped_ok", "stopped_infra"),
        *("device_seconds", "device_seconds_per_gate", "ungated"),
    }
    assert not report.exit.ready
    assert "no observed job" in report.exit.why[0]


def test_success_is_told_with_and_without_infra() -> None:
    report = report_of(counts(end("ok", 197), end("failed", 1), end("infra", 2, **STOPPED)), days=28)
    assert report.ended == {"ok": 197, "failed": 1, "infra": 2}
    assert report.success is not None
    assert (report.success.count, report.success.of, report.success.ratio) == (197, 200, 0.985)
    assert report.success_without_infra is not None
    assert report.success_without_infra.of == 198


def test_false_alarms_are_shared_over_jobs_that_could_show_one() -> None:
    report = report_of(
        counts(
            end("ok", 1000, GateEnding.ADMITTED),
            end("ok", 45),
            end("ok", 5, **ALARM),
            end("ok", 4, GateEnding.OVERRIDDEN, **ALARM),
            end("failed", 7, **ALARM),
        ),
        days=28,
    )
    assert report.false_alarms == share(9, 54)
    assert report.false_alarms_observed == share(5, 50)
    assert report.false_alarms_overridden == share(4, 4)


def test_a_miss_is_a_job_that_infra_stopped_after_a_clean_gate() -> None:
    ends = (end("infra", 3, GateEnding.ADMITTED), end("infra", 5, **ALARM), end("ok", 12, GateEnding.ADMITTED))
    report = report_of(counts(*ends), days=28)
    assert report.misses == share(3, 8)
    assert report.infra_after_clean == share(3, 15)
    assert report.stopped_infra == share(5, 5)


def test_words_of_a_launcher_that_are_none_of_ours_are_counted_apart() -> None:
    assert [word_of(word) for word in ("ok", "Succeeded", "failed", "infra ", "cancelled")] == [
        *("ok", "ok", "failed", "infra", "other")
    ]
    report = report_of(counts(end("cancelled", 3), end("ok", 1)), days=28)
    assert report.ended == {"ok": 1, "other": 3}
    assert report.success == share(1, 1)


def test_jobs_that_never_told_their_end_and_gates_that_let_nobody_in_are_no_jobs() -> None:
    made = counts(end("ok", 2), end("failed", 9, GateEnding.REJECTED))
    decisions = [
        *made.decisions,
        DecisionRow(way=GateEnding.ADMITTED, would=Verdict.ADMIT, count=5, device_seconds=0.0),
    ]
    report = report_of(dataclasses.replace(made, decisions=decisions), days=28)
    assert (report.jobs, report.untold, report.ended) == (2, 5, {"ok": 2})
    assert report.device_seconds == 2.0 * 11
    assert report.device_seconds_per_gate == pytest.approx(22 / 16)


def test_each_check_is_told_by_what_came_after_its_failures() -> None:
    failed = [("matmul", "ok", 3), ("matmul", "succeeded", 1), ("digest", "infra", 2), ("disk", "failed", 9)]
    ends = (end("ok", 6), end("ok", 4, **ALARM), end("infra", 2, **ALARM))
    report = report_of(counts(*ends, failed=failed), days=28)
    assert [(c.check, c.before_ok, c.before_infra) for c in report.checks] == [
        ("matmul", share(4, 10), share(0, 2)),
        ("digest", share(0, 10), share(2, 2)),
    ]


def test_nodes_left_out_most_come_first_with_their_reasons() -> None:
    excluded = [("n1", "WrongResult", 2), ("n1", "Silent", 5), ("n2", "SlowDevice", 3)]
    report = report_of(counts(end("ok", 1), excluded=excluded, out={"n1": 6, "n2": 3}), days=28)
    assert [(n.node, n.gates, list(n.reasons.items())) for n in report.nodes] == [
        ("n1", 6, [("Silent", 5), ("WrongResult", 2)]),
        ("n2", 3, [("SlowDevice", 3)]),
    ]


def test_waits_are_told_by_how_gates_ended() -> None:
    report = report_of(counts(waits={GateEnding.REJECTED: [9.0], GateEnding.ADMITTED: [1.0, 2.0, 3.0]}), days=28)
    assert [(w.way, w.n, w.p50_seconds, w.p95_seconds) for w in report.waits] == [
        (GateEnding.ADMITTED, 3, 2.0, 3.0),
        (GateEnding.REJECTED, 1, 9.0, 9.0),
    ]


# --- from observe to enforce ----------------------------------------------------------------------------------------


@every(
    ("ends", "ready", "said"),
    [
        ([end("ok", 49)], False, "49 observed jobs have ended, below the 50"),
        ([end("ok", 188)], False, "1 more jobs without one are needed"),
        ([end("ok", 189)], True, "0 of 189 successful jobs had a failing check: at most 2.0 % (95 %), below 2 %"),
        ([end("ok", 400), end("ok", 1, **ALARM)], True, "1 of 401"),
        ([end("ok", 250), end("ok", 3, **ALARM)], False, "more jobs without one are needed"),
        ([end("ok", 90), end("ok", 10, **ALARM)], False, "must be below 2 %: find out"),
        ([end("ok", 300), end("ok", 30, **STOPPED)], False, "30 of 330 successful jobs would not have been admitted"),
        ([end("infra", 60, **ALARM)], False, "no observed job was successful"),
        ([end("ok", 500, GateEnding.ADMITTED)], False, "no observed job"),
        ([end("cancelled", 500)], False, "no observed job"),
    ],
)
def test_enforce_waits_until_observe_has_shown_enough(ends: list[EndRow], ready: bool, said: str) -> None:
    found = report_of(counts(*ends), days=28).exit
    assert found.ready is ready
    assert said in " | ".join(found.why)


@given(alarms=st.integers(0, 40), ratio=st.sampled_from([0.01, 0.02, 0.1]))
def test_the_number_that_is_still_needed_is_the_least_that_suffices(alarms: int, ratio: float) -> None:
    rule = ExitRule(most_false_ratio=ratio)
    least = needed(alarms, rule)
    assert wilson(alarms, least)[1] < ratio <= wilson(alarms, least - 1)[1]


@given(good=st.integers(0, 3000), alarms=st.integers(0, 60), infra=st.integers(0, 60))
def test_ready_is_never_said_with_few_jobs_or_many_alarms(good: int, alarms: int, infra: int) -> None:
    found = exit_of([end("ok", good), end("ok", alarms, **ALARM), end("infra", infra)], ExitRule())
    assert not found.ready or (good + alarms + infra >= 50 and wilson(alarms, good + alarms)[1] < 0.02)


# --- what is kept of a gate -----------------------------------------------------------------------------------------


def reason(code: str, node: str | None = None, check: str | None = None, status: Status = Status.FAIL) -> Reason:
    return Reason(
        code=code,
        message="m",
        status=status,
        blame=blame_of(code),
        action=action_of(code),
        node=node,
        check=check,
    )


def decided(mode: Mode = Mode.ENFORCE, *, lease: bool = True, **changes: Any) -> Gate:
    request = GateRequest(job="j", nodes=("n1", "n2"), mode=mode, lease=lease)
    gate = new_gate("g-000000000001-00", request, POLICY, NOW)
    decision = Decision(
        id=gate.id,
        decision=Verdict.ADMIT,
        reasons=(),
        nodes=(AdmittedNode(node="n1", evidence_age_seconds=1.0),),
        excluded=(),
        policy={},
        retryable=False,
        decided_at=NOW + 30,
        duration_seconds=30.0,
    )
    return dataclasses.replace(gate, progress=Decided(decision=dataclasses.replace(decision, **changes)))


def test_observed_with_a_failing_check_on_a_node_of_the_job_is_alarmed() -> None:
    gate = decided(Mode.OBSERVE, would=Verdict.REJECT, reasons=(reason("Observed"),))
    facts = facts_of(gate, [state("n1", with_wrong()), state("n2", with_wrong())])
    assert facts is not None
    assert (facts.way, facts.would, facts.alarmed, facts.clean) == (GateEnding.OBSERVED, Verdict.REJECT, True, False)
    assert [(f.node, f.check, f.code, f.out) for f in facts.faults] == [("n1", "matmul", "WrongResult", False)]


def test_observed_without_evidence_would_be_stopped_and_is_no_alarm_and_not_clean() -> None:
    gate = decided(Mode.OBSERVE, would=Verdict.HOLD, reasons=(reason("Observed"),))
    facts = facts_of(gate, [state("n1", [])])
    assert facts is not None
    assert (facts.would, facts.alarmed, facts.clean) == (Verdict.HOLD, False, False)


def test_a_failure_older_than_the_gate_asks_for_is_no_alarm() -> None:
    gate = decided(Mode.OBSERVE, would=Verdict.HOLD, reasons=(reason("Observed"),))
    old = tuple(dataclasses.replace(r, age_seconds=1e9) for r in with_wrong())
    facts = facts_of(gate, [state("n1", old)])
    assert facts is not None
    assert not facts.alarmed


def test_what_an_admitted_job_went_without_is_kept_and_does_not_alarm() -> None:
    out = ExcludedNode(
        node="n2", reasons=(reason("WrongResult", "n2", "matmul"), reason("Reserved", "n2"), reason("Quarantined"))
    )
    facts = facts_of(decided(excluded=(out,)), [state("n1"), state("n2", with_wrong())])
    assert facts is not None
    assert (facts.alarmed, facts.clean) == (False, True)
    assert [(f.node, f.check, f.code) for f in facts.faults] == [
        ("n2", "matmul", "WrongResult"),
        ("n2", "", "Quarantined"),
    ]


def test_an_answer_without_nodes_is_no_job_and_an_open_gate_has_no_facts() -> None:
    assert facts_of(decided(lease=False), ()) is None
    assert facts_of(dataclasses.replace(decided(), progress=Waiting()), ()) is None


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, GateEnding.ADMITTED),
        ({"decision": Verdict.REJECT, "reasons": (reason("Expired"),)}, GateEnding.REJECTED),
        ({"decision": Verdict.REJECT, "reasons": (reason("Released"),)}, GateEnding.WITHDRAWN),
        ({"decision": Verdict.REJECT, "reasons": (reason("Superseded"),)}, GateEnding.WITHDRAWN),
        ({"would": Verdict.REJECT, "reasons": (reason("Override"), reason("Expired"))}, GateEnding.OVERRIDDEN),
    ],
)
def test_how_a_gate_ended_is_told_by_its_first_reason(changes: dict[str, Any], way: GateEnding) -> None:
    gate = decided(**changes)
    assert gate.decision is not None
    assert way_of(gate, gate.decision) is way


@pytest.mark.parametrize(
    ("count", "seconds"), [(10**400, 1e308), (-(10**400), -1e308), (4, 1e308)], ids=["huge", "negative", "long"]
)
def test_costs_are_numbers_whatever_a_node_says_of_itself(count: int, seconds: float) -> None:
    run = OrderedRun(order_id="o", round=1, ordered_at=NOW + 20, deadline_seconds=60.0)
    inventory = Inventory(
        accelerator="cpu", device_count=count, core_count=4, memory_bytes=None, efa_count=None, devices=()
    )
    results = tuple(dataclasses.replace(r, age_seconds=1.0, duration_seconds=seconds) for r in with_wrong())
    known = dataclasses.replace(state("n1", results), inventory=inventory)
    facts = facts_of(dataclasses.replace(decided(), ordered={"n1": run}), [known])
    assert facts is not None
    assert 0 <= facts.device_seconds <= 1024 * 2 * 10


def test_runs_that_the_gate_ordered_cost_device_seconds_and_others_do_not() -> None:
    run = OrderedRun(order_id="o", round=1, ordered_at=NOW + 20, deadline_seconds=60.0)
    inventory = Inventory(
        accelerator="cpu", device_count=4, core_count=4, memory_bytes=None, efa_count=None, devices=()
    )
    seen = dataclasses.replace(state("n1"), inventory=inventory)
    facts = facts_of(dataclasses.replace(decided(), ordered={"n1": run}), [seen, state("n2")])
    assert facts is not None
    assert facts.device_seconds == 4 * 2 * 1.0


# --- with a store ---------------------------------------------------------------------------------------------------


async def test_an_engine_writes_the_facts_of_its_gates_and_they_are_counted(tmp_path: Path) -> None:
    world = World("n1", "n2")
    world.add("n3", results=with_wrong())
    async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
        gate, _ = await run.admit(job="a", nodes=("n1", "n3"), min_nodes=1)
        told = await run.engine.outcome(gate.id, "infra", "XID 79")
        assert told == Ended(outcome="infra", way=GateEnding.ADMITTED, alarmed=False, clean=True)
        assert await run.engine.outcome(gate.id, "infra", "XID 79") is None, "told twice, counted once"
        await run.engine.override(
            "b", Override(job="b", reason="deadline", owner="ana", since=NOW, until=world.now + 600)
        )
        gate, _ = await run.admit(job="b", nodes=("n3",))
        told = await run.engine.outcome(gate.id, "succeeded", "")
        assert told == Ended(outcome="ok", way=GateEnding.OVERRIDDEN, alarmed=True, clean=False)
        gate, _ = await run.admit(job="c", nodes=("n2",), mode=Mode.OBSERVE)
        await run.admit(job="d", nodes=("n2",))
        await run.engine.release(gate.id)
        found = await run.store.run(lambda connection: counts_of(read_facts_since(connection, NOW - 60)))
        report = report_of(found, days=1)
        assert report.false_alarms == share(1, 1)
        assert report.misses == share(1, 1)
        assert [c.check for c in report.checks] == ["matmul"]
        assert {(d.way, d.would) for d in report.decisions} >= {
            *(
                (GateEnding.ADMITTED, Verdict.ADMIT),
                (GateEnding.OBSERVED, Verdict.ADMIT),
                (GateEnding.OVERRIDDEN, Verdict.REJECT),
            ),
        }
        assert [(n.node, n.reasons["WrongResult"]) for n in report.nodes] == [("n3", 1)]
        later = await run.store.run(lambda connection: counts_of(read_facts_since(connection, NOW + 1e6)))
        assert report_of(later, days=1).jobs == 0


async def test_facts_written_twice_are_there_once_and_go_with_their_gate(url: str) -> None:

    gate = decided(Mode.OBSERVE, would=Verdict.REJECT, reasons=(reason("Observed"),))
    facts = facts_of(gate, [state("n1", with_wrong())])
    assert facts is not None
    store = Store.open(url)
    for _ in range(2):
        await store.write([PutRecord(kind=Kind.FACTS, key=gate.id, record=facts), PutGate(gate=gate)])
    kept = await store.run(lambda connection: read_facts(connection, gate.id))
    assert kept == facts
    await store.write([PutOutcome(gate=gate.id, job="j", attempt=0, status="ok", message="", told_at=NOW)])
    report = report_of(await store.run(lambda connection: counts_of(read_facts_since(connection, NOW))), days=1)
    assert report.false_alarms == share(1, 1)
    assert [(c.check, c.before_ok) for c in report.checks] == [("matmul", share(1, 1))]
    assert (report.nodes, [w.p50_seconds for w in report.waits]) == ((), [30.0])

    def drop(connection: Connection) -> None:
        prune(connection, before=NOW + 1e6, most_gates=10, most_events=10)

    await store.run(drop)
    assert await store.run(lambda connection: read_facts(connection, gate.id)) is None
    store.close()


@pytest.mark.thorough
def test_a_month_of_twenty_thousand_gates_is_counted_without_reading_their_records(tmp_path: Path) -> None:
    """The bound is loose, for machines that are busy; what was measured is in the docs."""

    async def main() -> float:
        store = Store.open(f"sqlite:///{tmp_path}/a.db")
        base = decided(Mode.OBSERVE, would=Verdict.REJECT, reasons=(reason("Observed"),))
        facts = facts_of(base, [state("n1", with_wrong())])
        assert facts is not None
        for start in range(0, 20_000, 500):  # each write is to end within the store's time-out
            changes: list[Change] = []
            for number in range(start, start + 500):
                key = f"g-{number:012x}-00"
                request = dataclasses.replace(base.request, job=f"job{number}")
                changes.append(PutGate(gate=dataclasses.replace(base, id=key, request=request)))
                fault = dataclasses.replace(facts.faults[0], node=f"n{number % 500}", out=number % 3 == 0)
                own = dataclasses.replace(facts, gate=key, wait_seconds=float(number % 97), faults=(fault, fault))
                changes.append(PutRecord(kind=Kind.FACTS, key=key, record=own))
                status = ("ok", "ok", "failed", "infra")[number % 4]
                told = PutOutcome(gate=key, job="j", attempt=0, status=status, message="", told_at=NOW)
                changes.append(told)
            await store.write(changes)
        began = time.perf_counter()
        found = await store.run(lambda connection: counts_of(read_facts_since(connection, NOW - 60)))
        report = report_of(found, days=28)
        seconds = time.perf_counter() - began
        assert report.jobs == 20_000
        store.close()
        return seconds

    seconds = asyncio.run(main())
    print(f"20,000 gates: {seconds:.3f} s")
    assert math.isfinite(seconds)
    assert seconds < 5 * PATIENCE


# --- metrics --------------------------------------------------------------------------------------------------------


def test_ends_of_jobs_are_counters_with_bounded_labels() -> None:
    metrics = metrics_of(fleet())
    for outcome in ("ok", "failed", "infra", "other"):
        for way in GateEnding:
            for alarmed in (False, True):
                metrics.job_ended(Ended(outcome=outcome, way=way, alarmed=alarmed, clean=not alarmed))
    text = metrics.render("")[0].decode()
    lines = [line for line in text.splitlines() if line.startswith("healthd_job_outcomes_total{")]
    assert len(lines) == 4 * 3
    assert 'healthd_job_outcomes_total{gate="overridden",outcome="infra"} 2.0' in lines
    assert "healthd_gate_false_alarms_total 3.0" in text
    assert "healthd_gate_misses_total 3.0" in text
