"""The time that compilation takes: ordered runs and groups get it where nodes say that they compile, and only there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from healthd.aggregator.fleet.node_record import joined
from healthd.aggregator.fleet.records import MOST_COMPILE_SECONDS, FleetNode
from healthd.aggregator.gate.records import OrderedRun
from healthd.aggregator.quarantine.counting import SOFT_FAILS, facts_of
from healthd.aggregator.quarantine.judge import COOLDOWN_SECONDS
from healthd.aggregator.validation.groups import orders_of
from healthd.aggregator.validation.plan import advance, begin
from healthd.aggregator.validation.records import Validation
from healthd.core.model import CollectiveOrder, OrderReport, RankReport
from healthd.localize.model import Outcome
from tests.aggregator.lab import POLICY, inventory
from tests.aggregator.ruling import Case, fault
from tests.aggregator.world import NOW, gate, node, state, step, view

NAMES = ("n1", "n2")
BARE = POLICY.collective_start_seconds + POLICY.collective_join_seconds
WORK = POLICY.collective_timeout_seconds * len(POLICY.collective_checks)


def compiling(name: str, seconds: float = 1200.0) -> FleetNode:
    """A node without evidence that compiles what is cold."""
    return node(name, dataclasses.replace(state(name, ()), compile_seconds=seconds))


def run_of(fleet_node: FleetNode) -> OrderedRun:
    after, _ = step(NOW, gate(nodes=(fleet_node.node,)), view(fleet_node), POLICY)
    return after.ordered[fleet_node.node]


def test_an_ordered_run_has_the_time_to_compile_where_the_node_does() -> None:
    usual = run_of(node("n1", state("n1", ()))).deadline_seconds
    assert run_of(compiling("n1")).deadline_seconds == usual + 1200
    after, _ = step(NOW, gate(nodes=("n1",)), view(compiling("n1")), POLICY)
    later, _ = step(NOW + usual + 1, after, view(compiling("n1")), POLICY)
    assert later.ordered["n1"].round == 1
    assert not later.failed, "it is not called off in the middle of it"


def test_a_hook_that_compiles_says_so_for_the_node_whose_daemon_does_not() -> None:
    both = joined(compiling("n1", 0.0), compiling("n1", 1200.0))
    assert both.state is not None
    assert both.state.compile_seconds == 1200.0


def test_no_node_can_hold_an_order_open_by_its_word_for_as_long_as_it_likes() -> None:
    usual = run_of(node("n1", state("n1", ()))).deadline_seconds
    assert run_of(compiling("n1", 1e12)).deadline_seconds == usual + MOST_COMPILE_SECONDS
    assert run_of(compiling("n1", -500.0)).deadline_seconds == usual


class Group:
    """The whole of two nodes with a rank each, of which the second may compile."""

    def __init__(self, *, compile_seconds: float) -> None:
        self.compile_seconds = compile_seconds
        self.reports: dict[str, RankReport] = {}
        self.ended: dict[str, OrderReport] = {}
        self.validation = begin(NOW, "v", NAMES, self.nodes(), POLICY, deadline=NOW + 3600)
        self.at(0)

    def nodes(self) -> Mapping[str, FleetNode]:
        found = {}
        for name in NAMES:
            stored = dataclasses.replace(
                state(name),
                inventory=inventory(1),
                peer_address="10.0.0.1",
                compile_seconds=self.compile_seconds if name == "n2" else 0.0,
            )
            told = self.ended.get(name)
            if name in self.reports and told is None:
                told = OrderReport(status="running", ranks=(self.reports[name],))
            orders = {f"v.0:{name}": told} if told is not None else {}
            found[name] = node(name, stored, orders=orders)
        return found

    def at(self, seconds: float) -> Validation:
        self.validation = advance(NOW + seconds, self.validation, self.nodes(), POLICY, lambda count: ()).validation
        return self.validation

    def all_inside(self, *, cold: bool) -> None:
        for index, name in enumerate(NAMES):
            self.reports[name] = RankReport(
                rank=index,
                target="cpu:0",
                check="all_reduce",
                events=3,
                last="all_reduce/1024 entered",
                cold=cold and name == "n2",
            )

    def order(self, name: str) -> CollectiveOrder:
        (order,) = orders_of(self.validation, name, POLICY, workload="train")
        assert order.collective is not None
        return order.collective

    @property
    def closed(self) -> bool:
        return not self.validation.groups or self.validation.groups[0].closed


def test_all_nodes_of_a_group_wait_for_the_one_that_compiles() -> None:
    group = Group(compile_seconds=900.0)
    assert [group.order(name).compile_seconds for name in NAMES] == [900, 900]
    group.all_inside(cold=True)
    group.at(20)
    group.at(BARE + WORK + 600)
    assert not group.closed
    group.at(BARE + WORK + 900 + 60)
    assert group.closed


def test_a_group_in_which_all_is_compiled_is_called_off_as_soon_as_ever() -> None:
    group = Group(compile_seconds=900.0)
    group.all_inside(cold=False)
    group.at(20)
    group.at(20 + POLICY.collective_join_seconds + WORK - 1)
    assert not group.closed
    group.at(20 + POLICY.collective_join_seconds + WORK + 1)
    assert group.closed


def test_where_nobody_compiles_orders_and_times_are_as_ever() -> None:
    group = Group(compile_seconds=0.0)
    assert group.order("n1").compile_seconds == 0
    assert group.validation.deadline == NOW + POLICY.validation_seconds
    group.all_inside(cold=False)
    group.at(20)
    assert not group.closed


def test_a_cold_node_has_not_taken_part_and_nobody_is_accused_or_searched_for() -> None:
    group = Group(compile_seconds=0.0)
    for index, (name, why) in enumerate(zip(NAMES, ("Cancelled", "ColdCache"), strict=True)):
        rank = RankReport(rank=index, target="cpu:0", check="all_reduce", events=0, reason=why, message="said why")
        group.ended[name] = OrderReport(status="done", ranks=(rank,))
    group.at(5)
    (tested,) = group.validation.history
    assert tested.outcome is Outcome.UNKNOWN
    assert tested.unfit["n2"].code == "ColdCache"
    assert not tested.accused
    assert group.validation.verdict is not None
    assert not group.validation.verdict.culprits


def test_what_the_rules_order_has_the_time_too() -> None:
    case = Case()
    for _ in range(SOFT_FAILS):
        case.result(fault("SlowDevice"))
    told = facts_of(case.now, compiling("n1"), POLICY, room=case.room, person=False, kept=True)
    assert case.last is not None
    case.last = dataclasses.replace(case.last, compile_seconds=told.compile_seconds)
    case.wait(COOLDOWN_SECONDS + 1)
    assert case.record.probe is not None
    assert case.record.probe.deadline_seconds == POLICY.run_seconds[case.record.probe.tier] + 1200
