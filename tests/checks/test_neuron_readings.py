"""What neuron-ls and sysfs say of Neuron devices: documented shapes are read, anything else is None or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checks.accelerators import neuron
from checks.accelerators.neuron import ls as neuron_ls
from checks.accelerators.neuron import sysfs as neuron_sysfs
from checks.accelerators.neuron.ls import Listing
from tests.every import every
from tests.fakes.neuron import NeuronMachine
from tests.profile import examples

DOCUMENTED = {
    "neuron_device": 4,
    "bdf": "CC:00.0",
    "cpu_affinity": "48-95,144-191",
    "numa_node": "-1",
    "connected_to": [12, 3, 5, 1],
    "nc_count": 4,
    "logical_neuroncore_config": 2,
    "memory_size": 103079215104,
    "neuroncore_ids": [16, 17, 18, 19],
    "neuron_processes": [
        {"pid": 7, "command": "/opt/venv/bin/python train.py --key x", "neuron_runtime_version": "2.0.0"}
    ],
}


def one(**changes: Any) -> neuron_ls.Entry:
    (entry,) = neuron_ls.parse(json.dumps([{**DOCUMENTED, **changes}])).devices
    return entry


def test_documented_members_are_read() -> None:
    entry = one()
    assert (entry.number, entry.bdf, entry.numa_node, entry.cores, entry.lnc) == (4, "0000:cc:00.0", None, 4, 2)
    assert (entry.connected_to, entry.core_ids) == ((12, 3, 5, 1), (16, 17, 18, 19))
    assert entry.processes == (neuron_ls.Process(7, "python", "2.0.0"),)
    assert one(bdf="0001:cc:00.0").bdf == "0001:cc:00.0"
    assert (one(numa_node="1").numa_node, one(numa_node=0).numa_node) == (1, 0)


@every(
    ("member", "value"),
    [
        ("bdf", "cc.00:0"),
        ("bdf", 5),
        ("numa_node", "one"),
        ("connected_to", None),
        ("connected_to", ["1"]),
        ("connected_to", "1, 2"),
        ("nc_count", "4"),
        ("nc_count", 4.0),
        ("nc_count", True),
        ("nc_count", 0),
        ("nc_count", -4),
        ("logical_neuroncore_config", 3),
        ("memory_size", 96),  # GiB
        ("memory_size", "96 GB"),
        ("memory_size", 1e11),
        ("neuroncore_ids", [0, 1, 2]),
        ("neuroncore_ids", [0, 0, 1, 2]),
        ("neuron_processes", None),
        ("neuron_processes", [{"pid": "7", "command": "x", "neuron_runtime_version": "2"}]),
        ("neuron_processes", [{"pid": 7, "command": "x"}]),
        ("neuron_processes", [{"pid": 7, "command": "x", "neuron_runtime_version": None}]),
        ("neuron_processes", [7]),
    ],
)
def test_member_of_another_shape_or_unit_is_none(member: str, value: object) -> None:
    fields = {"nc_count": "cores", "logical_neuroncore_config": "lnc", "memory_size": "memory_bytes"}
    fields |= {"neuroncore_ids": "core_ids", "neuron_processes": "processes"}
    entry = one(**{member: value})
    assert getattr(entry, fields.get(member, member)) is None
    assert one().number == entry.number


@every(
    "text",
    ["", "{}", "[]", "[1]", "[{}]", "[[]]", "null", "[", "[" * 9999,
     '[{"neuron_device": null}]', '[{"neuron_device": "0"}]',
     json.dumps([DOCUMENTED, DOCUMENTED]), json.dumps([{**DOCUMENTED, "neuron_device": n} for n in range(300)]),
     json.dumps([DOCUMENTED, {**DOCUMENTED, "neuron_device": 5}])],
)  # fmt: skip
def test_what_is_no_list_of_numbered_devices_is_refused_as_a_whole(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        neuron_ls.parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def listings(draw: st.DrawFn) -> str:
    """Outputs of documented shape in which members are dropped, null, extra or of another type; some are cut."""
    entries = []
    for index in range(draw(st.integers(0, 4))):
        entry: dict[str, Any] = {
            **DOCUMENTED,
            "neuron_device": index,
            "neuroncore_ids": [4 * index + n for n in range(4)],
        }
        for name in draw(st.lists(st.sampled_from(sorted(DOCUMENTED)), max_size=3)):
            match draw(st.integers(0, 2)):
                case 0:
                    entry.pop(name, None)
                case 1:
                    entry[name] = None
                case _:
                    entry[name] = draw(JSON)
        entry.update(draw(st.dictionaries(st.text(max_size=8), JSON, max_size=2)))
        entries.append(entry)
    text = json.dumps(entries)
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


def parsed(text: str) -> Listing | None:
    try:
        return neuron_ls.parse(text)
    except ValueError as error:
        words = str(error)
    assert words
    assert "\n" not in words
    return None


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(listings() | st.text(max_size=200))
@example("[{}]")
def test_parser_makes_right_readings_or_none_of_anything_and_never_crashes(text: str) -> None:
    found = parsed(text)
    if found is None:
        return
    plain = {item["neuron_device"]: item for item in json.loads(text)}
    assert sorted(plain) == [entry.number for entry in found.devices]
    for entry in found.devices:
        item: Mapping[str, Any] = plain[entry.number]
        for value, name in ((entry.cores, "nc_count"), (entry.memory_bytes, "memory_size")):
            assert value is None or value == item[name]
        assert entry.core_ids is None or sorted(item["neuroncore_ids"]) == list(entry.core_ids)
        assert entry.processes is None or len(entry.processes) == len(item["neuron_processes"])
        assert entry.connected_to is None or list(entry.connected_to) == item["connected_to"]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=60) | st.sampled_from(["1, 2", "1 2\n", "", "-1", "1,,2", "12345", "٣", "0x1"]))
def test_numbers_of_sysfs_are_plain_decimals_or_nothing(text: str) -> None:
    number = neuron_sysfs.parse_number(text, 1, 64)
    assert number is None or (text.strip() == text.strip().lstrip("+") and int(text.strip()) == number)
    found = neuron_sysfs.parse_list(text)
    assert found is None or all(0 <= item < 10_000 for item in found)


LEAVES = ("info/serial_number", "info/architecture/device_name", "core_count", "connected_devices")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> NeuronMachine:
    machine = NeuronMachine(tmp_path_factory.mktemp("fuzz") / "machine", "trn1.2xlarge")
    machine.fault("no_tools")
    return machine


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    leaf=st.sampled_from(LEAVES), content=st.binary(max_size=40) | st.sampled_from([b"2\n", b"999", b"-2", b"2 cores"])
)
def test_garbage_in_sysfs_is_none_never_a_crash(shared: NeuronMachine, leaf: str, content: bytes) -> None:
    place = shared.root / "sys/devices/virtual/neuron_device/neuron0" / leaf
    kept = place.read_bytes()
    place.write_bytes(content)
    try:
        (device,) = neuron.find(shared.host, {})["devices"]
    finally:
        place.write_bytes(kept)
    assert device["cores"] in (None, 2) or str(device["cores"]).encode() in content
    json.dumps(device)


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf_that_is_gone_is_none_and_the_others_stand(leaf: str, tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    machine.remove(f"/sys/devices/virtual/neuron_device/neuron3/{leaf}")
    devices = neuron_sysfs.read_devices(machine.host)
    assert devices is not None
    assert len(devices) == 16
    fields = ("serial", "kind", "cores", "connected_to")
    gone = fields[LEAVES.index(leaf)]
    assert getattr(devices[3], gone) is None
    assert all(getattr(device, name) for device in devices for name in fields if (device.number, name) != (3, gone))
