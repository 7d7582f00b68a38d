"""
Instance types: what a machine of each type should have, every figure with its source. Data and look-ups alone.

What no source says stays None ("unknown"): nobody is judged by a guess. Peaks are dense (no sparsity) and are what the
vendor promises, never what a healthy device reaches: a measured speed is compared with half of them, as a warning
(`checks.limits.floors`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

GIB = 2**30

# Where figures are from; a record names one or two of these. Looked up in November 2026.
_EC2 = "Amazon EC2 User Guide, Specifications for Amazon EC2 accelerated computing instances"
_NEURON = "AWS Neuron documentation, about-neuron/arch/neuron-hardware"
_DRIVER = "AWS Neuron driver, v4/neuron_dhal_v4.c (device tables of its platforms); not seen on a machine"
_NVIDIA = "NVIDIA data sheet of the GPU, as quoted by others"
# How the devices of a type are linked: the tables of the AWS Neuron driver, v2/neuron_dhal_v2.c (Trainium, Inferentia2)
# and v3/neuron_dhal_v3.c (Trainium2). The driver has no table for Trainium3 and lists no links for it.
_LINKS = "AWS Neuron driver, fw_io_topology_v2 and _v3 (links)"

# Families of EC2 without accelerators: general purpose, compute, memory, storage, high performance computing.
# Source: Amazon EC2 Instance Types, naming conventions.
_PLAIN = frozenset(("a", "c", "d", "h", "hpc", "i", "im", "is", "m", "mac", "r", "t", "u", "x", "z"))
_NAME = re.compile(r"([a-z]+)[a-z0-9-]*\.[a-z0-9-]+")


class Chip(NamedTuple):
    """
    One device. `accelerator` is a name of `checks.accelerators`.

    `cores` are physical NeuronCores and `lnc` the logical configurations (physical cores in a logical one) that the
    device can have, its default first; None and empty for GPUs. Peaks by dtype as the probes write it. Of GPUs,
    `memory_bytes` is what EC2 states, in GiB rounded down; the driver keeps up to 2 % of it.
    """

    name: str
    accelerator: str
    cores: int | None
    lnc: tuple[int, ...]
    memory_bytes: int
    memory_bytes_per_second: float | None
    flops_per_second: Mapping[str, float]
    source: str


class InstanceType(NamedTuple):
    """
    One type. `devices` None: nobody says how many.

    `efa_interfaces` is the most that the type takes, one a network card (0: no EFA; None: unknown); whoever launches an
    instance decides how many it gets. `topology` is how devices are linked: single, chain (a ring that is open between
    its ends), ring, torus, switch (all to all) or pcie; None where that is unknown.
    """

    name: str
    chip: Chip
    devices: int | None
    efa_interfaces: int | None
    topology: str | None
    source: str

    def neighbours(self, device: int) -> tuple[int, ...] | None:
        """
        The devices that one has NeuronLinks to, by the host's numbers, ascending; inside a container they may differ.

        None where links are not between pairs of devices, or unknown. Raises ValueError for a device it has not.
        """
        if self.devices is None or self.topology is None:
            return None
        if not 0 <= device < self.devices:
            raise ValueError(f"{self.name} has devices 0 to {self.devices - 1}, not {device}")
        if self.topology == "single":
            return ()
        if self.topology == "chain":
            return tuple(other for other in (device - 1, device + 1) if 0 <= other < self.devices)
        if self.topology == "ring":
            return tuple(sorted({(device - 1) % self.devices, (device + 1) % self.devices}))
        if self.topology == "torus":
            return torus_neighbours(device)
        return None


def torus_neighbours(device: int) -> tuple[int, ...]:
    """
    Of the 4 x 4 torus of 16 Trainium or Trainium2 devices: one step left, right, up and down, around the edges.

    Source: the driver's tables for Trn1 and Trn2, which list the same sets; the `connected_to` of neuron-ls in the AWS
    Neuron documentation (device 0: 12, 3, 4, 1).
    """
    row, column = divmod(device, 4)
    sideways = {4 * row + (column - 1) % 4, 4 * row + (column + 1) % 4}
    return tuple(sorted(sideways | {(device - 4) % 16, (device + 4) % 16}))


def _v2(name: str) -> Chip:
    """Trainium and Inferentia2 have the same two NeuronCores-v2, and no logical configuration of them."""
    peaks = {"fp32": 47.5e12, "tf32": 190e12, "bf16": 190e12, "fp16": 190e12, "int8": 380e12}
    return Chip(name, "neuron", 2, (1,), 32 * GIB, 820.0 * GIB, peaks, _NEURON)


def _gpu(
    name: str, memory_gib: int, bytes_per_second: float | None, teraflops: Mapping[str, float], source: str = _NVIDIA
) -> Chip:
    peaks = {dtype: peak * 1e12 for dtype, peak in teraflops.items()}
    return Chip(name, "cuda", None, (), memory_gib * GIB, bytes_per_second, peaks, f"{_EC2} (memory); {source}")


_A100 = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624}
_HOPPER = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}

TRAINIUM = _v2("Trainium")
INFERENTIA2 = _v2("Inferentia2")
# EC2's table says 512 GiB each; the Neuron documentation, neuron-ls and neuron-monitor say 96, and they are nearer.
TRAINIUM2 = Chip(
    "Trainium2", "neuron", 8, (2, 1), 96 * GIB, 2.9e12,
    {"fp32": 181e12, "tf32": 667e12, "bf16": 667e12, "fp16": 667e12, "fp8": 1299e12}, _NEURON,
)  # fmt: skip
TRAINIUM3 = Chip(
    "Trainium3", "neuron", 8, (2, 1), 144 * GIB, 4.9e12,
    {"fp32": 183e12, "tf32": 671e12, "bf16": 671e12, "fp16": 671e12, "mxfp8": 2517e12}, _NEURON,
)  # fmt: skip
A100_40 = _gpu("A100", 40, 1.555e12, _A100)
A100_80 = _gpu("A100", 80, 2.039e12, _A100)
H100 = _gpu("H100", 80, 3.35e12, _HOPPER)
H200 = _gpu("H200", 141, 4.8e12, _HOPPER)
B200 = _gpu("B200", 179, 8e12, {"bf16": 2250, "fp16": 2250, "fp8": 4500})
B300 = _gpu("B300", 268, 8e12, {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500})
GB200 = _gpu("B200", 185, 8e12, {"tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000})
A10G = _gpu("A10G", 22, None, {}, "peaks and bandwidth unknown: this GPU is made for EC2")
L4 = _gpu("L4", 22, 300e9, {"bf16": 121, "fp16": 121, "fp8": 242})
L40S = _gpu("L40S", 44, 864e9, {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05, "fp8": 733})

_BOTH = f"{_EC2}; {_NEURON}"
_LINKED = f"{_BOTH}; {_LINKS}"
_EFA_MAP = "aws-neuron/connected-device-maps-over-efa-for-neuron (EFA)"
# name, device, how many, EFA interfaces at most, links, source
_ROWS: tuple[tuple[str, Chip, int | None, int | None, str | None, str], ...] = (
    ("trn1.2xlarge", TRAINIUM, 1, 0, "single", _BOTH),
    ("trn1.32xlarge", TRAINIUM, 16, 8, "torus", _LINKED),
    ("trn1n.32xlarge", TRAINIUM, 16, 16, "torus", _LINKED),
    ("trn2.3xlarge", TRAINIUM2, 1, 1, "single", _BOTH),
    ("trn2.48xlarge", TRAINIUM2, 16, 16, "torus", _LINKED),
    # EC2's table shows no accelerators for it; the Neuron documentation does.
    ("trn2u.48xlarge", TRAINIUM2, 16, 16, "torus", _LINKED),
    # No public list of sizes; links go through switches.
    ("trn3.48xlarge", TRAINIUM3, 16, 16, "switch", f"{_DRIVER}; {_EFA_MAP}"),
    ("trn3sn.48xlarge", TRAINIUM3, 16, None, "switch", _DRIVER),
    ("trn3p.48xlarge", TRAINIUM3, None, None, None, _DRIVER),
    ("trn3e.24xlarge", TRAINIUM3, 4, None, "switch", _DRIVER),
    ("trn3sn.3xlarge", TRAINIUM3, 1, None, "single", _DRIVER),
    ("trn3pd98.3xlarge", TRAINIUM3, 1, None, "single", _DRIVER),
    ("inf2.xlarge", INFERENTIA2, 1, 0, "single", _BOTH),
    ("inf2.8xlarge", INFERENTIA2, 1, 0, "single", _BOTH),
    ("inf2.24xlarge", INFERENTIA2, 6, 0, "chain", _LINKED),
    ("inf2.48xlarge", INFERENTIA2, 12, 0, "ring", _LINKED),
    ("p4d.24xlarge", A100_40, 8, 4, "switch", _EC2),
    ("p4de.24xlarge", A100_80, 8, 4, "switch", _EC2),
    ("p5.4xlarge", H100, 1, 1, "single", _EC2),
    ("p5.48xlarge", H100, 8, 32, "switch", _EC2),
    ("p5e.48xlarge", H200, 8, 32, "switch", _EC2),
    ("p5en.48xlarge", H200, 8, 16, "switch", _EC2),
    ("p6-b200.48xlarge", B200, 8, 8, "switch", _EC2),
    # The first of its 17 network cards takes no EFA.
    ("p6-b300.48xlarge", B300, 8, 16, "switch", _EC2),
    ("p6e-gb200.36xlarge", GB200, 4, None, "switch", _EC2),
    *((f"g5.{size}", A10G, devices, efa, links, _EC2) for size, devices, efa, links in (
        ("xlarge", 1, 0, "single"), ("2xlarge", 1, 0, "single"), ("4xlarge", 1, 0, "single"),
        ("8xlarge", 1, 1, "single"), ("12xlarge", 4, 1, "pcie"), ("16xlarge", 1, 1, "single"),
        ("24xlarge", 4, 1, "pcie"), ("48xlarge", 8, 1, "pcie"),
    )),
    *((f"g6.{size}", L4, devices, efa, links, _EC2) for size, devices, efa, links in (
        ("xlarge", 1, 0, "single"), ("2xlarge", 1, 0, "single"), ("4xlarge", 1, 0, "single"),
        ("8xlarge", 1, 1, "single"), ("12xlarge", 4, 1, "pcie"), ("16xlarge", 1, 1, "single"),
        ("24xlarge", 4, 1, "pcie"), ("48xlarge", 8, 1, "pcie"),
    )),
    *((f"g6e.{size}", L40S, devices, efa, links, _EC2) for size, devices, efa, links in (
        ("xlarge", 1, 0, "single"), ("2xlarge", 1, 0, "single"), ("4xlarge", 1, 0, "single"),
        ("8xlarge", 1, 1, "single"), ("12xlarge", 4, 1, "pcie"), ("16xlarge", 1, 1, "single"),
        ("24xlarge", 4, 2, "pcie"), ("48xlarge", 8, 4, "pcie"),
    )),
)  # fmt: skip

TYPES: Mapping[str, InstanceType] = {row[0]: InstanceType(*row) for row in _ROWS}


def type_name(text: object) -> str | None:
    """
    The name of an instance type in what somebody says of it; None where it can be none (`HVM domU`).

    SageMaker writes `ml.` before the name.
    """
    if not isinstance(text, str) or len(text) > 64:
        return None
    name = text.strip().lower().removeprefix("ml.")
    return name if _NAME.fullmatch(name) else None


def find_type(name: str | None) -> InstanceType | None:
    """The record of a type; None for a type that the catalogue does not have: what it should have is then unknown."""
    plain = type_name(name)
    return TYPES.get(plain) if plain else None


def has_no_accelerators(name: str | None) -> bool:
    """Whether a type is of a family that has no accelerators, by its name; False where that cannot be told."""
    plain = type_name(name)
    match = _NAME.fullmatch(plain) if plain else None
    return match is not None and match[1] in _PLAIN
