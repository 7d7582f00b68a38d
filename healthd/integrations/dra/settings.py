"""Settings of taints on devices: `device_taints` in the table of the actuator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Effect = Literal["None", "NoSchedule"]


@dataclass(frozen=True, kw_only=True)
class DeviceTaintSettings:
    """The DeviceTaintRule of a device."""

    taints: Literal["off", "None", "NoSchedule"] = "off"
    """Effect of the DeviceTaintRule for a device that is the only fault of its node, if devices are allocated by
    DRA. None: the rule only informs, and the node is tainted as without it. NoSchedule: new claims get other
    devices, and the node is not tainted. off: no rules, and none of the rights that they need. Begin with None."""
