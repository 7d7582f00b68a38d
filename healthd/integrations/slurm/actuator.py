"""
Drains nodes in Slurm by `scontrol`, run where the aggregator is, as SlurmUser or an operator of Slurm.

A drain places nothing new on a node and ends no job. Its reason begins with `OWNER-fleet: `, so that only our own is
undone; the drains of `healthd slurm health` (`healthd: ...`) are the node's own word and not ours. Warning: AWS
ParallelCluster terminates nodes that are drained; leave the mode at observe there unless you want that.

Verified against Slurm 22.05.8 (Debian 12). Unverified on hardware: ParallelCluster's reaction, as AWS documents it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from healthd.aggregator.drain.plan import ActuatorError, Done, Outcome, Removal
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.integrations.slurm.scontrol import Scontrol, SlurmError, SlurmNode, one_node, reason_text

T = TypeVar("T")

# Less than a gate's reject is held back for (`answer` of `[actuator]`): a controller that is away is reported in time.
ANSWER_SECONDS = 8.0

# Where Slurm has a node under another name than the fleet, the reason says the fleet's: the mark is all that is kept.
_AS = re.compile(r"as (\S+): ")


class SlurmActuator:
    """See the module. `scontrol` is how Slurm is asked."""

    name = "slurm"

    def __init__(self, scontrol: Scontrol, *, owner: str) -> None:
        self._scontrol = scontrol
        self._mark = f"{owner}-fleet: "

    async def marked(self) -> Mapping[str, str]:
        """As in `Actuator`."""
        return await _in_thread(self._marked, self._scontrol.afresh())

    async def remove(self, removal: Removal) -> Outcome:
        """As in `Actuator`. A node that somebody else has taken out, for whatever reason, is left as it is."""
        return await _in_thread(lambda scontrol: self._remove(scontrol, removal), self._scontrol.afresh())

    async def restore(self, node: str) -> Outcome:
        """As in `Actuator`."""
        return await _in_thread(lambda scontrol: self._restore(scontrol, node), self._scontrol.afresh())

    def _marked(self, scontrol: Scontrol) -> Mapping[str, str]:
        return {self._fleet_name(node): node.reason for node in scontrol.nodes() if node.bears(self._mark)}

    def _remove(self, scontrol: Scontrol, removal: Removal) -> Outcome:
        node = _find(scontrol, removal)
        if node is None:
            return Outcome(done=Done.LEFT, note=f"Slurm has no node {' or '.join(removal.names)}")
        if node.bears(self._mark):
            return Outcome(done=Done.OUT, note=f"{node.name} is drained: {node.reason}")
        if node.off:
            return Outcome(done=Done.LEFT, note=f"{node.name} is powered off by Slurm; no drain is needed")
        if node.out:
            note = f"{node.name} is out of service by others: {node.reason or 'no reason'}"
            return Outcome(done=Done.LEFT, note=note)
        whose = "" if node.name == removal.node else f"as {removal.node}: "
        scontrol.drain(node.name, reason_text(self._mark, whose + removal.reason))
        return Outcome(done=Done.OUT, note=f"{node.name} is drained; its running jobs continue")

    def _restore(self, scontrol: Scontrol, name: str) -> Outcome:
        node = self._drained_for(scontrol, name)
        if node is None:
            return Outcome(done=Done.LEFT, note=f"{name} has no drain by healthd")
        scontrol.undrain(node.name)
        return Outcome(done=Done.BACK, note=f"{node.name} is no longer drained")

    def _drained_for(self, scontrol: Scontrol, name: str) -> SlurmNode | None:
        """The node that bears our mark for a node of the fleet: looked at anew, right before it is undrained."""
        node = scontrol.node(name)
        if node is not None and node.bears(self._mark) and self._fleet_name(node) == name:
            return node
        return next((one for one in scontrol.nodes() if one.bears(self._mark) and self._fleet_name(one) == name), None)

    def _fleet_name(self, node: SlurmNode) -> str:
        match = _AS.match(node.reason, len(self._mark))
        return match[1] if match else node.name


def _find(scontrol: Scontrol, removal: Removal) -> SlurmNode | None:
    """The node under the first of its names that Slurm knows."""
    for name in removal.names:
        if one_node(name) and (node := scontrol.node(name)) is not None:
            return node
    return None


async def _in_thread(work: Callable[[Scontrol], T], scontrol: Scontrol) -> T:
    """
    What `work` gives; ActuatorError for what Slurm says. When nobody waits for that any more, the program that it is in
    ends, and no other starts.
    """
    try:
        return await asyncio.to_thread(work, scontrol)
    except SlurmError as error:
        raise ActuatorError(str(error)) from None
    except asyncio.CancelledError:
        scontrol.cancel()
        raise


def make(settings: ActuatorSettings) -> SlurmActuator:
    """As the configuration has it."""
    return SlurmActuator(Scontrol(timeout_seconds=ANSWER_SECONDS), owner=settings.owner)
