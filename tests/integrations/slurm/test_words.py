"""What Slurm says of its nodes and jobs, and what follows from it: pure."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Action, Blame, Status
from healthd.cli.hooks.readiness import Fitness
from healthd.core.errors import BadInputError, ConfigError
from healthd.core.model import Decision, ExcludedNode, Reason, Verdict
from healthd.integrations.slurm.health import ADOPT_SECONDS, culprits, next_step
from healthd.integrations.slurm.jobs import at_fault, outcome_of, read_ids, read_job
from healthd.integrations.slurm.scontrol import (
    MARK,
    MAX_REASON_LENGTH,
    Scontrol,
    SlurmNode,
    one_node,
    parse_nodes,
    reason_text,
)
from tests.every import every

# As slurm-wlm 22.05.8 prints it.
SHOWN = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=1 CPUTot=1 CPULoad=4.95
   AvailableFeatures=(null)
   NodeAddr=127.0.0.1 NodeHostName=localhost Port=47818 Version=22.05.8
   OS=Linux 6.18.44 #1 SMP
   RealMemory=1 AllocMem=0 FreeMem=11914 Sockets=1 Boards=1
   State=IDLE+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=p
   BootTime=2026-11-21T08:58:39 SlurmdStartTime=2026-11-21T13:41:28
   CfgTRES=cpu=1,mem=1M,billing=1
   Reason=fan [left] is loud [root@2026-11-21T13:45:12]
   Comment=a Reason=healthd: x

NodeName=n2 CoresPerSocket=1
   State=IDLE*+CLOUD+POWERED_DOWN ThreadsPerCore=1 TmpDisk=0

"""


def node(*states: str, reason: str = "", at: float | None = None) -> SlurmNode:
    return SlurmNode(name="n1", states=frozenset(states), reason=reason, reason_at=at)


def test_node_is_read_with_its_flags_and_reason_and_comments_say_nothing() -> None:
    first, second = parse_nodes(SHOWN)
    assert (first.name, first.states, first.reason) == ("n1", frozenset({"IDLE", "DRAIN"}), "fan [left] is loud")
    assert first.reason_at == time.mktime((2026, 11, 21, 13, 45, 12, 0, 0, -1))
    assert (second.states, second.reason, second.off) == (frozenset({"IDLE", "CLOUD", "POWERED_DOWN"}), "", True)


@every(
    ("text", "drained", "out"),
    [
        ("DRAINED", True, True),
        ("DRAINING*", True, True),
        ("MIXED+DRAIN", True, True),
        ("DOWN", False, True),
        ("FAIL", False, True),
        ("IDLE+MAINTENANCE+RESERVED", False, False),
        ("ALLOCATED", False, False),
    ],
)
def test_states_of_old_and_new_releases(text: str, drained: bool, out: bool) -> None:
    (found,) = parse_nodes(f"NodeName=n1 Arch=x\n   State={text} ThreadsPerCore=1\n")
    assert (found.drained, found.out) == (drained, out)


def test_node_without_a_state_is_not_known() -> None:
    with pytest.raises(BadInputError, match="no State"):
        parse_nodes("NodeName=n1 Arch=x86_64\n   Reason=healthd: x\n")


@given(st.data())
def test_cut_or_mangled_output_never_makes_an_operators_drain_ours(data: st.DataObject) -> None:
    lines = SHOWN.split("\n")
    drop = data.draw(st.sets(st.integers(0, len(lines) - 1)))
    text = "\n".join(line for number, line in enumerate(lines) if number not in drop)
    text = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.text(max_size=20))
    try:
        found = parse_nodes(text)
    except BadInputError:
        return
    assert not any(one.bears(MARK) for one in found)


@given(st.text(max_size=400))
def test_anything_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(BadInputError):
        parse_nodes(text)


@given(st.text(max_size=600))
def test_reason_is_one_line_that_is_recognised_again(why: str) -> None:
    reason = reason_text(MARK, why)
    assert reason.isprintable()
    assert len(reason) <= MAX_REASON_LENGTH
    shown = f"NodeName=n1\n   State=IDLE+DRAIN\n   Reason={reason} [root@2026-11-21T13:45:12]\n"
    (found,) = parse_nodes(shown)
    assert (found.bears(MARK), found.reason) == (True, reason)


@every("name", ["ALL", "all", "n[1-3]", "n1,n2", "", "-a", "n1 State=DOWN", "n1\n", "^n"])
def test_what_may_mean_more_than_one_node_is_never_passed_on(name: str) -> None:
    assert not one_node(name)
    assert Scontrol("/nowhere").node(name) is None


FIT, UNFIT, SILENT = Fitness(fit=True, why=""), Fitness(fit=False, why="fan"), Fitness(fit=None, why="no answer")


@every(
    ("entry", "found", "action"),
    [
        (node("IDLE"), FIT, "nothing"),
        (node("IDLE"), UNFIT, "drain"),
        (node("ALLOCATED"), UNFIT, "drain"),  # the job that runs goes on
        (node("IDLE"), SILENT, "drain"),
        (node("IDLE", "DRAIN", reason="healthd: fan"), FIT, "undrain"),
        (node("IDLE", "DRAIN", reason="healthd: fan"), UNFIT, "nothing"),
        (node("IDLE", "DRAIN", reason="healthd: fan"), SILENT, "nothing"),
        (node("IDLE", "DRAIN", reason="by an operator"), FIT, "nothing"),
        (node("IDLE", "DRAIN", reason="by an operator"), UNFIT, "nothing"),
        (node("IDLE", "DRAIN", reason=""), FIT, "nothing"),
        (node("IDLE", "DRAIN", reason="not healthd: fan"), FIT, "nothing"),
        (node("IDLE", "DRAIN", reason="healthd-fleet: fan"), FIT, "nothing"),
        (node("IDLE", "DRAIN", reason="Prolog error", at=1000.0), FIT, "nothing"),  # somebody else's prolog
        (node("DOWN", reason="healthd: fan"), FIT, "nothing"),  # down is not drained, and not by us
        (node("DOWN", reason="Not responding"), UNFIT, "nothing"),
        (node("FAIL"), UNFIT, "nothing"),
        (node("IDLE", "POWERED_DOWN"), UNFIT, "nothing"),
    ],
)
def test_only_own_drains_are_undone_and_others_are_left(entry: SlurmNode, found: Fitness, action: str) -> None:
    assert next_step(entry, found).action == action


@pytest.mark.parametrize(
    ("found", "seconds", "action"),
    [(FIT, ADOPT_SECONDS, "undrain"), (UNFIT, -ADOPT_SECONDS, "drain"), (FIT, ADOPT_SECONDS + 1, "nothing")],
)
def test_drain_by_slurm_for_our_prolog_is_ours_when_the_times_agree(
    found: Fitness, seconds: float, action: str
) -> None:
    entry = node("IDLE", "DRAIN", reason="Prolog error", at=1000.0 + seconds)
    assert next_step(entry, found, refused_at=1000.0).action == action


def test_silence_neither_drains_nor_resumes_where_it_is_to_be_left_alone() -> None:
    for entry in (node("IDLE"), node("IDLE", "DRAIN", reason="healthd: fan")):
        assert next_step(entry, SILENT, drain_unknown=False).action == "nothing"


@pytest.mark.parametrize(("bad", "of", "drained"), [(2, 4, 2), (3, 4, 0), (3, 30, 3), (4, 39, 0), (1, 1, 1)])
def test_many_at_fault_at_once_are_not_drained(bad: int, of: int, drained: int) -> None:
    assert len(culprits([(f"n{one}", "") for one in range(bad)], of=of, most=2)) == drained


def excluded(name: str, code: str, status: Status, blame: Blame) -> ExcludedNode:
    reason = Reason(code=code, message=f"{name} {code}", status=status, blame=blame, action=Action.NONE, node=name)
    return ExcludedNode(node=name, reasons=(reason,))


def test_only_what_is_proved_against_a_node_itself_drains_it() -> None:
    decision = Decision(
        id="g",
        decision=Verdict.REJECT,
        reasons=(),
        nodes=(),
        excluded=(
            excluded("n1", "WrongResult", Status.FAIL, Blame.NODE),
            excluded("n2", "Silent", Status.UNKNOWN, Blame.CONTROL),
            excluded("n3", "PathFault", Status.FAIL, Blame.PATH),
            excluded("n4", "NotYetRun", Status.UNKNOWN, Blame.NODE),
            excluded("n5", "Quarantined", Status.UNKNOWN, Blame.NODE),
        ),
        policy={},
        retryable=True,
        decided_at=0.0,
        duration_seconds=0.0,
    )
    assert at_fault(decision) == (("n1", "WrongResult: n1 WrongResult"), ("n5", "Quarantined: n5 Quarantined"))
    (text,) = (reason_text(MARK, why) for node, why in at_fault(decision) if node == "n1")
    assert text[:20] == "healthd: WrongResult", "what sinfo -R shows of it"


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"SLURM_JOB_ID": "7"}, ("7", 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_RESTART_COUNT": "3"}, ("7", 3)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, ("7", 2)),
    ],
)
def test_job_and_attempt_are_what_slurmctld_says(environ: dict[str, str], found: tuple[str, int]) -> None:
    assert read_ids(environ) == found


@every(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "0"},
        {"SLURM_JOB_ID": "-1"},
        {"SLURM_JOB_ID": "7_1"},
        {"SLURM_JOB_ID": "²"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_RESTART_COUNT": "x"},
    ],
)
def test_no_job_is_an_error_and_never_a_gate(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_ids(environ)


def test_names_are_read_without_scontrol_and_a_part_is_never_asked_for() -> None:
    away = Scontrol("/nowhere/scontrol")
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}
    assert read_job(environ, away).nodes == ("n1", "n2", "n3")
    for more in ({"SLURM_JOB_NUM_NODES": "4"}, {"SLURM_JOB_NODELIST": "n[1-"}, {"SLURM_JOB_NODELIST": "n1,n1,n2"}):
        with pytest.raises(ConfigError):
            read_job({**environ, **more}, away)


@pytest.mark.parametrize("nodes", [{}, {"SLURM_JOB_NODELIST": ""}, {"SLURM_JOB_NODELIST": "(null)"}])
def test_a_job_whose_nodes_are_not_told_is_an_error_unless_slurm_says_that_it_has_none(nodes: dict[str, str]) -> None:
    away = Scontrol("/nowhere/scontrol")
    with pytest.raises(ConfigError, match="job 7 has no list of nodes: SLURM_JOB_NODELIST"):
        read_job({"SLURM_JOB_ID": "7", **nodes}, away)
    with pytest.raises(ConfigError):
        read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", **nodes}, away)
    assert read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "0", **nodes}, away).nodes == ()


def test_a_list_in_which_scontrol_finds_no_node_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\n")
    (tmp_path / "scontrol").chmod(0o755)
    for more in ({}, {"SLURM_JOB_NUM_NODES": "0"}):
        with pytest.raises(ConfigError):
            read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": " ", **more}, Scontrol(str(tmp_path / "scontrol")))


def test_part_of_a_heterogeneous_job_is_watched_as_its_nodes_show_it() -> None:
    environ = {"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    job = read_job(environ, Scontrol("/nowhere/scontrol"))
    assert (job.name, job.workload) == ("slurm-8", "slurm:7")


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [("0:0", "ok", "exit code 0"), ("3:0", "failed", "exit code 3"), ("0:9", "failed", "exit code 0, signal 9")],
)
def test_end_of_a_job_in_the_words_of_the_aggregator(code: str, status: str, message: str) -> None:
    assert outcome_of({"SLURM_JOB_EXIT_CODE2": code}) == (status, message)
    assert outcome_of({})[0] == "failed"


def test_what_goes_to_slurm_is_escaped() -> None:
    evil = "gone \x1b[2J\x1b]0;owned\x07 \u202e"
    assert reason_text(MARK, evil).isprintable()
    assert "\\u001b[2J" in reason_text(MARK, evil)
