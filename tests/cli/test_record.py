"""A recorded machine says what the machine said, holds no secrets, and knows its bounds."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from checks.accelerators import cuda, detect
from checks.accelerators.neuron import DESCRIPTOR as NEURON
from checks.contract import Context, Finding, Tier, load_params
from checks.discover import builtin_checks
from checks.host.machine import Host, HostError
from healthd.cli.check import examine
from healthd.cli.support.record import record as command
from healthd.cli.support.recording import (
    Copier,
    ToolRun,
    record,
    record_machine,
    run_tool,
    tools_of,
    write_program,
)
from healthd.core.errors import BadInputError
from healthd.core.model import Health
from healthd.core.pseudonyms import redact_line, redact_mounts, redact_output
from tests.every import every
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import Machine
from tests.node.standin_kit import settings

SECRET = "hunter2-s3cr3t"


def passive_findings(root: Path) -> dict[str, list[Finding] | str]:
    """What each passive check finds on a machine, or the error that it ends with; and who holds devices."""
    host = Host(root)
    accelerator = detect(host)
    inventory = accelerator.find(host, {})
    holders = accelerator.holders(host, inventory, {})
    found: dict[str, list[Finding] | str] = {"holders": repr(holders)}
    for name, check in builtin_checks().items():
        if check.tier is not Tier.PASSIVE:
            continue
        context = Context(
            host=host,
            params=load_params(check.params_type, {}),
            tier=Tier.PASSIVE,
            device=None,
            group=None,
            previous=None,
            inventory={**inventory, "holders": holders},
            limits={},
        )
        try:
            found[name] = [item for item in check(context) if isinstance(item, Finding)]
        except HostError as error:
            found[name] = f"{error.reason}: {error}"
    return found


@pytest.mark.parametrize(
    ("kind", "driver", "faults"),
    [
        ("trn1.2xlarge", "2.30.2.0", []),
        ("trn2.3xlarge", "2.31.7.0", [("busy", None), ("unhealthy_component", None), ("efa_errors", None)]),
        (
            "trn2.3xlarge",
            "2.30.2.0",
            [
                *(("stuck_core", None), ("ecc", "neuron:0"), ("hw_error_line", None)),
                *(("efa_down", None), ("version_pair", None), ("benign_lines", None)),
            ],
        ),
        ("inf2.24xlarge", "2.30.2.0", [("wrong_neighbours", "neuron:1"), ("missing_core", "neuron:4")]),
        ("trn1.2xlarge", "2.30.2.0", [("no_driver", None)]),
        ("trn1.2xlarge", "2.30.2.0", [("half_json", "neuron-ls"), ("exec_errors", "neuroncore:1")]),
        ("trn1.2xlarge", "2.30.2.0", [("no_tools", None), ("less_memory", None)]),
        ("trn1.2xlarge", "2.30.2.0", [("no_permission", None)]),
    ],
)
def test_a_recorded_machine_finds_what_the_machine_found(
    tmp_path: Path, kind: str, driver: str, faults: list[tuple[str, str | None]]
) -> None:
    machine = NeuronMachine(tmp_path / "machine", kind, driver=driver)
    for fault, target in faults:
        machine.fault(fault, target)
    before = passive_findings(machine.root)
    record(machine.host, tmp_path / "recorded")
    shutil.rmtree(machine.root)
    moved = (tmp_path / "recorded").rename(tmp_path / "elsewhere")
    assert passive_findings(moved) == before


def test_a_share_of_a_large_machine_is_recorded_with_its_links_and_numbers(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge", share=(8, 9))
    before = passive_findings(machine.root)
    record(machine.host, tmp_path / "recorded")
    assert passive_findings(tmp_path / "recorded") == before
    link = Host(tmp_path / "recorded").readlink("/sys/class/infiniband/rdmap16s25")
    assert link == "../../devices/pci0000:10/0000:10:19.0/infiniband/rdmap16s25"


def test_packages_of_rpm_are_recorded_by_what_it_says(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge", package_manager="rpm")
    before = passive_findings(machine.root)
    finding = before["neuron_versions"][0]
    assert isinstance(finding, Finding)
    assert "runtime 2.34.10.0" in finding.message
    record(machine.host, tmp_path / "recorded")
    assert passive_findings(tmp_path / "recorded") == before


def test_a_whole_round_of_checks_says_the_same_of_both(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn2.3xlarge")
    machine.fault("ecc", "neuron:0", "sram_ecc_uncorrected=2")
    record(machine.host, tmp_path / "recorded")
    said = []
    for root in (machine.root, tmp_path / "recorded"):
        state = asyncio.run(examine(settings(root, tmp_path), (), Tier.PASSIVE, quiet=True))
        assert state.health is Health.UNHEALTHY
        results = {result.check: (result.status, result.findings) for result in state.results}
        assert state.inventory is not None
        # Since when a device is there is told from the first look at it, which is another for each round.
        devices = tuple(dataclasses.replace(device, since=None) for device in state.inventory.devices)
        inventory = dataclasses.replace(state.inventory, devices=devices)
        said.append((results, inventory, state.versions, state.instance_id, state.allocated))
    assert said[0] == said[1]


def test_a_plain_machine_is_recorded_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    machine.say("clock", synchronized=False)
    before = passive_findings(machine.root)
    made = record(machine.host, tmp_path / "recorded")
    assert passive_findings(tmp_path / "recorded") == before
    assert made.left_out["/bin/neuron-ls"] == "not installed"


def test_gpus_on_the_bus_are_recorded_with_the_driver_that_has_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    for address in ("0000:10:1c.0", "0000:a0:1c.0"):
        machine.write(f"/sys/bus/pci/devices/{address}/vendor", "0x10de\n")
        machine.write(f"/sys/bus/pci/devices/{address}/class", "0x030200\n")
    (machine.root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    (machine.root / "sys/bus/pci/devices/0000:a0:1c.0/driver").symlink_to("../../drivers/vfio-pci")
    record(machine.host, tmp_path / "recorded")
    found = cuda.find(Host(tmp_path / "recorded"), {})
    assert found["without_driver"] == cuda.find(machine.host, {})["without_driver"] == ["0000:10:1c.0"]


def test_the_machine_that_runs_this_can_be_recorded_without_tools(tmp_path: Path) -> None:
    made = record(Host(), tmp_path / "recorded", tools=False)
    again = Host(tmp_path / "recorded")
    assert made.files > 20
    assert again.host_name() == os.uname().nodename
    assert again.boot_id() == Host().boot_id()
    assert again.file_system("/").size_bytes == Host().file_system("/").size_bytes
    assert not (tmp_path / "recorded/bin").exists()
    assert not list((tmp_path / "recorded/proc").glob("*/environ"))


def test_nothing_secret_is_recorded(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.fault("busy", None, "900")
    machine.state["processes"][0]["command"] = f"/home/u/bin/train --token {SECRET}"
    machine.save()
    machine.write("/proc/900/environ", f"TOKEN={SECRET}\0")
    machine.write("/proc/900/cmdline", f"train\0--token\0{SECRET}\0")
    machine.write("/etc/fstab", f"//server/share /data cifs ro,username={SECRET},password={SECRET},_netdev 0 0\n")
    machine.write("/etc/shadow", SECRET)
    machine.write("/etc/os-release", "NAME=Test\n")
    (machine.root / "proc/900/fd/9").symlink_to(f"/home/u/{SECRET}")
    mountinfo = machine.host.read("/proc/self/mountinfo")
    machine.write("/proc/self/mountinfo", mountinfo + f"40 1 0:9 / /x ro - cifs //s/x rw,password={SECRET}\n")
    for line in (
        f"[    0.000001] Command line: root=/dev/sda1 token={SECRET}",
        f'[    0.000002] Unknown kernel command line parameters "token={SECRET}", will be passed to user space.',
        f'[    9.000000] audit: type=1309 audit(1.2:3): argc=2 a0="{SECRET}"',
    ):
        machine.write("/dev/kmsg", machine.host.read("/dev/kmsg") + line + "\n")
    record(machine.host, tmp_path / "recorded")
    for path in (tmp_path / "recorded").rglob("*"):
        assert SECRET not in (os.readlink(path) if path.is_symlink() else path.name)
        if path.is_file() and not path.is_symlink():
            assert SECRET not in path.read_text(), path
    holder = Host(tmp_path / "recorded").run(["neuron-ls", "-j"], timeout_seconds=10).stdout
    assert json.loads(holder)[0]["neuron_processes"][0]["command"] == "train"
    assert "_netdev" in (tmp_path / "recorded/etc/fstab").read_text()


def test_state_of_a_device_is_recorded_and_what_resets_it_is_only_read(tmp_path: Path) -> None:
    """To read this leaf tells the state; to write it would reset the device."""
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    (leaf,) = (machine.root / "sys").rglob("reset")
    leaf.chmod(0o400)
    before = leaf.stat().st_mtime_ns
    record(machine.host, tmp_path / "recorded")
    (copied,) = (tmp_path / "recorded").rglob("reset")
    assert (copied.read_text(), leaf.stat().st_mtime_ns) == ("1\n", before)


def test_bounds_end_a_recording_and_are_told(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    for name, bounds in (("files", {"max_files": 30}), ("bytes", {"max_bytes": 2000}), ("time", {"max_seconds": 0.0})):
        copier = Copier(machine.host, tmp_path / name, **bounds)
        record_machine(copier, tools=False)
        assert len([why for why in copier.made.left_out.values() if "everything after it" in why]) == 1
        assert copier.made.files < 60
        assert "everything after it" in (tmp_path / name / "recording.json").read_text()


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "file").write_text("")
    for name in ("full", "file"):
        with pytest.raises(BadInputError, match="name a"):
            record(machine.host, tmp_path / name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_recording_is_its_owners_alone(tmp_path: Path) -> None:
    """It has what only root may read, such as the kernel log."""
    before = os.umask(0o022)
    try:
        record(Machine(tmp_path / "machine").host, tmp_path / "recorded", tools=False)
    finally:
        os.umask(before)
    assert (tmp_path / "recorded").stat().st_mode & 0o777 == 0o700


@pytest.mark.system(root=True)  # to give a directory away
def test_a_directory_of_another_user_is_not_recorded_into(tmp_path: Path) -> None:
    """Who owns it could put links there while it is written to."""
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 54321, 54321)
    with pytest.raises(BadInputError, match="another user"):
        record(Machine(tmp_path / "machine").host, tmp_path / "theirs", tools=False)
    assert not list((tmp_path / "theirs").iterdir())


def test_a_file_that_may_not_be_read_is_there_and_may_not_be_read(tmp_path: Path) -> None:
    copier = Copier(Host(tmp_path / "none"), tmp_path / "recorded")
    copier.unreadable("/sys/a/b", HostError("NoPermission", "/sys/a/b: permission denied"))
    copier.unreadable("/sys/a/c", HostError("NoData", "/sys/a/c: no such file"))
    assert not (tmp_path / "recorded/sys/a/b").stat().st_mode & 0o777
    assert not (tmp_path / "recorded/sys/a/c").exists()
    assert set(copier.made.left_out) == {"/sys/a/b", "/sys/a/c"}


def test_links_that_go_in_circles_or_nowhere_are_left(tmp_path: Path) -> None:
    folder = tmp_path / "machine/sys/class/infiniband"
    folder.mkdir(parents=True)
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    (folder / "c").symlink_to("../../../../../../../gone")
    copier = Copier(Host(tmp_path / "machine"), tmp_path / "recorded")
    for name in "abc":
        copier.copy_linked(f"/sys/class/infiniband/{name}/ports")
    assert not [path for path in (tmp_path / "recorded").rglob("*") if path.is_file()]


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> NeuronMachine:
    return NeuronMachine(tmp_path / "machine", "trn1.2xlarge")


LS, MONITOR = NEURON.support_tools


def replayed(tmp_path: Path, run: ToolRun) -> Host:
    write_program(Copier(Host(tmp_path / "none"), tmp_path / "replay"), "neuron-ls", [run])
    return Host(tmp_path / "replay")


def test_a_tool_that_failed_fails_again_with_the_same_words(tmp_path: Path, machine: NeuronMachine) -> None:
    machine.fault("no_driver")
    run = run_tool(machine.host, LS, tmp_path)
    assert run is not None
    again = replayed(tmp_path, run).run(["neuron-ls", "-j"], timeout_seconds=10)
    assert again == machine.host.run(["neuron-ls", "-j"], timeout_seconds=10)
    assert again.returncode == 1


def test_a_tool_that_hung_hangs_again(tmp_path: Path, machine: NeuronMachine) -> None:
    machine.fault("hang", "neuron-ls")
    run = run_tool(machine.host, LS, tmp_path, 0.2)
    assert run == ToolRun(("-j",), "", "", None)
    with pytest.raises(HostError, match="did not finish"):
        replayed(tmp_path, run).run(["neuron-ls", "-j"], timeout_seconds=0.3)


def test_a_tool_that_streams_streams_again(tmp_path: Path, machine: NeuronMachine) -> None:
    run = run_tool(machine.host, MONITOR, tmp_path)
    assert run is not None
    line = replayed(tmp_path, run).first_line(["neuron-ls", "-c", "other.json"], timeout_seconds=10)
    assert json.loads(line)["system_data"]["neuron_hw_counters"]["neuron_devices"][0]["mem_ecc_uncorrected"] == 0


def test_a_tool_that_is_not_there_is_none(tmp_path: Path, machine: NeuronMachine) -> None:
    machine.fault("no_tools")
    assert {run_tool(machine.host, tool, tmp_path) for tool in tools_of(machine.host)} == {None}


words = st.text(st.characters(codec="utf-8"), max_size=12)
arguments = st.lists(st.sampled_from((" ", "\t", "\n", "\\", '"', "=", "x", "é")), max_size=6).map("".join)


@given(st.lists(words, min_size=1, max_size=3), arguments, st.integers(min_value=0, max_value=400))
def test_of_commands_nothing_but_the_name_is_kept_in_whole_and_cut_output(
    others: list[str], tail: str, end: int
) -> None:
    entries = [{"pid": 1, "command": f"/bin/train {tail}{SECRET}", "other": other} for other in others]
    text = json.dumps(entries, indent=1)
    whole = json.loads(redact_output(text))
    assert [entry["command"] for entry in whole] == ["train"] * len(entries)
    assert [entry["other"] for entry in whole] == others
    assert SECRET not in redact_output(text[:end])


@every(
    ("command", "kept"),
    [
        ("python3 train.py --k v", "python3"),
        ("/usr/bin/python3", "python3"),
        ("", ""),
        ("TOKEN=abc python3", ""),
        ("a\tb", "a"),
        ("x" * 300, "x" * 64),
    ],
)
def test_names_of_programs(command: str, kept: str) -> None:
    assert json.loads(redact_output(json.dumps({"command": command})))["command"] == kept


@given(st.text(max_size=200))
def test_text_without_commands_stays_as_it_is(text: str) -> None:
    if '"command"' not in text:
        assert redact_output(text) == text


@pytest.mark.parametrize(
    "line",
    [
        "NEURON_HW_ERR=DMA_ERROR instance-id=i-0 hostname=h nd-id=0 nc-id=0 serial-num=1 action=X",
        "EXT4-fs error (device sda1): audit failed",
        "NVRM: Xid (PCI:0000:10:1c): 79, GPU has fallen off the bus.",
    ],
)
def test_lines_that_tell_of_faults_stay_whole(line: str) -> None:
    assert redact_line(line) == line


def test_mounts_keep_all_but_secrets() -> None:
    assert (
        redact_mounts("ro,password=a,relatime credentials=/root/x 0")
        == "ro,password=(removed),relatime credentials=(removed) 0"
    )


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(tmp_path: Path, machine: NeuronMachine) -> None:
    options = ["--host-root", str(machine.root), "--json"]
    done = CliRunner().invoke(command, [str(tmp_path / "recorded"), *options])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert (said["files"] > 100, said["left_out"]) == (True, {"/bin/nvidia-smi": "not installed"})
    done = CliRunner().invoke(command, [str(tmp_path / "second"), "--host-root", str(machine.root), "--no-tools"])
    assert "files" in done.output
    assert not (tmp_path / "second/bin").exists()
