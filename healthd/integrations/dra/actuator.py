"""
Takes out single devices before the actuator of Kubernetes takes out their node.

Where single devices are all that is wrong with a node, and DRA can leave these out, they are tainted instead, before a
taint of ours on the node goes. Where they cannot be, the node is tainted as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from healthd.aggregator.drain.plan import Actuator, Done, Outcome, Removal
from healthd.clients.kubernetes import MarkedNodes, note_text
from healthd.core.integrations import table_of
from healthd.integrations.dra.devices import plugin_resource
from healthd.integrations.dra.rules import Applied, DeviceTaintRules
from healthd.integrations.dra.settings import DeviceTaintSettings


class DeviceActuator:
    """A `healthd.aggregator.drain.plan.Actuator` in front of that of the nodes."""

    def __init__(self, nodes: Actuator, marked: MarkedNodes, rules: DeviceTaintRules) -> None:
        """`nodes` and `marked` are the same, as what it does and as what it shares."""
        self.name = nodes.name
        self._nodes = nodes
        self._marked = marked
        self._rules = rules

    async def marked(self) -> Mapping[str, str]:
        """As in `Actuator`: the nodes with a taint, and those with a rule for a device."""
        nodes = await self._nodes.marked()
        return {**await self._rules.marked(), **nodes}

    async def remove(self, removal: Removal) -> Outcome:
        """OUT with our taint on the node or its devices. LEFT also where the driver has tainted the devices."""
        if not removal.devices:
            outcome = await self._nodes.remove(removal)
            await self._rules.remove(removal.node)
            return outcome
        devices = await self._taint_devices(removal)
        if devices is not None and devices.out and not removal.whole:
            await self._nodes.restore(removal.node)
            return Outcome(done=Done.OUT if devices.ours else Done.LEFT, note=devices.note)
        outcome = await self._nodes.remove(removal)
        return outcome if devices is None else replace(outcome, note=f"{outcome.note}; {devices.note}")

    async def _taint_devices(self, removal: Removal) -> Applied | None:
        """The devices of a node, by rules; None for a node that is not there."""
        found = await self._marked.find(removal.node, removal.names)
        if found is None:
            return None
        name, node = found
        if (resource := plugin_resource(node)) is not None:
            await self._rules.remove(removal.node)
            return Applied(out=False, note=f"no rule for its device: a device plugin allocates them ({resource})")
        return await self._rules.apply(removal.node, name, removal.devices, note_text(removal.reason))

    async def restore(self, node: str) -> Outcome:
        """Our marks on the node go, and our rules for its devices; nothing else is touched."""
        gone = await self._rules.remove(node)
        outcome = await self._nodes.restore(node)
        if not gone:
            return outcome
        notes = (*gone, outcome.note) if outcome.done is Done.BACK else gone
        return Outcome(done=Done.BACK, note="; ".join(notes))


def device_actuator(nodes: Actuator, *, undo: bool) -> DeviceActuator | None:
    """A `healthd.aggregator.drain.targets.MakeDeviceActuator`, for the actuator of a Kubernetes."""
    if not isinstance(nodes, MarkedNodes):
        return None
    effect = table_of(nodes.device_settings, "device", DeviceTaintSettings).taints
    if effect == "off" and not undo:
        return None
    rules = DeviceTaintRules(
        nodes.server, key=nodes.key, owner=nodes.owner, effect="NoSchedule" if effect == "off" else effect
    )
    return DeviceActuator(nodes, nodes, rules)
