"""What a gate found out of nodes that it then gave back: others may have had them since, so it is found out anew."""

from __future__ import annotations

import dataclasses

from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate.eligibility import MOST_RUNS
from healthd.aggregator.gate.records import Claim, ClaimKind, Gate, Phase
from healthd.core.model import OrderReport, Verdict
from tests.aggregator.lab import Lab
from tests.aggregator.world import NOW, POLICY, gate, good_results, node, state, step, view

ELSEWHERE = Claim(kind=ClaimKind.LEASED, gate="g-9", job="other", attempt=0)


class Losing(Lab):
    """The node `lost` is not heard."""

    lost = ""

    def _node(self, name: str, current: Gate) -> FleetNode:
        found = super()._node(name, current)
        return dataclasses.replace(found, heard_seconds=1e6) if name == self.lost else found


def test_nodes_that_passed_together_before_they_were_given_back_are_validated_again() -> None:
    lab = Losing(("n1", "n2", "n3"))
    lab.claims["n3"] = ELSEWHERE  # it may be given back, so the gate waits
    current = lab.ask(pool="a", count=2)
    while current.phase is not Phase.GRANTING:
        current = lab.step(current)
    lab.lost = "n2"
    current = lab.step(current)
    assert (current.phase, current.reserved) == (Phase.WAITING, ())
    lab.lost = ""
    decision = lab.decide(current)
    assert decision.decision is Verdict.ADMIT
    assert [set(group) for group in lab.groups] == [{"n1", "n2"}] * 2


def test_nodes_that_were_never_given_back_are_validated_once() -> None:
    lab = Lab(("n1", "n2", "n3"), bad={"n3": "corrupt"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2", "n3"), min_nodes=2))
    assert decision.decision is Verdict.ADMIT
    assert [set(group) for group in lab.groups].count({"n1", "n2", "n3"}) == 1


DONE = OrderReport(status="done")
SILENT = {"heard_seconds": 1e6}


def aged(name: str, age: float, **changed: object) -> FleetNode:
    """A node whose good evidence is so many seconds old."""
    return node(name, state(name, good_results(age)), **changed)


class Aging:
    """A gate that wants n1 and n2 with fresh evidence, and waits for an hour; n3 is another job's."""

    def __init__(self) -> None:
        self.now = NOW
        self.gate = gate(pool="a", count=2, max_age_seconds=60.0, wait_seconds=3600.0)
        self.orders: list[str] = []

    def step(self, *nodes: FleetNode, after: float = 10.0) -> None:
        self.now += after
        seen = view(*nodes, node("n3"), claims={"n3": ELSEWHERE})
        self.gate, _ = step(self.now, self.gate, seen, POLICY)
        run = self.gate.ordered.get("n1")
        if run is not None and run.order_id not in self.orders:
            self.orders.append(run.order_id)

    def done(self, name: str, age: float, **changed: object) -> FleetNode:
        """It has done the run that it was ordered."""
        return aged(name, age, orders={self.gate.ordered[name].order_id: DONE}, **changed)


def test_run_of_before_a_node_was_given_back_counts_by_its_age_alone() -> None:
    waits = Aging()
    waits.step(aged("n1", 100.0), aged("n2", 100.0))
    assert set(waits.gate.ordered) == {"n1", "n2"}
    waits.step(waits.done("n1", 1.0), aged("n2", 100.0, **SILENT))
    assert waits.gate.reserved == ()
    waits.step(aged("n1", 1.0, behind_seconds=190.0), aged("n2", 1.0), after=190.0)
    assert waits.gate.phase is Phase.CHECKING
    assert waits.gate.ordered["n1"].round == 2


def test_run_counts_for_a_gate_as_long_as_it_has_the_node() -> None:
    waits = Aging()
    waits.step(aged("n1", 100.0), aged("n2", 100.0))
    waits.step(waits.done("n1", 1.0), aged("n2", 100.0))
    assert waits.gate.reserved == ("n1", "n2")
    waits.step(aged("n1", 1.0, behind_seconds=190.0), waits.done("n2", 1.0), after=190.0)
    assert set(waits.gate.granted) == {"n1", "n2"}


def test_gate_that_gave_a_node_back_runs_it_again_as_often_as_others_fall_silent() -> None:
    waits = Aging()
    old, fit = aged("n1", 100.0), aged("n2", 1.0)
    for _ in range(4):
        waits.step(old, fit, after=100.0)
        assert set(waits.gate.reserved) == {"n1", "n2"}
        waits.step(waits.done("n1", 1.0), aged("n2", 1.0, **SILENT))
        assert waits.gate.reserved == ()
    waits.step(old, fit, after=100.0)
    waits.step(waits.done("n1", 1.0), fit)
    assert waits.gate.phase is Phase.GRANTING
    assert len(waits.orders) == 5, "no order's id is used twice"


def test_runs_that_are_called_off_for_the_sake_of_others_do_not_count_either() -> None:
    waits = Aging()
    old, fit = aged("n1", 100.0), aged("n2", 1.0)
    for _ in range(4):
        waits.step(old, fit, after=100.0)
        assert set(waits.gate.reserved) == {"n1", "n2"}
        waits.step(old, aged("n2", 1.0, **SILENT))
    assert len(waits.orders) == 4


def test_node_that_falls_silent_after_its_runs_is_run_again() -> None:
    waits = Aging()
    old = {name: aged(name, 100.0) for name in ("n1", "n2")}
    for _ in range(4):
        waits.step(old["n1"], old["n2"], after=100.0)
        assert set(waits.gate.reserved) == {"n1", "n2"}
        waits.step(waits.done("n1", 1.0), old["n2"])
        waits.step(aged("n1", 100.0, **SILENT), old["n2"])
    assert len(waits.orders) == 4


def test_runs_since_a_node_was_given_back_are_bounded() -> None:
    waits = Aging()
    old = {name: aged(name, 100.0) for name in ("n1", "n2")}
    refused = OrderReport(status="refused", message="somebody has the devices")

    def refuse() -> None:
        run = waits.gate.ordered["n1"]
        waits.step(aged("n1", 100.0, orders={run.order_id: refused}), old["n2"])

    waits.step(old["n1"], old["n2"])
    refuse()
    waits.step(old["n1"], aged("n2", 100.0, **SILENT))
    waits.step(old["n1"], old["n2"], after=100.0)
    for _ in range(3):
        assert waits.gate.failed == {}
        refuse()
    assert set(waits.gate.failed) == {"n1"}
    assert len(waits.orders) == 5


def test_node_that_falls_silent_in_every_run_is_not_run_for_ever() -> None:
    waits = Aging()
    old = {name: aged(name, 100.0) for name in ("n1", "n2")}
    for _ in range(5):
        waits.step(old["n1"], old["n2"], after=100.0)
        waits.step(aged("n1", 100.0, **SILENT), old["n2"])
    assert waits.gate.reserved == ()
    assert len(waits.orders) == MOST_RUNS


def test_node_that_is_not_waited_for_any_longer_is_not_run_in_every_step() -> None:
    slow = aged("n3", 100.0)
    current = gate(nodes=("n1", "n2", "n3"), min_nodes=2, max_age_seconds=60.0, wait_seconds=200.0)
    orders, now = set(), NOW
    while current.decision is None:
        current, _ = step(now, current, view(node("n1"), node("n2"), slow), POLICY)
        orders.add(current.ordered["n3"].order_id)
        now += 1.0
    assert len(orders) <= MOST_RUNS
