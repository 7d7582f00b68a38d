"""What a gate found out of nodes that it then gave back: others may have had them since, so it is found out anew."""

from __future__ import annotations

import dataclasses

from healthd.aggregator.model.claims import Claim, ClaimKind
from healthd.aggregator.model.gates import Gate, Phase
from healthd.aggregator.model.nodes import FleetNode
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


def test_run_of_before_a_node_was_given_back_counts_by_its_age_alone() -> None:
    claims = {"n3": ELSEWHERE}
    old, fresh = state("n1", good_results(100.0)), state("n1", good_results(1.0))
    other_old, other = state("n2", good_results(100.0)), state("n2", good_results(1.0))
    asked = gate(pool="a", count=2, max_age_seconds=60.0)
    both = (node("n1", old), node("n2", other_old), node("n3"))
    current, _ = step(NOW, asked, view(*both, claims=claims), POLICY)
    assert set(current.ordered) == {"n1", "n2"}
    done = {current.ordered["n1"].order_id: OrderReport(status="done")}
    seen = view(node("n1", fresh, orders=done), node("n2", other_old, heard_seconds=1e6), node("n3"), claims=claims)
    current, _ = step(NOW + 10, current, seen, POLICY)
    assert current.reserved == ()
    seen = view(node("n1", fresh, behind_seconds=190.0), node("n2", other), node("n3"), claims=claims)
    current, _ = step(NOW + 200, current, seen, POLICY)
    assert current.phase is Phase.CHECKING
    assert current.ordered["n1"].round == 2


def test_run_counts_for_a_gate_as_long_as_it_has_the_node() -> None:
    claims = {"n3": ELSEWHERE}
    old, fresh = state("n1", good_results(100.0)), state("n1", good_results(1.0))
    other_old, other = state("n2", good_results(100.0)), state("n2", good_results(1.0))
    asked = gate(pool="a", count=2, max_age_seconds=60.0)
    both = (node("n1", old), node("n2", other_old), node("n3"))
    current, _ = step(NOW, asked, view(*both, claims=claims), POLICY)
    done = {run.order_id: OrderReport(status="done") for run in current.ordered.values()}
    seen = view(node("n1", fresh, orders=done), node("n2", other_old), node("n3"), claims=claims)
    current, _ = step(NOW + 10, current, seen, POLICY)
    assert current.reserved == ("n1", "n2")
    seen = view(node("n1", fresh, behind_seconds=190.0), node("n2", other, orders=done), node("n3"), claims=claims)
    current, _ = step(NOW + 200, current, seen, POLICY)
    assert set(current.granted) == {"n1", "n2"}
