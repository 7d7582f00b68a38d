"""Data-parallel steps over nodes, as the aggregator judges them: who is named, and what is no evidence."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from checks.collective.training.shard import digests_text
from checks.contract import Status, Tier
from healthd.aggregator.engine.admission import terms_of
from healthd.aggregator.policy import Policy
from healthd.aggregator.validation.nccom import launch_mode
from healthd.aggregator.validation.outcome import read_group
from healthd.aggregator.validation.plan import begin, shown_in
from healthd.aggregator.validation.records import Group, RankRange
from healthd.aggregator.validation.records import Tested as Seen
from healthd.core.model import GateRequest, OrderReport, OrderStatus, RankReport, ValidationKind
from healthd.localize.model import Outcome
from tests.aggregator.lab import Lab
from tests.aggregator.world import NOW, neuron, node, state
from tests.every import every

NAME = "data_parallel_step"
COUNT = 4


def texts(*digests: str) -> list[str]:
    return [digests_text([one * 8]) for one in digests]


def data(rank: int, *, ranks: int = COUNT) -> dict[str, Any]:
    free = [None, None, "none"]
    names = ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds", "own_seconds")
    size = {
        "size_bytes": 1024,
        "bytes": 1024,
        "seconds": 0.001,
        "ready_seconds": 0.05,
        "own_seconds": 0.06,
        "cpu_wait_seconds": 0.0,
        "limits": dict.fromkeys(names, free),
        "mismatches": 0,
        "first": None,
        "sources": {},
    }
    training = {
        "steps": 2,
        "places": "head: norm_weight",
        "digests": {"reduction": texts("a1", "a2"), "optimizer": texts("b1", "b2")},
        "sums": {"head": [[1.0, 10.0, 1.0], [1.0, 10.0, 1.0]]},
        "faults": [],
    }
    return {
        "rank": rank,
        "ranks": ranks,
        "device": "cpu:0",
        "targets": [],
        "seed": 1,
        "sizes": [size],
        "training": training,
    }


def read(*changes: Callable[[dict[str, Any]], object] | None, lost: dict[str, Any] | None = None) -> Seen:
    """The outcome of as many nodes as there are changes to what their ranks say; the last may be `lost`."""
    reports = {}
    for number, change in enumerate(changes):
        told = copy.deepcopy(data(number, ranks=len(changes)))
        if change is not None:
            change(told)
        words: dict[str, Any] = {"events": 7, "last": f"{NAME}/2 left", "key": "cpu", "data": told}
        if lost is not None and number == len(changes) - 1:
            words = lost
        rank = RankReport(rank=number, target="cpu:0", check=NAME, **words)
        reports[f"n{number}"] = OrderReport(status=OrderStatus.DONE, ranks=(rank,))
    group = Group(
        id="v.0",
        seats=tuple(RankRange(node=f"n{i}", first_rank=i, ranks=1) for i in range(len(changes))),
        main="10.0.0.1",
        port=30000,
        started_at=0.0,
        ends_at=100.0,
    )
    return read_group(group, reports, (NAME,), round_number=0, seconds=1.0)


def training(told: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = told["training"]
    return found


# --- who is named -----------------------------------------------------------------------------------------------------


def test_nodes_whose_gradients_and_parameters_agree_pass_with_the_speed_of_the_reduction() -> None:
    tested = read(None, None, None)
    assert tested.outcome is Outcome.PASS
    assert tested.busbw_bytes_per_second == {NAME: pytest.approx(1024 / 0.001 * 4 / 3)}


def test_node_in_whom_its_own_rank_saw_the_fault_is_shown_by_the_failing_whole() -> None:
    own = {"reason": "SilentCorruption", "step": 1, "message": "layer block1, gradient of gelu has other bits"}
    tested = read(None, None, lambda told: training(told).update(faults=[own]), None)
    assert tested.outcome is Outcome.FAIL
    assert set(tested.accused) == {"n2"}
    why = tested.accused["n2"]
    assert (why.code, why.target, why.check, why.status) == ("SilentCorruption", "rank:2", NAME, Status.FAIL)
    assert "step 2: n2 (cpu:0) is at fault" in why.message
    assert "layer block1, gradient of gelu" in why.message
    assert shown_in(tested) == ("n2",)


def test_node_whose_parameters_differ_is_shown_and_one_whose_reduced_gradients_do_may_only_have_received_them() -> None:
    def change(phase: str) -> Callable[[dict[str, Any]], object]:
        return lambda told: training(told)["digests"].update({phase: texts("a1", "cc")})

    parameters = read(None, change("optimizer"), None)
    assert [(node, why.code) for node, why in parameters.accused.items()] == [("n1", "SilentCorruption")]
    reduced = read(None, change("reduction"), None)
    assert [(node, why.code) for node, why in reduced.accused.items()] == [("n1", "SilentCorruption")]
    assert "layer head, reduced gradient of norm_weight" in reduced.accused["n1"].message
    assert shown_in(reduced) == ()


def test_of_two_nodes_that_differ_neither_is_accused() -> None:
    tested = read(None, lambda told: training(told)["digests"].update({"reduction": texts("a1", "cc")}))
    assert (tested.outcome, tested.accused) == (Outcome.FAIL, {})
    assert "one of n0 (cpu:0), n1 (cpu:0)" in tested.reasons[0].message


def test_node_that_is_late_by_its_own_work_is_named_and_those_that_waited_are_not() -> None:
    def late(told: dict[str, Any]) -> None:
        told["sizes"][0].update(ready_seconds=2.0, own_seconds=2.1)

    def waited(told: dict[str, Any]) -> None:
        told["sizes"][0].update(seconds=0.6)

    tested = read(waited, late, waited, waited)
    assert tested.outcome is Outcome.SLOW
    assert [(node, why.code) for node, why in tested.accused.items()] == [("n1", "SlowNode")]


def test_node_that_died_is_named() -> None:
    gone = {"events": 3, "last": f"{NAME}/1 entered", "reason": "Crashed", "message": "killed by SIGKILL"}
    tested = read(None, None, None, lost=gone)
    assert [(node, why.code) for node, why in tested.accused.items()] == [("n2", "RankDied")]
    assert shown_in(tested) == ("n2",)


# --- what is no evidence ----------------------------------------------------------------------------------------------

ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "none": lambda told: told.pop("training"),
    "text": lambda told: told.update(training="fine"),
    "no steps": lambda told: training(told).update(steps=0),
    "steps of text": lambda told: training(told).update(steps="two"),
    "steps without end": lambda told: training(told).update(steps=10**9),
    "no digests": lambda told: training(told).update(digests={}),
    "digests of a step less": lambda told: training(told)["digests"].update({"optimizer": texts("b1")}),
    "digests of numbers": lambda told: training(told)["digests"].update({"optimizer": [1, 2]}),
    "digests of no places": lambda told: training(told)["digests"].update(
        {"optimizer": [one[:11] for one in texts("b1", "b2")]}
    ),
    "digests of another phase": lambda told: training(told)["digests"].update({"forward": texts("b1", "b2")}),
    "no places": lambda told: training(told).pop("places"),
    "another place": lambda told: training(told).update(places="head: other"),
    "no sums": lambda told: training(told).pop("sums"),
    "sums of text": lambda told: training(told).update(sums={"head": [["a", 1, 1], [1, 1, 1]]}),
    "sums beyond all numbers": lambda told: training(told).update(sums={"head": [[10**400, 1, 1], [1, 1, 1]]}),
    "sums of another layer": lambda told: training(told).update(sums={"tail": [[1, 1, 1], [1, 1, 1]]}),
    "faults of text": lambda told: training(told).update(faults="none"),
    "a fault of another code": lambda told: training(told).update(
        faults=[{"reason": "RankDied", "step": 0, "message": ""}]
    ),
    "a fault in no step": lambda told: training(told).update(
        faults=[{"reason": "WrongResult", "step": 9, "message": ""}]
    ),
    "no own time": lambda told: told["sizes"][0].pop("own_seconds"),
    "no limit of it": lambda told: told["sizes"][0]["limits"].pop("own_seconds"),
    "no device": lambda told: told.pop("device"),
}


@every("kind", ODD)
def test_rank_whose_steps_cannot_be_read_gives_no_pass_and_accuses_nobody_else(kind: str) -> None:
    tested = read(None, ODD[kind], None)
    assert tested.outcome in (Outcome.FAIL, Outcome.UNKNOWN)
    assert set(tested.accused) <= {"n1"}


def test_ranks_that_all_say_nothing_of_steps_do_not_pass() -> None:
    tested = read(*[ODD["none"]] * 3)
    assert tested.outcome is not Outcome.PASS


# --- what is run when -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "kind", "checks"),
    [
        (None, ValidationKind.COLLECTIVES, ("all_reduce", "all_gather", "reduce_scatter")),
        (Tier.QUICK, ValidationKind.COLLECTIVES, ("all_reduce", "all_gather", "reduce_scatter")),
        (Tier.DEEP, ValidationKind.COLLECTIVES, ("all_reduce", "all_gather", "reduce_scatter", NAME)),
        (Tier.SOAK, ValidationKind.COLLECTIVES, ("all_reduce", "all_gather", "reduce_scatter", NAME)),
        (None, ValidationKind.TRAINING, (NAME,)),
    ],
)
def test_steps_are_run_from_the_deep_tier_on_and_alone_where_they_are_asked_for(
    tier: Tier | None, kind: ValidationKind, checks: tuple[str, ...]
) -> None:
    asked = GateRequest(job="j", nodes=("n1", "n2"), tier=tier, kind=kind)
    assert terms_of(asked, Policy()).checks == checks


def test_orders_of_a_validation_name_what_its_gate_was_asked_for() -> None:
    lab = Lab(("n1", "n2"))
    asked = lab.ask(nodes=("n1", "n2"), kind=ValidationKind.TRAINING)
    validation = begin(
        NOW, "v", ("n1", "n2"), lab.view(asked).nodes, lab.policy, deadline=NOW + 60, checks=asked.terms.checks
    )
    assert validation.checks == (NAME,)


def test_nccom_test_runs_no_training_steps_so_ranks_of_torch_do() -> None:
    policy = Policy(nccom_launch="ssh")
    fleet = {"n1": node("n1", dataclasses.replace(state("n1"), inventory=neuron()))}
    assert launch_mode(("n1",), fleet, policy, ("all_reduce", NAME)) == "ssh"
    assert launch_mode(("n1",), fleet, policy, (NAME,)) is None
