"""
The aggregator and groups that nccom-test runs over: it carries planned launches to their nodes and nothing else, and
what the main node found is the outcome.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checks.contract import Finding, Measurement, Status
from healthd.aggregator.model.nodes import FleetNode
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.validations import Validation
from healthd.aggregator.validation.groups import orders_of
from healthd.aggregator.validation.plan import Step, advance, begin
from healthd.core import wire
from healthd.core.model import DeviceRecord, Inventory, Launch, LaunchOrder, NccomGroup, Order, OrderReport
from healthd.localize.model import Outcome
from tests.aggregator.world import NOW, node, state
from tests.runner.launch_kit import (
    ADDRESSES,
    CHECK,
    NODES,
    hostile,
    launch,
)


def neuron(ranks: int = 2, accelerator: str = "neuron") -> Inventory:
    record = DeviceRecord(target="neuron:0", kind="Trainium", serial=None, cores=ranks, memory_bytes=None)
    return Inventory(
        accelerator=accelerator,
        device_count=1,
        core_count=ranks,
        memory_bytes=None,
        efa_count=None,
        devices=(record,),
        workers=tuple(f"neuroncore:{i}" for i in range(ranks)),
    )


ONE_CHECK = Policy(settle_seconds=0.0, collective_checks=("all_reduce",))


@dataclasses.dataclass
class Centre:
    """A validation of three nodes; `told` holds what they report by order, `now` goes on by hand."""

    policy: Policy = ONE_CHECK
    names: tuple[str, ...] = NODES
    inventories: dict[str, Inventory] = dataclasses.field(default_factory=dict)
    unwilling: tuple[str, ...] = ()
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
                carriers=("torch", *(() if name in self.unwilling else ("nccom",))),
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

    def all_run(self, *launches: Launch) -> None:
        for name in self.names:
            self.says(name, OrderReport(status="running", launches=launches if name == "n1" else ()))
        self.go(0.1)


def test_nodes_are_told_of_the_group_and_start_nothing_before_they_are_asked() -> None:
    centre = Centre()
    (told,) = centre.orders("n2")
    assert told.collective is not None
    assert told.collective.nccom == NccomGroup(mode="carried", hosts=ADDRESSES, nodes=NODES)
    assert (told.collective.checks, told.collective.main, told.collective.size) == ((CHECK,), ADDRESSES[0], 6)
    centre.all_run()
    assert len(centre.orders("n2")) == 1


def test_planned_launch_goes_to_its_node_alone_and_only_while_the_group_is_open() -> None:
    centre = Centre()
    centre.all_run(launch())
    collective, started = centre.orders("n2")
    assert started.launch == LaunchOrder(validation="g-1:c0", group="g-1:c0.0", check=CHECK, argv=tuple(launch().argv))
    assert started.id == f"{collective.id}:launch:{CHECK}"
    assert len(centre.orders("n1")) == len(centre.orders("n3")) == 1
    # Said again, and not said any more, it is the same order.
    centre.all_run(launch(), launch("n3"))
    centre.all_run()
    assert centre.orders("n2")[1] == started
    assert len(centre.orders("n3")) == 2
    centre.says("n1", OrderReport(status="done", findings={CHECK: (passed(),)}))
    centre.go(0.1)
    assert [len(centre.orders(name)) for name in NODES] == [1, 1, 1]
    assert all(centre.orders(name)[0].withdrawn for name in NODES)


@hostile
def test_aggregator_carries_nothing_else_and_ends_the_group(asked: Launch, why: str) -> None:
    centre = Centre()
    centre.all_run(asked)
    assert all(len(centre.orders(name)) == 1 for name in NODES)
    assert why in centre.validation.groups[0].refused
    assert centre.validation.groups[0].closed
    for name in NODES:
        centre.says(name, OrderReport(status="cancelled"))
    (tested,) = centre.go(0.1).history
    assert (tested.outcome, tested.accused) == (Outcome.UNKNOWN, {})
    assert {name: one.code for name, one in tested.unfit.items()} == {"n1": "LaunchRefused"}


def test_aggregator_carries_no_second_launch_to_a_node() -> None:
    centre = Centre()
    centre.all_run(launch())
    centre.all_run(launch(), launch(routed='"radix"'))
    assert "already" in centre.validation.groups[0].refused
    assert len(centre.orders("n2")) == 1


def test_launches_of_others_than_the_main_node_are_not_heard() -> None:
    centre = Centre()
    centre.all_run()
    centre.says("n3", OrderReport(status="running", launches=(launch(),)))
    centre.go(0.1)
    assert len(centre.orders("n2")) == 1


def test_node_that_refuses_a_launch_takes_no_part_and_is_not_accused() -> None:
    centre = Centre()
    centre.all_run(launch())
    started = centre.orders("n2")[1]
    centre.says("n2", OrderReport(status="refused", message="no orted"), started.id)
    centre.go(0.1)
    centre.go(centre.policy.collective_grace_seconds)
    for name in NODES:
        centre.says(name, OrderReport(status="cancelled"), centre.validation.groups[0].order_id(name))
    (tested,) = centre.go(0.1).history
    assert set(tested.unfit) == {"n2"}
    assert "no orted" in tested.unfit["n2"].message
    assert not tested.accused


def passed(status: Status = Status.PASS, reason: str | None = None) -> Finding:
    measured = Measurement(name=f"{CHECK}_duration_seconds", value=1.0, lower=None, upper=None, origin="none")
    return Finding(status=status, reason=reason, message="what was found", target="node", measurements=(measured,))


WITHOUT_A_NUMBER = Finding(status=Status.PASS, reason=None, message="all is well", target="node")


@pytest.mark.parametrize(
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
    ("carrier", "kinds", "found"),
    [
        ("auto", ("neuron", "neuron", "neuron"), "carried"),
        ("auto", ("neuron", "cpu", "neuron"), None),
        ("auto", ("cpu", "cpu", "cpu"), None),
        ("torch", ("neuron", "neuron", "neuron"), None),
        ("nccom", ("cpu", "cpu", "cpu"), "carried"),
    ],
)
def test_policy_and_devices_say_what_carries(carrier: Any, kinds: tuple[str, ...], found: str | None) -> None:
    policy = Policy(settle_seconds=0.0, collective_carrier=carrier)
    inventories = {name: neuron(accelerator=kind) for name, kind in zip(NODES, kinds, strict=True)}
    centre = Centre(policy=policy, inventories=inventories)
    assert centre.validation.launch == found
    (told,) = centre.orders("n1")
    assert told.collective is not None
    assert (told.collective.nccom is None) == (found is None)
    assert told.collective.checks[0] == ("all_reduce" if found is None else CHECK)


def test_one_node_whose_owner_has_not_asked_for_it_keeps_all_to_torch() -> None:
    assert Centre(unwilling=("n2",)).validation.launch is None
    by_ssh = Policy(settle_seconds=0.0, nccom_launch="ssh")
    assert Centre(policy=by_ssh, unwilling=NODES).validation.launch == "ssh"


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
