"""Versions of AWS Neuron: pairs that do not work, drivers that are not the installed ones, and what nobody can say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.accelerators.neuron.versions import (
    PACKAGES,
    Package,
    find_started,
    parse_dpkg,
    parse_rpm,
    parse_version,
    read_all,
    same_version,
)
from checks.contract import Action, Finding, Status
from checks.host.identity import read_identity
from checks.system.neuron.neuron_versions import PAIRS, judge_pairs, neuron_versions
from tests.every import every
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import number, worst_of

NEURON = {"accelerator": "neuron"}
CONFLICT = (Status.FAIL, "VersionMismatch")
DOUBT = (Status.WARN, "VersionMismatch")
DARK = (Status.UNKNOWN, "NoData")
STATUS = "/var/lib/dpkg/status"


@pytest.fixture
def machine(tmp_path: Path) -> NeuronMachine:
    return NeuronMachine(tmp_path / "machine", "inf2.xlarge")


def findings(machine: NeuronMachine, **others: Any) -> list[Finding]:
    return machine.findings(neuron_versions, inventory=NEURON, **others)


def install(machine: NeuronMachine, **versions: str) -> None:
    """Packages by what they are; `loaded` is the driver that runs."""
    loaded = {"loaded": versions.pop("loaded")} if "loaded" in versions else {}
    pairs = {**loaded, **{PACKAGES[part]: version for part, version in versions.items()}}
    machine.fault("version_pair", None, ",".join(f"{name}={version}" for name, version in pairs.items()))


def test_versions_of_one_release_pass_and_are_told(machine: NeuronMachine) -> None:
    found = findings(machine)
    assert worst_of(found) == (Status.PASS, None)
    assert "driver 2.30.2.0" in found[0].message
    assert number(found, "neuron_packages_count").value == 4.0


def test_check_does_not_concern_other_accelerators(machine: NeuronMachine) -> None:
    (finding,) = machine.findings(neuron_versions)
    assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")


@pytest.mark.parametrize(
    ("driver", "runtime", "conflict"),
    [
        ("2.29.1.0", "2.33.1.0", False),
        ("2.29.1.0", "2.32.9.0", True),
        ("2.28.9.0", "2.32.9.0", False),
        ("2.31.7.0", "2.32.9.0", True),
        ("2.26.9.0", "2.32.0.0", True),
        ("2.26.9.0", "2.31.9.0", False),
        ("2.27.0.0", "2.32.0.0", False),
        ("2.26.9.0", "2.34.10.0", True),
    ],
)
def test_pair_that_is_known_not_to_work_fails_with_both_versions_and_the_remedy(
    driver: str, runtime: str, conflict: bool, machine: NeuronMachine
) -> None:
    install(machine, loaded=driver, driver=driver, runtime=runtime, collectives=runtime)
    found = findings(machine)
    assert worst_of(found) == (CONFLICT if conflict else (Status.PASS, None))
    if conflict:
        assert driver in found[0].message
        assert runtime in found[0].message
        assert "upgrade aws-neuronx-" in found[0].message


def test_every_known_pair_is_tripped_by_a_version_of_these_tests() -> None:
    tripped = [("2.29.1.0", "2.32.9.0"), ("2.26.9.0", "2.34.10.0")]
    messages = [
        finding.message
        for driver, runtime in tripped
        for finding in judge_pairs(driver, {"runtime": Package(runtime, None)})
    ]
    assert all(any(pair.remedy in message for message in messages) for pair in PAIRS)


def test_loaded_driver_counts_not_the_installed_one(machine: NeuronMachine) -> None:
    install(machine, loaded="2.26.5.0", driver="2.30.2.0", runtime="2.34.10.0", collectives="2.34.10.0")
    found = {(finding.status, finding.action) for finding in findings(machine)}
    assert found == {(Status.FAIL, None), (Status.WARN, Action.REBOOT)}


def test_installed_driver_that_is_not_loaded_yet_is_a_warning(machine: NeuronMachine) -> None:
    install(machine, driver="2.30.9.0")
    (finding,) = findings(machine)
    assert (finding.status, finding.reason, finding.action) == (*DOUBT, Action.REBOOT)
    assert "2.30.2.0 is loaded but 2.30.9.0 is installed" in finding.message


def test_driver_that_is_not_the_one_that_started_last_is_a_warning(machine: NeuronMachine) -> None:
    log = (machine.root / "dev/kmsg").read_text()
    machine.write("/dev/kmsg", f"{log}[ 99.0] neuron: Neuron Driver Started with Version:2.29.1.0-0a1b\n")
    (finding,) = findings(machine)
    assert (finding.status, finding.reason) == DOUBT
    assert "2.29.1.0-0a1b" in finding.message


def test_kernel_log_serves_where_sysfs_tells_no_version(machine: NeuronMachine) -> None:
    machine.remove("/sys/module/neuron/version")
    assert worst_of(findings(machine)) == (Status.PASS, None)


@pytest.mark.parametrize("text", [None, "", "nonsense\n", "\x00"])
def test_driver_without_a_version_is_unknown_never_healthy(text: str | None, machine: NeuronMachine) -> None:
    machine.remove("/dev/kmsg")
    if text is None:
        machine.remove("/sys/module/neuron/version")
    else:
        machine.write("/sys/module/neuron/version", text)
    assert worst_of(findings(machine)) == DARK


def test_runtime_and_collectives_of_two_releases_are_a_warning(machine: NeuronMachine) -> None:
    install(machine, runtime="2.34.10.0", collectives="2.33.4.0")
    (finding,) = findings(machine)
    assert (finding.status, finding.reason) == DOUBT


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("install ok half-configured", DOUBT),
        ("install ok unpacked", DOUBT),
        ("", DOUBT),
        ("deinstall ok config-files", (Status.PASS, None)),
        ("install ok triggers-pending", (Status.PASS, None)),
    ],
)
def test_installation_that_broke_off_is_a_warning(state: str, expected: object, machine: NeuronMachine) -> None:
    text = (machine.root / STATUS.lstrip("/")).read_text()
    head = f"Package: {PACKAGES['tools']}\nStatus: "
    machine.write(STATUS, text.replace(f"{head}install ok installed", f"{head}{state}"))
    assert worst_of(findings(machine)) == expected


def test_package_with_a_version_that_is_not_understood_is_unknown(machine: NeuronMachine) -> None:
    install(machine, runtime="newest")
    assert worst_of(findings(machine)) == DARK


@pytest.mark.parametrize("text", [None, "", "Package: adduser\nStatus: install ok installed\nVersion: 3\n"])
def test_container_without_neuron_packages_is_skipped_and_says_so(text: str | None, machine: NeuronMachine) -> None:
    machine.remove(STATUS)
    if text is not None:
        machine.write(STATUS, text)
    (finding,) = findings(machine)
    assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")
    assert "2.30.2.0" in finding.message


def test_package_system_that_cannot_be_read_is_unknown(machine: NeuronMachine) -> None:
    machine.remove(STATUS)
    (machine.root / STATUS.lstrip("/")).mkdir()
    assert worst_of(findings(machine)) == DARK


# --- rpm --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rpm(machine: NeuronMachine) -> NeuronMachine:
    """Amazon Linux: rpm in the place of dpkg."""
    machine.remove("/var/lib/dpkg")
    machine.write("/var/lib/rpm/rpmdb.sqlite", b"")
    return machine


def says(machine: NeuronMachine, script: str) -> None:
    machine.write("/bin/rpm", f"#!/bin/sh\n{script}\n")
    (machine.root / "bin/rpm").chmod(0o755)


def test_rpm_is_asked_where_there_is_no_dpkg(rpm: NeuronMachine) -> None:
    says(
        rpm,
        "echo aws-neuronx-dkms 2.30.2.0; echo aws-neuronx-runtime-lib 2.32.1.0\n"
        "echo 'package aws-neuronx-tools is not installed'; exit 1",
    )
    (finding,) = findings(rpm)
    assert (finding.status, finding.reason) == CONFLICT


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'error: cannot open Packages database' >&2; echo 'package x is not installed'; exit 4", "NoData"),
        ("exit 1", "NoData"),
    ],
)
def test_rpm_that_cannot_be_asked_is_unknown(script: str, reason: str, rpm: NeuronMachine) -> None:
    says(rpm, script)
    assert worst_of(findings(rpm)) == (Status.UNKNOWN, reason)


def test_rpm_without_neuron_packages_is_skipped(rpm: NeuronMachine) -> None:
    says(rpm, "echo 'package aws-neuronx-dkms is not installed'; exit 4")
    assert worst_of(findings(rpm)) == (Status.SKIP, "NotApplicable")


# --- the node's versions ----------------------------------------------------------------------------------------------


def test_versions_of_the_node_are_part_of_its_identity(machine: NeuronMachine) -> None:
    versions = read_identity(machine.host, imds=False)["versions"]
    assert versions["neuron_driver"] == "2.30.2.0"
    assert set(versions) >= {"neuron_runtime", "neuron_collectives", "neuron_tools"}


def test_machine_without_a_neuron_driver_has_no_neuron_versions(machine: NeuronMachine) -> None:
    machine.fault("no_driver")
    assert read_all(machine.host) == {}


def test_packages_that_cannot_be_read_leave_the_driver(rpm: NeuronMachine) -> None:
    says(rpm, "exit 1")
    assert read_all(rpm.host) == {"neuron_driver": "2.30.2.0"}


# --- parsers ----------------------------------------------------------------------------------------------------------


@every(
    ("text", "expected"),
    [
        ("2.30.2.0", (2, 30, 2, 0)),
        ("2.9.4.0-8a6fdf292607dccc", (2, 9, 4, 0)),
        ("1:2.34.10.0-1ubuntu1", (2, 34, 10, 0)),
        ("2.34", (2, 34)),
        ("2", None),
        ("", None),
        ("v2.3", None),
        ("\u0662.3", None),
    ],
)
def test_version_is_its_numbers(text: str, expected: tuple[int, ...] | None) -> None:
    assert parse_version(text) == expected


def test_versions_are_compared_as_far_as_both_say() -> None:
    assert same_version("2.30.2.0-8a6f", "2.30.2.0")
    assert same_version("2.30", "2.30.2.0")
    assert same_version("2.30.2.0", "2.30.3.0") is False
    assert same_version("2.30.2.0", "newest") is None


def test_driver_that_started_last_counts() -> None:
    lines = [(1.0, "Neuron Driver Started with Version:2.1.0.0-a"), (None, "x"), (3.0, "y Version:2.2.0.0")]
    assert find_started(lines) == "2.1.0.0-a"
    assert find_started([*lines, (4.0, "kernel: Neuron Driver Started with Version: 2.3.0.0")]) == "2.3.0.0"
    assert find_started([]) is None


words = st.sampled_from(
    [*(f"Package: {name}\n" for name in PACKAGES.values()), "Status: install ok installed\n", "Version: 2.30.2.0\n",
     "Status:", "Version: ", "\n", "\n\n", " ", "Package: ", "install ok half-installed\n", "aws-neuronx-tools 2.1\n"]
)  # fmt: skip


@given(st.lists(words, max_size=20).map("".join) | st.text(max_size=100))
def test_any_package_list_gives_versions_or_nothing(text: str) -> None:
    for found in (parse_dpkg(text), parse_rpm(text)):
        assert set(found) <= set(PACKAGES)
        assert all(package.version and "\n" not in package.version for package in found.values())


@given(st.text(max_size=60))
def test_any_text_is_a_version_or_none(text: str) -> None:
    version = parse_version(text)
    assert version is None or (len(version) > 1 and min(version) >= 0)
    assert find_started([(None, f"Neuron Driver Started with Version:{text}")]) is None or text
