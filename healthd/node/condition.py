"""
The node's health as a condition of its Kubernetes node: pure. `condition_writer` writes it.

A condition of our own only informs. `AcceleratedHardwareReady` is another matter: where EKS node auto repair or
Karpenter's NodeRepair is on, False has the instance replaced or rebooted after ten minutes, without draining. So it is
written only where it is configured, and says False only of a fault of the accelerators that is real (not injected), on
a node that no job has and that is not in maintenance: what another instance of the same template would have as well
(too few EFA interfaces), or all nodes at once (a shared file system that hangs), must not have it replaced. Where the
EKS node monitoring agent runs as well, it writes the same condition and the two overwrite each other.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from checks.contract import Action, Blame, Status
from checks.printable import printable
from healthd.clients.kubernetes import STRATEGIC, ApiServer, KubernetesError, node_path, records
from healthd.core.backoff import Backoff
from healthd.core.errors import HealthdError
from healthd.core.model import CheckSpec, Health, NodeState, Reason
from healthd.core.tasks import LogOnce, wait_for
from healthd.node.clock import Clock
from healthd.node.settings import KubernetesSettings
from healthd.node.state.store import NodeStore

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


# Kubernetes Events of a node: what `kubectl describe node` and `kubectl get events` say befell it. Pure.


NEEDS_EVENTS = "create on events"
PATH = "/api/v1/namespaces/default/events"
"""Of objects without a namespace, such as nodes."""


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


# Writes the node's health to its Kubernetes node: its conditions (see `condition`), and an Event where one is new.


log = logging.getLogger(__name__)

NEEDS = "patch on nodes/status"

EVENTS_AT_ONCE, EVENT_SECONDS = 25, 300.0  # as the kubelet's own
# A node that flaps must not write at every turn of it.
LEAST_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 2.0
# Errors that waiting does not heal: a missing permission, a node of another name. Try again now and then.
HOPELESS_SECONDS = 60.0
HOPELESS = (401, 403, 404)


class ConditionWriter:
    """Writes when the status or reason of a condition changes, and each five minutes; `run` is a supervised task."""

    def __init__(
        self,
        store: NodeStore,
        settings: KubernetesSettings,
        server: ApiServer,
        *,
        clock: Clock,
        seed: int | None = None,
        least_seconds: float = LEAST_SECONDS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._store = store
        self._settings = settings
        self._server = server
        self._clock = clock
        self._chance = random.Random(seed)  # noqa: S311
        self._least_seconds = least_seconds
        self._first_pause_seconds = first_pause_seconds
        self._node = settings.node or store.settings.name
        self._changed_event = asyncio.Event()
        self._written: Mapping[str, tuple[str, str]] | None = None
        self._since: dict[str, tuple[str, str]] = {}  # type -> (status, lastTransitionTime)
        self._trouble, self._trouble_of_events = LogOnce(log), LogOnce(log)
        self._events, self._events_at = float(EVENTS_AT_ONCE), clock.boot()
        store.listen(self._changed_event.set)

    async def run(self) -> None:
        """Write the condition for ever, whatever the API server does."""
        failures = 0
        while True:
            try:
                await self.write()
            except KubernetesError as error:
                self._trouble.say(self._complaint("node condition", error))
                failures += 1
                await asyncio.sleep(self.pause(error, failures))
                continue
            failures = 0
            self._trouble.clear()
            await self._until_due()

    async def _until_due(self) -> None:
        """Wait until a change must be written at once, or the heartbeat is due."""
        # Spread, so that a fleet that started together does not write in one second.
        due = self._clock.boot() + self._settings.heartbeat_seconds * self._chance.uniform(0.9, 1.0)
        await asyncio.sleep(self._least_seconds)
        while (left := due - self._clock.boot()) > 0:
            if self._changed():
                return
            await wait_for(self._changed_event, left)

    def _changed(self) -> bool:
        return self._written != _gist(conditions(self._store.snapshot(), self._settings))

    async def write(self) -> tuple[Condition, ...]:
        """Write the present conditions once. Raises KubernetesError."""
        if self._written is None:
            self._since = await self._read()
        wanted = conditions(self._store.snapshot(), self._settings)
        now = _iso(self._clock.wall())
        since = {one.type: self._transition(one, now) for one in wanted}
        items = [
            {
                "type": one.type,
                "status": one.status,
                "reason": one.reason,
                "message": one.message,
                "lastHeartbeatTime": now,
                "lastTransitionTime": since[one.type],
            }
            for one in wanted
        ]
        # Strategic: conditions are merged by type. A plain merge patch would wipe out the kubelet's.
        path = node_path(self._node) + "/status"
        await self._server.patch(path, {"status": {"conditions": items}}, kind=STRATEGIC, needs=NEEDS)
        if self._written is None:
            log.info("condition %s is being written to node %s", ", ".join(one.type for one in wanted), self._node)
        if self._settings.events:
            await self._tell(wanted, now)
        self._since.update({one.type: (one.status, since[one.type]) for one in wanted})
        self._written = _gist(wanted)
        return wanted

    async def _tell(self, wanted: tuple[Condition, ...], now: str) -> None:
        """An Event for each condition that is another than it was; one that cannot be made is no fault of the node."""
        for one in wanted:
            before = self._since.get(one.type, ("", ""))[0] if self._written is None else self._written.get(one.type)
            if before == (one.status if self._written is None else (one.status, one.reason)):
                continue
            if not self._may_tell():
                return
            text = f"{one.type} is {one.status}: {one.message}"
            made = event(self._node, status=one.status, reason=one.reason, message=text, now=now)
            try:
                await self._server.create(PATH, made, needs=NEEDS_EVENTS)
            except KubernetesError as error:
                self._trouble_of_events.say(self._complaint("node event", error))
                return

    def _may_tell(self) -> bool:
        """Whether another Event may be made: EVENTS_AT_ONCE, then one each EVENT_SECONDS, as the kubelet does it."""
        now = self._clock.boot()
        self._events = min(float(EVENTS_AT_ONCE), self._events + (now - self._events_at) / EVENT_SECONDS)
        self._events_at = now
        if self._events < 1.0:
            return False
        self._events -= 1.0
        return True

    def _transition(self, wanted: Condition, now: str) -> str:
        """When the status became what it is: who repairs nodes counts from there, so a refresh must not move it."""
        status, since = self._since.get(wanted.type, ("", now))
        return since if status == wanted.status else now

    async def _read(self) -> dict[str, tuple[str, str]]:
        """The conditions that were written before this daemon started."""
        node = await self._server.get(node_path(self._node), needs="get on nodes")
        found = {}
        for one in records(node, "status", "conditions"):
            name, status, since = one.get("type"), one.get("status"), one.get("lastTransitionTime")
            if isinstance(name, str) and isinstance(status, str) and isinstance(since, str) and since:
                found[name] = (status, since)
        return found

    def pause(self, error: KubernetesError, failures: int) -> float:
        """How long to wait after so many failures in a row."""
        grown = Backoff(self._first_pause_seconds, self._settings.heartbeat_seconds).after(failures)
        if error.status in HOPELESS:
            grown = HOPELESS_SECONDS
            self._written = None  # the node may be another one by then
        spread = grown * self._chance.uniform(0.75, 1.25)
        asked = min(error.retry_after_seconds or 0.0, self._settings.heartbeat_seconds)
        return max(spread, asked)

    def _complaint(self, what: str, error: HealthdError) -> str:
        text = f"{what}: {error}"
        if isinstance(error, KubernetesError) and error.status == 404:
            text += f"; no node is named {self._node}: set node.kubernetes.node"
        return text


def _gist(wanted: tuple[Condition, ...]) -> Mapping[str, tuple[str, str]]:
    """What must be written at once when it changes; numbers in messages wait for the heartbeat."""
    return {one.type: (one.status, one.reason) for one in wanted}


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
