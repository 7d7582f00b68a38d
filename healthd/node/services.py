"""What integrations run in the node daemon."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from healthd.core.config import record_at
from healthd.core.tasks import Tasks
from healthd.integrations import INTEGRATIONS
from healthd.node.clock import Clock
from healthd.node.settings import NodeSettings
from healthd.node.state.store import NodeStore


@dataclass(frozen=True, kw_only=True)
class DaemonParts:
    """What a service of a daemon may use. `stop_seconds` is the time it has to end."""

    settings: NodeSettings
    store: NodeStore
    clock: Clock
    tasks: Tasks
    stop_seconds: float


class NodeService(Protocol):
    """Runs from entry to exit, beside the daemon; does nothing where its settings turn it off. ConfigError."""

    def __call__(self, parts: DaemonParts) -> AbstractAsyncContextManager[None]:
        """The service as a context."""


@contextlib.asynccontextmanager
async def integrated(parts: DaemonParts) -> AsyncIterator[None]:
    """The services of all integrations."""
    async with contextlib.AsyncExitStack() as stack:
        for one in INTEGRATIONS:
            if one.node_service is not None:
                service: NodeService = record_at(one.node_service)
                await stack.enter_async_context(service(parts))
        yield
