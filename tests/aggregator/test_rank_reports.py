"""What the aggregator makes of reports of ranks that are odd: nothing that is not a measurement of its own passes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from checks.contract import Blame, Finding, Measurement, Status
from healthd.aggregator.validation.outcome import read_group
from healthd.aggregator.validation.records import Group, RankRange
from healthd.aggregator.validation.records import Tested as Seen
from healthd.core.model import OrderReport, RankReport
from healthd.localize.model import Outcome
from tests.every import every

GROUP = Group(
    id="v.0",
    seats=tuple(RankRange(node=f"n{i}", first_rank=i, ranks=1) for i in range(3)),
    main="10.0.0.1",
    port=30000,
    started_at=0.0,
    ends_at=100.0,
)


def size(size_bytes: int = 1024) -> dict[str, Any]:
    return {
        "size_bytes": size_bytes,
        "bytes": size_bytes,
        "seconds": 1e-3,
        "ready_seconds": 1e-4,
        "limits": {
            "busbw_bytes_per_second": [None, None, "none"],
            "algbw_bytes_per_second": [None, None, "none"],
            "duration_seconds": [None, None, "none"],
        },
        "mismatches": 0,
        "first": None,
        "sources": {},
    }


def data(rank: int) -> dict[str, Any]:
    targets = ["cpu:0"]
    return {
        "rank": rank,
        "ranks": 3,
        "device": "cpu:0",
        "targets": targets,
        "seed": 1,
        "sizes": [size(1024), size(65536)],
    }


def rank(number: int, found: Any, **others: Any) -> RankReport:
    return RankReport(
        **{
            "rank": number,
            "target": "cpu:0",
            "check": "all_reduce",
            "events": 4,
            "last": "all_reduce/65536 left",
            "key": "cpu",
            "data": found,
            **others,
        }
    )


def read(*ranks: RankReport) -> Seen:
    reports = {f"n{i}": OrderReport(status="done", ranks=tuple(r for r in ranks if r.rank == i)) for i in range(3)}
    return read_group(GROUP, reports, ("all_reduce",), round_number=0, seconds=1.0)


def with_second(change: Callable[[dict[str, Any]], object]) -> Seen:
    odd = copy.deepcopy(data(1))
    change(odd)
    return read(rank(0, data(0)), rank(1, odd), rank(2, data(2)))


def test_three_ranks_that_measured_all_sizes_pass() -> None:
    assert with_second(lambda odd: None).outcome is Outcome.PASS


def test_training_steps_of_a_rank_are_not_looked_at_in_a_collective() -> None:
    tested = with_second(lambda odd: odd.update(training={"steps": "many"}))
    assert (tested.outcome, tested.reasons) == (Outcome.PASS, ())


def first(odd: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = odd["sizes"][0]
    return found


ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "empty": lambda odd: odd.clear(),
    "no sizes": lambda odd: odd.update(sizes=[]),
    "null sizes": lambda odd: odd.update(sizes=None),
    "a size less": lambda odd: odd["sizes"].pop(),
    "a size twice": lambda odd: odd["sizes"].append(size(1024)),
    "another size": lambda odd: first(odd).update(size_bytes=2048),
    "sizes of text": lambda odd: odd.update(sizes=["1024"]),
    "another rank": lambda odd: odd.update(rank=0),
    "rank of text": lambda odd: odd.update(rank="one"),
    "ranks without end": lambda odd: odd.update(ranks=1 << 60),
    "ranks beyond all numbers": lambda odd: odd.update(ranks=10**5000),
    "fewer ranks": lambda odd: odd.update(ranks=2),
    "no ranks": lambda odd: odd.pop("ranks"),
    "null mismatches": lambda odd: first(odd).update(mismatches=None),
    "no mismatches": lambda odd: first(odd).pop("mismatches"),
    "mismatches of text": lambda odd: first(odd).update(mismatches=""),
    "negative mismatches": lambda odd: first(odd).update(mismatches=-1),
    "no seconds": lambda odd: first(odd).pop("seconds"),
    "NaN seconds": lambda odd: first(odd).update(seconds=math.nan),
    "seconds beyond all numbers": lambda odd: first(odd).update(seconds=10**400),
    "a limit beyond all numbers": lambda odd: first(odd)["limits"].update(duration_seconds=[10**400, None, "config"]),
    "no time at all": lambda odd: first(odd).update(seconds=0),
    "negative time": lambda odd: first(odd).update(seconds=-1.0),
    "infinite bytes": lambda odd: first(odd).update(bytes=math.inf),
    "no bytes": lambda odd: first(odd).update(bytes=0),
    "other bytes": lambda odd: first(odd).update(bytes=10**15),
    "no limits": lambda odd: first(odd).pop("limits"),
    "limits of text": lambda odd: first(odd).update(limits="none"),
    "a limit of two": lambda odd: first(odd)["limits"].update(duration_seconds=[None, None]),
    "a limit of text": lambda odd: first(odd)["limits"].update(duration_seconds=["a", None, "config"]),
    "sources of text": lambda odd: first(odd).update(mismatches=1, sources={"none": 3}),
    "sources in a list": lambda odd: first(odd).update(mismatches=1, sources=[1]),
    "sources beyond": lambda odd: first(odd).update(mismatches=1, sources={"77": 3}),
    "null targets": lambda odd: odd.update(targets=None),
}


@every("kind", ODD)
def test_rank_whose_data_are_no_measurement_gives_no_pass_and_marks_no_node(kind: str) -> None:
    tested = with_second(ODD[kind])
    assert tested.outcome is Outcome.UNKNOWN
    assert tested.accused == {}
    assert all(one.blame is Blame.CHECK for one in tested.unfit.values()), tested.unfit


@pytest.mark.parametrize("ready", [pytest.param(10**400, id="huge"), -1.0, None, "late", math.nan, True])
def test_lateness_that_is_no_time_is_not_counted(ready: object) -> None:
    tested = with_second(lambda odd: first(odd).update(ready_seconds=ready))
    assert (tested.outcome, tested.accused) == (Outcome.PASS, {})


def test_ranks_that_all_measured_nothing_do_not_pass() -> None:
    tested = read(*(rank(i, {**data(i), "sizes": []}) for i in range(3)))
    assert tested.outcome is not Outcome.PASS


def test_rank_that_is_lost_and_has_data_too_is_lost() -> None:
    tested = read(rank(0, data(0)), rank(1, data(1), reason="Crashed", message="killed"), rank(2, data(2)))
    assert tested.outcome is Outcome.FAIL


@pytest.mark.parametrize("turned", [False, True])
def test_rank_that_is_reported_twice_counts_by_the_worse_report(turned: bool) -> None:
    both = [rank(1, None, reason="Crashed", message="killed"), rank(1, data(1))]
    tested = read(rank(0, data(0)), *(reversed(both) if turned else both), rank(2, data(2)))
    assert tested.outcome is Outcome.FAIL


@pytest.mark.parametrize("status", ["running", "accepted"])
def test_node_that_has_not_ended_gives_no_outcome_whatever_its_ranks_say(status: str) -> None:
    reports = {f"n{i}": OrderReport(status="done", ranks=(rank(i, data(i)),)) for i in range(3)}
    reports["n1"] = OrderReport(status=status, ranks=(rank(1, data(1)),))
    tested = read_group(GROUP, reports, ("all_reduce",), round_number=0, seconds=1.0)
    assert tested.outcome is Outcome.UNKNOWN
    assert tested.silent == ("n1",)


def test_ranks_of_others_are_not_taken_from_a_node() -> None:
    reports = {
        "n0": OrderReport(status="done", ranks=tuple(rank(i, data(i)) for i in range(3))),
        "n1": OrderReport(status="done"),
        "n2": OrderReport(status="done", ranks=(rank(2, data(2)),)),
    }
    tested = read_group(GROUP, reports, ("all_reduce",), round_number=0, seconds=1.0)
    assert tested.outcome is Outcome.UNKNOWN
    assert set(tested.unfit) == {"n1"}


def test_words_of_a_rank_without_sense_break_nothing() -> None:
    odd = [rank(1, None, events=10**9, last="x entered", reason="Timeout"), rank(2, None, events=-5, last="")]
    tested = read(rank(0, data(0)), *odd)
    assert tested.outcome is not Outcome.PASS


@pytest.mark.parametrize("number", ["9" * 5000, "\N{SUPERSCRIPT TWO}", "77"], ids=["long", "no digit", "none of them"])
def test_ranks_that_no_group_has_in_the_words_of_a_rank_break_nothing(number: str) -> None:
    lost = rank(1, None, reason="CheckError", message=f"rank:{number} did something")
    assert set(read(rank(0, data(0)), lost, rank(2, data(2))).accused) == {"n1"}


@pytest.mark.parametrize(
    "odd", ["9" * 5000, "\N{SUPERSCRIPT TWO}", "none", ""], ids=["long", "no digit", "word", "empty"]
)
def test_labels_and_targets_of_a_main_node_are_only_words(odd: str) -> None:
    measured = Measurement(
        name="nccom_nodes_all_reduce_busbw_bytes_per_second",
        value=1.0,
        lower=None,
        upper=None,
        origin="none",
        labels={"size_bytes": odd},
    )
    finding = Finding(status=Status.PASS, reason=None, message="fine", target=f"rank:{odd}", measurements=(measured,))
    group = dataclasses.replace(GROUP, hosts=("a", "b", "c"))
    check = "nccom_nodes_all_reduce"
    reports = {f"n{i}": OrderReport(status="done") for i in range(3)}
    for status, outcome in ((Status.PASS, Outcome.PASS), (Status.FAIL, Outcome.FAIL)):
        found = {check: (dataclasses.replace(finding, status=status, reason=None if outcome is Outcome.PASS else "X"),)}
        reports["n0"] = OrderReport(status="done", findings=found)
        assert read_group(group, reports, (check,), round_number=0, seconds=1.0).outcome is outcome


def test_port_that_another_program_has_is_no_evidence_of_any_node() -> None:
    why = "port 30000 is in use on this node; use another port for the group"
    lost = rank(0, None, events=0, last="", reason="StartFailed", message=why)
    waits = [rank(i, None, events=1, last="rendezvous entered", reason="Cancelled", message="off") for i in (1, 2)]
    seen = read(lost, *waits)
    assert seen.outcome is Outcome.UNKNOWN
    assert (seen.accused, seen.unfit) == ({}, {})
    assert why in seen.reasons[0].message


def late(number: int) -> RankReport:
    """Of a rank that was not up yet when its group was called off."""
    return rank(number, None, events=0, last="", reason="Cancelled", message="was not ready")


@pytest.mark.parametrize("told", [True, False])
def test_node_that_had_no_time_to_start_before_another_died_can_take_part(told: bool) -> None:
    dead = rank(0, None, events=3, last="all_reduce/1024 entered", reason="Crashed", message="killed by SIGKILL")
    reports = {
        "n0": OrderReport(status="done", ranks=(dead,)),
        "n1": OrderReport(status="cancelled", ranks=(late(1),) if told else ()),
        "n2": OrderReport(status="cancelled", ranks=(late(2),)),
    }
    seen = read_group(GROUP, reports, ("all_reduce",), round_number=1, seconds=1.0)
    assert seen.outcome is Outcome.FAIL
    assert set(seen.accused) == {"n0"}
    assert not seen.unfit


@pytest.mark.parametrize("reason", ["Cancelled", "Timeout"])
def test_node_that_did_not_start_while_nobody_else_ended_cannot_take_part(reason: str) -> None:
    waits = rank(0, None, events=1, last="rendezvous joined", reason="Cancelled", message="called off")
    reports = {
        "n0": OrderReport(status="cancelled", ranks=(waits,)),
        "n1": OrderReport(status="cancelled", ranks=(dataclasses.replace(late(1), reason=reason),)),
        "n2": OrderReport(status="cancelled", ranks=(dataclasses.replace(waits, rank=2),)),
    }
    seen = read_group(GROUP, reports, ("all_reduce",), round_number=1, seconds=1.0)
    assert seen.outcome is Outcome.UNKNOWN
    assert {node: why.code for node, why in seen.unfit.items()} == {"n1": "StartFailed"}
    assert not seen.accused
