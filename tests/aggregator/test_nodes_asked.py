"""A decided gate says of each node that was asked for whether it was given, well or left out, and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest

from checks.contract import Status, Tier
from healthd.aggregator.policy import Policy
from healthd.cli.terminal import decisions
from healthd.core.model import Decision, OrderReport
from healthd.core.wire import decode
from tests.aggregator.api_kit import POLICY, living, scenario
from tests.aggregator.lab import POLICY as VALIDATED
from tests.aggregator.lab import Lab
from tests.aggregator.world import NOW, gate, good_results, node, state, step, view, with_wrong
from tests.cli.render_kit import plain

STALE = good_results(4000.0)


def decided(*fleet: Any, at: float = 0.0, policy: Policy | None = None, **request: Any) -> Decision:
    """What a gate decides on this fleet, `at` seconds after it was asked for the first time."""
    policy = policy or dataclasses.replace(POLICY, node_grace_seconds=60.0)
    after = gate(policy, **request)
    for now in dict.fromkeys((NOW, NOW + at)):
        after, _ = step(now, after, view(*fleet), policy)
    assert after.decision is not None
    return after.decision


def shown(decision: Decision) -> tuple[list[str], list[str], list[str]]:
    """Given, well, left out."""
    parts = (decision.nodes, decision.well, decision.excluded)
    return tuple([one.node for one in part] for part in parts)  # type: ignore[return-value]


def test_of_a_rejected_gate_the_good_nodes_are_shown_as_well_and_the_bad_ones_with_why() -> None:
    fleet = (node("n1"), node("n2", state("n2", with_wrong())), node("n3"), node("n4", state("n4", STALE)))
    decision = decided(*fleet, nodes=("n1", "n2", "n3", "n4"))
    assert shown(decision) == ([], ["n1", "n3"], ["n2", "n4"])
    assert [one.evidence_age_seconds for one in decision.well] == [5.0, 5.0]
    assert [one.reasons[0].code for one in decision.excluded] == ["WrongResult", "Stale"]
    assert decision.request is not None
    assert decision.request.nodes == ("n1", "n2", "n3", "n4")


def test_of_an_impossible_gate_the_nodes_that_there_are_are_shown_too() -> None:
    fleet = (node("n1"), node("n2", state("n2", with_wrong())))
    decision = decided(*fleet, at=61.0, nodes=("n1", "n2", "nosuch"))
    assert shown(decision) == ([], ["n1"], ["n2", "nosuch"])
    assert decision.excluded[1].reasons[0].code == "UnknownNode"


def test_a_node_that_was_not_looked_at_to_the_end_is_not_well() -> None:
    fleet = (node("n1"), node("n2", state("n2", STALE), orders={"g-1:run:1:n2": OrderReport(status="running")}))
    decision = decided(*fleet, at=11.0, nodes=("n1", "n2"), wait_seconds=10.0)
    assert shown(decision) == ([], ["n1"], ["n2"])
    assert decision.excluded[0].reasons[0].message.startswith("n2 is running tier quick")


def test_of_a_pool_with_too_few_good_nodes_those_that_are_good_are_shown() -> None:
    fleet = [node(f"n{number}", state(f"n{number}", with_wrong() if number else None)) for number in range(3)]
    assert shown(decided(*fleet, pool="a", count=2)) == ([], ["n0"], ["n1", "n2"])


def test_a_job_that_is_given_nodes_of_a_pool_is_not_told_of_all_the_others_that_are_well() -> None:
    lab = Lab(("n1", "n2", "n3"), policy=dataclasses.replace(VALIDATED, collective=False))
    given, well, out = shown(lab.decide(lab.ask(pool="a", count=1)))
    assert (len(given), well, out) == (1, [], [])


def test_nodes_that_collectives_cleared_are_well_and_the_culprit_is_not() -> None:
    names = ("n1", "n2", "n3", "n4")
    lab = Lab(names, bad={"n3": "corrupt"})
    assert shown(lab.decide(lab.ask(nodes=names))) == ([], ["n1", "n2", "n4"], ["n3"])


@pytest.mark.parametrize(
    ("bad", "codes"),
    [
        ({"n2": "corrupt"}, {"Ambiguous"}),  # two nodes and nobody else: one of them
        ({"n1": "silent", "n2": "silent"}, {"Undecided", "Silent"}),
    ],
)
def test_nodes_that_no_collectives_cleared_are_not_well_and_say_so(bad: dict[str, str], codes: set[str]) -> None:
    lab = Lab(("n1", "n2"), bad=bad)
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), wait_seconds=120.0))
    assert shown(decision) == ([], [], ["n1", "n2"])
    assert {one.reasons[0].code for one in decision.excluded} <= codes


def test_collectives_that_the_deadline_cut_off_make_nobody_well() -> None:
    lab = Lab(("n1", "n2", "n3"), bad={"n2": "silent"})
    current = lab.ask(nodes=lab.names, wait_seconds=600.0)
    while current.validation is None:
        current = lab.step(current)
    after, _ = step(NOW + 601.0, current, lab.view(current), lab.policy)
    assert after.decision is not None
    given, well, out = shown(after.decision)
    assert (given, well, sorted(out)) == ([], [], ["n1", "n2", "n3"])


def test_what_people_read_names_all_nodes_what_was_asked_and_what_was_applied() -> None:
    fleet = (node("n1"), node("n2", state("n2", with_wrong())), node("n3"), node("n4", state("n4", STALE)))
    decision = decided(*fleet, nodes=("n1", "n2", "n3", "n4"), tier=Tier.QUICK, max_age_seconds=60.0)
    in_short = plain(*decisions.decision_report(decision))
    assert "n2: WrongResult" in in_short[1]
    assert in_short[2:] == ["  not verified: n4 (Stale)", "  passed: n1, n3"]
    whole = plain(*decisions.decision_report(decision, whole=True))
    assert whole[1] == "  asked for: n1, n2, n3, n4"
    assert "tier quick (asked for), maximum age of the evidence 60 s (asked for), wait 5 s, " in whole[2]
    assert "  left out: n2 (see above)" in whole
    assert "  left out: n4" in whole
    assert whole[-1] == "  passed: n1, n3"


def test_the_page_and_the_api_of_a_rejected_gate_show_all_nodes(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"), living(client, "n2", status=Status.FAIL):
            question = {"job": "train", "nodes": ["n1", "n2"], "max_age_seconds": 60.0}
            answer = await client.post("/v1/gates?wait=5", json=question)
            decision = decode(answer.content, Decision, what="decision")
            assert shown(decision) == ([], ["n1"], ["n2"])
            kept = (await client.get(f"/v1/gates/{decision.id}/evidence")).json()
            assert sorted(one["node"] for one in kept["states"]) == ["n1", "n2"], "the evidence of both is kept"
            page = (await client.get(f"/gates/{decision.id}")).text
            text = " ".join(page.split())
            assert "Requested: n1, n2. The job got none of them." in text
            assert text.index("<h3>Well</h3>") < text.index('href="/nodes/n1"') < text.index("<h3>Left out</h3>")
            assert "see above" in text, "what is wrong with n2 is told once"
            assert '<th scope="row">maximum age of the evidence</th><td>60 s</td><td>60 s</td>' in text
            assert '<th scope="row">tier</th><td><span class="muted">from the settings</span></td><td>quick' in text

    scenario(test, tmp_path, policy=dataclasses.replace(POLICY, rules=False))


def test_a_pool_gate_that_replaced_a_bad_node_says_so_in_its_answer_and_on_its_page(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1") as (bad,), living(client, "n2"):
            bad.on_run = lambda: bad.changes.update(status=Status.FAIL)
            question = {"job": "train", "pool": "train", "count": 1, "max_age_seconds": 0.001}
            answer = await client.post("/v1/gates?wait=10", json=question)
            decision = decode(answer.content, Decision, what="decision")
            assert [one.node for one in decision.nodes] == ["n2"]
            assert [(one.node, one.reasons[0].code) for one in decision.excluded] == [("n1", "WrongResult")]
            assert "  left out: n1" in plain(*decisions.decision_report(decision))
            text = (await client.get(f"/gates/{decision.id}")).text
            assert "WrongResult" in text[text.index("<h3>Left out</h3>") :]
            assert "Nothing speaks against it" not in text
            assert "old when the gate ordered the check or granted the lease" in text

    scenario(test, tmp_path, policy=dataclasses.replace(POLICY, rules=False))
