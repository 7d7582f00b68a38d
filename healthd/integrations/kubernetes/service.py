"""What runs in the node daemon: the writer of the condition, and the watch over maintenance."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from healthd.integrations.kubernetes.condition_writer import ConditionWriter
from healthd.integrations.kubernetes.maintenance import MaintenanceWatch
from healthd.integrations.kubernetes.server import server_of_pod
from healthd.integrations.kubernetes.settings import KubernetesSettings
from healthd.node.services import DaemonParts
from healthd.node.settings import DAEMON

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def service(parts: DaemonParts) -> AsyncIterator[None]:
    """A `healthd.node.services.NodeService`: nothing outside of a pod, and no watch in a hook."""
    settings, store = parts.settings, parts.store
    wanted = settings.of("kubernetes", KubernetesSettings)
    server = server_of_pod(wanted)
    if server is not None and wanted.maintenance and settings.executor == DAEMON:
        watch = MaintenanceWatch(store, server, node=wanted.node or settings.name, signs=wanted.maintenance)
        parts.tasks.supervise("watch over maintenance", watch.run)
    if server is not None and wanted.on:
        if wanted.accelerated_hardware_ready:
            log.warning(
                "AcceleratedHardwareReady is being written: if node repair is on, a hardware fault replaces this "
                "instance"
            )
        writer = ConditionWriter(store, wanted, server, clock=parts.clock)
        parts.tasks.supervise("node condition", writer.run)
    yield
