"""When a group under test is called off: who is slow to start, who does not find the others, who is not heard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.validation.groups import orders_of
from healthd.aggregator.validation.plan import advance, begin
from healthd.aggregator.validation.records import Group, Validation
from healthd.core.model import RANK_READY, OrderReport, RankReport
from healthd.localize.model import Outcome
from tests.aggregator.lab import POLICY, inventory
from tests.aggregator.world import NOW, node, state

NAMES = ("n1", "n2", "n3")
START, JOIN = POLICY.collective_start_seconds, POLICY.collective_join_seconds


class Course:
    """A validation of three nodes with a rank each, and what they have reported last."""

    def __init__(self) -> None:
        self.last: dict[str, str] = {}
        self.ended: dict[str, OrderReport] = {}
        self.unheard: dict[str, float] = {}
        self.heard = set(NAMES)
        self.validation = begin(NOW, "v", NAMES, self.nodes(), POLICY, deadline=NOW + 300)
        self.at(0)

    @property
    def group(self) -> Group:
        (group,) = self.validation.groups
        return group

    def nodes(self) -> Mapping[str, FleetNode]:
        found = {}
        for name in NAMES:
            stored = dataclasses.replace(state(name), inventory=inventory(1), peer_address="10.0.0.1")
            orders = {}
            if name in self.heard and name in self.last:
                rank = RankReport(rank=NAMES.index(name), target="cpu:0", check="all_reduce", events=0)
                events = 0 if self.last[name] in ("", RANK_READY) else 1
                rank = dataclasses.replace(rank, last=self.last[name], events=events)
                orders[self.group.order_id(name)] = OrderReport(status="running", ranks=(rank,))
            if name in self.ended:
                orders[self.group.order_id(name)] = self.ended[name]
            found[name] = node(name, stored, orders=orders, heard_seconds=self.unheard.get(name, 1.0))
        return found

    def at(self, seconds: float) -> Validation:
        """Go on at so many seconds after the start."""
        self.validation = advance(NOW + seconds, self.validation, self.nodes(), POLICY, lambda count: ()).validation
        return self.validation

    def say(self, *last: str) -> None:
        self.last = dict(zip(NAMES, last, strict=True))

    def call_off(self, seconds: float) -> None:
        """Every node does as the withdrawn orders say."""
        for name in NAMES:
            (order,) = orders_of(self.validation, name, POLICY, workload="train")
            assert order.withdrawn
            slow = not self.last[name]
            rank = RankReport(
                rank=NAMES.index(name),
                target="cpu:0",
                check="all_reduce",
                events=int(self.last[name] not in ("", RANK_READY)),
                last=self.last[name],
                reason="StartFailed" if slow else "Cancelled",
            )
            self.ended[name] = OrderReport(status="cancelled", ranks=(rank,))
        self.at(seconds)


def test_nodes_wait_for_one_that_is_slow_to_start_and_then_have_all_the_time_to_join() -> None:
    course = Course()
    course.say("rendezvous/peers joined", "rendezvous/peers joined", "")
    course.at(START - 1)
    assert not course.group.closed
    course.say("rendezvous/peers joined", "rendezvous/peers joined", RANK_READY)
    course.at(START - 0.5)
    course.at(START + JOIN - 1)
    assert not course.group.closed
    course.at(START - 0.5 + JOIN)
    assert course.group.closed


def test_node_that_does_not_start_in_time_is_left_out_and_not_at_fault() -> None:
    course = Course()
    course.say("rendezvous/peers joined", "rendezvous/peers joined", "")
    course.at(START)
    assert course.group.closed
    course.call_off(START + 1)
    (tested,) = course.validation.history
    assert tested.outcome is Outcome.UNKNOWN
    assert set(tested.unfit) == {"n3"}
    assert tested.accused == {}


def test_rank_that_is_up_and_does_not_come_is_absent() -> None:
    course = Course()
    course.say("rendezvous/peers joined", "rendezvous/peers joined", RANK_READY)
    course.at(1)
    course.at(1 + JOIN)
    course.call_off(2 + JOIN)
    (tested,) = course.validation.history
    assert tested.outcome is Outcome.FAIL
    assert tested.accused["n3"].code == "RankAbsent"


def test_group_that_is_whole_is_given_the_time_that_its_operation_may_take() -> None:
    course = Course()
    course.say(*["all_reduce/1024 entered"] * 3)
    course.at(1)
    course.at(1 + START + JOIN)
    assert not course.group.closed


def test_node_that_falls_silent_in_the_middle_is_not_waited_for_to_the_end() -> None:
    course = Course()
    course.say(*["all_reduce/1024 entered"] * 3)
    course.at(1)
    course.unheard["n2"] = POLICY.silent_seconds + 1
    course.at(2)
    course.at(2 + POLICY.tuning.collective_grace_seconds)
    assert course.group.closed


def test_nodes_that_did_not_come_back_to_a_restarted_aggregator_yet_are_not_late() -> None:
    course = Course()
    course.say(*[RANK_READY] * 3)
    course.at(1)
    course.heard = {"n1"}
    course.at(1 + JOIN)
    assert not course.group.closed
