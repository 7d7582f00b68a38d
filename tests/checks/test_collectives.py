"""All-reduce, all-gather and reduce-scatter over real ranks, and who is accused when they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.collective.all_gather import all_gather
from checks.collective.all_reduce import all_reduce
from checks.collective.judge import judge_ranks
from checks.collective.nccom.run import free_ports
from checks.collective.reduce_scatter import reduce_scatter
from checks.contract import Evidence, Finding, Group, Missing, Progress, Status, worst
from tests.every import every

NAMES = ["all_gather", "all_reduce", "reduce_scatter"]
CHECKS = {"all_gather": all_gather, "all_reduce": all_reduce, "reduce_scatter": reduce_scatter}
SMALL = {"sizes_bytes": [1024, 65536], "iterations": 2}


def judged(name: str, evidence: Sequence[Evidence], missing: Sequence[Missing] = ()) -> list[Finding]:
    judge = CHECKS[name].judge
    assert judge
    return list(judge(list(evidence), list(missing)))


def accused(findings: Sequence[Finding]) -> list[tuple[str, str | None]]:
    return [(finding.target, finding.reason) for finding in findings if finding.status is Status.FAIL]


# --- real ranks -------------------------------------------------------------------------------------------------------


def test_two_healthy_ranks_pass_with_bandwidths_by_the_nccl_definitions(run_ranks: Any) -> None:
    evidence, missing = run_ranks(NAMES, size=2)
    assert not missing
    for name, items in zip(NAMES, evidence, strict=True):
        findings = judged(name, items)
        assert [f.status for f in findings] == [Status.PASS] * 3, findings
        for finding, size_bytes in zip(findings, (1024, 2**20, 8 * 2**20), strict=True):
            values = {m.name: m.value for m in finding.measurements}
            assert {m.labels["size_bytes"] for m in finding.measurements} == {str(size_bytes)}
            seconds = values[f"{name}_duration_seconds"]
            slowest = max(
                size["seconds"] for e in items for size in e.data["sizes"] if size["size_bytes"] == size_bytes
            )
            assert seconds == slowest
            algbw = values[f"{name}_algbw_bytes_per_second"]
            assert algbw == pytest.approx(size_bytes / seconds)
            # With two ranks: 2 (n - 1) / n = 1 and (n - 1) / n = 1/2.
            factor = 1.0 if name == "all_reduce" else 0.5
            assert values[f"{name}_busbw_bytes_per_second"] == pytest.approx(algbw * factor)
            assert "every element exact" in finding.message


def test_another_rendezvous_is_another_group_of_the_same_processes(run_ranks: Any) -> None:
    evidence, missing = run_ranks(["all_reduce"] * 3, size=2, params=SMALL, fresh_groups=True)
    assert not missing
    assert [worst(f.status for f in judged("all_reduce", items)) for items in evidence] == [Status.PASS] * 3


def test_sizes_that_three_ranks_cannot_share_are_rounded_down_and_still_exact(run_ranks: Any) -> None:
    evidence, missing = run_ranks(NAMES, size=3, params={"sizes_bytes": [4, 1000, 40000], "iterations": 1})
    assert not missing
    for name, items in zip(NAMES, evidence, strict=True):
        assert {size["bytes"] for e in items for size in e.data["sizes"]} == {12, 996, 39996}
        assert worst(f.status for f in judged(name, items)) is Status.PASS


@pytest.mark.parametrize("name", NAMES)
def test_rank_that_holds_a_wrong_value_is_named_with_its_device(run_ranks: Any, name: str) -> None:
    evidence, missing = run_ranks([name], size=3, params=SMALL, faults={1: {"kind": "corrupt", "event": None}})
    assert not missing
    findings = judged(name, evidence[0])
    assert accused(findings) == [("rank:1", "CollectiveMismatch")]
    assert any("rank:1 (cpu:1) holds 1 wrong values" in f.message for f in findings)
    # Speed of the size that was wrong is shown, and does not claim exactness.
    assert [("exact" in f.message) for f in findings if f.target == "node"] == [False, True]


def test_rank_that_never_joins_is_absent_and_those_who_waited_are_not_accused(run_ranks: Any) -> None:
    absent = {2: {"kind": "absent", "event": None}}
    waits_at = ["rendezvous", "joined"]
    evidence, missing = run_ranks(["all_reduce"], size=3, params=SMALL, faults=absent, waits_at=waits_at)
    findings = judged("all_reduce", evidence[0], missing)
    assert accused(findings) == [("rank:2", "RankAbsent")]
    assert "waiting for it: rank:0, rank:1" in findings[0].message


def test_rank_that_hangs_before_an_operation_is_named(run_ranks: Any) -> None:
    fault = {"kind": "hang", "event": ["all_reduce/65536", "entered"]}
    evidence, missing = run_ranks(["all_reduce"], size=2, params=SMALL, faults={1: fault}, waits_at=fault["event"])
    findings = judged("all_reduce", evidence[0], missing)
    assert accused(findings) == [("rank:1", "RankHung")]
    assert "did not enter all_reduce/65536" in findings[0].message


def test_rank_whose_peers_time_out_first_is_still_the_one_that_hangs(run_ranks: Any) -> None:
    fault = {"kind": "hang", "event": ["all_gather/1024", "entered"]}
    evidence, missing = run_ranks(["all_gather"], size=3, params=SMALL, faults={1: fault}, timeout_seconds=3.0)
    assert {one.reason for one in missing if one.target != "rank:1"} == {"CheckError"}  # torch gave up on its own
    assert accused(judged("all_gather", evidence[0], missing)) == [("rank:1", "RankHung")]


@pytest.mark.parametrize("event", [["reduce_scatter/65536", "entered"], ["rendezvous", "left"]])
def test_rank_that_dies_is_named_and_those_that_lost_it_are_victims(run_ranks: Any, event: list[str]) -> None:
    fault = {"kind": "crash", "event": event}
    evidence, missing = run_ranks(["reduce_scatter"], size=3, params=SMALL, faults={1: fault})
    assert len(missing) == 3
    findings = judged("reduce_scatter", evidence[0], missing)
    assert accused(findings) == [("rank:1", "RankDied")]
    assert "waiting for it: rank:0, rank:2" in findings[0].message


def test_rank_that_raises_is_unknown_and_nobody_is_accused(run_ranks: Any) -> None:
    fault = {"kind": "raise", "event": ["all_reduce/65536", "entered"]}
    evidence, missing = run_ranks(["all_reduce"], size=2, params=SMALL, faults={0: fault})
    (finding,) = judged("all_reduce", evidence[0], missing)
    assert (finding.status, finding.reason, finding.target) == (Status.UNKNOWN, "CheckError", "rank:0")
    assert "the check itself is broken" in finding.message


def test_one_rank_alone_does_not_apply(cpu_device: Any, context: Any) -> None:
    group = Group(
        rank=0, size=1, rendezvous="file:///nowhere", interface=None, seed=1, timeout_seconds=1.0, targets=("cpu:0",)
    )
    for check in CHECKS.values():
        (finding,) = check(context(check, device=cpu_device, group=group))
        assert isinstance(finding, Finding)
        assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")
        assert "needs at least 2 ranks" in finding.message


INTERFACES = """
import json, os, sys, types
import torch
from checks.collective.ranks import join, reach
from checks.contract import Group
device = types.SimpleNamespace(torch=torch, collective_backend="gloo")
def group(rendezvous, interface):
    return Group(rank=0, size=1, rendezvous=rendezvous, interface=interface, seed=1, timeout_seconds=60.0, targets=())
for number, interface in enumerate(json.loads(sys.argv[2])):
    one = group(f"{sys.argv[1]}-{number}" if interface == "file" else f"{sys.argv[3]}?group={number}",
                None if interface == "file" else interface)
    join(one, device, reach(one, device))
    print(os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))
"""


@pytest.mark.parametrize(
    ("given", "groups", "seen"),
    [
        # Inside a node, then between nodes by an interface, then by whichever the library takes.
        ({}, ["file", "lo", None], ["lo lo", "lo lo", "None None"]),
        ({"NCCL_SOCKET_IFNAME": "lo"}, ["file", None], ["lo lo", "None lo"]),
        ({"GLOO_SOCKET_IFNAME": "lo"}, [None], ["lo None"]),
    ],
)
def test_an_interface_of_one_group_is_not_that_of_the_next(
    run_with_torch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    groups: list[str | None],
    seen: list[str],
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    store = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    done = run_with_torch(INTERFACES, (tmp_path / "rendezvous").as_uri(), json.dumps(groups), store)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == seen


# --- the pure judge ---------------------------------------------------------------------------------------------------


def rank_evidence(rank: int, ranks: int = 3, *, name: str = "all_reduce", **size: Any) -> Evidence:
    free = [None, None, "none"]
    limits = dict.fromkeys(("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds"), free)
    measured = {"size_bytes": 1024, "bytes": 1024, "seconds": 0.001, "limits": limits, "mismatches": 0, "first": None}
    targets = [f"cpu:{index}" for index in range(ranks)]
    return Evidence(
        target=f"rank:{rank}",
        key="cpu",
        data={
            "rank": rank,
            "ranks": ranks,
            "device": targets[rank],
            "targets": targets,
            "seed": 1,
            "sizes": [{**measured, "sources": {}, **size}],
        },
    )


def events(*names: str) -> tuple[Progress, ...]:
    """`joined`, `met` (reached the main rank), `ready`, `+1` (entered operation 1), `-1` (left it)."""
    words = {
        "joined": ("rendezvous", "joined"),
        "met": ("rendezvous/peers", "joined"),
        "ready": ("rendezvous", "left"),
    }
    pairs = [words.get(name) or (f"op/{name[1:]}", "entered" if name[0] == "+" else "left") for name in names]
    return tuple(Progress(step=step, event=event, monotonic_seconds=float(i)) for i, (step, event) in enumerate(pairs))


def gone(rank: int, reason: str, *names: str, order: int | None = None, message: str = "") -> Missing:
    return Missing(target=f"rank:{rank}", reason=reason, message=message, progress=events(*names), order=order)


PEER = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
NCCL = "[PG ID 0 Rank 0] NCCL error: remote process exited or there was a network error"
SYSTEM = "DistBackendError: NCCL error, ncclSystemError: System call (e.g. socket, malloc) failed"
READY = ("joined", "ready")


@every(
    ("missing", "expected"),
    [
        # The first to die did it, although the others died as well (rival fault 25).
        (
            [
                gone(0, "Crashed", *READY, "+1", order=2),
                gone(1, "Crashed", *READY, "+1", order=1),
                gone(2, "Timeout", *READY),
            ],
            [("rank:1", "RankDied", "fail")],
        ),
        # A victim's complaint came before the news of the death.
        (
            [gone(0, "CheckError", *READY, "+1", order=0, message=PEER), gone(1, "Crashed", *READY, "+1", order=1)],
            [("rank:1", "RankDied", "fail")],
        ),
        # A death before joining is a death, not an absence.
        ([gone(0, "Timeout", "joined"), gone(1, "Crashed", order=0)], [("rank:1", "RankDied", "fail")]),
        # Nobody came: nobody can be told.
        ([gone(0, "Timeout"), gone(1, "Timeout"), gone(2, "Timeout")], [("node", "Timeout", "unknown")]),
        # All are inside the same operation: nobody can be told.
        ([gone(r, "Timeout", *READY, "+1") for r in range(3)], [("node", "Timeout", "unknown")]),
        # Two are behind, inside an operation: each may be waiting for the other.
        (
            [
                gone(0, "Timeout", *READY, "+1", "-1", "+2"),
                gone(1, "Timeout", *READY, "+1"),
                gone(2, "Timeout", *READY, "+1"),
            ],
            [("node", "Timeout", "unknown")],
        ),
        # One alone is behind, inside an operation that the others left.
        (
            [
                gone(0, "Timeout", *READY, "+1", "-1"),
                gone(1, "Timeout", *READY, "+1"),
                gone(2, "Timeout", *READY, "+1", "-1"),
            ],
            [("rank:1", "RankHung", "fail")],
        ),
        # Two left an operation and did not enter the next: nobody kept them.
        (
            [gone(0, "Timeout", *READY, "+1"), gone(1, "Timeout", *READY), gone(2, "Timeout", *READY)],
            [("rank:1", "RankHung", "fail"), ("rank:2", "RankHung", "fail")],
        ),
        # The main rank stops once it is through: who still reads its store is behind it, and its victim.
        (
            [gone(0, "Timeout", "joined", "met", "ready", "+1"), gone(1, "Timeout", "joined", "met")],
            [("node", "Timeout", "unknown")],
        ),
        ([gone(0, "Timeout", "joined", "met"), gone(1, "Timeout", "joined")], [("node", "Timeout", "unknown")]),
        # A rank whose peer died, and whose library ends it for that, is a victim too.
        (
            [
                gone(0, "Crashed", *READY, "+1", message=f"killed by SIGABRT: {NCCL}"),
                gone(1, "Crashed", *READY, "+1", message="killed by SIGKILL: (no words)"),
            ],
            [("rank:1", "RankDied", "fail")],
        ),
        # A device that is not there is the node's fault; the ranks that waited are not.
        (
            [gone(0, "Timeout", "joined"), gone(1, "MissingDevice", message="no such device: cpu:1")],
            [("rank:1", "MissingDevice", "fail")],
        ),
        ([gone(0, "Timeout", "joined"), gone(1, "Busy", message="pid 7")], [("rank:1", "Busy", "unknown")]),
        ([gone(0, "Timeout", *READY), gone(1, "Garbage", *READY, order=0)], [("rank:1", "Garbage", "unknown")]),
        # What is missing for one rank does not hide a death or a lost device of another.
        (
            [gone(0, "MissingTool"), gone(1, "Crashed", *READY, order=0, message="killed by SIGKILL")],
            [("rank:0", "MissingTool", "unknown"), ("rank:1", "RankDied", "fail")],
        ),
        (
            [gone(0, "NoPermission"), gone(1, "Timeout", "joined"), gone(2, "DeviceLost", order=0)],
            [("rank:0", "NoPermission", "unknown"), ("rank:2", "DeviceLost", "fail")],
        ),
        # Others that end while one is missing may do so for that.
        (
            [gone(0, "ColdCache"), gone(1, "CheckError", "joined", order=0, message="RuntimeError: what")],
            [("rank:0", "ColdCache", "unknown")],
        ),
        # Killed by a signal, whatever its last words are.
        (
            [
                gone(0, "Timeout", *READY),
                gone(1, "Crashed", *READY, message="killed by SIGSEGV: ls exited with code 1"),
            ],
            [("rank:1", "RankDied", "fail")],
        ),
        # Who is told to end has died of nothing: the end of a job may tell all of its processes.
        (
            [
                gone(0, "CheckError", *READY, "+1", order=0, message=PEER),
                gone(1, "Crashed", *READY, "+1", order=1, message="killed by SIGTERM: (no words)"),
            ],
            [("rank:1", "Crashed", "unknown")],
        ),
        # Nor has who was ended because memory ran out.
        (
            [
                gone(0, "CheckError", *READY, "+1", order=0, message=PEER),
                gone(1, "CannotAllocate", *READY, "+1", message="killed by SIGKILL when memory ran out"),
            ],
            [("rank:1", "CannotAllocate", "unknown")],
        ),
        # Nor is a victim of either accused in its place, whose library gave up without a word of why; who died is.
        (
            [
                gone(0, "Crashed", *READY, "+1", order=0, message="killed by SIGABRT: Fatal Python error: Aborted"),
                gone(1, "Crashed", *READY, "+1", order=1, message="killed by SIGTERM: (no words)"),
            ],
            [("rank:1", "Crashed", "unknown")],
        ),
        (
            [
                gone(0, "Crashed", *READY, "+1", order=0, message="killed by SIGABRT: Fatal Python error: Aborted"),
                gone(1, "CannotAllocate", *READY, "+1", message="killed by SIGKILL when memory ran out"),
            ],
            [("rank:1", "CannotAllocate", "unknown")],
        ),
        (
            [
                gone(0, "Crashed", order=0, message="killed by SIGABRT: Fatal Python error: Aborted"),
                gone(1, "Crashed", *READY, order=1, message=f"exited with code 143 in the middle: {PEER}"),
            ],
            [("rank:1", "Crashed", "unknown")],
        ),
        (
            [
                gone(0, "Crashed", *READY, "+1", order=1, message="killed by SIGSEGV: (no words)"),
                gone(1, "Crashed", *READY, "+1", order=0, message="killed by SIGTERM: (no words)"),
            ],
            [("rank:0", "RankDied", "fail")],
        ),
        # A library that gives up may do so for a peer.
        (
            [gone(0, "Timeout", *READY), gone(1, "Crashed", *READY, message=f"killed by SIGABRT: {SYSTEM}")],
            [("rank:1", "Crashed", "unknown")],
        ),
        # Our own tool failed in one, and others complain of that.
        (
            [
                gone(0, "CheckError", *READY, order=0, message=SYSTEM),
                gone(1, "Crashed", *READY, order=1, message="exited with code 1 in the middle: ImportError: torch"),
            ],
            [("rank:1", "Crashed", "unknown")],
        ),
    ],
)
def test_culprit_is_named_and_never_its_victims(missing: list[Missing], expected: list[tuple[str, str, str]]) -> None:
    findings = judged("all_reduce", [], missing)
    assert [(f.target, f.reason, f.status.value) for f in findings] == expected


def test_rank_that_died_beside_a_missing_one_is_no_victim_of_it() -> None:
    missing = [gone(0, "MissingTool"), gone(1, "DeviceLost", *READY, order=0), gone(2, "Timeout", "joined")]
    for finding in judged("all_reduce", [], missing):
        assert "(waiting for it: rank:2)" in finding.message


def test_rank_that_does_not_go_on_after_the_others_ended_hangs() -> None:
    (finding,) = judged("all_reduce", [rank_evidence(0, 2)], [gone(1, "Timeout", *READY, "+1", "-1")])
    assert (finding.target, finding.reason) == ("rank:1", "RankHung")
    assert "rank:1 (cpu:1) hangs" in finding.message


def test_rank_of_which_nothing_is_known_is_unknown_never_a_pass() -> None:
    """Rival faults 2 and 3."""
    (finding,) = judged("all_reduce", [rank_evidence(0, 2)])
    assert (finding.target, finding.reason, finding.status) == ("rank:1", "NoData", Status.UNKNOWN)


def test_rank_that_sent_wrong_values_to_several_is_accused_and_not_they() -> None:
    items = [
        rank_evidence(0, mismatches=5, first="x", sources={"2": 5}),
        rank_evidence(1, mismatches=5, first="x", sources={"2": 5}),
        rank_evidence(2),
    ]
    assert accused(judged("all_gather", items)) == [("rank:2", "CollectiveMismatch")]


def test_wrong_sum_at_every_rank_accuses_no_single_rank() -> None:
    items = [rank_evidence(rank, mismatches=1, first="element 3 is 1 instead of 2") for rank in range(3)]
    findings = judged("all_reduce", items)
    assert accused(findings) == [("node", "CollectiveMismatch")]
    assert "one of rank:0 (cpu:0), rank:1 (cpu:1), rank:2 (cpu:2)" in findings[0].message


def test_longest_time_decides_and_every_limit_can_be_tripped() -> None:
    """Rival fault 5. Nobody is accused for the time: who waited measures longest."""
    for suffix, limit in (
        ("busbw_bytes_per_second", [1e9, None, "config"]),
        ("algbw_bytes_per_second", [1e9, None, "config"]),
        ("duration_seconds", [None, 0.001, "config"]),
    ):
        free = {
            key: [None, None, "none"]
            for key in ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds")
        }
        items = [rank_evidence(rank, limits={**free, suffix: limit}, seconds=0.001 * (rank + 1)) for rank in range(3)]
        (finding,) = judged("all_reduce", items)
        assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "SlowLink", "node")
        assert "ranks took 1 ms to 3 ms" in finding.message
        assert "limit from config" in finding.message
        # size 1024, 3 ms, three ranks
        assert finding.measurements[0].value == pytest.approx(1024 / 0.003 * 4 / 3)


def test_plain_limit_is_for_the_largest_size_and_others_are_set_by_size(run_ranks: Any) -> None:
    limits = {
        "all_reduce_busbw_bytes_per_second": {"lower": 1e15, "upper": None, "origin": "config"},
        "all_reduce_duration_seconds/1024": {"lower": None, "upper": 1e-9, "origin": "baseline"},
    }
    evidence, _ = run_ranks(["all_reduce"], size=2, params=SMALL, limits=limits)
    small, large = judged("all_reduce", evidence[0])
    assert "limit from baseline" in small.message
    assert "limit from config" in large.message
    assert [m.origin for m in small.measurements] == ["none", "none", "baseline"]


def test_same_evidence_gives_the_same_findings_in_any_order() -> None:
    """Rival fault 9."""
    items = [rank_evidence(rank, mismatches=rank % 2, first="x") for rank in range(3)]
    assert judged("all_reduce", items) == judged("all_reduce", items[::-1])


def test_collectives_load_without_torch() -> None:
    modules = ", ".join(f"checks.collective.{name}" for name in NAMES)
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_judge_takes_no_evidence_and_nothing_missing_for_no_findings() -> None:
    assert list(judge_ranks("all_reduce", [], [])) == []
