"""
The node's health as a condition of its Kubernetes node, and as an Event where that changes. Pure.

A condition of our own only informs. `AcceleratedHardwareReady` is another matter: where EKS node auto repair or
Karpenter's NodeRepair is on, False has the instance replaced or rebooted after ten minutes, without draining. So it is
written only where it is configured, and says False only of a fault of the accelerators that is real (not injected), on
a node that no job has and that is not in maintenance: what another instance of the same template would have as well
(too few EFA interfaces), or all nodes at once (a shared file system that hangs), must not have it replaced. Where the
EKS node monitoring agent runs as well, it writes the same condition and the two overwrite each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from checks.contract import Action, Blame, Status
from checks.printable import printable
from healthd.core.model import CheckSpec, Health, NodeState, Reason
from healthd.integrations.kubernetes.settings import KubernetesSettings

ACCELERATED_HARDWARE_READY = "AcceleratedHardwareReady"
MESSAGE_CHARACTERS = 512

_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
# After these something of the machine has to be reset, restarted or replaced.
_HARDWARE = (Action.RESET_DEVICE, Action.REBOOT, Action.REPLACE)
# What a check that looks at accelerators alone may say that is a fault of theirs. `Stuck` is none: probes cannot be
# killed either while the file system with their libraries hangs.
_OF_A_DEVICE = frozenset(
    {
        "WrongResult",
        "SilentCorruption",
        "MemoryCorruption",
        "EccErrors",
        "HardwareErrors",
        "DeviceLost",
        "RecoveryNeeded",
        "StuckCores",
        "StuckMemory",
        "ParityLost",
    }
)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One condition as it should be: `status` is True, False or Unknown, and True is good."""

    type: str
    status: str
    reason: str
    message: str


def conditions(state: NodeState, settings: KubernetesSettings) -> tuple[Condition, ...]:
    """What the node's object is to say of this state; empty where nothing is to be written."""
    found = []
    if settings.condition:
        found.append(_own(state, settings.condition))
    if settings.accelerated_hardware_ready:
        found.append(_accelerated(state))
    return tuple(found)


def _own(state: NodeState, name: str) -> Condition:
    """Fit for jobs: healthy, or with warnings only, and not quarantined. That a job has it now is no fault of it."""
    worst = state.reasons[0] if state.reasons else None
    if state.health is Health.UNHEALTHY:
        return _condition(name, "False", worst, "Unhealthy", "unhealthy")
    if state.quarantine is not None:
        kept = state.quarantine
        return Condition(type=name, status="False", reason="Quarantined", message=_line(f"{kept.owner}: {kept.reason}"))
    if state.health is Health.UNKNOWN:
        return _condition(name, "Unknown", worst, "Unknown", "the node's health is unknown")
    if state.health is Health.DEGRADED:
        return _condition(name, "True", worst, "Degraded", "warnings only")
    return Condition(type=name, status="True", reason="Healthy", message="all enabled checks pass")


def _accelerated(state: NodeState) -> Condition:
    """See the module. Whatever is not a proven, real, free hardware fault is not False: an instance hangs on it."""
    name = ACCELERATED_HARDWARE_READY
    checks = {spec.name: spec for spec in state.checks}
    faults = [reason for reason in state.reasons if _is_of_accelerators(reason, checks.get(reason.check or ""))]
    real = [reason for reason in faults if not reason.injected]
    if real and state.maintenance is not None:
        text = _line(f"the node is in maintenance: {state.maintenance}")
        return Condition(type=name, status="Unknown", reason="InMaintenance", message=text)
    if real and (state.allocated or state.leases):
        why = _condition(name, "Unknown", real[0], "Unhealthy", "")
        text = _line(f"reported as not ready once no job uses the node: {why.message}")
        return Condition(type=name, status="Unknown", reason=why.reason, message=text)
    if real:
        return _condition(name, "False", real[0], "Unhealthy", "a fault of the accelerators")
    if faults:
        return _condition(name, "Unknown", faults[0], "InjectedFault", "an injected fault")
    if state.health in (Health.HEALTHY, Health.DEGRADED):
        return Condition(type=name, status="True", reason="Healthy", message="no fault of the accelerators was found")
    worst = state.reasons[0] if state.reasons else None
    return _condition(name, "Unknown", worst, "Unknown", "the accelerators' health is unknown")


def _is_of_accelerators(reason: Reason, check: CheckSpec | None) -> bool:
    """Whether it is proven that an accelerator of this node is at fault, and that a reset or another machine helps."""
    if reason.status is not Status.FAIL or reason.blame is not Blame.NODE or reason.action not in _HARDWARE:
        return False
    if check is None:
        return False
    said = f"{reason.code}: {reason.message.removeprefix(f'{reason.check} {reason.target}: ')}"
    return (check.accelerators and reason.code in _OF_A_DEVICE) or said.startswith(check.accelerator_faults)


def _condition(name: str, status: str, reason: Reason | None, code: str, text: str) -> Condition:
    if reason is None:
        return Condition(type=name, status=status, reason=code, message=text)
    where = f"{reason.check} on {reason.target}: " if reason.check and reason.target else ""
    mark = "injected: " if reason.injected else ""
    # A check of another party may use any code; the API server takes words alone.
    known = reason.code if _REASON.fullmatch(reason.code) and len(reason.code) <= 256 else code
    return Condition(type=name, status=status, reason=known, message=_line(f"{mark}{where}{reason.message}"))


def _line(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= MESSAGE_CHARACTERS else line[: MESSAGE_CHARACTERS - 1] + "…"


def event(node: str, *, status: str, reason: str, message: str, now: str) -> dict[str, object]:
    """The Event of a condition whose status or reason is another now; `now` as Kubernetes writes times."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{node}.", "namespace": "default"},
        # The kubelet gives its events the node's name as uid, and `kubectl describe node` looks for that.
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "type": "Normal" if status == "True" else "Warning",
        "reason": reason,
        "message": message,
        "source": {"component": "healthd", "host": node},
        "reportingComponent": "healthd",
        "reportingInstance": node,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
