"""What a gate makes of collectives over its nodes: who is named, who is spared, who starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checks.contract import Blame, Status
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate.records import Accuse, Gate, Phase, RevokeLease
from healthd.core import wire
from healthd.core.model import Decision, Verdict
from healthd.localize.model import Outcome
from tests.aggregator.lab import POLICY, TOOL_FAILURES, VICTIMS_WORDS, Lab
from tests.every import every

ENDS_WITHIN = ("raised", "no data", "garbage", "internal error", "exits", "told to end", "guard told to end")
"""Of `TOOL_FAILURES`, those in the middle of the collectives for which nothing is named that was missing."""
FOUR = ("n1", "n2", "n3", "n4")
SIX = ("n1", "n2", "n3", "n4", "n5", "n6")


def codes(decision: Decision) -> dict[str, str]:
    return {one.node: one.reasons[0].code for one in decision.excluded if one.reasons}


def included(decision: Decision) -> list[str]:
    return [one.node for one in decision.nodes]


def test_nodes_that_pass_together_are_admitted_after_one_group() -> None:
    lab = Lab(FOUR)
    decision = lab.decide(lab.ask(nodes=FOUR))
    assert decision.decision is Verdict.ADMIT
    assert lab.groups == [FOUR]
    assert decision.reasons == ()
    assert not lab.claims


def test_one_node_alone_needs_no_collective_over_nodes() -> None:
    lab = Lab(("n1",))
    assert lab.decide(lab.ask(nodes=("n1",))).decision is Verdict.ADMIT
    assert lab.groups == []


def test_a_request_can_do_without_collectives() -> None:
    lab = Lab(FOUR, bad={"n2": "corrupt"})
    assert lab.decide(lab.ask(nodes=FOUR, collective=False)).decision is Verdict.ADMIT
    assert lab.groups == []


@every("kind", ["corrupt", "hang", "die", "absent", "slow"])
@every("culprit", ["n1", "n3", "n6"])
def test_the_culprit_is_named_and_alone_and_the_job_is_rejected(kind: str, culprit: str) -> None:
    lab = Lab(SIX, bad={culprit: kind})
    decision = lab.decide(lab.ask(nodes=SIX))
    assert decision.decision is Verdict.REJECT
    assert decision.retryable
    assert codes(decision) == {culprit: "SlowNode" if kind == "slow" else "CollectiveFault"}
    assert decision.reasons[0].message.startswith(culprit)
    assert decision.reasons[0].blame is Blame.NODE
    assert lab.accused() == {culprit}
    assert not lab.claims


def test_daemons_without_torch_cannot_run_collectives_and_the_refusal_says_what_to_do() -> None:
    """As with the profile observe and enforced gates."""
    lab = Lab(("n1", "n2", "n3"), bad=dict.fromkeys(("n1", "n2", "n3"), "no torch"))
    decision = lab.decide(lab.ask(nodes=("n1", "n2", "n3")))
    assert (decision.decision, decision.retryable) == (Verdict.REJECT, True)
    first = decision.reasons[0].message
    assert first.startswith("n1, n2, n3 cannot run collectives")
    assert all(one in first for one in ("profile active", "--execute", "policy.collective = false"))


@every("failure", TOOL_FAILURES)
@every("names", [("n1", "n2"), ("n1", "n2", "n3"), SIX])
def test_failure_of_the_tool_itself_takes_out_its_node_and_accuses_none(failure: str, names: tuple[str, ...]) -> None:
    lab = Lab(names, bad={"n2": failure})
    decision = lab.decide(lab.ask(nodes=names, min_nodes=1))
    alone = len(names) == 2 and failure in ENDS_WITHIN
    assert included(decision) == ([] if alone else [name for name in names if name != "n2"])
    (why,) = (one.reasons[0] for one in decision.excluded if one.node == "n2")
    assert why.status is Status.UNKNOWN
    assert why.blame is not Blame.NODE
    assert lab.accused() == set()
    # It is no failed test: nothing was searched for.
    assert len(lab.groups) <= 2


@every("failure", ENDS_WITHIN)
def test_node_alone_after_collectives_that_ended_in_the_middle_does_not_start(failure: str) -> None:
    """Its own part in them is not known, and it has nobody left to show it with."""
    lab = Lab(("n1", "n2"), bad={"n2": failure})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), min_nodes=1))
    assert decision.decision is Verdict.REJECT
    assert decision.retryable
    assert any(one.code == "Undecided" and one.message.startswith("n1 ") for one in decision.reasons)
    assert lab.accused() == set()
    assert not lab.claims


def test_node_alone_whose_rank_died_beside_one_that_lacks_a_tool_does_not_start() -> None:
    lab = Lab(("n1", "n2"), bad={"n1": "die", "n2": "no tool"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), min_nodes=1))
    assert decision.decision is Verdict.REJECT
    assert "RankDied" in [one.code for one in decision.reasons]


@every("failure", ENDS_WITHIN)
def test_node_left_alone_runs_with_idle_ones_and_starts_when_they_pass(failure: str) -> None:
    lab = Lab(SIX, bad={"n2": failure})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), min_nodes=1))
    assert included(decision) == ["n1"]
    assert "n1" in lab.groups[-1]
    assert "n2" not in lab.groups[-1]
    assert len(lab.groups[-1]) > 1
    assert lab.accused() == set()
    assert not lab.claims


@every("idle", [1, 4])
@every("words", VICTIMS_WORDS)
def test_node_left_alone_that_fails_with_idle_ones_too_does_not_start(words: str, idle: int) -> None:
    lab = Lab(SIX[: 2 + idle], bad={"n1": words})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), min_nodes=1))
    assert "n1" not in included(decision)
    assert lab.accused() <= {"n1"}
    assert not lab.claims


def test_node_left_alone_is_not_proven_by_idle_ones_that_cannot_take_part() -> None:
    lab = Lab(("n1", "n2", "n3"), bad={"n2": "raised", "n3": "refuse"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), min_nodes=1))
    assert included(decision) == []
    assert lab.accused() == set()


def test_node_left_alone_is_told_from_a_bad_idle_one_by_a_second_idle_one() -> None:
    lab = Lab(("n1", "n2", "n3", "n4"), bad={"n2": "raised", "n3": "die"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), min_nodes=1))
    assert included(decision) == ["n1"]
    assert lab.accused() <= {"n3"}


def test_node_alone_that_passed_with_another_before_starts() -> None:
    lab = Lab(("n1", "n2", "n3"), bad={"n2": "raised"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2", "n3"), min_nodes=1))
    assert included(decision) == ["n1", "n3"]


@every("words", VICTIMS_WORDS)
@every("culprit", ["n1", "n2"])
@every("names", [("n1", "n2"), ("n1", "n2", "n3"), SIX])
def test_node_that_fails_in_silence_is_never_admitted_for_what_its_peers_say(
    words: str, culprit: str, names: tuple[str, ...]
) -> None:
    lab = Lab(names, bad={culprit: words})
    decision = lab.decide(lab.ask(nodes=names, min_nodes=1))
    assert culprit not in included(decision)
    assert lab.accused() <= {culprit}
    if len(names) > 2:
        assert included(decision) == [name for name in names if name != culprit]
        assert lab.accused() == {culprit}


def test_failures_of_the_tool_in_several_nodes_accuse_none_beside_a_node_at_fault() -> None:
    lab = Lab(SIX, bad={"n2": "raised", "n4": "no data", "n5": "corrupt"})
    decision = lab.decide(lab.ask(nodes=SIX, min_nodes=2))
    assert decision.decision is Verdict.ADMIT
    assert lab.accused() == {"n5"}
    assert included(decision) == ["n1", "n3", "n6"]


@pytest.mark.parametrize("failure", ["no tool", "no permission"])
def test_nodes_without_what_a_check_needs_are_all_left_out_at_once(failure: str) -> None:
    """As after an update that went wrong on some nodes: one validation each would be too many."""
    lab = Lab(SIX, bad=dict.fromkeys(("n1", "n3", "n4", "n5"), failure))
    decision = lab.decide(lab.ask(nodes=SIX, min_nodes=2))
    assert included(decision) == ["n2", "n6"]
    assert lab.accused() == set()
    assert len(lab.groups) == 2


def test_the_rest_starts_where_fewer_nodes_are_enough() -> None:
    lab = Lab(FOUR, bad={"n3": "corrupt"})
    decision = lab.decide(lab.ask(nodes=FOUR, min_nodes=3))
    assert decision.decision is Verdict.ADMIT
    assert included(decision) == ["n1", "n2", "n4"]
    assert codes(decision) == {"n3": "CollectiveFault"}
    # The rest has passed together before it was admitted.
    assert set(lab.groups[-1]) == {"n1", "n2", "n4"}


def test_spares_of_the_pool_take_the_place_of_culprits_and_the_new_whole_is_validated() -> None:
    lab = Lab(SIX, bad={"n2": "die"})
    decision = lab.decide(lab.ask(pool="a", count=4))
    assert decision.decision is Verdict.ADMIT
    assert len(included(decision)) == 4
    assert "n2" not in included(decision)
    assert set(lab.groups[-1]) == set(included(decision))
    assert lab.accused() == {"n2"}


def test_a_borrowed_partner_that_was_found_at_fault_is_no_spare_and_accused_once() -> None:
    lab = Lab(SIX, bad={"n1": "corrupt", "n3": "corrupt"})
    decision = lab.decide(lab.ask(pool="a", count=2))
    assert decision.decision is Verdict.ADMIT
    assert sorted(effect.node for effect in lab.effects if isinstance(effect, Accuse)) == ["n1", "n3"]
    assert set(codes(decision)) == {"n1", "n3"}


def test_an_idle_node_that_cannot_take_part_is_not_borrowed() -> None:
    """Its devices, or its address, are not known: it would end the search and the job with it."""

    class Lame(Lab):
        def _node(self, name: str, current: Gate) -> FleetNode:
            found = super()._node(name, current)
            assert found.state is not None
            changes: dict[str, dict[str, Any]] = {
                "n3": {"inventory": None},
                "n4": {"peer_address": None, "address": None},
            }
            return dataclasses.replace(found, state=dataclasses.replace(found.state, **changes.get(name, {})))

    lab = Lame(("n1", "n2", "n3", "n4", "n5"), bad={"n2": "corrupt"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2")))
    assert codes(decision) == {"n2": "CollectiveFault"}
    assert lab.accused() == {"n2"}


def test_of_two_nodes_without_a_third_neither_is_accused() -> None:
    lab = Lab(("n1", "n2"), bad={"n2": "corrupt"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2")))
    assert decision.decision is Verdict.REJECT
    assert codes(decision) == {"n1": "Ambiguous", "n2": "Ambiguous"}
    assert all(one.reasons[0].blame is Blame.PATH for one in decision.excluded)
    assert lab.accused() == set()


def test_of_two_nodes_an_idle_third_tells_which() -> None:
    lab = Lab(("n1", "n2", "n3"), bad={"n2": "corrupt"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2")))
    assert codes(decision) == {"n2": "CollectiveFault"}
    assert lab.accused() == {"n2"}
    assert any("n3" in group for group in lab.groups)
    assert not lab.claims


@pytest.mark.parametrize("idle", [2, 3, 4])
def test_as_many_idle_nodes_are_borrowed_as_let_all_be_tested_in_pairs(idle: int) -> None:
    lab = Lab(tuple(f"n{i}" for i in range(1, 4 + idle)), bad={"n2": "corrupt"})
    lab.decide(lab.ask(nodes=("n1", "n2", "n3"), min_nodes=2))
    pairs = [group for group in lab.groups if len(group) == 2]
    first = {name for group in pairs[: (3 + idle) // 2] for name in group}
    assert len({name for group in lab.groups for name in group}) == (4 if idle == 2 else 6)
    assert {"n1", "n2", "n3"} <= first
    assert lab.accused() == {"n2"}


def test_an_idle_node_that_a_validation_named_before_is_not_borrowed() -> None:
    lab = Lab(("n1", "n2", "n3", "n4"), bad={"n2": "corrupt", "n3": "die"}, doubted=("n3",))
    decision = lab.decide(lab.ask(nodes=("n1", "n2")))
    assert not any("n3" in group for group in lab.groups)
    assert codes(decision) == {"n2": "CollectiveFault"}
    assert lab.accused() == {"n2"}


@pytest.mark.parametrize("kind", ["silent", "refuse"])
def test_a_borrowed_partner_that_drops_out_does_not_end_the_search(kind: str) -> None:
    lab = Lab(("n1", "n2", "n3", "n4"), bad={"n2": "corrupt", "n3": kind})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), min_nodes=1))
    assert any("n3" in group for group in lab.groups)
    assert codes(decision) == {"n2": "CollectiveFault"}
    assert lab.accused() == {"n2"}
    assert decision.decision is Verdict.ADMIT


def test_a_broken_path_is_named_and_marks_no_node() -> None:
    lab = Lab(SIX, cut=[frozenset(("n2", "n5"))])
    decision = lab.decide(lab.ask(nodes=SIX, min_nodes=5))
    assert decision.decision is Verdict.ADMIT
    assert codes(decision) == {"n5": "PathFault"}
    (excluded,) = decision.excluded
    assert "the path between n2 and n5 is broken" in excluded.reasons[0].message
    assert lab.accused() == set()


def test_nodes_behind_one_switch_are_named_as_a_group() -> None:
    names = tuple(f"n{i:02d}" for i in range(16))
    behind = names[4:8]
    labels = {name: {"switch": "s2" if name in behind else "s1"} for name in names}
    cut = [frozenset((a, b)) for a in behind for b in names if b not in behind]
    lab = Lab(names, cut=cut, labels=labels)
    decision = lab.decide(lab.ask(nodes=names, min_nodes=8))
    assert decision.decision is Verdict.ADMIT
    assert set(codes(decision).values()) == {"TopologyFault"}
    assert set(codes(decision)) == set(behind)
    assert lab.accused() == set()


def test_a_node_that_falls_silent_is_left_out_and_not_accused() -> None:
    lab = Lab(FOUR, bad={"n4": "silent"})
    began = lab.now
    decision = lab.decide(lab.ask(nodes=FOUR, min_nodes=3))
    assert decision.decision is Verdict.ADMIT
    assert codes(decision) == {"n4": "Silent"}
    assert lab.accused() == set()
    assert lab.now - began < 60


def test_the_one_node_that_a_verdict_leaves_starts_alone_where_one_is_enough() -> None:
    lab = Lab(("n1", "n2"), bad={"n1": "silent"})
    decision = lab.decide(lab.ask(nodes=("n1", "n2"), min_nodes=1))
    assert decision.decision is Verdict.ADMIT
    assert included(decision) == ["n2"]
    assert codes(decision) == {"n1": "Silent"}


def test_a_node_whose_devices_are_taken_is_left_out_and_not_accused() -> None:
    lab = Lab(FOUR, bad={"n1": "refuse"})
    decision = lab.decide(lab.ask(nodes=FOUR, min_nodes=3))
    assert decision.decision is Verdict.ADMIT
    assert codes(decision) == {"n1": "Busy"}
    assert lab.accused() == set()


def test_a_failure_that_does_not_come_again_is_told_and_accuses_nobody() -> None:
    lab = Lab(FOUR, bad={"n2": "once"})
    decision = lab.decide(lab.ask(nodes=FOUR))
    assert decision.decision is Verdict.ADMIT
    assert [one.code for one in decision.reasons] == ["PassingFault"]
    assert decision.reasons[0].status is Status.WARN
    assert lab.accused() == set()


def test_half_of_the_nodes_bad_is_still_told() -> None:
    lab = Lab(FOUR, bad={"n1": "corrupt", "n4": "hang"})
    decision = lab.decide(lab.ask(nodes=FOUR, min_nodes=2))
    assert decision.decision is Verdict.ADMIT
    assert included(decision) == ["n2", "n3"]
    assert lab.accused() == {"n1", "n4"}


def test_the_search_ends_with_what_is_known_when_time_is_up() -> None:
    policy = dataclasses.replace(POLICY, validation_seconds=2.5)
    lab = Lab(SIX, bad={"n3": "corrupt"}, policy=policy)
    decision = lab.decide(lab.ask(nodes=SIX))
    assert decision.decision is Verdict.REJECT
    assert lab.accused() <= {"n3"}


def test_a_gate_in_the_middle_of_a_search_survives_the_wire_and_goes_on() -> None:
    """An aggregator that restarts reads the gate back from disk and asks its nodes for nothing twice."""
    lab = Lab(SIX, bad={"n3": "corrupt"})
    current = lab.ask(nodes=SIX)
    while current.decision is None:
        current = wire.decode(wire.encode(lab.step(current)), Gate, what="gate")
    assert codes(current.decision) == {"n3": "CollectiveFault"}
    assert len(lab.groups) == len(set(lab.ran))


def test_the_same_search_gives_the_same_verdict() -> None:
    verdicts = []
    for _ in range(2):
        lab = Lab(SIX, bad={"n5": "hang"})
        lab.decide(lab.ask(nodes=SIX))
        verdicts.append((lab.groups, lab.last.validations))
    assert verdicts[0] == verdicts[1]


def test_who_follows_the_gate_is_told_what_runs() -> None:
    lab = Lab(FOUR, bad={"n4": "silent"})
    current = lab.step(lab.ask(nodes=FOUR))
    assert current.phase is Phase.VALIDATING
    current = lab.step(current)
    assert "collectives over 4 nodes, all together" in current.waiting[0].message
    assert "n4" in current.waiting[0].message


def test_outcomes_of_all_groups_are_kept_for_explanation() -> None:
    lab = Lab(FOUR, bad={"n3": "corrupt"})
    lab.decide(lab.ask(nodes=FOUR))
    history = lab.last.validations[-1].history
    assert history[0].outcome is Outcome.FAIL
    assert history[0].members == FOUR
    assert len(history) == len(lab.groups)


def test_a_request_without_a_lease_only_answers() -> None:
    lab = Lab(FOUR)
    decision = lab.decide(lab.ask(nodes=FOUR, lease=False))
    assert decision.decision is Verdict.ADMIT
    assert included(decision) == list(FOUR)
    assert lab.last.granted == {}
    assert not lab.claims


class Losing(Lab):
    """Nodes that are `lost` were not heard for long."""

    lost: tuple[str, ...] = ()

    def _node(self, name: str, current: Gate) -> FleetNode:
        found = super()._node(name, current)
        return dataclasses.replace(found, heard_seconds=1e3) if name in self.lost else found


def test_nodes_that_remain_when_one_is_lost_under_its_lease_run_together_again_without_leases() -> None:
    lab = Losing(FOUR)
    current = lab.ask(nodes=FOUR, min_nodes=3)
    while len(current.granted) < len(FOUR):
        current = lab.step(current)
    first = {grant.lease_id for grant in current.granted.values()}
    lab.lost = ("n2",)
    after = lab.step(current)
    assert after.granted == {}, "under a lease a node runs nothing"
    assert {effect.node for effect in lab.effects if isinstance(effect, RevokeLease)} == set(FOUR)
    decision = lab.decide(after)
    assert decision.decision is Verdict.ADMIT
    assert included(decision) == ["n1", "n3", "n4"]
    assert lab.groups == [FOUR, ("n1", "n3", "n4")]
    assert first.isdisjoint(grant.lease_id for grant in lab.last.granted.values())
