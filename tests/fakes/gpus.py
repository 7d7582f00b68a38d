"""A machine with NVIDIA GPUs, as a directory: the driver's pages of /proc, and NVML (`tests/fakes/pynvml`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checks.accelerators import cuda
from checks.contract import Check, Evidence, Finding, Limit, Previous
from tests.hosts.machine import Machine

_MODULE = Path(__file__).with_name("pynvml")
_DMI = "/sys/devices/virtual/dmi/id"
HEALTHY_GPU: Mapping[str, Any] = {
    "ecc": 1,
    "volatile_uncorrected": 0,
    "aggregate_uncorrected": 0,
    "remapped_rows": [0, 0, 0, 0],
    "clock_reasons": 1,
    "temperature": 34,
    "slowdown_temperature": 89,
    "utilization": 0,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_replays": 0,
    "nvlinks": [1] * 18,
    "nvlink_errors": [0, 0, 0, 0],
    "fabric": [3, 0],
    "fabric_health": 0xAA,
    "recovery_action": 0,
    "used_bytes": 4 << 20,
    "processes": [],
}


class GpuMachine(Machine):
    """H100s, all well. `gpu` changes what one says, `error` lets a call fail."""

    def __init__(self, root: Path, count: int = 8, *, instance_type: str | None = "p5.48xlarge") -> None:
        super().__init__(root)
        shutil.copytree(_MODULE, root / "python" / "pynvml", ignore=shutil.ignore_patterns("__pycache__"))
        self.state: dict[str, Any] = {"driver": "570.172.08", "nvml": "12.570.172.08", "cuda": 12080, "errors": {}}
        self.state["gpus"] = [
            {"bdf": f"0000:{0x53 + 16 * index:02x}:00.0", "uuid": _uuid(index), **HEALTHY_GPU} for index in range(count)
        ]
        for index, gpu in enumerate(self.state["gpus"]):
            page = f"Model: \t NVIDIA H100 80GB HBM3\nGPU UUID: \t {gpu['uuid']}\nDevice Minor: \t {index}\n"
            self.write(f"/proc/driver/nvidia/gpus/{gpu['bdf']}/information", page)
        if instance_type is not None:
            self.write(f"{_DMI}/sys_vendor", "Amazon EC2\n")
            self.write(f"{_DMI}/product_name", f"{instance_type}\n")
        self._store()

    def gpu(self, index: int, **changes: Any) -> None:
        """Change what a GPU says; None: it does not support that."""
        self.state["gpus"][index].update(changes)
        self._store()

    def error(self, call: str, code: int) -> None:
        """Let a call of the module end with an error: `nvmlDeviceGetEccMode`, that with `@0`, or `*@0`."""
        self.state["errors"][call] = code
        self._store()

    def well(self) -> None:
        """No call fails any more."""
        self.state["errors"] = {}
        self._store()

    def run(
        self,
        check: Check,
        *,
        inventory: Mapping[str, Any] | None = None,
        limits: Mapping[str, Limit] | None = None,
        previous: Previous | None = None,
        **params: Any,
    ) -> list[Finding | Evidence]:
        """As `Machine.run`, with the inventory that the accelerator finds here."""
        found = {**cuda.find(self.host, {}), "holders": [], **(inventory or {})}
        return super().run(check, inventory=found, limits=limits, previous=previous, **params)

    def _store(self) -> None:
        self.write("/nvml.json", json.dumps(self.state))


def _uuid(index: int) -> str:
    return f"GPU-{index:08x}-1111-2222-3333-444455556666"
