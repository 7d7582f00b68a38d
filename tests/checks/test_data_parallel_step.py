"""Training steps of several real ranks together: what all must share, and who is named when they do not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from checks.collective.training.data_parallel_step import data_parallel_step
from checks.collective.training.shard import digests_text, names_of
from checks.contract import Evidence, Finding, Group, Missing, Status, worst

NAME = "data_parallel_step"
TWO = {"steps": 2}


def judged(evidence: Sequence[Evidence], missing: Sequence[Missing] = ()) -> list[Finding]:
    judge = data_parallel_step.judge
    assert judge
    return list(judge(list(evidence), list(missing)))


def accused(findings: Sequence[Finding]) -> list[tuple[str, str | None]]:
    return [(finding.target, finding.reason) for finding in findings if finding.status is Status.FAIL]


def corrupt(place: str, magnitude: float | None = None) -> dict[str, Any]:
    return {"kind": "corrupt", "event": None, "places": {place: magnitude}}


# --- real ranks -------------------------------------------------------------------------------------------------------


def test_healthy_ranks_hold_the_same_gradients_and_parameters_after_every_step(run_ranks: Any) -> None:
    (evidence,), missing = run_ranks([NAME], size=3, params={"steps": 3})
    assert not missing
    findings = judged(evidence)
    assert [finding.status for finding in findings] == [Status.PASS]
    assert "gradients and parameters match on all ranks in 3 steps" in findings[0].message
    one, two, three = (item.data["training"] for item in evidence)
    assert one["digests"] == two["digests"] == three["digests"]
    assert {len(set(digests)) for digests in one["digests"].values()} == {3}  # of each step others
    assert len(names_of(one["places"])) == 16
    assert len(json.dumps(evidence[0].data, separators=(",", ":"))) < 1750  # 64 ranks report at once, of 4 steps
    assert one["sums"]["head"][0][0] != two["sums"]["head"][0][0]  # each rank has a batch of its own
    values = {m.name: m.value for m in findings[0].measurements}
    seconds = values[f"{NAME}_duration_seconds"]
    assert seconds
    assert seconds == min(item.data["sizes"][0]["seconds"] for item in evidence)
    assert values[f"{NAME}_busbw_bytes_per_second"] == pytest.approx(468_224 / seconds * 4 / 3)


def test_group_stays_open_over_other_collectives(run_ranks: Any) -> None:
    evidence, missing = run_ranks(["all_reduce", NAME, "all_reduce"], size=2, params={})
    assert not missing
    assert worst(one.status for one in judged(evidence[1])) is Status.PASS


@pytest.mark.parametrize("size", [2, 3])
def test_rank_whose_own_gradient_is_wrong_is_named_with_layer_and_operation(run_ranks: Any, size: int) -> None:
    """All hold the same reduced gradients then: the rank itself sees it, so that two ranks are enough."""
    (evidence,), _ = run_ranks([NAME], size=size, params=TWO, faults={1: corrupt("block1.gelu_grad", 1e-9)})
    findings = judged(evidence)
    assert accused(findings) == [("rank:1", "SilentCorruption")]
    assert "step 2: rank:1 (cpu:1) is at fault" in findings[0].message
    assert "layer block1, gradient of gelu" in findings[0].message


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("block1.up_weight_reduced", "layer block1, reduced gradient of up_weight"),
        ("block0.qkv_weight_update", "layer block0, qkv_weight after the optimizer"),
    ],
)
def test_minority_is_named_where_what_all_must_share_differs(run_ranks: Any, place: str, words: str) -> None:
    (evidence,), _ = run_ranks([NAME], size=3, params={"steps": 3}, faults={2: corrupt(place, 1e-9)})
    findings = judged(evidence)
    assert accused(findings) == [("rank:2", "SilentCorruption")]
    assert f"step 2: rank:2 (cpu:2) differs from 2 other ranks: {words}" in findings[0].message


@pytest.mark.parametrize("place", ["block1.up_weight_reduced", "block1.up_weight_update"])
def test_of_two_ranks_that_differ_neither_is_accused(run_ranks: Any, place: str) -> None:
    (evidence,), _ = run_ranks([NAME], size=2, params=TWO, faults={1: corrupt(place, 1e-9)})
    findings = judged(evidence)
    assert accused(findings) == [("node", "DigestMismatch")]
    assert "no majority shows which is wrong: one of rank:0 (cpu:0), rank:1 (cpu:1)" in findings[0].message


def test_of_two_ranks_the_one_whose_sum_is_not_the_mean_is_named(run_ranks: Any) -> None:
    (evidence,), _ = run_ranks([NAME], size=2, params=TWO, faults={1: corrupt("block1.up_weight_reduced")})
    findings = judged(evidence)
    assert accused(findings) == [("rank:1", "SilentCorruption")]
    assert "differs from the other rank" in findings[0].message
    assert "which is not the mean of what the ranks contributed" in findings[0].message


def test_rank_that_is_wrong_each_time_is_further_from_float64_than_rounding_explains(run_ranks: Any) -> None:
    """One flipped bit in the first tensor that the host reads, which is before the first reduction."""
    (evidence,), _ = run_ranks([NAME], size=2, params=TWO, faults={0: {"kind": "corrupt", "event": None}})
    findings = judged(evidence)
    assert accused(findings) == [("rank:0", "WrongResult")]
    assert "step 1: rank:0 (cpu:0) is at fault: wrong from layer embed, operation token on" in findings[0].message


def test_slow_rank_has_the_long_own_work_and_the_others_wait_in_the_reduction(run_ranks: Any) -> None:
    slow = {"kind": "slow", "event": None, "factor": 20.0}
    (evidence,), _ = run_ranks([NAME], size=3, params={"steps": 3}, faults={1: slow})
    sizes = [item.data["sizes"][0] for item in evidence]
    own = [size["own_seconds"] for size in sizes]
    assert own[1] > 2 * max(own[0], own[2])
    assert sizes[1]["ready_seconds"] > 2 * max(sizes[0]["ready_seconds"], sizes[2]["ready_seconds"])
    assert min(sizes[0]["seconds"], sizes[2]["seconds"]) > sizes[1]["ready_seconds"] / 4  # of two steps
    # The limit between them names the slow one alone.
    bound = (own[1] + max(own[0], own[2])) / 2
    limit = {"own_seconds": [None, bound, "config"]}
    findings = judged([with_size(item, limits={**item.data["sizes"][0]["limits"], **limit}) for item in evidence])
    assert accused(findings) == [("rank:1", "SlowDevice")]
    assert "own work of rank:1 (cpu:1)" in findings[-1].message


@pytest.mark.parametrize(
    ("quantity", "limit"),
    [
        ("busbw_bytes_per_second", {"lower": 1e15, "upper": None, "origin": "config"}),
        ("algbw_bytes_per_second", {"lower": 1e15, "upper": None, "origin": "config"}),
        ("duration_seconds", {"lower": None, "upper": 1e-9, "origin": "config"}),
        ("own_seconds", {"lower": None, "upper": 1e-9, "origin": "config"}),
    ],
)
def test_each_limit_is_held_against_what_was_measured(run_ranks: Any, quantity: str, limit: Any) -> None:
    (evidence,), _ = run_ranks([NAME], size=2, params=TWO, limits={f"{NAME}_{quantity}": limit})
    own = quantity == "own_seconds"
    expected = [("rank:0", "SlowDevice"), ("rank:1", "SlowDevice")] if own else [("node", "SlowLink")]
    assert accused(judged(evidence)) == expected


def test_rank_that_hangs_before_a_reduction_is_named(run_ranks: Any) -> None:
    fault = {"kind": "hang", "event": [f"{NAME}/2", "entered"]}
    (evidence,), missing = run_ranks([NAME], size=3, params=TWO, faults={1: fault}, waits_at=fault["event"])
    findings = judged(evidence, missing)
    assert accused(findings) == [("rank:1", "RankHung")]
    assert f"did not enter {NAME}/2" in findings[0].message


def test_rank_that_dies_is_named_and_those_that_lost_it_are_victims(run_ranks: Any) -> None:
    fault = {"kind": "crash", "event": [f"{NAME}/2", "entered"]}
    (evidence,), missing = run_ranks([NAME], size=3, params=TWO, faults={1: fault})
    findings = judged(evidence, missing)
    assert accused(findings) == [("rank:1", "RankDied")]
    assert "waiting for it: rank:0, rank:2" in findings[0].message


def test_rank_that_never_joins_is_absent(run_ranks: Any) -> None:
    absent = {0: {"kind": "absent", "event": None}}
    (evidence,), missing = run_ranks(
        [NAME], size=2, params=TWO, faults=absent, waits_at=["rendezvous", "joined"], timeout_seconds=5.0
    )
    assert accused(judged(evidence, missing)) == [("rank:0", "RankAbsent")]


def test_what_it_cannot_do_is_said(cpu_device: Any, context: Any) -> None:
    group = Group(
        rank=0, size=1, rendezvous="file:///nowhere", interface=None, seed=1, timeout_seconds=1.0, targets=("cpu:0",)
    )
    (alone,) = data_parallel_step(context(data_parallel_step, device=cpu_device, group=group))
    assert isinstance(alone, Finding)
    assert (alone.status, alone.reason) == (Status.SKIP, "NotApplicable")
    two = dataclasses.replace(group, size=2)
    with pytest.raises(ValueError, match="'steps' must be from 2 to 16, not 1"):
        list(data_parallel_step(context(data_parallel_step, device=cpu_device, group=two, steps=1)))


# --- the pure judge ---------------------------------------------------------------------------------------------------


def with_size(item: Evidence, **changes: Any) -> Evidence:
    return dataclasses.replace(item, data={**item.data, "sizes": [{**item.data["sizes"][0], **changes}]})


def rank(
    number: int,
    ranks: int = 3,
    *,
    reduced: str = "aa",
    updated: str = "bb",
    sums: tuple[float | None, float | None, float | None] = (1.0, 10.0, 1.0),
    faults: Sequence[Mapping[str, Any]] = (),
    key: str = "k",
) -> Evidence:
    free = [None, None, "none"]
    size = {
        "size_bytes": 1024,
        "bytes": 1024,
        "seconds": 0.001,
        "ready_seconds": 0.01,
        "own_seconds": 0.02,
        "cpu_wait_seconds": 0.0,
        "limits": dict.fromkeys(
            ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds", "own_seconds"), free
        ),
        "mismatches": 0,
        "first": None,
        "sources": {},
    }
    training = {
        "steps": 1,
        "places": "head: norm_weight",
        "digests": {"reduction": [digests_text([reduced * 8])], "optimizer": [digests_text([updated * 8])]},
        "sums": {"head": [list(sums)]},
        "faults": list(faults),
    }
    return Evidence(
        target=f"rank:{number}",
        key=key,
        data={
            "rank": number,
            "ranks": ranks,
            "device": "cpu:0",
            "targets": [],
            "seed": 1,
            "sizes": [size],
            "training": training,
        },
    )


def test_same_reduced_gradients_that_are_not_the_mean_accuse_nobody() -> None:
    wrong = judged([rank(number, sums=(1.0, 10.0, 1.1)) for number in range(3)])
    assert accused(wrong) == [("node", "CollectiveMismatch")]
    assert "one of rank:0 (cpu:0), rank:1 (cpu:0), rank:2 (cpu:0)" in wrong[0].message


@pytest.mark.parametrize(("off", "reason"), [(3e-6, None), (9e-6, "CollectiveMismatch")])
def test_bound_of_the_mean_is_what_rounding_explains(off: float, reason: str | None) -> None:
    """6 sqrt(3) 2^-24 of the sum of absolute values, 10: 6.2e-6."""
    findings = judged([rank(number, sums=(1.0, 10.0, 1.0 + off)) for number in range(3)])
    assert [why for _, why in accused(findings)] == ([reason] if reason else [])


def test_ranks_that_contribute_no_numbers_are_wrong_and_those_that_received_them_are_not() -> None:
    nothing = (None, None, None)
    assert accused(judged([rank(0, 2, sums=nothing), rank(1, 2, sums=nothing)])) == [
        ("rank:0", "WrongResult"),
        ("rank:1", "WrongResult"),
    ]
    received = (1.0, 10.0, None)
    one = judged([rank(0, sums=received), rank(1, sums=nothing), rank(2, sums=received, reduced="cc")])
    assert accused(one) == [("rank:1", "WrongResult")]
    assert "gradients of layer head that are not numbers" in one[0].message


def test_rank_that_trains_on_with_what_it_received_is_not_wrong_in_the_next_step() -> None:
    def trained_on(number: int, ranks: int) -> Evidence:
        item = rank(number, ranks)
        told = item.data["training"]
        told["steps"] = 2
        told["sums"]["head"] = [[1.0, 10.0, None], [None, None, None]]
        told["digests"] = {phase: texts * 2 for phase, texts in told["digests"].items()}
        return item

    assert accused(judged([trained_on(0, 2), trained_on(1, 2)])) == [("node", "CollectiveMismatch")]
    gone = Missing(target="rank:2", reason="Crashed", message="signal 9", order=0)
    assert accused(judged([trained_on(0, 3), trained_on(1, 3)], [gone])) == [("rank:2", "RankDied")]


def test_reduced_gradients_that_are_no_numbers_are_wrong() -> None:
    assert accused(judged([rank(number, sums=(1.0, 10.0, None)) for number in range(3)])) == [
        ("node", "CollectiveMismatch")
    ]
    reduced = judged([rank(0, 2, reduced="cc", sums=(1.0, 10.0, None)), rank(1, 2)])
    assert accused(reduced) == [("rank:0", "SilentCorruption")]


def test_judging_takes_as_many_times_longer_as_there_are_more_ranks() -> None:
    def calls(count: int) -> int:
        """How often it looks at the sums of a rank."""
        seen = 0

        class Counted(dict[str, Any]):
            def __getitem__(self, name: str) -> Any:
                nonlocal seen
                seen += name == "sums"
                return super().__getitem__(name)

        ranks = [rank(number, count) for number in range(count)]
        for item in ranks:
            item.data["training"] = Counted(item.data["training"])  # type: ignore[index]
        assert accused(judged(ranks)) == []
        return seen

    assert calls(80) <= 10 * calls(8)


def test_two_that_agree_against_two_accuse_nobody() -> None:
    halves = [rank(number, 4, reduced="aa" if number < 2 else "cc") for number in range(4)]
    (finding,) = [one for one in judged(halves) if one.status is Status.FAIL]
    assert (finding.target, finding.reason) == ("node", "DigestMismatch")
    assert "layer head, reduced gradient of norm_weight differs" in finding.message


def test_parameters_are_compared_with_ranks_of_the_same_key_alone() -> None:
    mixed = [rank(0), rank(1), rank(2, updated="cc", key="another kind of device")]
    assert accused(judged(mixed)) == []
    assert accused(judged([rank(0), rank(1), rank(2, updated="cc")])) == [("rank:2", "SilentCorruption")]


def test_rank_that_saw_a_fault_in_itself_is_named_and_its_consequences_are_not() -> None:
    own = {"reason": "WrongResult", "step": 0, "message": "wrong from layer head on"}
    findings = judged([rank(0), rank(1, faults=[own], reduced="cc", updated="cc"), rank(2)])
    assert accused(findings) == [("rank:1", "WrongResult")]


def test_rank_without_evidence_is_judged_as_in_every_collective() -> None:
    findings = judged([rank(0), rank(2)], [Missing(target="rank:1", reason="Crashed", message="signal 9", order=0)])
    assert accused(findings) == [("rank:1", "RankDied")]
