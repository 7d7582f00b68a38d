"""Writes the node's health to its Kubernetes node: its conditions, and an Event where one is new."""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
from collections.abc import Mapping

from healthd.clients.kubernetes import STRATEGIC, ApiServer, KubernetesError, node_path, records
from healthd.core.backoff import Backoff
from healthd.core.errors import HealthdError
from healthd.core.tasks import LogOnce, wait_for
from healthd.integrations.kubernetes.condition import Condition, conditions, event
from healthd.integrations.kubernetes.settings import KubernetesSettings
from healthd.node.clock import Clock
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

NEEDS, NEEDS_EVENTS = "patch on nodes/status", "create on events"
EVENTS_PATH = "/api/v1/namespaces/default/events"
"""Of objects without a namespace, such as nodes."""

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
                await self._server.create(EVENTS_PATH, made, needs=NEEDS_EVENTS)
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
