"""The catalogue of instance types: complete, with sources, and unknown where nobody knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.catalog import GIB, TYPES, InstanceType, find_type, has_no_accelerators, type_name
from tests.every import every

REPOSITORY = Path(__file__).parents[2]
G_SIZES = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "12xlarge", "16xlarge", "24xlarge", "48xlarge")


def the(name: str) -> InstanceType:
    found = find_type(name)
    assert found is not None
    return found


@every(
    ("name", "chip", "devices", "cores", "logical", "memory_gib", "efa"),
    [
        ("trn1.2xlarge", "Trainium", 1, 2, 2, 32, 0),
        ("trn1.32xlarge", "Trainium", 16, 32, 32, 512, 8),
        ("trn1n.32xlarge", "Trainium", 16, 32, 32, 512, 16),
        ("trn2.3xlarge", "Trainium2", 1, 8, 4, 96, 1),
        ("trn2.48xlarge", "Trainium2", 16, 128, 64, 1536, 16),
        ("trn2u.48xlarge", "Trainium2", 16, 128, 64, 1536, 16),
        ("trn3.48xlarge", "Trainium3", 16, 128, 64, 2304, 16),
        ("inf2.xlarge", "Inferentia2", 1, 2, 2, 32, 0),
        ("inf2.8xlarge", "Inferentia2", 1, 2, 2, 32, 0),
        ("inf2.24xlarge", "Inferentia2", 6, 12, 12, 192, 0),
        ("inf2.48xlarge", "Inferentia2", 12, 24, 24, 384, 0),
        ("p4d.24xlarge", "A100", 8, None, None, 320, 4),
        ("p4de.24xlarge", "A100", 8, None, None, 640, 4),
        ("p5.4xlarge", "H100", 1, None, None, 80, 1),
        ("p5.48xlarge", "H100", 8, None, None, 640, 32),
        ("p5e.48xlarge", "H200", 8, None, None, 1128, 32),
        ("p5en.48xlarge", "H200", 8, None, None, 1128, 16),
        ("p6-b200.48xlarge", "B200", 8, None, None, 1432, 8),
        ("p6-b300.48xlarge", "B300", 8, None, None, 2144, 16),
        ("p6e-gb200.36xlarge", "B200", 4, None, None, 740, None),
        ("g5.48xlarge", "A10G", 8, None, None, 176, 1),
        ("g6.12xlarge", "L4", 4, None, None, 88, 1),
        ("g6e.24xlarge", "L40S", 4, None, None, 176, 2),
        ("g6e.48xlarge", "L40S", 8, None, None, 352, 4),
    ],
)
def test_type_has_the_figures_of_its_documentation(
    name: str,
    chip: str,
    devices: int,
    cores: int | None,
    logical: int | None,
    memory_gib: int,
    efa: int | None,
) -> None:
    found = the(name)
    assert (found.chip.name, found.devices, found.efa_interfaces) == (chip, devices, efa)
    assert found.devices is not None
    assert found.devices * found.chip.memory_bytes == memory_gib * GIB
    if cores is not None and logical is not None:
        assert found.chip.cores == cores // found.devices
        assert found.chip.lnc[0] == cores // logical
    else:
        assert (found.chip.cores, found.chip.lnc) == (None, ())


@every("family", ["g5", "g6", "g6e"])
def test_every_size_of_the_small_gpu_families_is_there(family: str) -> None:
    assert {name for name in TYPES if name.startswith(f"{family}.")} == {f"{family}.{size}" for size in G_SIZES}


@every("found", TYPES.values())
def test_every_record_names_its_sources_and_agrees_with_itself(found: InstanceType) -> None:
    assert len(found.source) > 10
    assert len(found.chip.source) > 10
    assert found.chip.accelerator in ("neuron", "cuda")
    assert (found.chip.cores is None) == (found.chip.accelerator == "cuda") == (not found.chip.lnc)
    assert all(1e12 < peak < 1e17 for peak in found.chip.flops_per_second.values())
    assert found.topology != "single" or found.devices == 1
    assert found.topology != "torus" or found.devices == 16


@every("name", ["trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge"])
def test_torus_has_the_neighbours_that_the_vendors_tool_shows(name: str) -> None:
    """From a listing of neuron-ls in the AWS Neuron documentation."""
    shown = {0: (12, 3, 4, 1), 1: (13, 0, 5, 2)}
    for device, neighbours in shown.items():
        assert the(name).neighbours(device) == tuple(sorted(neighbours))


@every("found", TYPES.values())
def test_links_go_both_ways_and_never_to_oneself(found: InstanceType) -> None:
    for device in range(found.devices or 0):
        for other in found.neighbours(device) or ():
            assert other != device
            assert device in (found.neighbours(other) or ())


# Links of each type, from the tables of the AWS Neuron driver: v2/neuron_dhal_v2.c and v3/neuron_dhal_v3.c.
TORUS = [
    {12, 3, 4, 1}, {13, 0, 5, 2}, {14, 1, 6, 3}, {15, 2, 7, 0}, {0, 7, 8, 5}, {1, 4, 9, 6}, {2, 5, 10, 7},
    {3, 6, 11, 4}, {4, 11, 12, 9}, {5, 8, 13, 10}, {6, 9, 14, 11}, {7, 10, 15, 8}, {8, 15, 0, 13}, {9, 12, 1, 14},
    {10, 13, 2, 15}, {11, 14, 3, 12},
]  # fmt: skip
DRIVER_TABLES: dict[str, list[set[int]]] = {
    "trn1.2xlarge": [set()],
    "trn1.32xlarge": TORUS,
    "trn1n.32xlarge": TORUS,
    "trn2.3xlarge": [set()],
    "trn2.48xlarge": TORUS,
    "trn2u.48xlarge": TORUS,
    "inf2.xlarge": [set()],
    "inf2.8xlarge": [set()],
    "inf2.24xlarge": [{1}, {0, 2}, {1, 3}, {2, 4}, {3, 5}, {4}],
    "inf2.48xlarge": [{(n - 1) % 12, (n + 1) % 12} for n in range(12)],
}


@every("name", [name for name, kind in TYPES.items() if kind.chip.accelerator == "neuron"])
def test_links_of_each_type_are_those_of_the_drivers_table(name: str) -> None:
    kind = the(name)
    table = DRIVER_TABLES.get(name)
    if table is None:  # Trainium3: the driver lists no links
        assert kind.chip.name == "Trainium3"
        assert kind.topology in ("switch", "single", None)
        return
    assert [set(kind.neighbours(device) or ()) for device in range(kind.devices or 0)] == table
    assert len(table) == 1 or "fw_io_topology" in kind.source


def test_ring_and_chain_have_two_neighbours_single_devices_none_and_switches_are_unknown() -> None:
    assert the("inf2.48xlarge").neighbours(0) == (1, 11)
    assert the("inf2.24xlarge").neighbours(5) == (4,)
    assert the("inf2.xlarge").neighbours(0) == ()
    assert the("trn3.48xlarge").neighbours(0) is None
    assert the("p5.48xlarge").neighbours(0) is None
    with pytest.raises(ValueError, match="devices 0 to 11, not 12"):
        the("inf2.48xlarge").neighbours(12)


def test_type_of_unknown_size_promises_nothing() -> None:
    found = the("trn3p.48xlarge")
    assert (found.devices, found.efa_interfaces) == (None, None)
    assert found.neighbours(0) is None


@every("name", ["trn9.32xlarge", "trn1.31xlarge", "", None, "HVM domU", "trn1", "x" * 1000, "t.\n"])
def test_unknown_type_is_unknown(name: str | None) -> None:
    """Rival fault 6."""
    assert find_type(name) is None


def test_names_are_found_however_they_are_written() -> None:
    assert find_type(" ml.TRN1.32xlarge\n") is TYPES["trn1.32xlarge"]
    assert type_name("c7i.metal-24xl") == "c7i.metal-24xl"


@every(
    ("name", "expected"),
    [
        ("c7i.large", True),
        ("m5.metal", True),
        ("u-6tb1.56xlarge", True),
        ("hpc7a.96xlarge", True),
        ("g4dn.xlarge", False),
        ("trn9.2xlarge", False),
        ("p3.2xlarge", False),
        ("vt1.3xlarge", False),
        ("q1.large", False),
        (None, False),
    ],
)
def test_only_families_known_to_be_plain_count_as_plain(name: str | None, expected: bool) -> None:
    assert has_no_accelerators(name) is expected


@given(st.text(max_size=100) | st.integers() | st.none() | st.lists(st.text()))
def test_any_text_is_a_name_or_none(text: object) -> None:
    name = type_name(text)
    assert name is None or (name == type_name(name) and "\n" not in name)


def test_catalogue_is_loaded_without_anything_heavy() -> None:
    """It is part of every passive round: no json, no network, no process library."""
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\nimport checks.contract\nbefore = set(sys.modules)\n"
        "import checks.catalog\nprint(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "['checks.catalog']"
