"""EFA: how many, which are missing or down and who uses them, counters as rates, and what libfabric offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.accelerators import cpu
from checks.catalog import TYPES
from checks.contract import Evidence, Finding, Limit, Previous, Status
from checks.host.efa import address_of, count_efa, name_at
from checks.host.machine import Host
from checks.system.efa import MAPS, RATE_LIMITS, Params, efa, map_devices, parse_fi_info, rates
from tests.every import every
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import Machine, number, worst_of

BOOT = "1b0e4d5a-7f3c-4e2a-9c1d-2f6a8b3c4d5e"
RDMA = "/sys/class/infiniband"
DMI = "/sys/devices/virtual/dmi/id"
PASSES = (Status.PASS, None)
MISSING = (Status.FAIL, "MissingDevice")


def make(tmp_path: Path, name: str = "trn1.32xlarge") -> NeuronMachine:
    return NeuronMachine(tmp_path / "machine", name)


class Trn1(Machine):
    """The little of a trn1.32xlarge that this check reads: quicker to make than the whole stand-in."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.write(f"{DMI}/sys_vendor", "Amazon EC2\n")
        self.write(f"{DMI}/product_name", "trn1.32xlarge\n")
        self.write("/dev/infiniband/uverbs0", "")
        self.names = sorted(name_at(address) for address in set(MAPS["trn1.32xlarge"]))
        for name in self.names:
            self.write(f"{RDMA}/{name}/device/vendor", "0x1d0f\n")
            self.write(f"{RDMA}/{name}/device/device", "0xefa1\n")
            self.write(f"{RDMA}/{name}/ports/1/state", "4: ACTIVE\n")
            self.write(f"{RDMA}/{name}/ports/1/phys_state", "5: LinkUp\n")
            for counter in RATE_LIMITS:
                self.count(name, counter, 0)
        self.say_domains(self.names)

    def count(self, name: str, counter: str, value: int | str) -> None:
        self.write(f"{RDMA}/{name}/ports/1/hw_counters/{counter}", f"{value}\n")

    def say_domains(self, names: Sequence[str]) -> None:
        """What fi_info prints."""
        blocks = "".join(f"provider: efa\\n    domain: {name}-rdm\\n" for name in names)
        fi_info(self, f"printf '{blocks}'")

    def drop(self, name: str) -> None:
        self.remove(f"{RDMA}/{name}")


@pytest.fixture
def trn1(tmp_path: Path) -> Trn1:
    return Trn1(tmp_path / "machine")


def inventory(machine: Machine, **changes: Any) -> dict[str, Any]:
    if isinstance(machine, NeuronMachine):
        shown = [(d["neuron_device"], d["bdf"]) for d in machine.state["devices"] if d["visible"]]
    else:
        shown = [(index, None) for index in range(16)]
    devices = [{"target": f"neuron:{index}", "index": index, "bdf": bdf} for index, bdf in shown]
    return {"accelerator": "neuron", "device_count": len(devices), "devices": devices, **changes}


def look(machine: Machine, previous: Previous | None = None, **params: Any) -> tuple[list[Finding], Previous]:
    """One look, and what the next one gets to see of it a minute later."""
    items = machine.run(efa, inventory=inventory(machine), previous=previous, **params)
    evidence = tuple(item for item in items if isinstance(item, Evidence))
    later = Previous(evidence=evidence, elapsed_seconds=60.0, boot_id=machine.host.boot_id())
    return [item for item in items if isinstance(item, Finding)], later


def bad(findings: list[Finding]) -> list[tuple[Status, str | None, str]]:
    return [(item.status, item.reason, item.target) for item in findings if item.status is not Status.PASS]


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"), [("trn1.32xlarge", 8), ("trn1n.32xlarge", 16), ("trn2.48xlarge", 16), ("trn2u.48xlarge", 16)]
)
def test_whole_machine_passes_with_its_count_and_every_port_up(name: str, count: int, tmp_path: Path) -> None:
    findings, _ = look(make(tmp_path, name))
    assert bad(findings) == []
    counted = number(findings, "efa_interfaces_count")
    assert (counted.value, counted.lower, counted.origin) == (count, count, "catalogue")
    assert number(findings, "efa_ports_up_count").value == count


@pytest.mark.parametrize(
    "name", ["trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge", "trn3.48xlarge"]
)
def test_published_map_has_an_interface_for_each_device_of_the_type(name: str) -> None:
    assert len(MAPS[name]) == TYPES[name].devices
    assert len(set(MAPS[name])) == TYPES[name].efa_interfaces


def test_missing_interface_is_named_with_its_devices_and_the_remedy_with_launch_template_and_key(
    trn1: Trn1,
) -> None:
    trn1.drop("rdmap32s25")
    findings, _ = look(trn1)
    assert bad(findings) == [(*MISSING, "node"), (*MISSING, "efa:rdmap32s25")]
    assert "7 is below 8" in findings[0].message
    assert "launch template" in findings[0].message
    assert "set expected" in findings[0].message
    assert findings[1].message == "no EFA interface at 0000:20:19.0; used by neuron:4, neuron:5"


def test_fewer_that_are_wanted_so_are_in_order_and_none_is_named(trn1: Trn1) -> None:
    trn1.drop("rdmap32s25")
    findings, _ = look(trn1, expected=7)
    assert bad(findings) == []
    assert number(findings, "efa_interfaces_count").origin == "config"
    assert worst_of(look(trn1, expected=9)[0]) == MISSING


def test_none_at_all_is_one_warning_for_a_node_by_itself(trn1: Trn1) -> None:
    trn1.remove(RDMA)
    (finding,), _ = look(trn1)
    assert (finding.status, finding.reason, finding.target) == (Status.WARN, "MissingDevice", "node")
    assert "jobs over several nodes need them; add them in the launch template" in finding.message


@pytest.mark.parametrize("params", [{"required": True}, {"expected": 8}, {"required": True, "expected": 8}])
def test_none_at_all_is_one_failure_where_a_fleet_or_the_operator_wants_them(
    params: dict[str, Any], trn1: Trn1
) -> None:
    trn1.remove(RDMA)
    (finding,), _ = look(trn1, **params)
    assert (finding.status, finding.reason, finding.target) == (*MISSING, "node")


def test_interfaces_on_the_bus_that_no_driver_has_are_told_as_that(trn1: Trn1) -> None:
    trn1.remove(RDMA)
    trn1.write("/sys/bus/pci/devices/0000:10:1a.0/vendor", "0x1d0f\n")
    trn1.write("/sys/bus/pci/devices/0000:10:1a.0/device", "0xefa1\n")
    findings, _ = look(trn1)
    assert "load the efa driver" in findings[0].message
    assert (findings[0].status, findings[0].reason) == MISSING  # they are there, and cannot be used


@pytest.mark.parametrize("name", ["trn1.2xlarge", "inf2.48xlarge", "inf2.xlarge", "trn2.3xlarge"])
def test_types_that_work_alone_need_none(name: str, tmp_path: Path) -> None:
    machine = make(tmp_path, name)
    if machine.state["efa"]:
        machine.fault("efa_missing", "all")
    assert worst_of(look(machine)[0]) == (Status.SKIP, "NotApplicable")


def test_type_of_which_nobody_says_how_many_is_unknown_until_somebody_does(tmp_path: Path) -> None:
    machine = make(tmp_path, "trn3sn.48xlarge")
    found = len(machine.state["efa"])
    assert worst_of(look(machine)[0]) == (Status.UNKNOWN, "UnknownInstanceType")
    assert worst_of(look(machine, expected=found)[0]) == PASSES


@pytest.mark.parametrize("product", ["trn9.48xlarge", "", "\x00\xff"])
def test_neuron_devices_on_a_type_that_is_not_known_are_unknown(product: str, trn1: Trn1) -> None:
    trn1.write(f"{DMI}/product_name", product)
    findings, _ = look(trn1)
    assert findings[0].reason == "UnknownInstanceType"
    assert worst_of(findings)[0] is Status.UNKNOWN


def test_plain_machine_and_gpus_elsewhere_are_not_concerned(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    for accelerator in ("cpu", "cuda"):
        findings = machine.findings(efa, inventory={"accelerator": accelerator})
        assert worst_of(findings) == (Status.SKIP, "NotApplicable")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("p5.48xlarge", (Status.WARN, "MissingDevice")), ("g5.48xlarge", (Status.SKIP, "NotApplicable"))],
)
def test_gpus_made_for_many_nodes_are_warned_of_and_others_left_alone(
    name: str, expected: object, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "machine")
    machine.write("/sys/class/net/eth0/mtu", "9001\n")
    machine.write(f"{DMI}/sys_vendor", "Amazon EC2\n")
    machine.write(f"{DMI}/product_name", f"{name}\n")
    assert worst_of(machine.findings(efa, inventory={"accelerator": "cuda"})) == expected


def test_machine_without_sysfs_is_unknown_where_interfaces_are_expected(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    machine.remove("/sys")
    findings = machine.findings(efa, inventory={"accelerator": "neuron"}, expected=8)
    assert worst_of(findings) == (Status.UNKNOWN, "NoData")


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("state", "1: DOWN", (Status.FAIL, "LinkDown")),
        ("state", "2: INIT", (Status.FAIL, "LinkDown")),
        ("phys_state", "3: Disabled", (Status.FAIL, "LinkDown")),
        ("state", "ACTIVE?", (Status.FAIL, "LinkDown")),
        ("state", "", (Status.UNKNOWN, "NoData")),
        ("phys_state", "", (Status.UNKNOWN, "NoData")),
    ],
)
def test_port_that_is_not_up_is_named_with_the_devices_behind_it_and_no_other(
    file: str, text: str, expected: tuple[Status, str], trn1: Trn1
) -> None:
    trn1.write(f"{RDMA}/rdmap160s26/ports/1/{file}", text)
    findings, _ = look(trn1, fi_info=False)
    assert bad(findings) == [(*expected, "efa:rdmap160s26")]
    (finding,) = [item for item in findings if item.target == "efa:rdmap160s26"]
    assert finding.message.endswith("; used by neuron:2, neuron:3")


def test_link_that_is_down_is_told_once_though_libfabric_leaves_it_out(tmp_path: Path) -> None:
    machine = make(tmp_path)
    machine.fault("efa_down", "efa:rdmap160s26")
    assert bad(look(machine)[0]) == [(Status.FAIL, "LinkDown", "efa:rdmap160s26")]


def test_faults_of_the_stand_in_are_found_and_named(tmp_path: Path) -> None:
    machine = make(tmp_path)
    _, before = look(machine)
    machine.fault("efa_errors", "efa:rdmap16s25")
    assert bad(look(machine, before)[0]) == [(Status.WARN, "LinkErrors", "efa:rdmap16s25")]
    machine.fault("efa_missing", "efa:rdmap16s25")
    assert bad(look(machine, before)[0]) == [(*MISSING, "node"), (*MISSING, "efa:rdmap16s25")]


def test_interface_without_ports_is_unknown(trn1: Trn1) -> None:
    trn1.remove(f"{RDMA}/rdmap160s26/ports")
    assert (Status.UNKNOWN, "NoData", "efa:rdmap160s26") in bad(look(trn1)[0])


# --- counters ---------------------------------------------------------------------------------------------------------


def test_every_limit_of_the_source_has_a_parameter() -> None:
    for counter, limit in RATE_LIMITS.items():
        assert getattr(Params, f"max_{counter}_per_second") == limit


@pytest.mark.parametrize("counter", RATE_LIMITS)
@pytest.mark.parametrize("over", [False, True])
def test_counter_that_rises_faster_than_its_limit_is_a_warning_on_that_interface(
    counter: str, over: bool, trn1: Trn1
) -> None:
    _, before = look(trn1)
    trn1.count("rdmap16s25", counter, int(60 * RATE_LIMITS[counter]) + over)
    findings, _ = look(trn1, before)
    assert bad(findings) == ([(Status.WARN, "LinkErrors", "efa:rdmap16s25")] if over else [])
    measured = number(findings, f"efa_{counter}_per_second")
    assert measured.value == pytest.approx(RATE_LIMITS[counter], rel=0.01)
    assert (measured.upper, measured.origin) == (RATE_LIMITS[counter], "default")


def test_limit_of_the_operator_counts_and_none_is_no_limit(trn1: Trn1) -> None:
    _, before = look(trn1)
    trn1.count("rdmap16s25", "rx_drops", 600)
    assert worst_of(look(trn1, before, max_rx_drops_per_second=9.0)[0]) == (Status.WARN, "LinkErrors")
    assert worst_of(look(trn1, before)[0]) == PASSES
    trn1.count("rdmap16s25", "rx_drops", 6_000_000)
    assert worst_of(look(trn1, before, max_rx_drops_per_second=None)[0]) == PASSES
    named = {"efa_rx_drops_per_second@efa:rdmap16s25": Limit(lower=None, upper=1.0, origin="baseline")}
    items = trn1.run(efa, inventory=inventory(trn1), previous=before, limits=named)
    assert worst_of([item for item in items if isinstance(item, Finding)])[1] == "LinkErrors"


def test_counter_that_was_set_back_is_no_rate_and_counts_again_from_there(trn1: Trn1) -> None:
    trn1.count("rdmap16s25", "rx_drops", 9_000_000)
    findings, before = look(trn1)
    assert bad(findings) == []  # a first look has nothing to compare with
    trn1.count("rdmap16s25", "rx_drops", 5)
    findings, before = look(trn1, before)
    assert bad(findings) == []
    assert any("counters of rdmap16s25/1 were reset" in item.message for item in findings)
    trn1.count("rdmap16s25", "rx_drops", 6006)
    assert bad(look(trn1, before)[0]) == [(Status.WARN, "LinkErrors", "efa:rdmap16s25")]


def test_counters_of_another_boot_are_not_compared(trn1: Trn1) -> None:
    _, before = look(trn1)
    trn1.count("rdmap16s25", "rx_drops", 9_000_000)
    earlier_boot = Previous(evidence=before.evidence, elapsed_seconds=60.0, boot_id=BOOT)
    assert bad(look(trn1, earlier_boot)[0]) == []


@pytest.mark.parametrize("text", ["", "many", "-1", "1" * 40, "\xb2", "0x10"])
def test_counters_that_cannot_be_read_are_unknown_never_zero(text: str, trn1: Trn1) -> None:
    for counter in RATE_LIMITS:
        trn1.count("rdmap16s25", counter, text)
    assert bad(look(trn1)[0]) == [(Status.UNKNOWN, "NoData", "efa:rdmap16s25")]
    assert bad(look(trn1, counters=False)[0]) == []


counters = st.dictionaries(
    st.sampled_from(["a/1", "b/1"]),
    st.dictionaries(st.sampled_from(["rx_drops", "retrans_pkts"]), st.integers(0, 2**64)),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(counters, anything | counters, st.floats(0.0, 1e9))
def test_rates_are_never_negative_and_remembered_nonsense_is_none(
    now: Mapping[str, Mapping[str, int]], before: Any, elapsed_seconds: float
) -> None:
    evidence = Evidence(target="node", key="efa", data={"counters": before})
    found, _ = rates(now, Previous(evidence=(evidence,), elapsed_seconds=elapsed_seconds, boot_id=BOOT), BOOT)
    assert all(0 <= rate.per_second < float("inf") for rate in found)


# --- libfabric --------------------------------------------------------------------------------------------------------


AWS_FI_INFO = "/opt/amazon/efa/bin/fi_info"


def fi_info(machine: Machine, script: str, path: str = AWS_FI_INFO) -> None:
    machine.write(path, f"#!/bin/sh\necho x >> {machine.root}/asked\n{script}\n")
    (machine.root / path.lstrip("/")).chmod(0o755)


def asked(machine: Machine) -> int:
    return (machine.root / "asked").read_text().count("x")


def test_libfabric_without_the_provider_fails_in_words(trn1: Trn1) -> None:
    fi_info(trn1, "echo 'fi_getinfo: -61 (No data available)' >&2; exit 61")
    findings, _ = look(trn1)
    assert bad(findings) == [(Status.FAIL, "NetworkUnusable", "node")]
    assert "exit 61, fi_getinfo: -61 (No data available)" in findings[-1].message


def test_without_the_devices_of_verbs_here_it_is_not_the_node_that_is_blamed(trn1: Trn1) -> None:
    fi_info(trn1, "exit 61")
    trn1.remove("/dev/infiniband")
    findings, _ = look(trn1)
    assert bad(findings) == [(Status.UNKNOWN, "NoData", "node")]
    assert "give the container these devices" in findings[-1].message


def test_interface_that_libfabric_does_not_offer_is_named(trn1: Trn1) -> None:
    trn1.say_domains(trn1.names[1:])
    assert bad(look(trn1)[0]) == [(Status.FAIL, "NetworkUnusable", f"efa:{trn1.names[0]}")]


def test_container_is_not_blamed_for_interfaces_whose_files_it_was_not_given(trn1: Trn1) -> None:
    for index, name in enumerate(trn1.names):
        trn1.write(f"/sys/class/infiniband_verbs/uverbs{index}/ibdev", f"{name}\n")
    trn1.write("/dev/infiniband/uverbs1", "")
    trn1.say_domains(trn1.names[:2])
    assert {target for *_, target in bad(look(trn1)[0])} == {f"efa:{name}" for name in trn1.names[2:]}
    trn1.write("/.dockerenv", "")
    assert bad(look(trn1)[0]) == []
    trn1.say_domains(trn1.names[:1])
    assert bad(look(trn1)[0]) == [(Status.FAIL, "NetworkUnusable", f"efa:{trn1.names[1]}")]
    mounts = trn1.host.read("/proc/self/mountinfo")
    trn1.remove("/proc/self/mountinfo")
    trn1.write("/proc/self/mountinfo", f"{mounts}22 21 0:6 / /dev rw - devtmpfs udev rw\n")  # that of the host
    assert {target for *_, target in bad(look(trn1)[0])} == {f"efa:{name}" for name in trn1.names[1:]}
    trn1.remove("/dev/infiniband")
    fi_info(trn1, "exit 61")
    assert bad(look(trn1)[0]) == [(Status.UNKNOWN, "NoData", "node")]


def test_program_that_is_not_installed_is_neither_a_fault_nor_a_pass(trn1: Trn1) -> None:
    trn1.remove(AWS_FI_INFO)
    findings, previous = look(trn1)
    assert bad(findings) == [(Status.SKIP, "NotApplicable", "node")]
    assert "libfabric was not checked: fi_info is not installed" in findings[-1].message
    assert worst_of(findings)[0] is Status.PASS, "the interfaces were counted, and their links are up"
    assert bad(look(trn1, previous)[0]) == [(Status.SKIP, "NotApplicable", "node")]


def test_program_that_is_there_and_cannot_be_started_is_unknown(trn1: Trn1) -> None:
    trn1.write("/opt/amazon/efa/bin/fi_info", "no program")
    findings, _ = look(trn1)
    assert bad(findings) == [(Status.UNKNOWN, "MissingTool", "node")]
    (trn1.root / "opt/amazon/efa/bin/fi_info").chmod(0o755)
    assert bad(look(trn1)[0]) == [(Status.UNKNOWN, "MissingTool", "node")]


@pytest.mark.parametrize("output", ["exit 0", "echo nonsense", "echo 'provider: tcp'; echo 'domain: eth0'"])
def test_output_that_names_no_domain_never_passes(output: str, trn1: Trn1) -> None:
    fi_info(trn1, output)
    assert worst_of(look(trn1)[0]) == (Status.FAIL, "NetworkUnusable")


def test_program_that_is_killed_says_nothing_of_the_node(trn1: Trn1) -> None:
    fi_info(trn1, "kill -9 $$")
    findings, _ = look(trn1)
    assert bad(findings) == [(Status.UNKNOWN, "Crashed", "node")]
    assert "signal 9" in findings[-1].message


def test_another_libfabric_without_efa_is_not_the_one_of_the_jobs(trn1: Trn1) -> None:
    """Of a distribution, or built without the provider: jobs that bring AWS's own in their image work."""
    trn1.remove(AWS_FI_INFO)
    fi_info(trn1, "echo 'fi_getinfo: -61 (No data available)' >&2; exit 61", "/bin/fi_info")
    findings, _ = look(trn1)
    assert bad(findings) == [(Status.UNKNOWN, "NoData", "node")]
    assert AWS_FI_INFO in findings[-1].message


def test_fewer_domains_than_interfaces_never_pass_whatever_their_names(trn1: Trn1) -> None:
    fi_info(trn1, "printf 'provider: efa\\n    domain: efa_0-rdm\\n'")
    findings, _ = look(trn1)
    assert bad(findings) == [(Status.UNKNOWN, "NoData", "node")]
    assert "efa_0" in findings[-1].message


def test_libfabric_is_asked_once_in_ten_minutes_and_its_answer_stands_with_its_age(trn1: Trn1) -> None:
    fi_info(trn1, "exit 61")
    findings, before = look(trn1)
    for _ in range(9):
        findings, before = look(trn1, before)
        assert bad(findings) == [(Status.FAIL, "NetworkUnusable", "node")]
    assert asked(trn1) == 1
    assert "(540 s ago)" in findings[-1].message
    look(trn1, before)
    assert asked(trn1) == 2


def test_other_interfaces_than_before_make_it_ask_anew(trn1: Trn1) -> None:
    fi_info(trn1, "exit 61")
    _, before = look(trn1)
    trn1.drop("rdmap16s25")
    look(trn1, before)
    assert asked(trn1) == 2


def test_machine_without_interfaces_does_not_start_it(trn1: Trn1) -> None:
    fi_info(trn1, "exit 0")
    trn1.remove(RDMA)
    look(trn1)
    assert not (trn1.root / "asked").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine with one interface, written by hand."""
    machine = Machine(tmp_path_factory.mktemp("efa") / "machine")
    files = {"device/vendor": "0x1d0f", "device/device": "0xefa2"}
    files |= {"ports/1/state": "4: ACTIVE", "ports/1/phys_state": "5: LinkUp", "ports/1/hw_counters/rx_drops": "0"}
    for name, text in files.items():
        machine.write(f"{RDMA}/rdmap0s6/{name}", text)
    return machine


@given(anything)
def test_remembered_answer_that_is_nonsense_is_unknown(small: Machine, value: Any) -> None:
    machine = small
    data = {"fi_info": {"age_seconds": 1.0, "names": ["rdmap0s6"], "status": value, "missing": value, "message": value}}
    previous = Previous(
        evidence=(Evidence(target="node", key="efa", data=data),), elapsed_seconds=60.0, boot_id=machine.host.boot_id()
    )
    findings = [item for item in machine.run(efa, previous=previous, expected=1) if isinstance(item, Finding)]
    told = {"skip": Status.PASS, "fail": Status.FAIL}  # without a number nothing passes
    assert worst_of(findings)[0] is told.get(str(value), Status.UNKNOWN)


@given(st.text(max_size=200))
def test_any_text_of_fi_info_is_domains_or_none(text: str) -> None:
    assert all(parse_fi_info(text))


def test_old_and_new_words_of_fi_info_are_read() -> None:
    text = "provider: efa;ofi_rxr\n    fabric: EFA-fe80::1\n    domain: efa_0-rdm\nprovider: tcp\n    domain: eth0\n"
    assert parse_fi_info(text) == ["efa_0"]


# --- places and names -------------------------------------------------------------------------------------------------


@given(st.integers(0, 255), st.integers(0, 31), st.integers(0, 7), st.integers(0, 3))
def test_names_and_places_tell_each_other(bus: int, slot: int, function: int, domain: int) -> None:
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"
    assert address_of(name_at(address)) == address


@every("name", ["efa_0", "rdmap999s1", "rdmap1s99", "rdmap", "mlx5_0", "rdmap1s1f9"])
def test_name_that_tells_no_place_is_none(name: str) -> None:
    assert address_of(name) is None


def test_in_a_container_with_a_share_numbers_are_not_taken_for_the_hosts(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn2.48xlarge", share=[4, 5, 6, 7])
    findings, _ = look(machine)
    assert bad(findings) == []
    from checks.host.efa import read_adapters

    seen = inventory(machine)["devices"]
    renumbered = [{**device, "index": index, "target": f"neuron:{index}"} for index, device in enumerate(seen)]
    mapped = map_devices("trn2.48xlarge", read_adapters(machine.host) or [], renumbered)
    assert not set(mapped) & {MAPS["trn2.48xlarge"][index] for index in range(4)}


@pytest.mark.parametrize("bdf", [None, "", "10:1c.0", 7, "zz:zz"])
def test_device_whose_place_is_not_told_uses_nobody_knows_which(bdf: object, trn1: Trn1) -> None:
    from checks.host.efa import read_adapters

    assert map_devices(None, read_adapters(trn1.host) or [], [{"target": "neuron:0", "bdf": bdf}]) == {}


def test_one_function_counts_and_a_device_off_the_bus_does_not_end_the_count(trn1: Trn1) -> None:
    trn1.write(f"{RDMA}/aaa_rxe0/node_type", "1: CA")
    assert count_efa(trn1.host) == cpu.count_efa(trn1.host) == 8


def test_machine_without_sysfs_counts_none_not_zero(tmp_path: Path) -> None:
    assert count_efa(Host(tmp_path)) is None
