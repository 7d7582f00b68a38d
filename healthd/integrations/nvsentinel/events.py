"""
Sends what checks found wrong to NVSentinel, as health events: gRPC on the Unix socket of its platform connector.

An event is of one check, and is sent when the check fails, when it fails otherwise, and when it passes again; all that
is known at the start is sent once, so that a fault of an earlier daemon that is gone ends there too. Not knowing is
neither: it sends nothing. Only `STORE_ONLY` unless the settings say otherwise, because NVSentinel cordons, drains and
repairs nodes. Also then a fault is for storing alone that was injected, or while a job has the node.

Source: NVIDIA/NVSentinel, data-models/protobufs/health_event.proto (0 of `processingStrategy` is taken for
EXECUTE_REMEDIATION), docs/designs on the processing strategy. Verified with a gRPC server of these messages alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.contract import Action, Blame, Status
from checks.printable import printable
from healthd.clients.kubernetes import name_in_cluster
from healthd.core.backoff import Backoff
from healthd.core.errors import ConfigError, HealthdError
from healthd.core.model import NodeState, Reason
from healthd.core.tasks import LogOnce, wait_for
from healthd.integrations.nvsentinel.settings import NvsentinelSettings, NvsentinelStrategy
from healthd.node.clock import Clock
from healthd.node.protobuf import field
from healthd.node.services import DaemonParts
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

METHOD = "/datamodels.PlatformConnector/HealthEventOccurredV1"
VERSION, AGENT = 1, "healthd"
STRATEGIES = {NvsentinelStrategy.EXECUTE_REMEDIATION: 1, NvsentinelStrategy.STORE_ONLY: 2}
# Of the enum RecommendedAction; whatever healthd has no better word for is for a person.
NO_ACTION, CONTACT_SUPPORT = 0, 5
ACTIONS = {Action.RESET_DEVICE: 2, Action.REBOOT: 15, Action.REPLACE: 25}
MAX_CHARACTERS = 512
MAX_CODES, MAX_TARGETS = 8, 16
SEND_SECONDS = 5.0  # as NVSentinel's own monitors
LEAST_SECONDS = 5.0
"""Between two calls: a check that flaps must not send at every turn of it."""
LOOK_SECONDS = 30.0
RETRY = Backoff(first_seconds=2.0, most_seconds=300.0)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What an event says of a check, but for its message and time."""

    faults: tuple[tuple[str, str | None], ...]
    """Reason and target of each; empty: the check passes."""
    strategy: NvsentinelStrategy


@dataclass(frozen=True, kw_only=True)
class _Event:
    check: str
    told: Told
    reasons: tuple[Reason, ...]


def due(state: NodeState, told: Mapping[str, Told], strategy: NvsentinelStrategy) -> tuple[_Event, ...]:
    """The events that are to be sent; `told` is what was sent last of each check."""
    free = not state.allocated and not state.leases
    results = {result.check: result for result in state.results}
    found = []
    for name in sorted(results):
        reasons = tuple(one for one in state.reasons if one.check == name and one.status is not Status.WARN)
        faults = tuple(one for one in reasons if one.status is Status.FAIL and one.blame is Blame.NODE)
        if faults:
            real = free and not any(one.injected for one in faults)
            now = Told(
                faults=tuple((one.code, one.target) for one in faults),
                strategy=strategy if real else NvsentinelStrategy.STORE_ONLY,
            )
        elif reasons or results[name].status not in (Status.PASS, Status.WARN):
            continue  # it is not verified
        else:
            before = told.get(name)
            # The end of a fault is for whom its beginning was.
            now = Told(faults=(), strategy=strategy if before is None else before.strategy)
        if told.get(name) != now:
            found.append(_Event(check=name, told=now, reasons=faults))
    return tuple(found)


def request(state: NodeState, events: tuple[_Event, ...], *, node: str, wall_seconds: float) -> bytes:
    """The HealthEvents message."""
    return field(1, VERSION) + b"".join(field(2, _message(state, one, node, wall_seconds)) for one in events)


def _message(state: NodeState, event: _Event, node: str, wall_seconds: float) -> bytes:
    """One HealthEvent."""
    accelerators = {spec.name for spec in state.checks if spec.accelerators}
    cuda = state.inventory is not None and state.inventory.accelerator == "cuda" and event.check in accelerators
    healthy = not event.reasons
    actions = [ACTIONS[one.action] for one in event.reasons if one.action in ACTIONS]
    fatal = bool(actions) and not any(one.injected for one in event.reasons)
    text = "; ".join(one.message for one in event.reasons) if event.reasons else f"{event.check} passes"
    targets = dict.fromkeys(one.target for one in event.reasons if one.target is not None)
    parts = [
        field(1, VERSION),
        field(2, AGENT),
        field(3, "GPU" if cuda else "Node"),
        field(4, event.check),
        field(5, fatal),
        field(6, healthy),
        field(7, printable(text)[:MAX_CHARACTERS]),
        field(8, NO_ACTION if healthy else max(actions, default=CONTACT_SUPPORT)),
        *(field(9, code) for code in list(dict.fromkeys(one.code for one in event.reasons))[:MAX_CODES]),
        *(field(10, field(1, "DEVICE") + field(2, target)) for target in list(targets)[:MAX_TARGETS]),
        *([field(11, field(1, "injected") + field(2, "true"))] if any(o.injected for o in event.reasons) else []),
        field(12, field(1, int(wall_seconds))),
        field(13, node),
        field(16, STRATEGIES[event.told.strategy]),
    ]
    return b"".join(parts)


class SendError(HealthdError):
    """The platform connector did not take the events."""


class EventSender:
    """Sends what has changed, the newest alone; `run` is a supervised task. ConfigError without grpcio."""

    def __init__(
        self,
        store: NodeStore,
        settings: NvsentinelSettings,
        *,
        node: str,
        clock: Clock,
        least_seconds: float = LEAST_SECONDS,
    ) -> None:
        """`node` is the node's name in Kubernetes."""
        try:
            import grpc.aio
        except ImportError:
            raise ConfigError(
                "node.nvsentinel.socket: needs grpcio; run 'pip install grpcio' in healthd's environment, or leave it "
                "out"
            ) from None
        self._grpc: Any = grpc
        self._store = store
        self._settings = settings
        self._node = node
        self._clock = clock
        self._least_seconds = least_seconds
        self._told: dict[str, Told] = {}
        self._changed = asyncio.Event()
        self._trouble = LogOnce(log)
        store.listen(self._changed.set)

    async def run(self) -> None:
        """Send for ever, whatever the platform connector does."""
        failures = 0
        while True:
            try:
                await self.send()
            except SendError as error:
                self._trouble.say(str(error))
                failures += 1
                await asyncio.sleep(RETRY.after(failures))
                continue
            failures = 0
            self._trouble.clear()
            await asyncio.sleep(self._least_seconds)
            await wait_for(self._changed, LOOK_SECONDS)

    async def send(self) -> int:
        """Send what is due, in one call; how many events. SendError in one line."""
        state = self._store.snapshot()
        events = due(state, self._told, self._settings.strategy)
        if not events:
            return 0
        content = request(state, events, node=self._node, wall_seconds=self._clock.wall())
        socket = self._settings.socket
        options = [("grpc.enable_http_proxy", 0)]
        async with self._grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
            try:
                await channel.unary_unary(METHOD)(content, timeout=SEND_SECONDS)
            except self._grpc.aio.AioRpcError as error:
                raise SendError(
                    f"NVSentinel's platform connector does not accept health events at {socket} "
                    f"({error.code().name}); does it run on this node, and is its socket mounted?"
                ) from None
        self._told.update({one.check: one.told for one in events})
        return len(events)


@contextlib.asynccontextmanager
async def service(parts: DaemonParts) -> AsyncIterator[None]:
    """The sender of a daemon; none where no socket is configured."""
    settings = parts.settings.of("nvsentinel", NvsentinelSettings)
    if settings.socket is not None:
        node = name_in_cluster(parts.settings.integrations.values(), parts.settings.name)
        sender = EventSender(parts.store, settings, node=node, clock=parts.clock)
        parts.tasks.supervise("health events for NVSentinel", sender.run)
    yield
