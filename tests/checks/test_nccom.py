"""The nccom checks on a stand-in machine: right numbers where all is well, each fault told as what it is."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.collective.nccom.run import environment_of, plan_steps, rank_counts, visible_cores
from checks.collective.nccom.steps import nccom_all_gather, nccom_all_reduce, nccom_reduce_scatter
from checks.contract import Blame, Check, Context, Finding, Limit, Progress, Status, Tier, load_params
from checks.host.machine import Host
from tests.every import every
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import number, worst_of
from tests.patience import PATIENCE

CHECKS = (nccom_all_gather, nccom_all_reduce, nccom_reduce_scatter)
PASSES = (Status.PASS, None)


def inventory(machine: NeuronMachine, **changes: Any) -> dict[str, Any]:
    devices = [
        {
            "target": f"neuron:{device['neuron_device']}",
            "kind": "Trainium1" if machine.state["chip"] == "Trainium" else machine.state["chip"],
            "cores": device["nc_count"],
            "core_ids": device["neuroncore_ids"],
        }
        for device in machine.state["devices"]
        if device["visible"]
    ]
    cores = sum(device["cores"] for device in devices)
    return {"accelerator": "neuron", "devices": devices, "core_count": cores, "holders": [], **changes}


def run(
    machine: NeuronMachine,
    check: Check = nccom_all_reduce,
    tier: Tier = Tier.QUICK,
    limits: dict[str, Limit] | None = None,
    params: dict[str, Any] | None = None,
    **changes: Any,
) -> list[Finding]:
    context = Context(
        host=machine.host,
        params=load_params(check.params_type, params or {}),
        tier=tier,
        device=None,
        group=None,
        previous=None,
        inventory=inventory(machine, **changes),
        limits=limits or {},
    )
    return [item for item in check(context) if isinstance(item, Finding)]


@pytest.fixture
def machine(tmp_path: Path) -> NeuronMachine:
    return NeuronMachine(tmp_path / "machine", "trn1.32xlarge")


def wrap(machine: NeuronMachine, body: str) -> None:
    """Another program in the place of nccom-test, whose help is the real stand-in's."""
    tool = machine.root / "bin/nccom-test"
    tool.rename(machine.root / "bin/real-nccom-test")
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in *--help*) exec {machine.root}/bin/real-nccom-test --help;; esac\n{body}\n'
    )
    tool.chmod(0o755)


# --- all is well ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("trn1.2xlarge", "old"),
        ("trn1.32xlarge", "new"),
        ("trn1.32xlarge", "old"),
        ("trn2.48xlarge", "new"),
        ("inf2.24xlarge", "old"),
        ("inf2.48xlarge", "new"),
    ],
)
def test_whole_machine_passes_with_three_sizes_up_to_one_mebibyte(name: str, tools: str, tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", name, tools=tools)
    findings = run(machine)
    assert [finding.status for finding in findings] == [Status.PASS] * 3, findings
    assert all("values right" in finding.message for finding in findings)
    sizes = [int(finding.measurements[0].labels["size_bytes"]) for finding in findings]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= 2**20


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("units", [None, "old_units"])
def test_bandwidth_is_of_bytes_and_seconds_whatever_unit_is_printed(
    check: Check, units: str | None, machine: NeuronMachine
) -> None:
    if units:
        machine.state["faults"].append({"kind": units, "target": None, "value": None})
        machine.save()
    findings = run(machine, check)
    for finding in findings:
        of = {measured.name.removeprefix(f"{check.name}_"): measured for measured in finding.measurements}
        size = int(of["duration_seconds"].labels["size_bytes"])
        assert of["duration_seconds"].value
        algbw = size / of["duration_seconds"].value
        factor = 2 * 31 / 32 if check is nccom_all_reduce else 31 / 32
        assert of["algbw_bytes_per_second"].value == pytest.approx(algbw)
        assert of["busbw_bytes_per_second"].value == pytest.approx(algbw * factor)
    assert worst_of(findings) == PASSES


def test_deep_has_a_size_for_each_algorithm_and_several_types_and_rank_counts(machine: NeuronMachine) -> None:
    findings = run(machine, tier=Tier.DEEP)
    assert worst_of(findings) == PASSES
    seen = {(m.labels["dtype"], m.labels["ranks"]) for finding in findings for m in finding.measurements}
    assert seen == {("fp32", "32"), ("bf16", "32"), ("fp16", "32"), ("fp32", "2"), ("fp32", "8")}
    sizes = sorted({int(m.labels["size_bytes"]) for finding in findings for m in finding.measurements})
    below, middle, above = sizes
    assert below < 1e6 < middle < 56e6 < 56 * 2**20 < above


@every("ranks", [2, 4, 8, 12, 24, 32, 64, 128])
@every("tier", [Tier.QUICK, Tier.DEEP])
def test_every_rank_gets_an_equal_share_of_every_size(ranks: int, tier: Tier) -> None:
    for step in plan_steps("nccom_all_gather", tier, ranks=ranks, counts=()):
        assert all(size % (4 * ranks) == 0 for size in step.sizes_bytes)
        assert [big // small for small, big in zip(step.sizes_bytes, step.sizes_bytes[1:], strict=False)] == [
            step.factor
        ] * 2


def test_rank_counts_are_those_that_are_documented() -> None:
    assert rank_counts("Trainium1", 32, 2) == (2, 8)
    assert rank_counts("Trainium1", 2, 2) == ()
    assert rank_counts("Trainium2", 64, 4) == (4,)
    assert rank_counts(None, 24, None) == ()


def test_share_of_a_machine_runs_on_its_own_cores(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge", share=[4, 5, 6, 7])
    findings = run(machine)
    assert worst_of(findings) == PASSES
    assert findings[0].measurements[0].labels["ranks"] == "8"
    assert (visible_cores([8, 9, 10]), visible_cores([3]), visible_cores([2, 4])) == ("8-10", "3", "2,4")


def test_ranks_are_counted_as_the_tool_counts_cores(tmp_path: Path) -> None:
    """Jobs here have one physical core in a logical one; a process that says nothing gets two."""
    machine = NeuronMachine(tmp_path / "machine", "trn2.48xlarge", lnc=2)
    devices = [
        {
            "target": f"neuron:{index}",
            "kind": "Trainium2",
            "cores": 8,
            "core_ids": [8 * index + nth for nth in range(8)],
        }
        for index in range(16)
    ]
    findings = run(machine, devices=devices, core_count=128, lnc=1)
    assert worst_of(findings) == PASSES, findings
    assert findings[0].measurements[0].labels["ranks"] == "128"


def test_cores_with_a_gap_in_their_numbers_are_named_to_the_tool(tmp_path: Path) -> None:
    """Of a container that was given its devices 0 and 5: by itself the tool would take the cores 0 to 3."""
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge", share=[0, 5])
    assert [device["core_ids"] for device in inventory(machine)["devices"]] == [[0, 1], [10, 11]]
    findings = run(machine)
    assert worst_of(findings) == PASSES, findings


def test_variables_of_a_job_do_not_reach_the_tool(machine: NeuronMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(machine, f'env > {machine.root}/env; pwd >> {machine.root}/env; exec {machine.root}/bin/real-nccom-test "$@"')
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "30-31")
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "10.0.0.9:1")
    monkeypatch.setenv("FI_PROVIDER", "tcp")
    assert worst_of(run(machine)) == PASSES
    said = (machine.root / "env").read_text().splitlines()
    assert not any(line.startswith(("NEURON_RT_VISIBLE_CORES", "FI_")) for line in said)
    assert any(line.startswith("NEURON_RT_ROOT_COMM_ID=127.0.0.1:") for line in said)
    assert not os.path.exists(said[-1])  # its folder is gone, with what it wrote there
    assert environment_of({"SLURM_JOB_ID": "1", "A": "b"}, {"C": "d"}) == {"A": "b", "C": "d"}


# --- limits -----------------------------------------------------------------------------------------------------------


def test_speed_below_its_limit_is_a_slow_link(machine: NeuronMachine) -> None:
    limits = {"nccom_all_reduce_busbw_bytes_per_second/1048576": Limit(lower=20e9, upper=None, origin="config")}
    assert worst_of(run(machine, limits=limits)) == PASSES
    machine.state["faults"].append({"kind": "nccom_slow", "target": None, "value": "4"})
    machine.save()
    findings = run(machine, limits=limits)
    assert [finding.reason for finding in findings] == [None, None, "SlowLink"]
    assert findings[-1].measurements[0].lower == 20e9


def test_plain_limit_holds_for_the_largest_size_of_deep_alone(machine: NeuronMachine) -> None:
    limits = {"nccom_all_reduce_duration_seconds": Limit(lower=1.0, upper=None, origin="config")}
    assert worst_of(run(machine, limits=limits)) == PASSES
    failed = [finding for finding in run(machine, tier=Tier.DEEP, limits=limits) if finding.status is Status.FAIL]
    assert [finding.measurements[0].labels for finding in failed] == [
        {"size_bytes": str(128 * 2**20), "dtype": "fp32", "ranks": "32"}
    ]


# --- faults -----------------------------------------------------------------------------------------------------------


# New tools write a report, old ones a table alone; "0" is the exit code.
@pytest.mark.parametrize(
    ("kind", "value", "tools", "expected"),
    [
        ("nccom_wrong", None, "new", (Status.FAIL, "CollectiveMismatch")),
        ("nccom_wrong", "0", "old", (Status.FAIL, "CollectiveMismatch")),
        ("nccom_fail", None, "old", (Status.FAIL, "CollectiveFailed")),
        ("nccom_fail", "0", "new", (Status.FAIL, "CollectiveFailed")),
        ("nccom_missing_row", None, "new", (Status.FAIL, "CollectiveFailed")),
        ("nccom_missing_row", None, "old", (Status.FAIL, "CollectiveFailed")),
        ("nccom_nan", None, "new", (Status.FAIL, "CollectiveFailed")),
        ("nccom_nan", None, "old", (Status.FAIL, "CollectiveFailed")),
        ("no_driver", None, "new", (Status.FAIL, "MissingDevice")),
        ("busy", None, "old", (Status.SKIP, "Busy")),
    ],
)
def test_each_failure_is_told_as_what_it_is(
    kind: str, value: str | None, tools: str, expected: object, tmp_path: Path
) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge", tools=tools)
    if kind in ("busy", "no_driver"):
        machine.fault(kind)
    else:
        machine.state["faults"].append({"kind": kind, "target": None, "value": value})
        machine.save()
    assert worst_of(run(machine)) == expected


def test_log_of_a_failure_is_named_and_its_end_quoted(machine: NeuronMachine) -> None:
    machine.fault("nccom_fail")
    finding = run(machine)[0]
    assert "/tmp/nccom_test_log_" in finding.message
    assert "suspected hang in collectives" in finding.message
    assert "\n" not in finding.message
    assert len(finding.message) < 800


def test_hang_fails_and_leaves_no_process(machine: NeuronMachine) -> None:
    machine.fault("nccom_hang")
    (finding,) = run(machine, params={"step_seconds": 1.0})
    assert (finding.status, finding.reason, finding.blame) == (Status.FAIL, "Timeout", Blame.NODE)
    bench = int((machine.root / "neuron-bench.pid").read_text())
    assert happens(lambda: gone(bench))


def test_hang_is_told_with_the_last_words_and_the_log(machine: NeuronMachine) -> None:
    (machine.root / "tmp").mkdir(exist_ok=True)
    log = "/tmp/nccom_test_log_1.log"
    wrap(machine, f"echo 'Timeout waiting for RX from rank 3' >&2; echo 'neuron-bench - log file {log}'; exec sleep 60")
    (finding,) = run(machine, params={"step_seconds": 1.0})
    assert (finding.status, finding.reason) == (Status.FAIL, "Timeout")
    assert f"the collective hangs; log {log}; its last output: " in finding.message
    assert "Timeout waiting for RX from rank 3" in finding.message
    (machine.root / log.lstrip("/")).write_text("Connect to 10.0.0.7:40011 failed\n")
    assert "its last output: Connect to 10.0.0.7:40011 failed" in run(machine, params={"step_seconds": 1.0})[0].message


def test_step_that_had_too_little_time_left_is_unknown(machine: NeuronMachine) -> None:
    machine.fault("nccom_hang")
    findings = run(machine, params={"total_seconds": 1.2})
    assert worst_of(findings) == (Status.UNKNOWN, "Timeout")


def test_worker_that_is_killed_takes_the_benchmark_with_it(machine: NeuronMachine) -> None:
    """The cores must be free for the job that comes."""
    machine.fault("nccom_hang")
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = [sys.argv[1]]\n"
        "from tests.checks.test_nccom import NeuronMachine, run\n"
        "run(NeuronMachine.at(Path(sys.argv[2])))\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, str(Path.cwd()), str(machine.root)])
    noted = machine.root / "neuron-bench.pid"
    assert happens(lambda: noted.exists() and bool(noted.read_text()), 20)
    bench = int(noted.read_text())
    folder = os.readlink(f"/proc/{bench}/cwd")
    assert os.path.basename(folder).startswith("healthd-nccom-")
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert happens(lambda: gone(bench))
    assert happens(lambda: not os.path.exists(folder)), "its guard removes the folder once the benchmark has ended"


def happens(true: Callable[[], bool], within_seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + within_seconds * PATIENCE
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return False


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("exit_code", [137, 143])
def test_killed_tool_is_unknown(exit_code: int, machine: NeuronMachine) -> None:
    wrap(machine, f"exit {exit_code}")
    assert worst_of(run(machine)) == (Status.UNKNOWN, "Crashed")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("exit 0", (Status.FAIL, "CollectiveFailed")),
        ("echo usage: nccom-test; echo error: no such flag >&2; exit 2", (Status.UNKNOWN, "CheckError")),
        ("exec no-such-program", (Status.UNKNOWN, "MissingTool")),
        ("printf 'size(B) type time(us)\\n1 fp32 1\\n2 fp32 1\\n3 fp32 1\\n'", (Status.UNKNOWN, "Garbage")),
    ],
)
def test_tool_that_is_no_nccom_test_never_passes(body: str, expected: object, machine: NeuronMachine) -> None:
    wrap(machine, body)
    assert worst_of(run(machine)) == expected


def test_rows_whose_units_are_others_are_not_believed(machine: NeuronMachine) -> None:
    rows = "".join(f"{size} fp32 57 0.018\\n" for size in (1024, 32768, 1048576))
    wrap(machine, f"printf 'size(B) type time:avg(us) algbw(GB/s)\\n{rows}'")
    findings = run(machine)
    assert worst_of(findings) == (Status.UNKNOWN, "Garbage")
    assert number(findings, "nccom_all_reduce_algbw_bytes_per_second").value == pytest.approx(1024 / 57e-6)


def test_rows_of_another_type_are_not_taken(machine: NeuronMachine) -> None:
    rows = "".join(f"{size} uint8 57\\n" for size in (1024, 32768, 1048576))
    wrap(machine, f"printf 'size(B) type time:avg(us)\\n{rows}'")
    assert {finding.reason for finding in run(machine)} == {"Garbage"}


def test_tool_that_cannot_check_values_is_unknown_with_its_speeds(machine: NeuronMachine) -> None:
    tool = machine.root / "bin/nccom-test"
    tool.rename(machine.root / "bin/real")
    run_it = f'exec {machine.root}/bin/real "$@"'
    tool.write_text(f'#!/bin/sh\ncase "$*" in *--help*) echo usage: nccom-test -r N op; exit 0;; esac\n{run_it}\n')
    tool.chmod(0o755)
    findings = run(machine)
    assert worst_of(findings) == (Status.UNKNOWN, "NoData")
    assert not any("values right" in finding.message for finding in findings)


# --- what is not measured ---------------------------------------------------------------------------------------------


def test_missing_tool_is_unknown_with_the_remedy(machine: NeuronMachine) -> None:
    (machine.root / "bin/nccom-test").unlink()
    (finding,) = run(machine)
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "MissingTool")
    assert "aws-neuronx-tools" in finding.message


@pytest.mark.parametrize("body", ["exit 1", "echo hello", "exec /no/such/interpreter"])
def test_tool_without_a_help_is_unknown(body: str, machine: NeuronMachine) -> None:
    (machine.root / "bin/nccom-test").write_text(f"#!/bin/sh\n{body}\n")
    (finding,) = run(machine)
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "NoData")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"accelerator": "cuda"}, (Status.SKIP, "NotApplicable")),
        ({"devices": []}, (Status.UNKNOWN, "NoData")),
        ({"core_count": None, "devices": [{"target": "neuron:0", "cores": None}]}, (Status.UNKNOWN, "NoData")),
        ({"core_count": 1}, (Status.SKIP, "NotApplicable")),
        ({"holders": ["neuron:0: pid 7 (python)"]}, (Status.SKIP, "Busy")),
        ({"core_count": None}, PASSES),
    ],
)
def test_without_devices_of_ours_nothing_is_run(
    changes: dict[str, Any], expected: object, machine: NeuronMachine
) -> None:
    assert worst_of(run(machine, **changes)) == expected


def test_newer_tool_in_the_place_of_an_older_is_asked_again(machine: NeuronMachine) -> None:
    machine.state["tools"] = "old"
    machine.save()
    assert worst_of(run(machine)) == PASSES
    machine.state["tools"] = "new"
    machine.save()
    os.utime(machine.root / "bin/nccom-test", ns=(1, 1))
    assert "99 %" in run(machine)[0].message


def test_each_process_of_the_tool_is_announced(machine: NeuronMachine) -> None:
    context = Context(
        host=Host(machine.root),
        params=load_params(nccom_all_gather.params_type, {}),
        tier=Tier.QUICK,
        device=None,
        group=None,
        previous=None,
        inventory=inventory(machine),
        limits={},
    )
    events = [item.event for item in nccom_all_gather(context) if isinstance(item, Progress)]
    assert events == ["entered", "left"]


def test_findings_are_json(machine: NeuronMachine) -> None:
    machine.state["faults"].append({"kind": "nccom_nan", "target": None, "value": None})
    machine.save()
    values: Sequence[float | None] = [m.value for finding in run(machine) for m in finding.measurements]
    assert json.dumps(values, allow_nan=False)
    assert not any(value is not None and math.isnan(value) for value in values)
