"""All passive checks: the healthy machine passes with numbers; what is missing or garbage never does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checks
from checks.contract import Check, Status
from checks.discover import PACKAGES, builtin_checks
from checks.host.machine import HostError, parse_line, parse_record
from checks.reasons import REASONS
from checks.system.host_name import parse_fib_trie, parse_if_inet6
from checks.system.load import parse_cpu_list, parse_loadavg
from checks.system.memory import parse_meminfo
from checks.system.mounts import parse_mountinfo
from checks.system.processes import parse_stat
from tests.hosts.machine import Machine

CHECKS = builtin_checks(PACKAGES[:1])
NOT_HERE = {"instance_type", "neuron_counters", "neuron_versions"}  # the healthy machine is a plain one, not on EC2
NOT_HERE |= {"scheduled_events"}
NOT_HERE |= {"job_steps"}  # nor does a job report its steps
NOT_HERE |= {"neuron_cores", "neuron_topology", "device_permissions"}
NOT_HERE |= {"efa", "gpu_memory", "gpu_throttle", "gpu_links", "gpu_driver", "gpu_recovery"}

CHECKS_FOLDER = Path(checks.__file__).parent


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_check_that_does_not_concern_the_healthy_machine_says_so(name: str, machine: Machine) -> None:
    assert [(item.status, item.reason) for item in machine.findings(CHECKS[name])] == [(Status.SKIP, "NotApplicable")]


@pytest.mark.parametrize(
    "check", [check for name, check in CHECKS.items() if name not in NOT_HERE], ids=lambda check: check.name
)
def test_healthy_machine_passes_with_a_number(check: Check, machine: Machine) -> None:
    findings = machine.findings(check)
    assert {finding.status for finding in findings} == {Status.PASS}, findings
    values = [item.value for finding in findings for item in finding.measurements]
    assert values
    assert None not in values


# What a check cannot do without; sources that have a second one, or whose lack is a finding, have tests of their own.
SOURCES = [
    ("memory_free", "/proc/meminfo"),
    ("load", "/proc/loadavg"),
    ("mounts", "/proc/self/mountinfo"),
    ("host_name", "/etc/hostname"),
    ("host_name", "/proc/net/fib_trie"),
    ("processes", "/proc"),
    ("disk_space", "/host.json"),
    ("clock", "/host.json"),
    ("process_limits", "/host.json"),
]


@pytest.mark.parametrize(("name", "path"), SOURCES)
def test_missing_source_is_an_error_with_a_reason_that_the_runner_makes_unknown(
    name: str, path: str, machine: Machine
) -> None:
    machine.remove(path)
    with pytest.raises(HostError) as caught:
        machine.findings(CHECKS[name])
    assert caught.value.reason == "NoData"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("garbage", [b"", b"\x00\xff\xfe" * 50, b"nonsense\n", b"-1 -1 -1\n", b"[ {", b"9" * 6000])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("memory_free", "/proc/meminfo"),
        ("load", "/sys/devices/system/cpu/online"),
        ("mounts", "/proc/self/mountinfo"),
        ("host_name", "/proc/net/fib_trie"),
        ("disk_space", "/host.json"),
        ("clock", "/host.json"),
        ("shared_memory", "/host.json"),
    ],
)
def test_garbage_in_a_source_never_passes(name: str, path: str, garbage: bytes, machine: Machine) -> None:
    machine.write(path, garbage)
    if name == "host_name":
        machine.remove("/proc/net/if_inet6")
    try:
        findings = machine.findings(CHECKS[name])
    except HostError as error:
        findings = []
        reason = error.reason
    else:
        reason = ""
    assert reason == "NoData" or any(finding.status not in (Status.PASS, Status.SKIP) for finding in findings), findings


@pytest.mark.parametrize("text", ["", "nonsense", "0.2 0.3", "0.1 0.1 nan 1/2 3"])
def test_load_that_is_no_number_never_passes(text: str, machine: Machine) -> None:
    machine.write("/proc/loadavg", text)
    (finding,) = machine.findings(CHECKS["load"])
    assert finding.status in (Status.UNKNOWN, Status.FAIL)


def test_every_finding_of_a_broken_machine_has_a_reason_of_the_catalogue(machine: Machine) -> None:
    machine.write("/proc/meminfo", "")
    machine.write("/dev/kmsg", "[ 1.0] EDAC MC0: 1 UE memory read error\n")
    machine.say("file_systems:/", available_bytes=0)
    for name in ("memory_free", "kernel_log", "disk_space"):
        bad = [finding for finding in machine.findings(CHECKS[name]) if finding.status is not Status.PASS]
        assert bad
        assert all(finding.reason in REASONS for finding in bad)


texts = st.text(max_size=200) | st.lists(
    st.sampled_from(
        ["MemTotal:", "kB", "9" * 30, "1", "-1", " - ", "/", "ro", "(", ")", "D", "S", "|--", "/32 host LOCAL", "\n",
         " ", "[", "]", "nan", "inf", ";", ",", "0-3", "-", "\u0663", "\x00"]
    ),
    max_size=40,
).map("".join)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(texts)
def test_parsers_make_readings_or_nothing_of_any_text_and_never_crash(text: str) -> None:
    assert all(value >= 0 for value in parse_meminfo(text).values())
    assert parse_cpu_list(text) >= 0
    parse_loadavg(text)
    parse_stat(text)
    assert all(mount.point for mount in parse_mountinfo(text))
    assert all(parse_fib_trie(text))
    assert all(parse_if_inet6(text))
    for stamp, _ in (parse_line(text), parse_record(text)):
        assert stamp is None or abs(stamp) < float("inf")


def _may_pass(function: ast.AST, call: ast.Call) -> bool:
    """Whether a finding that is made without a measurement may pass: its status is, or can become, a pass."""
    given = dict(zip(("status", "reason"), call.args, strict=False))  # of `make_finding`
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    reason = given["reason"]
    if isinstance(reason, ast.Constant) and reason.value is not None:
        return False  # a pass alone has none
    text = ast.unparse(given["status"])
    if "Status." in text:
        return "Status.PASS" in text
    text = ast.unparse(function)
    return "Status.PASS" in text or "reason: str | None" in text


def _passes_on_words(tree: ast.AST) -> Iterator[int]:
    """The lines on which a finding without a measurement may pass."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name == "make_finding":
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("Finding", "make_finding"):
                measured = {None, "measurements"} & {keyword.arg for keyword in call.keywords}  # None: **vars(finding)
                if not measured and _may_pass(function, call):
                    yield call.lineno


def test_no_check_passes_on_words_alone() -> None:
    """
    A pass has a measurement. `Machine.run` holds every finding of every test to it; this holds what no test reaches.

    A program that an operator names is asked for its word, which may come without a number.
    """
    files = sorted(CHECKS_FOLDER.rglob("*.py"))
    found = [f"{file}:{line}" for file in files for line in _passes_on_words(ast.parse(file.read_text()))]
    assert found == []
    words = "def judge(tool):\n    yield make_finding(Status.PASS, None, 'it was not asked')"
    assert list(_passes_on_words(ast.parse(words))) == [2]
