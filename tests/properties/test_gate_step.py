"""`step` over any fleet: total, deterministic, level-triggered, and never an admission without evidence."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from checks.contract import Blame, Status, Tier
from healthd.aggregator.engine.admission import new_gate
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate.records import Claim, ClaimKind, Gate, GrantLease, Phase, RunStatus, WakeAt
from healthd.core import wire
from healthd.core.model import Allocation, CheckResult, GateRequest, Mode, OrderReport, Verdict
from tests.aggregator.world import NOW, POLICY, good_results, lease, node, result, state, step, view
from tests.profile import examples

NAMES = ("n1", "n2", "n3", "n4")
ages = st.sampled_from([0.0, 5.0, 3599.0, 3601.0, math.nan, math.inf])


@st.composite
def results(draw: st.DrawFn) -> tuple[CheckResult, ...]:
    if draw(st.booleans()):
        return good_results(draw(ages))
    status = draw(st.sampled_from(list(Status)))
    code = (
        None if status is Status.PASS else draw(st.sampled_from(["WrongResult", "Busy", "NotApplicable", "SlowLink"]))
    )
    blame = draw(st.sampled_from([None, *Blame]))
    one = result(
        "matmul", age=draw(ages), status=status, code=code, blame=blame, tier=draw(st.sampled_from(list(Tier)))
    )
    others = draw(st.sampled_from([good_results(), good_results()[:1], ()]))
    return (*(r for r in others if r.check != "matmul"), one)


@st.composite
def nodes(draw: st.DrawFn, name: str) -> FleetNode:
    used = draw(st.sampled_from([(), (), (), (Allocation(by="process", holder="pid 7"),)]))
    mine = draw(st.sampled_from([(), (), (lease(f"g-1:lease:1:{name}", gate_id="g-1"),), (lease("other"),)]))
    report = st.builds(OrderReport, status=st.sampled_from(["accepted", "running", "done", "refused", "cancelled"]))
    ids = st.sampled_from([f"g-1:run:1:{name}", f"g-1:run:2:{name}", f"g-1:lease:1:{name}"])
    return node(
        name,
        state(name, draw(results()), allocated=used, leases=mine),
        behind_seconds=draw(st.sampled_from([0.0, 1.0, 4000.0])),
        heard_seconds=draw(st.sampled_from([None, 0.0, 1.0, 59.0, 61.0])),
        confirmed=draw(st.sampled_from([True, True, True, False])),
        duplicate=draw(st.sampled_from([False, False, False, True])),
        orders=draw(st.dictionaries(ids, report, max_size=2)),
    )


fleets = st.tuples(*(st.one_of(st.none(), nodes(name)) for name in NAMES))
asked = st.one_of(
    st.builds(
        lambda names, mode: GateRequest(job="train", nodes=tuple(names), mode=mode),
        st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        st.sampled_from(list(Mode)),
    ),
    st.builds(lambda count: GateRequest(job="train", pool="a", count=count, min_nodes=1), st.integers(1, 5)),
)
times = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 29.0, 31.0, 301.0]), fleets), min_size=1, max_size=5)


def lasting(effects: tuple[object, ...]) -> list[object]:
    return [effect for effect in effects if not isinstance(effect, WakeAt)]


@settings(max_examples=examples(250), deadline=None)
@given(request=asked, story=times)
def test_any_story_keeps_the_promises(
    request: GateRequest, story: list[tuple[float, tuple[FleetNode | None, ...]]]
) -> None:
    gate, now = new_gate("g-1", request, POLICY, NOW), NOW
    for seconds, fleet in story:
        now += seconds
        seen = view(*(plausible(n, gate) for n in fleet if n is not None))
        before = gate
        gate, effects = step(now, before, seen, POLICY)
        # The same input, the same output, byte for byte; and stepping again asks for nothing new.
        assert (gate, effects) == step(now, before, seen, POLICY)
        assert lasting(step(now, gate, seen, POLICY)[1]) == []
        # What is on disk goes on as what is in memory.
        assert wire.decode(wire.encode(gate), Gate, what="gate") == gate
        assert (gate.phase is Phase.DECIDED) == (gate.decision is not None)
        if gate.decision is None:
            assert gate.waiting, "a gate that holds says why"
            assert any(isinstance(effect, WakeAt) and effect.at > now for effect in effects)
            continue
        assert gate.decision.decision is not Verdict.HOLD
        assert gate.decision.reasons or gate.decision.decision is Verdict.ADMIT
        # Each node that was asked for is given, well or left out, and is only one of these.
        parts = (gate.decision.nodes, gate.decision.well, gate.decision.excluded)
        told = [one.node for part in parts for one in part]
        assert len(told) == len(set(told))
        assert not gate.request.nodes or set(told) == set(gate.request.nodes)
        if gate.decision.decision is Verdict.ADMIT and gate.terms.mode is Mode.ENFORCE:
            for admitted in gate.decision.nodes:
                check_admitted(seen.nodes[admitted.node], now, before)
        break


def plausible(fleet_node: FleetNode, gate: Gate) -> FleetNode:
    """Nodes report on orders that they were given, and hold leases that they were granted."""
    assert fleet_node.state is not None
    given = {run.order_id for run in gate.ordered.values()} | {grant.lease_id for grant in gate.granted.values()}
    held = tuple(le for le in fleet_node.state.leases if le.gate != gate.id or le.id in given)
    orders = {key: report for key, report in fleet_node.orders.items() if key in given}
    return dataclasses.replace(fleet_node, state=dataclasses.replace(fleet_node.state, leases=held), orders=orders)


def check_admitted(fleet_node: FleetNode, now: float, before: Gate) -> None:
    """An oracle of its own: every enabled check passed or does not apply, and is young enough."""
    assert fleet_node.confirmed
    assert not fleet_node.duplicate
    assert fleet_node.state is not None
    assert any(held.gate == "g-1" for held in fleet_node.state.leases)
    leased_for = now - before.granted[fleet_node.node].granted_at
    by_check = {r.check: r for r in fleet_node.state.results}
    for spec in fleet_node.state.checks:
        ran = by_check[spec.name]
        assert ran.age_seconds + fleet_node.behind_seconds <= 3600.0 + leased_for
        if spec.tier is not Tier.PASSIVE:
            assert ran.tier.rank >= Tier.QUICK.rank
        for finding in ran.findings:
            fine = finding.status in (Status.PASS, Status.WARN)
            assert fine or (finding.status is Status.SKIP and finding.reason == "NotApplicable")


@settings(max_examples=examples(150), deadline=None)
@given(fleet=fleets, requests=st.lists(asked, min_size=2, max_size=4))
def test_gates_never_share_a_node(fleet: tuple[FleetNode | None, ...], requests: list[GateRequest]) -> None:
    claims: dict[str, Claim] = {}
    there = [n for n in fleet if n is not None]
    for turn in range(2):
        for number, request in enumerate(requests):
            enforced = dataclasses.replace(request, job=f"job{number}", mode=Mode.ENFORCE)
            gate = new_gate(f"gate-{number}-{turn}", enforced, POLICY, NOW)
            after, effects = step(NOW, gate, view(*there, claims=claims), POLICY)
            for name in after.held:
                assert name not in claims
                claims[name] = Claim(kind=ClaimKind.RESERVED, gate=gate.id, job=enforced.job, attempt=0)
            granted = {effect.node for effect in effects if isinstance(effect, GrantLease)}
            assert granted <= set(after.held)


@settings(max_examples=examples(150), deadline=None)
@given(fleet=fleets, request=asked, code=st.sampled_from(["SlowLink", "MissingTool", "Timeout", "Crashed"]))
def test_a_fault_of_path_tool_or_control_is_never_called_the_nodes(
    fleet: tuple[FleetNode | None, ...], request: GateRequest, code: str
) -> None:
    for blame in (Blame.PATH, Blame.CHECK, Blame.CONTROL):
        results_of = (*good_results()[:2], result("all_reduce", status=Status.FAIL, code=code, blame=blame))
        there = [node(n.node, state(n.node, results_of)) for n in fleet if n is not None]
        gate, _ = step(NOW, new_gate("g-1", request, POLICY, NOW), view(*there), POLICY)
        told = [*gate.waiting, *(r for why in gate.failed.values() for r in why)]
        assert all(r.blame is not Blame.NODE for r in told)
        assert all(run.status is RunStatus.OPEN for run in gate.ordered.values())
