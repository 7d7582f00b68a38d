"""Looking at the counters of Neuron devices time after time, as the runner has a check look."""

from __future__ import annotations

import json
from typing import Any

from checks.contract import Evidence, Finding, Previous
from checks.system.neuron.neuron_counters import neuron_counters
from tests.fakes.neuron import NeuronMachine

SYSFS = "/sys/devices/virtual/neuron_device"


def inventory(*numbers: int) -> dict[str, Any]:
    return {
        "accelerator": "neuron",
        "devices": [{"target": f"neuron:{index}", "index": index} for index in numbers],
    }


ONE = inventory(0)


class Looks:
    """One look after the other, as the runner has a check look."""

    def __init__(self, machine: NeuronMachine, **others: Any) -> None:
        self.machine = machine
        self.others = {"inventory": ONE, **others}
        self.last: Evidence | None = None
        self.boot_id = machine.host.boot_id()

    def look(self, seconds: float = 60.0, boot_id: str | None = None) -> list[Finding]:
        previous = None
        if self.last is not None:
            data = json.loads(json.dumps(self.last.data))  # it comes over a wire
            last = Evidence(target="node", key="k", data=data)
            previous = Previous(evidence=(last,), elapsed_seconds=seconds, boot_id=boot_id or self.boot_id)
        items = self.machine.run(neuron_counters, previous=previous, **self.others)
        (self.last,) = [item for item in items if isinstance(item, Evidence)]
        return [item for item in items if isinstance(item, Finding)]


def look(machine: NeuronMachine, **others: Any) -> list[Finding]:
    return Looks(machine, **others).look()
