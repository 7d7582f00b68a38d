"""
Write healthd-job/files/instance-types.yaml: what a job that wants whole nodes requests of each instance type.

`python -m deploy.helm.generate` after each change of `checks/catalog.py`; a test compares what stands there with what
this writes.
"""

from __future__ import annotations

from pathlib import Path

from checks.catalog import TYPES

TARGET = Path(__file__).parent / "healthd-job/files/instance-types.yaml"

# Names of the device plugins' resources by accelerator. Sources: AWS Neuron, NVIDIA k8s-device-plugin.
RESOURCES = {"neuron": "aws.amazon.com/neuron", "cuda": "nvidia.com/gpu"}

HEAD = """\
# Made from checks/catalog.py by `python -m deploy.helm.generate`. null: no source says how many there are.
"""


def instance_types() -> str:
    """A line for each type with devices: the resource, how many, and how many EFA interfaces."""
    lines = [
        f"{name}: {{resource: {RESOURCES[known.chip.accelerator]}, devices: {_count(known.devices)}, "
        f"efa: {_count(known.efa_interfaces)}}}\n"
        for name, known in TYPES.items()
    ]
    return HEAD + "".join(lines)


def _count(number: int | None) -> str:
    return "null" if number is None else str(number)


if __name__ == "__main__":
    TARGET.write_text(instance_types(), encoding="utf-8")
