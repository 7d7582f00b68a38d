"""Stragglers: who is slow among its peers, how rarely a healthy one is suspected, and nobody is named on one look."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd import baselines
from healthd.aggregator.fleet import slow as slow_devices
from healthd.aggregator.fleet.slow import RATE_FLOOR_RATIO, Peers, Sample, Suspect
from healthd.aggregator.validation.outcome import LATE_SECONDS, of_group
from healthd.aggregator.validation.records import Group, RankRange
from healthd.aggregator.validation.records import Tested as Outcomes
from healthd.baselines import Kind
from healthd.core.model import RankReport, Verdict
from healthd.localize.model import Outcome
from tests.aggregator.lab import Lab
from tests.every import every

MATMUL = "matmul_flops_per_second/bf16"
FOUR = ("n1", "n2", "n3", "n4")


def fleet(
    count: int, *, slow: Mapping[int, float] | None = None, noise: float = 0.02, seed: int = 1, run: str = "1"
) -> list[Sample]:
    """Devices of one kind; `slow` ones do that share of their work."""
    chance = random.Random(f"{seed} {run}")
    return [
        Sample(
            peers="trn1",
            name=MATMUL,
            node=f"n{i}",
            target="neuron:0",
            value=chance.gauss(1e12, noise * 1e12) * (slow or {}).get(i, 1.0),
            run=run,
        )
        for i in range(count)
    ]


def find(samples: Sequence[Sample], history: Sequence[Suspect] = ()) -> tuple[Suspect, ...]:
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for one in samples:
        groups[one.peers, one.name].append(one)
    return slow_devices.find([slow_devices.comparable(group) for group in groups.values()], history)


def nodes(found: Sequence[Suspect]) -> set[str]:
    return {one.node for one in found}


# --- rates over the fleet ---------------------------------------------------------------------------------------------


def test_a_slow_device_is_suspect_at_first_and_named_by_its_next_run() -> None:
    first = find(fleet(64, slow={7: 0.8}))
    assert nodes(first) == {"n7"}
    assert not first[0].confirmed
    assert "it is measured again before a device is named" in first[0].message
    again = find(fleet(64, slow={7: 0.8}, run="1"), first)
    assert not again[0].confirmed  # the same measurement twice is one measurement
    second = find(fleet(64, slow={7: 0.8}, run="2"), again)
    assert second[0].confirmed
    assert second[0].runs == ("1", "2")
    assert second[0].message.startswith("n7 neuron:0: matmul_flops_per_second/bf16 is ")


def test_a_device_that_is_back_in_line_is_suspect_no_more() -> None:
    first = find(fleet(64, slow={7: 0.8}))
    assert find(fleet(64, run="2"), first) == ()
    assert not find(fleet(64, slow={7: 0.8}, run="3"))[0].confirmed


def test_512_healthy_devices_with_noise_raise_hardly_any_alarm() -> None:
    # 100 looks at the fleet, each followed by the second measurement.
    looks = alarms = 0
    for seed in range(100):
        first = find(fleet(512, seed=seed))
        second = find(fleet(512, seed=seed, run="2"), first)
        looks += bool(first)
        alarms += any(one.confirmed for one in second)
    assert looks <= 1
    assert alarms == 0


def test_a_quarter_of_the_fleet_that_is_slow_is_found_whole() -> None:
    slow = dict.fromkeys(range(8), 0.8)
    assert nodes(find(fleet(32, slow=slow, noise=0.01))) == {f"n{i}" for i in range(8)}


@pytest.mark.parametrize(("slower", "found"), [(0.9 * RATE_FLOOR_RATIO, False), (1.3 * RATE_FLOOR_RATIO, True)])
def test_what_is_slower_by_less_than_the_floor_is_not_suspect(slower: float, found: bool) -> None:
    assert bool(find(fleet(64, slow={3: 1 - slower}, noise=0.001))) is found


@pytest.mark.parametrize(("count", "found"), [(10, False), (11, True)])
def test_fewer_than_eleven_peers_accuse_nobody(count: int, found: bool) -> None:
    assert bool(find(fleet(count, slow={3: 0.5}, noise=0.001))) is found


def test_devices_are_compared_with_their_like_alone() -> None:
    other = [dataclasses.replace(one, peers="inf2", value=0.3 * one.value) for one in fleet(20)]
    assert find([*fleet(64), *other]) == ()


def test_a_fast_device_is_no_straggler_and_a_long_duration_is() -> None:
    assert find(fleet(64, slow={3: 1.5})) == ()
    durations = [dataclasses.replace(one, name="all_reduce_duration_seconds/1024") for one in fleet(64, slow={3: 1.5})]
    assert nodes(find(durations)) == {"n3"}


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_no_measured_value_breaks_the_search(values: list[float]) -> None:
    some = [dataclasses.replace(one, value=value) for one, value in zip(fleet(30), values, strict=False)]
    found = find(some)
    assert find(some) == found
    assert all(not one.confirmed for one in found)


def test_the_last_values_of_the_fleet_are_searched_and_told_once() -> None:
    kind = Kind(hardware="trn1 x1", accelerator="neuron", versions=())
    peers = Peers()

    def measure(run: str) -> tuple[Suspect, ...]:
        for one in fleet(64, slow={7: 0.8}, run=run):
            measured = baselines.Sample(
                name=MATMUL, node=one.node, target=one.target, began=float(run), day=1, value=one.value
            )
            peers.take_in(kind, one.node, [measured])
        return asyncio.run(peers.search())

    assert measure("1") == ()
    assert nodes(peers.suspects) == {"n7"}
    confirmed = measure("2")
    assert nodes(confirmed) == {"n7"}
    assert [node for node, _ in peers.news] == ["n7"]
    assert measure("3") == ()
    assert nodes(peers.suspects) == {"n7"}
    peers.forget("n7")
    assert measure_nothing(peers) == ()
    assert peers.suspects == ()


def measure_nothing(peers: Peers) -> tuple[Suspect, ...]:
    return asyncio.run(peers.search())


# --- ranks of a group -------------------------------------------------------------------------------------------------


def report(rank: int, ready: object, *, took: object = 0.1) -> RankReport:
    size = {"size_bytes": 1 << 20, "ready_seconds": ready, "seconds": took}
    return RankReport(rank=rank, target="cpu:0", check="all_reduce", events=4, data={"rank": rank, "sizes": [size]})


def group_of(count: int, *, ranks: int = 1) -> Group:
    seats = tuple(RankRange(node=f"n{i}", first_rank=i * ranks, ranks=ranks) for i in range(count))
    return Group(id="g", seats=seats, main="10.0.0.1", port=29500, started_at=0.0, ends_at=60.0)


def judged(ready: Sequence[object], *, ranks: int = 1, took: object = 0.1, **changes: Any) -> Outcomes:
    group = group_of(len(ready) // ranks, ranks=ranks)
    passed = Outcomes(members=group.members, outcome=Outcome.PASS, round=0, seconds=1.0)
    reports = {rank: report(rank, one, took=took) for rank, one in enumerate(ready)}
    return of_group(dataclasses.replace(passed, **changes), group, {"all_reduce": reports})


@pytest.mark.parametrize("count", [2, 3, 4, 6, 32])
def test_a_late_rank_makes_its_group_slow_whatever_its_size(count: int) -> None:
    tested = judged([0.5, *[0.01] * (count - 1)])
    assert tested.outcome is Outcome.SLOW
    assert set(tested.accused) == {"n0"}
    reason = tested.accused["n0"]
    assert reason.code == "SlowNode"
    assert reason.message.startswith(
        "n0: rank:0 arrives at all_reduce of 1048576 bytes after 500 ms, the others after 10 ms"
    )


def test_a_node_whose_ranks_are_all_late_is_named_in_a_pair_too() -> None:
    assert set(judged([0.01, 0.01, 0.5, 0.6], ranks=2).accused) == {"n1"}
    assert set(judged([0.01, 0.01, 0.01, 0.6], ranks=2).accused) == {"n1"}


@every(
    ("late", "usual", "took", "slow"),
    [
        (0.01 + 1.1 * LATE_SECONDS, 0.01, 0.01, True),
        (0.01 + 0.9 * LATE_SECONDS, 0.01, 0.01, False),  # a busy host gives and takes so much
        (3.1, 1.0, 1.0, True),
        (2.9, 1.0, 1.0, False),  # less than two times more than the others
        (2.6, 0.01, 10.0, True),
        (2.4, 0.01, 10.0, False),  # less than a quarter of the operation
    ],
)
def test_each_floor_of_lateness_counts(late: float, usual: float, took: float, slow: bool) -> None:
    tested = judged([late, usual, usual, usual], took=took)
    assert (tested.outcome is Outcome.SLOW) is slow


def test_where_half_of_the_nodes_are_late_all_of_them_are_looked_into_and_where_more_are_it_is_normal() -> None:
    assert set(judged([0.5, 0.5, 0.01, 0.01]).accused) == {"n0", "n1"}
    assert judged([0.5, 0.5, 0.5, 0.01]).accused == {}
    assert judged([0.5] * 4).outcome is Outcome.PASS


def test_two_late_nodes_of_eight_are_both_named() -> None:
    assert set(judged([0.5, 0.01, 0.01, 0.01, 0.6, 0.01, 0.01, 0.01]).accused) == {"n0", "n4"}


def test_a_large_group_with_noise_is_not_slow() -> None:
    chance = random.Random(3)
    for _ in range(30):
        assert judged([abs(chance.gauss(0.05, 0.01)) for _ in range(256)]).outcome is Outcome.PASS


def test_a_group_that_did_not_pass_stays_what_it_was() -> None:
    assert judged([0.5, 0.01, 0.01], outcome=Outcome.FAIL).accused == {}


@every("ready", [None, "soon", -1.0, float("nan"), float("inf"), True, [0.1]])
def test_ranks_that_do_not_say_how_late_they_are_accuse_nobody(ready: object) -> None:
    assert judged([ready, 0.01, 0.01, 0.01]).outcome is Outcome.PASS
    assert judged([0.5, ready, ready, ready]).outcome is Outcome.PASS
    assert judged([0.5, 0.01, 0.01], took=ready).outcome is Outcome.PASS


@given(
    st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.lists(st.integers(), max_size=2), max_size=3)
)
def test_no_report_breaks_the_reading(data: dict[str, object]) -> None:
    group = group_of(2)
    passed = Outcomes(members=group.members, outcome=Outcome.PASS, round=0, seconds=1.0)
    for sizes in (data, [data], None):
        odd = RankReport(rank=0, target="cpu:0", check="c", events=0, data={"sizes": sizes})
        assert of_group(passed, group, {"c": {0: odd, 1: report(1, 0.5)}}).outcome is Outcome.PASS


@dataclasses.dataclass
class LateLab(Lab):
    """Some nodes come late: always, or in the first group alone."""

    late: Mapping[str, float] = dataclasses.field(default_factory=dict)
    once: bool = False

    def report(self, name: str, order: Any, members: tuple[str, ...]) -> Any:
        found = super().report(name, order, members)
        ready = self.late.get(name, 0.001) if not self.once or len(self.groups) == 1 else 0.001
        ranks = []
        for rank in found.ranks if found is not None else ():
            data = dict(rank.data or {})
            data["sizes"] = [{**size, "ready_seconds": ready} for size in data["sizes"]]
            ranks.append(dataclasses.replace(rank, data=data))
        return None if found is None else dataclasses.replace(found, ranks=tuple(ranks))


def test_a_late_node_is_measured_again_in_pairs_before_it_is_named() -> None:
    lab = LateLab(FOUR, late={"n3": 0.5})
    decision = lab.decide(lab.ask(nodes=FOUR, min_nodes=3))
    assert decision.decision is Verdict.ADMIT
    (out,) = decision.excluded
    assert (out.node, out.reasons[0].code) == ("n3", "SlowNode")
    assert "arrives at all_reduce" in out.reasons[0].message
    assert lab.accused() == {"n3"}
    assert sum("n3" in group for group in lab.groups) >= 2


def test_a_node_that_was_late_once_is_not_named() -> None:
    lab = LateLab(FOUR, late={"n3": 0.5}, once=True)
    lab.decide(lab.ask(nodes=FOUR))
    assert len(lab.groups) > 1
    assert lab.accused() == set()


def test_nodes_that_are_all_in_time_are_admitted_after_one_group() -> None:
    lab = LateLab(FOUR)
    assert lab.decide(lab.ask(nodes=FOUR)).decision is Verdict.ADMIT
    assert lab.groups == [FOUR]
