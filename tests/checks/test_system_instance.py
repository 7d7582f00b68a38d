"""The instance type: the accelerator it promises is there; a Trainium machine never passes as one with plain CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checks.catalog import TYPES
from checks.contract import Action, Finding, Status
from checks.system.devices import device_count
from checks.system.instance import instance_type
from tests.hosts.machine import Machine, number, worst_of

DMI = "/sys/devices/virtual/dmi/id"
MISSING = (Status.FAIL, "MissingDevice")
UNKNOWN = (Status.UNKNOWN, "UnknownInstanceType")
SKIPPED = (Status.SKIP, "NotApplicable")
PASSES = (Status.PASS, None)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def on(machine: Machine, product: str, vendor: str = "Amazon EC2") -> Machine:
    machine.write(f"{DMI}/sys_vendor", f"{vendor}\n")
    machine.write(f"{DMI}/product_name", f"{product}\n")
    machine.write(f"{DMI}/board_asset_tag", "i-0123456789abcdef0\n")
    return machine


def inventory(name: str, **changes: Any) -> dict[str, Any]:
    """What a healthy machine of a type shows, with its default logical configuration."""
    known = TYPES[name]
    count = changes.pop("device_count", known.devices)
    device = {"memory_bytes": known.chip.memory_bytes}
    return {
        "accelerator": known.chip.accelerator,
        "device_count": count,
        "devices": [{"target": f"{known.chip.accelerator}:{index}", **device} for index in range(count or 0)],
        **changes,
    }


@pytest.mark.parametrize("name", [name for name, known in TYPES.items() if known.devices is not None])
def test_whole_machine_of_every_type_passes_with_numbers(name: str, machine: Machine) -> None:
    findings = on(machine, name).findings(instance_type, inventory=inventory(name))
    assert worst_of(findings) == PASSES
    count = number(findings, "instance_devices_count")
    assert (count.value, count.lower) == (TYPES[name].devices, None)  # device_count judges it
    judged = machine.findings(device_count, inventory={**inventory(name), "expected_device_count": None})
    assert worst_of(judged) == PASSES
    assert (number(judged, "device_count").lower, number(judged, "device_count").origin) == (count.value, "catalogue")
    assert number(findings, "instance_device_memory_bytes").value == TYPES[name].chip.memory_bytes


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn2.48xlarge", "inf2.xlarge", "trn3p.48xlarge", "p5.48xlarge"])
def test_machine_whose_driver_is_gone_never_passes_as_plain_cpus(name: str, machine: Machine) -> None:
    (finding,) = on(machine, name).findings(instance_type)
    assert (finding.status, finding.reason, finding.target) == (*MISSING, "node")
    assert name in finding.message
    assert "driver" in finding.message
    assert "cpu" in finding.message


def test_machine_without_any_inventory_fails_as_well(machine: Machine) -> None:
    findings = on(machine, "trn1.32xlarge").findings(instance_type, inventory={"accelerator": None})
    assert worst_of(findings) == MISSING


@pytest.mark.parametrize(("name", "count"), [("trn1.32xlarge", 15), ("trn1.32xlarge", 0), ("p5.48xlarge", 7)])
def test_too_few_devices_for_the_type_are_one_finding_of_device_count(name: str, count: int, machine: Machine) -> None:
    seen = {**inventory(name, device_count=count), "expected_device_count": None}
    assert worst_of(on(machine, name).findings(instance_type, inventory=seen)) == PASSES
    (finding,) = machine.findings(device_count, inventory=seen)
    assert (finding.status, finding.reason, finding.target) == (*MISSING, "node")


def test_more_devices_than_the_type_has_are_one_finding_of_the_type(machine: Machine) -> None:
    seen = {**inventory("trn1.32xlarge", device_count=17), "expected_device_count": None}
    assert worst_of(on(machine, "trn1.32xlarge").findings(instance_type, inventory=seen)) == UNKNOWN
    assert worst_of(machine.findings(device_count, inventory=seen)) == PASSES


def test_devices_of_another_kind_than_the_types_are_compared_with_nothing(machine: Machine) -> None:
    seen = {**inventory("p5.48xlarge"), "expected_device_count": None}
    assert worst_of(on(machine, "trn1.32xlarge").findings(device_count, inventory=seen)) == UNKNOWN
    assert worst_of(machine.findings(instance_type, inventory=seen)) == MISSING


def test_count_that_the_driver_does_not_say_is_unknown(machine: Machine) -> None:
    seen = inventory("trn1.32xlarge", device_count=None)
    findings = on(machine, "trn1.32xlarge").findings(instance_type, inventory=seen)
    assert worst_of(findings) == (Status.UNKNOWN, "NoData")


def test_container_with_a_share_of_the_devices_says_how_many(machine: Machine) -> None:
    seen = {**inventory("trn1.32xlarge", device_count=4, core_count=8), "expected_device_count": None}
    on(machine, "trn1.32xlarge")
    assert worst_of(machine.findings(device_count, inventory=seen)) == MISSING
    findings = machine.findings(device_count, inventory=seen, expected=4)
    assert worst_of(findings) == PASSES
    assert number(findings, "device_count").origin == "config"


def under_xla(client: str, count: int) -> dict[str, Any]:
    devices = [{"target": f"xla:{index}", "kind": f"PJRT {client}"} for index in range(count)]
    return {"accelerator": "xla", "device_count": count, "devices": devices}


@pytest.mark.parametrize(("files", "expected"), [(16, PASSES), (15, MISSING), (0, MISSING)])
def test_devices_under_xla_are_counted_by_their_files_not_by_configuration(
    files: int, expected: object, machine: Machine
) -> None:
    on(machine, "trn1.32xlarge")
    for index in range(files):
        machine.write(f"/dev/neuron{index}", "")
    machine.write("/dev/neuron_helper", "")
    assert worst_of(machine.findings(instance_type, inventory=under_xla("NEURON", 32))) == expected


@pytest.mark.parametrize("client", ["CPU, Intel(R) Xeon(R)", "CUDA", "None"])
def test_xla_on_another_device_than_the_types_fails(client: str, machine: Machine) -> None:
    on(machine, "trn1.32xlarge")
    machine.write("/dev/neuron0", "")
    assert worst_of(machine.findings(instance_type, inventory=under_xla(client, 2))) == MISSING


def with_memory(*ratios: float | None) -> dict[str, Any]:
    full = TYPES["inf2.24xlarge"].chip.memory_bytes
    sizes = [None if ratio is None else int(ratio * full) for ratio in ratios]
    devices = [{"target": f"neuron:{index}", "memory_bytes": size} for index, size in enumerate(sizes)]
    return inventory("inf2.24xlarge", devices=devices)


def memory_findings(machine: Machine, *ratios: float | None, **params: Any) -> list[Finding]:
    found = on(machine, "inf2.24xlarge").findings(instance_type, inventory=with_memory(*ratios), **params)
    return [item for item in found if any("memory" in measured.name for measured in item.measurements)]


def test_device_with_less_memory_is_named_and_no_other_is_accused(machine: Machine) -> None:
    (finding,) = memory_findings(machine, 1, 1, 1, 0.75, 1, 1)
    assert (finding.status, finding.reason, finding.target) == (*MISSING, "neuron:3")
    assert finding.action is Action.INSPECT


@pytest.mark.parametrize(("ratio", "expected"), [(0.951, PASSES), (0.949, MISSING), (0.0, MISSING)])
def test_memory_that_the_driver_keeps_is_no_fault(ratio: float, expected: object, machine: Machine) -> None:
    assert worst_of(memory_findings(machine, 1, ratio, 1, 1, 1, 1)) == expected
    assert worst_of(memory_findings(machine, 1, 1, 0.5, 1, 1, 1, memory_ratio=0.4)) == PASSES


def test_memory_of_one_device_that_is_not_told_is_unknown_and_of_all_is_not_judged(machine: Machine) -> None:
    (finding,) = memory_findings(machine, 1, None, 1, 1, 1, 1)
    assert (finding.status, finding.reason, finding.target) == (Status.UNKNOWN, "NoData", "neuron:1")
    assert memory_findings(machine, *[None] * 6) == []


# --- what is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trn9.32xlarge", "g4dn.xlarge", "p3.2xlarge", "trn2.24xlarge"])
@pytest.mark.parametrize("accelerator", ["cpu", "neuron"])
def test_unknown_type_on_ec2_is_unknown_never_a_pass(name: str, accelerator: str, machine: Machine) -> None:
    """Rival fault 6."""
    (finding,) = on(machine, name).findings(instance_type, inventory={"accelerator": accelerator})
    assert (finding.status, finding.reason) == UNKNOWN
    assert name in finding.message


@pytest.mark.parametrize("product", ["", "HVM domU", "\x00\xff", "x" * 5000])
def test_type_that_cannot_be_read_on_ec2_is_unknown(product: str, machine: Machine) -> None:
    assert worst_of(on(machine, product).findings(instance_type)) == UNKNOWN


def test_type_whose_size_nobody_knows_is_unknown_until_somebody_says_it(machine: Machine) -> None:
    seen = {**inventory("trn3p.48xlarge", device_count=16, core_count=64), "expected_device_count": None}
    on(machine, "trn3p.48xlarge")
    assert worst_of(machine.findings(instance_type, inventory=seen)) == PASSES
    assert worst_of(machine.findings(device_count, inventory=seen)) == UNKNOWN
    assert worst_of(machine.findings(device_count, inventory=seen, expected=16)) == PASSES


def test_machine_elsewhere_is_not_concerned(machine: Machine) -> None:
    assert worst_of(machine.findings(instance_type)) == SKIPPED
    assert worst_of(on(machine, "trn1.32xlarge", vendor="Dell Inc.").findings(instance_type)) == SKIPPED
    assert worst_of(machine.findings(instance_type, inventory={"accelerator": "cuda"})) == SKIPPED


def test_type_without_accelerators_is_not_concerned_unless_it_shows_some(machine: Machine) -> None:
    assert worst_of(on(machine, "c7i.24xlarge").findings(instance_type)) == SKIPPED
    assert worst_of(machine.findings(instance_type, inventory={"accelerator": "neuron"})) == UNKNOWN


def test_neuron_devices_on_a_machine_that_tells_no_type_are_unknown(machine: Machine) -> None:
    """They exist on EC2 alone; a container may hide the firmware."""
    assert worst_of(machine.findings(instance_type, inventory=inventory("trn1.2xlarge"))) == UNKNOWN


def test_type_comes_from_the_parameter_or_the_tool_where_the_firmware_is_hidden(machine: Machine) -> None:
    seen = inventory("trn1.2xlarge")
    assert worst_of(machine.findings(instance_type, inventory=seen, type="trn1.2xlarge")) == PASSES
    assert worst_of(machine.findings(instance_type, inventory={**seen, "instance_type": "trn1.2xlarge"})) == PASSES
    assert worst_of(machine.findings(instance_type, inventory=seen, type="p5.48xlarge")) == MISSING
    seen = {**seen, "expected_device_count": None}
    assert worst_of(machine.findings(device_count, inventory=seen, type="trn1.2xlarge")) == PASSES
    assert worst_of(machine.findings(device_count, inventory=seen, type="trn1.32xlarge")) == MISSING


def test_parameter_that_is_no_type_is_said_and_not_passed_over(machine: Machine) -> None:
    (finding,) = on(machine, "trn1.2xlarge").findings(
        instance_type, inventory=inventory("trn1.2xlarge"), type="trainium"
    )
    assert (finding.status, finding.reason) == UNKNOWN
    assert "'trainium'" in finding.message
