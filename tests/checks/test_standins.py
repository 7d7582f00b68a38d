"""The stand-in Neuron machine: its tools and files say what the documentation says, for every type and fault."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators.holding import find_holders
from checks.accelerators.neuron import sysfs
from checks.accelerators.neuron.sysfs import find_leaves, read_counters
from checks.catalog import TYPES
from checks.host.efa import count_efa, read_adapters
from checks.host.identity import read_identity
from checks.host.machine import Host, HostError
from tests.fakes.neuron import STATE, NeuronMachine, main, parse_fault
from tests.fakes.neuron_faults import FAULTS
from tests.fakes.neuron_files import SYSFS
from tests.hosts.tree import read_tree

NEURON_TYPES = [name for name, kind in TYPES.items() if kind.chip.accelerator == "neuron" and kind.devices]
WAIT_SECONDS = 10.0


def listing(machine: NeuronMachine) -> list[dict[str, Any]]:
    done = machine.host.run(["neuron-ls", "-j"], timeout_seconds=WAIT_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def monitored(machine: NeuronMachine, config: dict[str, Any] | None = None) -> dict[str, Any]:
    argv = ["neuron-monitor"]
    if config is not None:
        machine.write("/monitor.json", json.dumps(config))
        argv += ["-c", str(machine.root / "monitor.json")]
    found: dict[str, Any] = json.loads(machine.host.first_line(argv, timeout_seconds=WAIT_SECONDS))
    return found


def leaf(machine: NeuronMachine, name: str, device: int = 0) -> str:
    """The text of the one file of this name, wherever it is below the device and not of a core."""
    found = []
    for folder, folders, files in os.walk(machine.root / SYSFS / f"neuron{device}"):
        folders[:] = [one for one in folders if not one.startswith("neuron_core")]
        found += [Path(folder, name)] * (name in files)
    (place,) = found
    return place.read_text().strip()


@pytest.mark.parametrize("name", NEURON_TYPES)
def test_each_type_shows_what_the_catalogue_promises(tmp_path: Path, name: str) -> None:
    kind = TYPES[name]
    machine = NeuronMachine(tmp_path / "machine", name)
    entries = listing(machine)
    assert len(entries) == kind.devices == len(list((machine.root / "dev").glob("neuron*")))
    assert {entry["nc_count"] * kind.chip.lnc[0] for entry in entries} == {kind.chip.cores}
    assert {entry["memory_size"] for entry in entries} == {kind.chip.memory_bytes}
    ids = [core for entry in entries for core in entry["neuroncore_ids"]]
    assert ids == list(range(len(ids)))
    for number, entry in enumerate(entries):
        neighbours = kind.neighbours(number)
        assert entry["connected_to"] == (None if not neighbours else entry["connected_to"])
        assert sorted(entry["connected_to"] or ()) == sorted(neighbours or ())
        assert int(leaf(machine, "core_count", number)) == kind.chip.cores
    adapters = read_adapters(machine.host)
    assert adapters is not None
    if kind.efa_interfaces is not None:
        assert len(adapters) == kind.efa_interfaces == count_efa(machine.host)
    addresses = [entry["bdf"] for entry in entries] + [adapter.address for adapter in adapters]
    assert len(set(addresses)) == len(addresses)
    identity = read_identity(machine.host)
    assert (identity["instance_type"], identity["on_ec2"]) == (name, True)
    assert identity["instance_id"] == entries[0]["instance_id"]


@pytest.mark.parametrize(
    ("name", "driver"), [("inf2.24xlarge", "2.30.2.0"), ("inf2.24xlarge", "2.31.7.0"), ("trn2.3xlarge", "2.31.7.0")]
)
def test_files_that_are_left_out_are_those_that_no_check_reads(tmp_path: Path, name: str, driver: str) -> None:
    found = []
    for whole in (True, False):
        machine = NeuronMachine(tmp_path / str(whole), name, driver=driver, whole=whole)
        devices = {number: device._replace(inode=None) for number, device in read_counters(machine.host).items()}
        leaves = [find_leaves(machine.host, f"/{SYSFS}/neuron{number}") for number in devices]
        found.append((leaves, devices, sysfs.read_devices(machine.host)))
    assert found[0] == found[1]
    assert all(
        {leaf.name for leaf in leaves} >= {"mem_ecc_uncorrected", "hw_error", "timeout"} for leaves in found[0][0]
    )
    assert len(read_tree(tmp_path / "True").files) > len(read_tree(tmp_path / "False").files) + 100


def test_machines_of_one_kind_are_alike_and_share_nothing(tmp_path: Path) -> None:
    first, second = (NeuronMachine(tmp_path / name, "trn1.2xlarge") for name in "ab")
    before = read_tree(second.root)
    assert read_tree(first.root) == before
    for kind in ("ecc", "hw_error_line", "no_permission", "no_tools"):
        first.fault(kind)
    first.change("/proc/loadavg", "0", "9")
    assert read_tree(second.root) == before
    assert (second.state["faults"], second.state["devices"][0]["ecc"]["mem_ecc_uncorrected"]) == ([], 0)
    assert read_tree(NeuronMachine(tmp_path / "c", "trn1.2xlarge").root) == before


@pytest.mark.parametrize(("lnc", "cores"), [(1, 128), (2, 64), (None, 64)])
def test_logical_configuration_decides_how_many_cores_tools_count(tmp_path: Path, lnc: int | None, cores: int) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn2.48xlarge", lnc=lnc)
    entries = listing(machine)
    assert sum(entry["nc_count"] for entry in entries) == cores
    assert {entry["logical_neuroncore_config"] for entry in entries} == {lnc or 2}
    assert len(list((machine.root / SYSFS / "neuron3").glob("neuron_core*"))) == 8


def test_old_tools_say_less(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", tools="old")
    assert set(listing(machine)[0]) == {
        "neuron_device", "bdf", "connected_to", "nc_count", "memory_size", "neuron_processes",
    }  # fmt: skip
    assert len(listing(machine)[0]["bdf"]) == len("10:1b.0")
    assert set(monitored(machine)["neuron_hardware_info"]) == {
        "neuron_device_count", "neuroncore_per_device_count", "error",
    }  # fmt: skip


@pytest.mark.parametrize("flags", [["-t"], [], ["--wide", "--show-all-procs"]])
def test_text_forms_name_every_device(tmp_path: Path, flags: list[str]) -> None:
    machine = NeuronMachine(tmp_path / "machine", "inf2.48xlarge")
    machine.fault("busy", "neuron:3")
    done = machine.host.run(["neuron-ls", *flags], timeout_seconds=WAIT_SECONDS)
    assert done.returncode == 0
    assert ("11" in done.stdout, "train.py" in done.stdout) == (True, "-t" not in flags)


def test_a_flag_that_there_is_not_is_told_on_standard_output(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    done = machine.host.run(["neuron-ls", "--frobnicate"], timeout_seconds=WAIT_SECONDS)
    assert (done.returncode, done.stderr) == (1, "")
    assert "--frobnicate" in done.stdout


def test_without_a_driver_tools_fail_as_documented_and_files_are_gone(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.fault("no_driver")
    done = machine.host.run(["neuron-ls", "-j"], timeout_seconds=WAIT_SECONDS)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Make sure aws-neuronx-dkms is installed" in done.stderr
    assert not list((machine.root / "dev").glob("neuron*"))
    assert not (machine.root / "sys/module/neuron").exists()
    assert monitored(machine)["system_data"]["neuron_hw_counters"]["error"]


def test_a_tool_that_hangs_is_killed_at_the_time_out(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.fault("hang", "neuron-ls")
    with pytest.raises(HostError) as caught:
        machine.host.run(["neuron-ls", "-j"], timeout_seconds=0.2)
    assert caught.value.reason == "Timeout"
    assert monitored(machine)["neuron_runtime_data"] == []


def test_half_written_json_null_members_and_extra_ones(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.fault("null_members")
    machine.fault("extra_members")
    (entry,) = listing(machine)
    assert (entry["connected_to"], entry["neuron_processes"]) == (None, None)
    assert {"firmware", "uuid"} <= set(entry)
    assert monitored(machine)["system_data"]["neuron_hw_counters"]["neuron_devices"] is None
    machine.fault("half_json", "neuron-ls")
    text = machine.host.run(["neuron-ls", "-j"], timeout_seconds=WAIT_SECONDS).stdout
    with pytest.raises(ValueError, match=r"."):
        json.loads(text)


def test_faults_of_devices_show_in_tool_and_files_alike(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    machine.fault("wrong_neighbours", "neuron:12")
    by_number = {entry["neuron_device"]: entry for entry in listing(machine)}
    lost = set(TYPES["trn1.32xlarge"].neighbours(12) or ()) - set(by_number[12]["connected_to"])
    (peer,) = lost
    assert 12 not in by_number[peer]["connected_to"]
    assert str(peer) not in leaf(machine, "connected_devices", 12).split(", ")
    machine.fault("missing_device", "neuron:5")
    machine.fault("missing_core", "neuroncore:4")
    machine.fault("less_memory", "neuron:7")
    by_number = {entry["neuron_device"]: entry for entry in listing(machine)}
    assert 5 not in by_number
    assert not (machine.root / "dev/neuron5").exists()
    assert not (machine.root / SYSFS / "neuron5").exists()
    assert (by_number[2]["nc_count"], by_number[2]["neuroncore_ids"]) == (1, [5])
    assert leaf(machine, "core_count", 2) == "1"
    assert by_number[7]["memory_size"] == 16 << 30


def test_no_links_are_listed_when_a_device_is_gone(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "inf2.24xlarge")
    machine.fault("missing_device", "neuron:2")
    assert [entry["connected_to"] for entry in listing(machine)] == [None] * 5


def test_counters_rise_and_begin_anew_in_files_and_stream(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "inf2.xlarge")
    machine.fault("ecc", "neuron:0", "mem_ecc_uncorrected=3")
    machine.fault("ecc", None, "2")
    assert leaf(machine, "mem_ecc_uncorrected") == "5"
    (row,) = monitored(machine)["system_data"]["neuron_hw_counters"]["neuron_devices"]
    assert row["mem_ecc_uncorrected"] == 5
    machine.fault("ecc_reset")
    assert leaf(machine, "mem_ecc_uncorrected") == "0"


def test_executions_that_failed_are_counted_per_core_and_told_once_in_the_stream(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.fault("busy")
    machine.fault("exec_errors", "neuroncore:1", "hw_error=2")
    folder = machine.root / SYSFS / "neuron0/neuron_core1/stats/status/hw_error"
    assert (folder / "total").read_text() == "2\n"
    (block,) = monitored(machine)["neuron_runtime_data"]
    assert block["report"]["execution_stats"]["error_summary"]["hardware"] == 2
    assert set(block["report"]["neuroncore_counters"]["neuroncores_in_use"]) == {"0", "1"}


@pytest.mark.parametrize(("period", "seconds"), [("1s", 1), ("1.0s", 5), (None, 5), ("100ms", 0.1), (1, 5)])
def test_monitor_honours_whole_units_alone(tmp_path: Path, period: object, seconds: float) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    config = {"period": period, "system_metrics": [{"type": "neuron_hw_counters"}]}
    report = monitored(machine, config)
    assert list(report["system_data"]) == ["neuron_hw_counters"]
    assert report["system_data"]["neuron_hw_counters"]["period"] == pytest.approx(seconds, rel=0.01)


def test_unhealthy_components_are_told_by_new_drivers_of_new_chips_alone(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "new", "trn2.3xlarge")
    machine.fault("unhealthy_component", "neuron:0", "sram,link_efa")
    assert leaf(machine, "unhealthy_components") == "sram,link_efa"
    for place, kind, driver in (("chip", "trn1.2xlarge", "2.30.2.0"), ("driver", "trn2.3xlarge", "2.29.1.0")):
        with pytest.raises(ValueError, match="does not tell"):
            NeuronMachine(tmp_path / place, kind, driver=driver).fault("unhealthy_component")


@pytest.mark.parametrize("name", ["mem_ecc_uncorrected", "core_count", "connected_devices", "serial_number"])
def test_from_driver_2_31_on_leaves_are_elsewhere_under_the_same_name(tmp_path: Path, name: str) -> None:
    old = NeuronMachine(tmp_path / "old", "trn2.3xlarge", driver="2.30.2.0")
    new = NeuronMachine(tmp_path / "new", "trn2.3xlarge", driver="2.31.7.0")
    assert leaf(old, name) == leaf(new, name)
    place = next((old.root / SYSFS).rglob(name)).relative_to(old.root)
    assert not (new.root / place).exists()


def test_a_busy_device_has_a_holder_in_proc_and_a_stuck_one_has_none(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    machine.fault("busy", "neuron:3", "777")
    machine.fault("stuck_core", "neuron:4", "888")
    held = {entry["neuron_device"]: [p["pid"] for p in entry["neuron_processes"]] for entry in listing(machine)}
    assert {number: pids for number, pids in held.items() if pids} == {3: [777], 4: [888]}
    files = {f"neuron:{number}": machine.root / f"dev/neuron{number}" for number in (3, 4)}
    assert find_holders(machine.root / "proc", files, ()) == ["neuron:3: pid 777 (python3)"]


def test_a_watcher_has_devices_open_and_owns_no_core(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.fault("watched", None, "99")
    ((process,),) = [entry["neuron_processes"] for entry in listing(machine)]
    assert (process["pid"], process["neuron_runtime_version"]) == (99, "NA")
    assert monitored(machine)["neuron_runtime_data"] == []
    files = {"neuron:0": machine.root / "dev/neuron0"}
    assert find_holders(machine.root / "proc", files, ()) == ["neuron:0: pid 99 (neuron-monitor)"]


def test_a_containers_share_starts_at_any_number_and_sees_all_of_sysfs(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge", share=(8, 9, 10, 11))
    machine.fault("renumbered")
    entries = listing(machine)
    assert [entry["neuron_device"] for entry in entries] == [8, 9, 10, 11]
    assert all(
        set(e["connected_to"]) != set(TYPES["trn1.32xlarge"].neighbours(e["neuron_device"]) or ()) for e in entries
    )
    assert sorted(path.name for path in (machine.root / "dev").glob("neuron*")) == [
        "neuron10",
        "neuron11",
        "neuron8",
        "neuron9",
    ]
    assert len(list((machine.root / SYSFS).iterdir())) == 16


def test_interfaces_go_down_go_missing_and_count(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    machine.fault("efa_missing", "efa:rdmap16s25")
    machine.fault("efa_down", "efa:rdmap16s26")
    machine.fault("efa_errors", "efa:rdmap32s25", "retrans_pkts=77")
    adapters = {adapter.name: adapter for adapter in read_adapters(machine.host, ("retrans_pkts",)) or ()}
    assert len(adapters) == 7
    assert adapters["rdmap16s26"].ports[0].state == "1: DOWN"
    assert adapters["rdmap16s26"].address == "0000:10:1a.0"
    assert adapters["rdmap32s25"].ports[0].counters == {"retrans_pkts": 77}
    text = machine.host.run(["fi_info", "-p", "efa"], timeout_seconds=WAIT_SECONDS).stdout
    assert ("rdmap32s25-rdm" in text, "rdmap16s26" in text) == (True, False)
    machine.fault("efa_missing", "all")
    done = machine.host.run(["fi_info", "-p", "efa"], timeout_seconds=WAIT_SECONDS)
    assert (done.returncode, done.stdout) == (61, "")
    assert "No data available" in done.stderr


def test_lines_of_the_kernel_log(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn2.48xlarge")
    before = len(machine.host.kernel_log())
    machine.fault("hw_error_line", "neuroncore:9", "HBM_UNCORRECTABLE_ERROR")
    (line,) = machine.host.kernel_log()[before:]
    assert " NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR " in f" {line[1]}"
    assert " nd-id=2 nc-id=1 " in line[1]
    machine.fault("benign_lines")
    assert len(machine.host.kernel_log()) == before + 5


def test_versions_that_do_not_go_together(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    assert "Version: 2.30.2.0\n" in machine.host.read("/var/lib/dpkg/status")
    machine.fault("version_pair", None, "loaded=2.29.1.0,aws-neuronx-tools=2.18.3.0")
    assert machine.host.read("/sys/module/neuron/version") == "2.29.1.0\n"
    assert "Version: 2.18.3.0\n" in machine.host.read("/var/lib/dpkg/status")
    (line,) = [text for _, text in machine.host.kernel_log() if "Driver Started" in text]
    assert "Version:2.29.1.0-" in line


def test_no_permission_and_no_tools(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.fault("no_permission")
    assert not os.stat(machine.root / "dev/neuron0").st_mode & 0o777
    assert machine.host.run(["neuron-ls", "-j"], timeout_seconds=WAIT_SECONDS).returncode == 1
    machine.fault("no_tools", "neuron-ls")
    assert not (machine.root / "bin/neuron-ls").exists()
    assert (machine.root / "bin/fi_info").exists()
    machine.fault("no_tools")
    assert not list((machine.root / "bin").iterdir())


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_every_fault_can_be_made_without_a_target(tmp_path: Path, kind: str) -> None:
    machine = NeuronMachine(tmp_path / "machine", "inf2.24xlarge" if kind == "wrong_neighbours" else "trn2.3xlarge")
    machine.fault(kind)
    assert json.loads((machine.root / STATE).read_text())["faults"] == [{"kind": kind, "target": None, "value": None}]


@pytest.mark.parametrize(
    ("kind", "target", "value"),
    [
        ("no_such", None, None),
        ("missing_device", "neuron:99", None),
        ("missing_device", "gpu:0", None),
        ("efa_down", "efa:eth0", None),
        ("ecc", None, "no_such_counter"),
        ("exec_errors", None, "no_such_status"),
        ("efa_errors", None, "no_such_counter"),
    ],
)
def test_a_fault_that_means_nothing_is_an_error_and_changes_nothing(
    tmp_path: Path, kind: str, target: str | None, value: str | None
) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn2.3xlarge")
    with pytest.raises(ValueError, match="no such"):
        machine.fault(kind, target, value)
    assert json.loads((machine.root / STATE).read_text())["faults"] == []


def test_by_hand_a_machine_is_made_and_faults_are_added_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "machine")
    assert main([place, "trn2.3xlarge", "--lnc", "1", "--tools", "old", "--fault", "busy@neuron:0=99"]) == 0
    assert main([place, "--fault", "ecc@neuron:0=sram_ecc_uncorrected=4"]) == 0
    machine = NeuronMachine.at(Path(place))
    assert [fault["kind"] for fault in machine.state["faults"]] == ["busy", "ecc"]
    assert leaf(machine, "sram_ecc_uncorrected") == "4"
    assert main([str(tmp_path / "other"), "p5.48xlarge"]) == 2
    assert "trn1.32xlarge" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hang", ("hang", None, None)),
        ("ecc@neuron:3=mem_ecc_corrected=7", ("ecc", "neuron:3", "mem_ecc_corrected=7")),
        ("version_pair=loaded=2.1", ("version_pair", None, "loaded=2.1")),
    ],
)
def test_faults_as_words(text: str, parts: tuple[str, str | None, str | None]) -> None:
    assert parse_fault(text) == parts


def test_the_tree_may_be_moved(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    machine.fault("busy")
    moved = machine.root.rename(tmp_path / "moved")
    assert count_efa(Host(moved)) == 8
    files = {"neuron:0": moved / "dev/neuron0"}
    assert find_holders(moved / "proc", files, ()) == ["neuron:0: pid 4242 (python3)"]
