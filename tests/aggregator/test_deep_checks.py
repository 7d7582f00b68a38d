"""Deep checks over nodes while nodes are upgraded: what some do not know is left out, and that is said."""

from __future__ import annotations

import dataclasses

from checks.contract import Status, Tier
from healthd.core.model import ValidationKind, Verdict
from tests.aggregator.lab import POLICY, Lab

OWN = "own_steps"  # judged as all_reduce is, which the lab's nodes answer to
DEEP = dataclasses.replace(POLICY, collective_deep_checks=(OWN,))
KNOWN = {"n1": (OWN,), "n2": (OWN,)}


def test_deep_gate_leaves_out_what_an_old_node_does_not_know_and_says_so() -> None:
    lab = Lab(("n1", "n2", "n3"), policy=DEEP, knows=KNOWN)
    decision = lab.decide(lab.ask(nodes=("n1", "n2", "n3"), tier=Tier.DEEP))
    assert decision.decision is Verdict.ADMIT
    (note,) = decision.reasons
    assert (note.code, note.status) == ("CheckUnknown", Status.WARN)
    assert f"n3 does not have {OWN}: upgrade it" in note.message
    (validation,) = lab.last.ended
    assert validation.checks == ("all_reduce",)


def test_deep_gate_of_nodes_that_all_know_it_runs_it() -> None:
    lab = Lab(("n1", "n2"), policy=DEEP, knows=KNOWN)
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), tier=Tier.DEEP))
    assert (decision.decision, decision.reasons) == (Verdict.ADMIT, ())
    assert lab.last.ended[0].checks == ("all_reduce", OWN)


def test_training_steps_that_a_node_does_not_know_are_refused_with_its_name() -> None:
    lab = Lab(("n1", "n2", "n3"), policy=DEEP, knows=KNOWN)
    decision = lab.decide(lab.ask(nodes=("n1", "n2", "n3"), kind=ValidationKind.TRAINING))
    assert decision.decision is Verdict.REJECT
    assert f"n3 does not have {OWN}: upgrade it" in decision.reasons[0].message
    assert lab.groups == []
    assert lab.accused() == set()


def test_idle_node_that_does_not_know_the_check_is_no_partner() -> None:
    names = ("n1", "n2", "n3", "n4", "n5")
    lab = Lab(names, policy=DEEP, knows={**KNOWN, "n4": (OWN,), "n5": (OWN,)}, bad={"n2": "corrupt"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), kind=ValidationKind.TRAINING))
    assert decision.decision is Verdict.REJECT
    assert lab.accused() == {"n2"}
    partners = {name for group in lab.groups for name in group} - {"n1", "n2"}
    assert partners == {"n4", "n5"}
