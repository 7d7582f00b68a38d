"""What the gate decides, as tables: (now, gate, fleet, policy) -> (gate, effects)."""

from __future__ import annotations

import dataclasses
import math

import pytest

from checks.contract import Blame, Status, Tier
from healthd.aggregator.fleet.node_record import joined
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate import decisions, resume
from healthd.aggregator.gate.eligibility import judge
from healthd.aggregator.gate.records import (
    Claim,
    ClaimKind,
    Closing,
    Effect,
    Gate,
    GrantLease,
    LeaseRow,
    LeaseState,
    Override,
    Phase,
    RevokeLease,
    RunStatus,
    Snapshot,
    WakeAt,
)
from healthd.aggregator.policy import Policy
from healthd.core import wire
from healthd.core.model import Allocation, CheckResult, Health, Mode, OrderReport, Quarantine, Verdict
from tests.aggregator.gate_kit import acknowledged, admit, decided
from tests.aggregator.world import (
    NOW,
    POLICY,
    gate,
    good_results,
    lease,
    neuron,
    node,
    result,
    state,
    step,
    view,
    with_wrong,
)

Effects = tuple[Effect, ...]


def of(kind: type, effects: Effects) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def ordered(after: Gate) -> list[str]:
    """The runs that its nodes have to do, by id."""
    return [run.order_id for run in after.ordered.values() if run.status is RunStatus.OPEN]


def busy(kind: ClaimKind, gate_id: str = "g-9", job: str = "other", attempt: int = 0) -> Claim:
    return Claim(kind=kind, gate=gate_id, job=job, attempt=attempt)


# --- admission --------------------------------------------------------------------------------------------------------


def test_gate_with_leases_from_before_a_restart_waits_for_nodes_that_have_not_confirmed_an_answer() -> None:
    nodes = [node("n1"), node("n2")]
    granted, effects = step(NOW, gate(nodes=("n1", "n2")), view(*nodes), POLICY)
    rows = [
        LeaseRow(node=one.node, lease=lease(one.lease_id, gate_id=granted.id), state=LeaseState.GRANTED, granted_at=NOW)
        for one in of(GrantLease, effects)
        if isinstance(one, GrantLease)
    ]
    first, second = (acknowledged(one, granted) for one in nodes)
    unconfirmed = dataclasses.replace(second, confirmed=False)
    held, _, _ = resume(granted, view(first, unconfirmed), POLICY, rows)
    assert held.decision is None
    admitted, _, _ = resume(held, view(first, second), POLICY, rows)
    assert admitted.decision is not None
    assert admitted.decision.decision is Verdict.ADMIT


@pytest.mark.parametrize("since_swapped", [None, 40.0], ids=["the device of then", "another device"])
def test_lease_that_an_old_copy_has_lost_admits_its_job_only_on_devices_that_were_tested(
    since_swapped: float | None,
) -> None:
    """The evidence is from when the lease was granted, an hour ago; nothing is measured under a lease."""
    (device,) = neuron().devices
    seen = dataclasses.replace(neuron(), devices=(dataclasses.replace(device, since=since_swapped),))
    row = LeaseRow(node="n1", lease=lease("L"), state=LeaseState.ACKNOWLEDGED, granted_at=NOW - 3600, adopted=True)
    results = [dataclasses.replace(one, devices=("neuron:0",), began_at=30.0) for one in good_results(3605)]
    checks = tuple(dataclasses.replace(one, accelerators=True) for one in state("n1").checks)
    known = dataclasses.replace(state("n1", results, leases=(row.lease,)), inventory=seen, checks=checks)
    one = node("n1", known, orders={"L": OrderReport(status="accepted")})
    after, _, _ = resume(gate(nodes=("n1",)), view(one), POLICY, [row])
    verdict = Verdict.ADMIT if since_swapped is None else Verdict.REJECT
    assert decided(after).decision is verdict, decided(after).reasons


def test_good_nodes_are_reserved_and_leased_and_admitted_once_all_have_stored_their_lease() -> None:
    nodes = [node("n1"), node("n2")]
    after, effects = step(NOW, gate(nodes=("n1", "n2")), view(*nodes), POLICY)
    assert after.phase is Phase.GRANTING
    assert after.reserved == ("n1", "n2")
    assert len(of(GrantLease, effects)) == 2
    half, effects = step(NOW + 1, after, view(acknowledged(nodes[0], after), nodes[1]), POLICY)
    assert half.decision is None
    assert [r.code for r in half.waiting] == ["LeaseNotAcknowledged"]
    decision = admit(after, *nodes)
    assert decision.decision is Verdict.ADMIT
    assert [n.node for n in decision.nodes] == ["n1", "n2"]
    assert decision.nodes[0].evidence_age_seconds == 5.0
    assert decision.excluded == ()


def test_a_lease_reported_accepted_but_not_in_the_state_is_not_acknowledged() -> None:
    after, _ = step(NOW, gate(nodes=("n1",)), view(node("n1")), POLICY)
    word_only = node("n1", orders={after.granted["n1"].lease_id: OrderReport(status="accepted")})
    after, _ = step(NOW + 1, after, view(word_only), POLICY)
    assert after.decision is None


def test_a_lease_that_is_about_to_be_stored_is_not_acknowledged() -> None:
    """Its node may still find that somebody else has the devices, or run probes of its own."""
    after, _ = step(NOW, gate(nodes=("n1",)), view(node("n1")), POLICY)
    storing = dataclasses.replace(
        acknowledged(node("n1"), after), orders={after.granted["n1"].lease_id: OrderReport(status="running")}
    )
    after, _ = step(NOW + 1, after, view(storing), POLICY)
    assert after.decision is None


def test_two_of_three_admits_with_the_spare_and_names_the_bad_node() -> None:
    nodes = [node("n1"), node("n2", state("n2", with_wrong())), node("n3")]
    after, _ = step(NOW, gate(nodes=("n1", "n2", "n3"), min_nodes=2), view(*nodes), POLICY)
    assert sorted(after.granted) == ["n1", "n3"]
    decision = admit(after, *nodes)
    assert [n.node for n in decision.nodes] == ["n1", "n3"]
    assert [(e.node, e.reasons[0].code) for e in decision.excluded] == [("n2", "WrongResult")]


def test_bad_node_is_rejected_at_once_by_name_check_device_and_number() -> None:
    after, effects = step(
        NOW, gate(nodes=("n1", "n2")), view(node("n1"), node("n2", state("n2", with_wrong()))), POLICY
    )
    decision = decided(after)
    assert decision.decision is Verdict.REJECT
    assert decision.retryable
    assert decision.reasons[0].message == "n2: matmul cpu:0: element 7 is 3.0, not 2.0"
    assert [e.node for e in decision.excluded] == ["n2"]
    assert not of(GrantLease, effects)
    assert not ordered(after)


def test_degraded_is_admitted_unless_policy_says_no() -> None:
    warned = node("n1", state("n1", (*good_results()[:2], result("all_reduce", status=Status.WARN, code="SlowLink"))))
    after, _ = step(NOW, gate(nodes=("n1",)), view(warned), POLICY)
    assert "n1" in after.granted
    strict = dataclasses.replace(POLICY, admit_degraded=False)
    after, _ = step(NOW, gate(nodes=("n1",)), view(warned), strict)
    assert decided(after).decision is Verdict.REJECT


# --- evidence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "results",
    [
        pytest.param((), id="nothing has run (rival fault 1, 11)"),
        pytest.param(good_results(age=4000.0), id="older than asked (rival fault 15)"),
        pytest.param(good_results()[:2], id="one check is missing"),
        pytest.param((*good_results()[:2], result("all_reduce", age=float("nan"))), id="an age that is no number"),
        pytest.param((*good_results()[:2], result("all_reduce", Tier.PASSIVE)), id="ran in a lighter tier"),
        pytest.param(
            (*good_results()[:2], result("all_reduce", status=Status.SKIP, code="Busy")), id="skipped for being busy"
        ),
        pytest.param(
            (*good_results()[:2], result("all_reduce", status=Status.UNKNOWN, code="CannotAllocate")),
            id="could not allocate (rival fault 17)",
        ),
        pytest.param(
            (*good_results()[:2], dataclasses.replace(result("all_reduce"), findings=())),
            id="printed no number (rival fault 2)",
        ),
    ],
)
def test_without_complete_fresh_evidence_the_tier_is_run_and_nothing_is_admitted(results: tuple[object, ...]) -> None:
    lacking = node("n1", state("n1", results))  # type: ignore[arg-type]
    after, _ = step(NOW, gate(nodes=("n1",)), view(lacking), POLICY)
    assert after.phase is Phase.CHECKING
    assert ordered(after) == ["g-1:run:1:n1"]
    assert after.ordered["n1"].deadline_seconds == 300.0
    ran = dataclasses.replace(lacking, orders={"g-1:run:1:n1": OrderReport(status="done")})
    end, effects = step(NOW + 30, after, view(ran), POLICY)
    decision = decided(end)
    assert decision.decision is Verdict.REJECT
    assert decision.retryable
    assert decision.excluded[0].node == "n1"
    assert not of(GrantLease, effects)


def test_behind_seconds_count_into_the_age_of_evidence() -> None:
    after, _ = step(NOW, gate(nodes=("n1",)), view(node("n1", behind_seconds=4000.0)), POLICY)
    assert ordered(after)
    assert not after.granted


def test_evidence_renewed_by_the_ordered_run_is_taken_when_the_run_is_done() -> None:
    after, _ = step(NOW, gate(nodes=("n1",)), view(node("n1", state("n1", ()))), POLICY)
    fresh_but_running = node("n1", orders={"g-1:run:1:n1": OrderReport(status="running")})
    after, _ = step(NOW + 1, after, view(fresh_but_running), POLICY)
    assert not after.granted
    after, _ = step(NOW + 2, after, view(node("n1", orders={"g-1:run:1:n1": OrderReport(status="done")})), POLICY)
    assert "n1" in after.granted


def test_a_run_that_is_never_reported_done_excludes_the_node_without_calling_it_unhealthy() -> None:
    stale = node("n1", state("n1", ()))
    after, effects = step(NOW, gate(nodes=("n1",)), view(stale), POLICY)
    assert of(WakeAt, effects)
    end, _ = step(NOW + 301, after, view(stale), POLICY)
    (excluded,) = decided(end).excluded
    assert excluded.reasons[0].code == "Timeout"
    assert excluded.reasons[0].blame is Blame.CHECK


def test_a_refused_run_is_ordered_again_a_bounded_number_of_times() -> None:
    current, fleet = gate(nodes=("n1",)), view(node("n1", state("n1", ())))
    orders = []
    for turn in range(6):
        current, _ = step(NOW + turn, current, fleet, POLICY)
        orders += [one for one in ordered(current) if one not in orders]
        if not orders or current.decision is not None:
            break
        refused = {orders[-1]: OrderReport(status="refused", message="a job has the devices")}
        fleet = view(node("n1", state("n1", ()), orders=refused))
    assert orders == ["g-1:run:1:n1", "g-1:run:2:n1", "g-1:run:3:n1"]
    assert decided(current).excluded[0].reasons[0].code == "Busy"


@pytest.mark.parametrize("blame", [Blame.CHECK, Blame.CONTROL, Blame.PATH])
def test_a_fault_that_is_not_the_nodes_makes_it_unknown_never_unhealthy(blame: Blame) -> None:
    """Rival faults 13, 18, 23, 25: nobody drains a node for a tool, an API or a path."""
    results = (*good_results()[:2], result("all_reduce", status=Status.FAIL, code="SlowLink", blame=blame))
    fleet_node = node("n1", state("n1", results))
    after, _ = step(NOW, gate(nodes=("n1",)), view(fleet_node), POLICY)
    assert ordered(after), "measured again before anything is said"
    done = dataclasses.replace(fleet_node, orders={"g-1:run:1:n1": OrderReport(status="done")})
    end, _ = step(NOW + 9, after, view(done), POLICY)
    decision = decided(end)
    assert decision.retryable
    assert decision.excluded[0].reasons[0].blame is blame


def test_remembered_verdicts_are_those_of_the_strict_question_and_never_younger_than_the_truth() -> None:
    for results in (good_results(), with_wrong(), ()):
        seen = node("n1", state("n1", results), oldest_seconds=5.0)
        for behind in (0.0, 3000.0, 3594.0, 3595.0, 3596.0, 9000.0):
            now = dataclasses.replace(seen, behind_seconds=behind)
            strict = judge(dataclasses.replace(now, oldest_seconds=None), Tier.QUICK, 3600.0, ())
            for _ in range(2):
                found = judge(now, Tier.QUICK, 3600.0, ())
                assert (found.health, found.reasons) == (strict.health, strict.reasons)
                if strict.age_seconds is not None:
                    assert found.age_seconds is not None
                    assert found.age_seconds >= strict.age_seconds
    nan = node("n1", state("n1", good_results(age=float("nan"))), oldest_seconds=math.inf)
    assert judge(nan, Tier.QUICK, 3600.0, ()).health is Health.UNKNOWN


def test_the_evidence_of_a_daemon_with_a_hook_grows_old_as_any_other() -> None:
    """What was fresh at the first look is not fresh for as long as both send nothing but ages."""
    daemon, hook = node("n1"), node("n1", oldest_seconds=5.0)
    assert judge(joined(daemon, hook), Tier.QUICK, 3600.0, ()).health is Health.HEALTHY
    daemon, hook = (dataclasses.replace(one, behind_seconds=4000.0) for one in (daemon, hook))
    assert judge(joined(daemon, hook), Tier.QUICK, 3600.0, ()).health is Health.UNKNOWN


def test_a_nodes_own_fault_comes_before_what_is_only_not_known() -> None:
    silent = node("n1", heard_seconds=500.0)
    bad = node("n2", state("n2", with_wrong()))
    end, _ = step(NOW, gate(nodes=("n1", "n2")), view(silent, bad), POLICY)
    assert [(line.node, line.code) for line in decided(end).reasons] == [("n2", "WrongResult"), ("n1", "Silent")]


# --- nodes that are away ----------------------------------------------------------------------------------------------


def test_a_name_nobody_reported_is_waited_for_and_then_impossible_with_the_nearest_names() -> None:
    fleet = view(node("trn-001"), node("trn-002"))
    after, _ = step(NOW, gate(nodes=("trn-003",)), fleet, POLICY)
    assert after.decision is None
    assert after.waiting[0].code == "UnknownNode"
    end, _ = step(NOW + 60, after, fleet, POLICY)
    decision = decided(end)
    assert not decision.retryable
    assert "did you mean trn-00" in decision.reasons[0].message


def test_silent_node_is_excluded_after_its_time_and_never_admitted() -> None:
    silent = node("n1", heard_seconds=61.0)
    after, _ = step(NOW, gate(nodes=("n1",)), view(silent), POLICY)
    assert decided(after).excluded[0].reasons[0].code == "Silent"
    assert decided(after).retryable


def test_a_node_known_from_the_store_only_is_waited_for_and_then_silent() -> None:
    absent = node("n1", heard_seconds=None)
    after, _ = step(NOW, gate(nodes=("n1",)), view(absent), POLICY)
    assert after.decision is None
    end, _ = step(NOW + 60, after, view(absent), POLICY)
    assert decided(end).excluded[0].reasons[0].code == "Silent"


def test_a_node_that_has_not_confirmed_an_answer_is_never_admitted() -> None:
    one_way = node("n1", confirmed=False)
    after, _ = step(NOW, gate(nodes=("n1",)), view(one_way), POLICY)
    assert not after.granted
    assert not ordered(after)
    granted, _ = step(NOW, gate(nodes=("n1",)), view(node("n1")), POLICY)
    stored = dataclasses.replace(acknowledged(node("n1"), granted), confirmed=False)
    end, _ = step(NOW + 1, granted, view(stored), POLICY)
    assert end.decision is None


def test_quarantine_and_a_duplicate_name_exclude_at_once() -> None:
    kept = Quarantine(reason="fan replaced on Monday", owner="ana", owner_kind="person", since=NOW, until=None)
    for fleet_node, code in (
        (node("n1", quarantine=kept), "Quarantined"),
        (node("n1", duplicate=True), "DuplicateNode"),
    ):
        after, _ = step(NOW, gate(nodes=("n1",)), view(fleet_node), POLICY)
        assert decided(after).reasons[0].code == code
    over = dataclasses.replace(kept, until=NOW - 1)
    after, _ = step(NOW, gate(nodes=("n1",)), view(node("n1", quarantine=over)), POLICY)
    assert "n1" in after.granted


# --- nodes of others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(ClaimKind))
def test_a_node_of_another_gate_is_held_for_and_the_other_is_named(kind: ClaimKind) -> None:
    fleet = view(node("n1"), node("n2"), claims={"n2": busy(kind)})
    after, _ = step(NOW, gate(nodes=("n1", "n2")), fleet, POLICY)
    assert after.phase is Phase.WAITING
    assert not after.held, "all or none"
    assert "job other" in after.waiting[0].message
    after, _ = step(NOW + 1, after, view(node("n1"), node("n2")), POLICY)
    assert sorted(after.granted) == ["n1", "n2"]


@pytest.mark.parametrize(("by", "holder"), [("process", "pid 7"), ("unseen", "holders of the devices cannot be seen")])
def test_an_allocated_node_is_held_for_until_time_is_up(by: str, holder: str) -> None:
    used = node("n1", state("n1", allocated=(Allocation(by=by, holder=holder),)))
    after, _ = step(NOW, gate(nodes=("n1",)), view(used), POLICY)
    assert after.waiting[0].code == "Allocated"
    end, _ = step(NOW + 600, after, view(used), POLICY)
    decision = decided(end)
    assert decision.reasons[0].code == "Expired"
    assert holder in decision.reasons[0].message
    assert decision.retryable


def test_what_the_job_itself_holds_is_not_somebody_elses() -> None:
    own = node("n1", state("n1", allocated=(Allocation(by="scheduler", holder="train"),)))
    after, _ = step(NOW, gate(nodes=("n1",)), view(own), POLICY)
    assert "n1" in after.granted


def test_a_bad_node_is_named_at_once_though_another_is_busy() -> None:
    fleet = view(node("n1", state("n1", with_wrong())), node("n2"), claims={"n2": busy(ClaimKind.LEASED)})
    after, _ = step(NOW, gate(nodes=("n1", "n2")), fleet, POLICY)
    assert decided(after).reasons[0].code == "WrongResult"


def test_a_gate_that_falls_below_its_need_gives_everything_back() -> None:
    stale = [node("n1", state("n1", ())), node("n2", state("n2", ()))]
    after, _ = step(NOW, gate(nodes=("n1", "n2")), view(*stale), POLICY)
    assert after.reserved == ("n1", "n2")
    taken = node("n2", state("n2", allocated=(Allocation(by="process", holder="pid 7"),)))
    after, _ = step(NOW + 1, after, view(stale[0], taken), POLICY)
    assert after.reserved == ()
    assert ordered(after) == []
    after, _ = step(NOW + 2, after, view(*stale), POLICY)
    assert ordered(after) == ["g-1:run:2:n1", "g-1:run:2:n2"]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_not_acknowledged_is_revoked_and_a_spare_of_the_pool_taken() -> None:
    fleet = [node("n1"), node("n2"), node("n3")]
    after, _ = step(NOW, gate(pool="a", count=2), view(*fleet), POLICY)
    assert sorted(after.granted) == ["n1", "n2"]
    stored = acknowledged(fleet[0], after)
    later, effects = step(NOW + 30, after, view(stored, fleet[1], fleet[2]), POLICY)
    assert [e.node for e in effects if isinstance(e, RevokeLease)] == ["n2"]
    assert [e.node for e in effects if isinstance(e, GrantLease)] == ["n3"]
    end, _ = step(NOW + 31, later, view(stored, fleet[1], acknowledged(fleet[2], later)), POLICY)
    decision = decided(end)
    assert [n.node for n in decision.nodes] == ["n1", "n3"]
    assert decision.excluded[0].reasons[0].code == "LeaseNotAcknowledged"


def test_a_pool_names_the_bad_node_that_it_replaced_with_its_reasons() -> None:
    def ran(name: str, *results: CheckResult) -> FleetNode:
        return node(
            name, state(name, results or good_results()), orders={f"g-1:run:1:{name}": OrderReport(status="done")}
        )

    after, _ = step(NOW, gate(pool="a", count=2), view(*(node(n, state(n, ())) for n in ("n1", "n2", "n3"))), POLICY)
    assert ordered(after) == ["g-1:run:1:n1", "g-1:run:1:n2"]
    found = (ran("n1", *with_wrong()), ran("n2"))
    after, _ = step(NOW + 1, after, view(*found, node("n3", state("n3", ()))), POLICY)
    after = wire.decode(wire.encode(after), Gate, what="gate")
    found = (*found, ran("n3"))
    after, _ = step(NOW + 2, after, view(*found), POLICY)
    assert sorted(after.granted) == ["n2", "n3"]
    end, _ = step(NOW + 3, after, view(found[0], *(acknowledged(one, after) for one in found[1:])), POLICY)
    decision = decided(end)
    assert (decision.decision, [one.node for one in decision.nodes]) == (Verdict.ADMIT, ["n2", "n3"])
    assert [(one.node, one.reasons[0].code) for one in decision.excluded] == [("n1", "WrongResult")]


def test_a_pool_does_not_choose_a_node_that_the_scheduler_must_avoid() -> None:
    def fleet(**removed: str) -> Snapshot:
        return dataclasses.replace(view(node("n1"), node("n2")), removed=removed)

    after, _ = step(NOW, gate(pool="a", count=1), fleet(n1="12:00"), POLICY)
    assert sorted(after.granted) == ["n2"]
    held, _ = step(NOW, gate(pool="a", count=2), fleet(n1="12:00"), POLICY)
    assert (held.decision, held.reserved) == (None, ())
    assert [(why.code, why.message) for why in held.waiting] == [
        ("Removed", "n1 is removed from scheduling by healthd until 12:00")
    ]
    back, _ = step(NOW + 1, held, fleet(), POLICY)
    assert sorted(back.granted) == ["n1", "n2"]
    named, _ = step(NOW, gate(nodes=("n1",)), fleet(n1="12:00"), POLICY)
    assert sorted(named.granted) == ["n1"]


def test_a_refused_lease_rejects_and_revokes_the_others() -> None:
    after, _ = step(NOW, gate(nodes=("n1", "n2")), view(node("n1"), node("n2")), POLICY)
    refused = node("n2", orders={after.granted["n2"].lease_id: OrderReport(status="refused", message="held by pid 7")})
    end, effects = step(NOW + 1, after, view(acknowledged(node("n1"), after), refused), POLICY)
    assert decided(end).reasons[0].message == "n2 did not keep its lease (refused): held by pid 7"
    assert {e.node for e in effects if isinstance(e, RevokeLease)} == {"n1", "n2"}


def test_a_node_that_turns_bad_while_leases_are_granted_is_not_admitted() -> None:
    after, _ = step(NOW, gate(nodes=("n1",)), view(node("n1")), POLICY)
    stored = acknowledged(node("n1", state("n1", with_wrong())), after)
    end, _ = step(NOW + 1, after, view(stored), POLICY)
    assert decided(end).decision is Verdict.REJECT


# --- pools ------------------------------------------------------------------------------------------------------------


def test_a_pool_gives_ready_nodes_before_those_that_must_be_measured_and_never_bad_ones() -> None:
    fleet = view(node("n1", state("n1", ())), node("n2", state("n2", with_wrong())), node("n3"), node("n4"), node("n5"))
    after, _ = step(NOW, gate(pool="a", count=3), fleet, POLICY)
    assert sorted(after.granted) == ["n3", "n4", "n5"]
    assert not ordered(after)


def test_a_pool_with_too_few_good_nodes_rejects_and_names_the_bad() -> None:
    fleet = view(node("n1"), node("n2", state("n2", with_wrong())))
    after, _ = step(NOW, gate(pool="a", count=2), fleet, POLICY)
    decision = decided(after)
    assert decision.retryable
    assert [e.node for e in decision.excluded] == ["n2"]


def test_unknown_pool_and_more_nodes_than_there_are_cannot_be_retried() -> None:
    for asked, code in ((gate(pool="b", count=1), "UnknownPool"), (gate(pool="a", count=3), "TooFewNodes")):
        after, _ = step(NOW, asked, view(node("n1"), node("n2")), POLICY)
        assert decided(after).reasons[0].code == code
        assert not decided(after).retryable
        if code == "UnknownPool":
            assert decided(after).reasons[0].message == "there is no pool `b`; pools: a"


def test_nothing_is_impossible_while_nodes_may_still_report() -> None:
    for asked in (gate(pool="b", count=1), gate(pool="a", count=3), gate(nodes=("n9",))):
        after, _ = step(NOW + 59, asked, view(node("n1"), settling="just started"), POLICY)
        assert after.decision is None


def test_min_nodes_of_a_pool_admits_with_fewer() -> None:
    nodes = [node("n1"), node("n2"), node("n3")]
    after, _ = step(NOW, gate(pool="a", count=5, min_nodes=3), view(*nodes), POLICY)
    assert len(admit(after, *nodes).nodes) == 3


# --- time, modes, persons ---------------------------------------------------------------------------------------------


def test_nothing_is_admitted_while_recovering() -> None:
    after, effects = step(NOW, gate(nodes=("n1",)), view(node("n1"), recovering="the database was lost"), POLICY)
    assert after.decision is None
    assert after.waiting[0].code == "Recovering"
    assert not of(GrantLease, effects)


def test_observe_admits_a_bad_node_and_records_what_enforce_would_have_said() -> None:
    fleet = view(node("n1"), node("n2", state("n2", with_wrong())))
    after, effects = step(NOW, gate(nodes=("n1", "n2"), mode=Mode.OBSERVE), fleet, POLICY)
    decision = decided(after)
    assert (decision.decision, decision.would) == (Verdict.ADMIT, Verdict.REJECT)
    assert [n.node for n in decision.nodes] == ["n1", "n2"]
    assert [r.code for r in decision.reasons] == ["Observed", "WrongResult"]
    assert len(of(GrantLease, effects)) == 2


def test_observe_does_not_hold_up_a_job_for_longer_than_its_bound_and_takes_no_lease_from_others() -> None:
    fleet = view(node("n1"), claims={"n1": busy(ClaimKind.LEASED)})
    after, _ = step(NOW, gate(nodes=("n1",), mode=Mode.OBSERVE), fleet, POLICY)
    assert after.decision is None
    end, effects = step(NOW + 60, after, fleet, POLICY)
    assert (decided(end).decision, decided(end).would) == (Verdict.ADMIT, Verdict.HOLD)
    assert not of(GrantLease, effects)


def test_observe_of_good_nodes_says_that_enforce_would_admit() -> None:
    nodes = [node("n1")]
    after, _ = step(NOW, gate(nodes=("n1",), mode=Mode.OBSERVE), view(*nodes), POLICY)
    assert admit(after, *nodes).would is Verdict.ADMIT


def test_an_override_admits_at_once_and_says_who_and_what_would_have_been() -> None:
    override = Override(job="train", reason="paper deadline", owner="ana", since=NOW, until=NOW + 60)
    fleet = view(node("n1", state("n1", with_wrong())), overrides={"train": override})
    after, effects = step(NOW, gate(nodes=("n1",)), fleet, POLICY)
    decision = decided(after)
    assert (decision.decision, decision.would) == (Verdict.ADMIT, Verdict.REJECT)
    assert decision.reasons[0].message == "ana admits job train by hand: paper deadline"
    assert of(GrantLease, effects)
    late, _ = step(NOW + 60, gate(nodes=("n1",)), fleet, POLICY)
    assert decided(late).decision is Verdict.REJECT


BY_HAND = {"train": Override(job="train", reason="paper deadline", owner="ana", since=NOW, until=NOW + 3600)}


@pytest.mark.parametrize("how", ["observe", "override"])
def test_what_admits_anyway_waits_while_a_pool_has_too_few_nodes_to_start_on(how: str) -> None:
    mode, overrides = (Mode.OBSERVE, {}) if how == "observe" else (Mode.ENFORCE, BY_HAND)
    bad = node("n1", state("n1", with_wrong()))
    taken = view(bad, node("n2"), claims={"n2": busy(ClaimKind.LEASED)}, overrides=overrides)
    asked = gate(pool="a", count=3, min_nodes=2, mode=mode, wait_seconds=300.0)
    after, _ = step(NOW, asked, taken, POLICY)
    after, effects = step(NOW + 61, after, taken, POLICY)
    assert after.decision is None, "one node is no job of two"
    assert after.waiting
    assert of(WakeAt, effects)
    assert step(NOW + 62, after, taken, POLICY)[0].decision is None
    end, _ = step(NOW + 90, after, view(bad, node("n2"), overrides=overrides), POLICY)
    assert (decided(end).decision, decided(end).would) == (Verdict.ADMIT, Verdict.REJECT)
    assert {n.node for n in decided(end).nodes} == {"n1", "n2"}
    expired, _ = step(NOW + 300, after, taken, POLICY)
    assert (decided(expired).decision, decided(expired).retryable) == (Verdict.REJECT, True)
    assert decided(expired).nodes == ()


@pytest.mark.parametrize("how", ["observe", "override"])
def test_what_admits_anyway_cannot_start_on_a_pool_that_nobody_has_or_that_is_too_small(how: str) -> None:
    mode, overrides = (Mode.OBSERVE, {}) if how == "observe" else (Mode.ENFORCE, BY_HAND)
    fleet = view(node("n1"), overrides=overrides)
    for pool, count, code in (("no-such-pool", 1, "UnknownPool"), ("a", 2, "TooFewNodes")):
        after, _ = step(NOW, gate(pool=pool, count=count, mode=mode), fleet, POLICY)
        decision = decided(after)
        assert (decision.decision, decision.retryable, decision.nodes) == (Verdict.REJECT, False, ())
        assert decision.reasons[0].code == code


def test_pending_nodes_are_waited_for_while_there_is_time_and_then_left_out() -> None:
    nodes = [node("n1"), node("n2"), node("n3", state("n3", ()))]
    after, _ = step(NOW, gate(nodes=("n1", "n2", "n3"), min_nodes=2, wait_seconds=200.0), view(*nodes), POLICY)
    assert not after.granted
    after, _ = step(NOW + 170, after, view(*nodes), POLICY)
    assert sorted(after.granted) == ["n1", "n2"]
    assert after.reserved == ("n1", "n2")


def test_a_withdrawn_gate_gives_back_what_it_had() -> None:
    after, _ = step(NOW, gate(nodes=("n1",)), view(node("n1")), POLICY)
    closed, effects = decisions.close(NOW + 1, after, POLICY, Closing.RELEASED, "withdrawn")
    assert decided(closed).reasons[0].code == "Released"
    assert decided(closed).retryable, "not admitted, which is not the same as impossible"
    assert of(RevokeLease, effects)
    assert not closed.held
    assert step(NOW + 2, closed, view(node("n1")), POLICY) == (closed, ())


def test_a_ready_node_with_a_warning_is_not_among_those_that_a_reject_left_out() -> None:
    """Who counts nodes that are left out would count it, as often as another one is bad."""
    warned = node("n1", state("n1", (*good_results()[:2], result("all_reduce", status=Status.WARN, code="SlowLink"))))
    bad = node("n2", state("n2", with_wrong()))
    after, _ = step(NOW, gate(nodes=("n1", "n2")), view(warned, bad), POLICY)
    assert decided(after).decision is Verdict.REJECT
    assert [one.node for one in decided(after).excluded] == ["n2"]


def test_of_many_bad_nodes_the_last_reason_counts_the_rest_and_is_of_no_node() -> None:
    names = tuple(f"n{i:02}" for i in range(40))
    after, _ = step(NOW, gate(nodes=names), view(*(node(name, state(name, with_wrong())) for name in names)), POLICY)
    reasons = decided(after).reasons
    assert (len(reasons), reasons[-1].node, reasons[-1].message) == (32, None, "and 9 more nodes")
    assert all(one.node for one in reasons[:-1])


def test_same_input_same_decision_byte_for_byte() -> None:
    """Rival fault 9."""
    fleet = view(*(node(f"n{i}", state(f"n{i}", with_wrong() if i % 3 else good_results())) for i in range(9)))
    asked = gate(nodes=tuple(f"n{i}" for i in range(9)))
    assert len({wire.encode(decided(step(NOW, asked, fleet, POLICY)[0])) for _ in range(3)}) == 1


def test_a_gate_survives_the_way_to_disk_and_back() -> None:
    after, _ = step(NOW, gate(nodes=("n1", "n2"), min_nodes=1), view(node("n1"), node("n2", state("n2", ()))), POLICY)
    assert wire.decode(wire.encode(after), Gate, what="gate") == after


def test_every_default_of_the_policy_is_usable_for_every_tier() -> None:
    assert set(Policy().run_seconds) == set(Tier)
