"""
The aggregator and groups that nccom-test runs over: which they are, and what the main node found is the outcome.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checks.contract import Finding, Measurement, Status
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.validation.groups import orders_of
from healthd.aggregator.validation.plan import Step, advance, begin
from healthd.aggregator.validation.records import Validation
from healthd.core import wire
from healthd.core.model import Inventory, NccomGroup, Order, OrderReport
from healthd.localize.model import Outcome
from tests.aggregator.world import NOW, neuron, node, state
from tests.every import every

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
NODES = ("n1", "n2", "n3")
CHECK = "nccom_nodes_all_reduce"
ONE_CHECK = Policy(tuning=Tuning(settle_seconds=0.0), nccom_launch="ssh", collective_checks=("all_reduce",))


@dataclasses.dataclass
class Centre:
    """A validation of three nodes; `told` holds what they report by order, `now` goes on by hand."""

    policy: Policy = ONE_CHECK
    names: tuple[str, ...] = NODES
    inventories: dict[str, Inventory] = dataclasses.field(default_factory=dict)
    addresses: dict[str, str] = dataclasses.field(default_factory=lambda: dict(zip(NODES, ADDRESSES, strict=True)))
    told: dict[str, dict[str, OrderReport]] = dataclasses.field(default_factory=dict)
    now: float = NOW

    def __post_init__(self) -> None:
        self.validation = begin(self.now, "g-1:c0", self.names, self.nodes(), self.policy, deadline=self.now + 600)
        self.go()

    def nodes(self) -> dict[str, FleetNode]:
        found = {}
        for name in self.names:
            known = dataclasses.replace(
                state(name),
                inventory=self.inventories.get(name, neuron()),
                peer_address=self.addresses[name],
            )
            found[name] = node(name, known, orders=self.told.get(name, {}))
        return found

    def go(self, seconds: float = 0.0) -> Validation:
        self.now += seconds
        step: Step = advance(self.now, self.validation, self.nodes(), self.policy, lambda _: ())
        self.validation = step.validation
        # It is a part of its gate, and goes to disk with it.
        assert wire.decode(wire.encode(self.validation), Validation, what="validation") == self.validation
        return self.validation

    def orders(self, name: str) -> tuple[Order, ...]:
        return orders_of(self.validation, name, self.policy, workload="train")

    def says(self, name: str, report: OrderReport, order_id: str | None = None) -> None:
        key = order_id or self.orders(name)[0].id
        self.told.setdefault(name, {})[key] = report

    def all_run(self) -> None:
        for name in self.names:
            self.says(name, OrderReport(status="running"))
        self.go(0.1)


def test_nodes_are_told_of_the_group() -> None:
    centre = Centre()
    (told,) = centre.orders("n2")
    assert told.collective is not None
    assert told.collective.nccom == NccomGroup(mode="ssh", hosts=ADDRESSES, nodes=NODES)
    assert (told.collective.checks, told.collective.main, told.collective.size) == ((CHECK,), ADDRESSES[0], 6)


def test_end_of_the_main_node_withdraws_the_orders_of_all() -> None:
    centre = Centre()
    centre.all_run()
    assert not any(centre.orders(name)[0].withdrawn for name in NODES)
    centre.says("n1", OrderReport(status="done", findings={CHECK: (passed(),)}))
    centre.go(0.1)
    assert all(centre.orders(name)[0].withdrawn for name in NODES)


def test_node_that_refuses_takes_no_part_and_is_not_accused() -> None:
    centre = Centre()
    centre.all_run()
    centre.says("n2", OrderReport(status="refused", message="the devices are taken"))
    centre.go(0.1)
    centre.go(centre.policy.tuning.collective_grace_seconds)
    for name in ("n1", "n3"):
        centre.says(name, OrderReport(status="cancelled"), centre.validation.groups[0].order_id(name))
    (tested,) = centre.go(0.1).history
    assert set(tested.unfit) == {"n2"}
    assert "the devices are taken" in tested.unfit["n2"].message
    assert not tested.accused


def passed(status: Status = Status.PASS, reason: str | None = None) -> Finding:
    measured = Measurement(name=f"{CHECK}_duration_seconds", value=1.0, lower=None, upper=None, origin="none")
    return Finding(status=status, reason=reason, message="what was found", target="node", measurements=(measured,))


WITHOUT_A_NUMBER = Finding(status=Status.PASS, reason=None, message="all is well", target="node")


@every(
    ("findings", "outcome"),
    [
        ([passed()], Outcome.PASS),
        ([passed(Status.WARN, "SlowLink")], Outcome.PASS),
        ([passed(), passed(Status.FAIL, "CollectiveMismatch")], Outcome.FAIL),
        ([passed(Status.FAIL, "Timeout")], Outcome.FAIL),
        ([passed(Status.FAIL, "SlowLink"), passed()], Outcome.SLOW),
        ([passed(Status.FAIL, "SlowLink"), passed(Status.FAIL, "CollectiveFailed")], Outcome.FAIL),
        ([passed(Status.UNKNOWN, "Garbage")], Outcome.UNKNOWN),
        ([passed(Status.UNKNOWN, "CheckError")], Outcome.UNKNOWN),
        ([passed(), passed(Status.UNKNOWN, "NoData")], Outcome.UNKNOWN),
        ([passed(Status.SKIP, "Busy")], Outcome.UNKNOWN),
        ([WITHOUT_A_NUMBER], Outcome.UNKNOWN),
        ([], Outcome.UNKNOWN),
    ],
)
def test_what_the_main_node_found_is_the_outcome_and_accuses_nobody(findings: list[Finding], outcome: Outcome) -> None:
    centre = Centre()
    centre.all_run()
    centre.says("n1", OrderReport(status="done", findings={CHECK: tuple(findings)} if findings else {}))
    centre.go(0.1)
    for name in NODES[1:]:
        centre.says(name, OrderReport(status="cancelled"), centre.validation.groups[0].order_id(name))
    tested = centre.go(0.1).history[0]
    assert (tested.outcome, tested.accused) == (outcome, {})
    assert set(tested.unfit) == ({"n1"} if outcome is Outcome.UNKNOWN else set())
    assert outcome is Outcome.PASS or tested.reasons


def test_node_that_falls_silent_gives_no_pass() -> None:
    centre = Centre()
    centre.all_run()
    centre.says("n1", OrderReport(status="done", findings={CHECK: (passed(),)}))
    centre.go(0.1)
    centre.says("n2", OrderReport(status="cancelled"), centre.validation.groups[0].order_id("n2"))
    (tested,) = centre.go(10.0).history
    assert (tested.outcome, tested.silent) == (Outcome.UNKNOWN, ("n3",))


def test_main_node_that_failed_is_searched_for_in_pairs() -> None:
    centre = Centre()
    centre.all_run()
    centre.says("n1", OrderReport(status="done", findings={CHECK: (passed(Status.FAIL, "CollectiveFailed"),)}))
    centre.go(0.1)
    for name in NODES[1:]:
        centre.says(name, OrderReport(status="cancelled"), centre.validation.groups[0].order_id(name))
    centre.go(0.1)
    (pair,) = centre.validation.groups
    assert len(pair.hosts) == 2
    assert pair.hosts[0] == pair.main == centre.addresses[pair.members[0]]


@pytest.mark.parametrize(
    ("launch", "kinds", "found"),
    [
        ("ssh", ("neuron", "neuron", "neuron"), "ssh"),
        ("slurm", ("neuron", "neuron", "neuron"), "slurm"),
        ("ssh", ("neuron", "cpu", "neuron"), None),
        ("ssh", ("cpu", "cpu", "cpu"), None),
        ("off", ("neuron", "neuron", "neuron"), None),
    ],
)
def test_policy_and_devices_say_what_carries(launch: Any, kinds: tuple[str, ...], found: str | None) -> None:
    policy = Policy(tuning=Tuning(settle_seconds=0.0), nccom_launch=launch)
    inventories = {name: neuron(accelerator=kind) for name, kind in zip(NODES, kinds, strict=True)}
    centre = Centre(policy=policy, inventories=inventories)
    assert centre.validation.launch == found
    (told,) = centre.orders("n1")
    assert told.collective is not None
    assert (told.collective.nccom is None) == (found is None)
    assert told.collective.checks[0] == ("all_reduce" if found is None else CHECK)


def test_ranks_of_torch_are_the_default() -> None:
    assert Centre(policy=Policy(tuning=Tuning(settle_seconds=0.0))).validation.launch is None


@pytest.mark.parametrize(
    ("changes", "lame"),
    [
        ({"inventories": {"n3": neuron(4)}}, {"n1", "n2"}),
        ({"addresses": {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.2"}}, {"n2", "n3"}),
    ],
)
def test_nodes_that_do_not_fit_together_are_told_and_start_nothing(changes: dict[str, Any], lame: set[str]) -> None:
    centre = Centre(**changes)
    assert centre.validation.groups == ()
    assert set(centre.validation.history[0].unfit) == lame
