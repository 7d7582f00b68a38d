"""What the driver and the firmware say of a Neuron device as a whole: its state, and parts that are unhealthy."""

from __future__ import annotations

from collections.abc import Iterator

from checks.accelerators.neuron.leaves import COMPONENTS, DeviceCounters
from checks.contract import Action, Finding, Status
from checks.system.neuron.neuron_kinds import REPLACE_IT

_LINKS = ("link_intraserver", "link_host", "link_efa", "link_interserver", "link_switch")
_PARTS = ("hbm", "sram", "firmware_service_api", "firmware_service_processor", *_LINKS, "axi_fabric")
_NONE = ("", "none")
# The driver's states of a device: enum neuron_device_state in neuron_device.h.
_RESETTING, _READY, _INVALID = 0, 1, 2


def judge_state(target: str, device: DeviceCounters) -> Iterator[Finding]:
    """What the leaf `reset` says, where it may be read: nobody can open a device that is not ready."""
    if device.state == _INVALID:
        text = (
            "the driver holds this device in an invalid state, because a reset of it failed: no process can open it; "
            f"load the driver again or reboot, and {REPLACE_IT} if that does not help"
        )
        yield Finding(status=Status.FAIL, reason="DeviceLost", message=text, target=target, action=Action.REBOOT)
    elif device.state == _RESETTING:
        text = "the driver is resetting this device: processes that open it wait until that has ended"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target, action=Action.RETRY)
    elif device.state not in (None, _READY):
        text = f"the driver says that the state of this device is {device.state}, which is not known here"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


def judge_components(target: str, device: DeviceCounters) -> Iterator[Finding]:
    """The comma list of parts that the firmware calls unhealthy."""
    words = parse_components(device.components)
    strange = [word for word in words if word not in _PARTS]
    known = [word for word in words if word in _PARTS]
    if known:
        text = f"the firmware calls unhealthy: {', '.join(known)}; {REPLACE_IT} if it stays"
        yield Finding(status=Status.FAIL, reason="UnhealthyComponent", message=text, target=target)
    if strange:
        text = f"{COMPONENTS} says {' '.join(strange)[:100]!r}, which is no part that is known here"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


def parse_components(text: str | None) -> list[str]:
    """The words of the list; none where there is no such leaf (older drivers, Trainium1), or it is empty."""
    words = [word.strip().lower() for word in (text or "").split(",")]
    return [word for word in words if word not in _NONE]
