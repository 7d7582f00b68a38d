"""
Answers the node health hook of NVIDIA's resiliency extension (NVRx): gRPC on a Unix socket.

`ft_launcher --ft-node-health-check-endpoint PATH` asks before each rendezvous whether the node may take part. The
answer is rendered from the one snapshot; the request's arguments, which are those of a script, are not looked at. Not
knowing is a failure. What cannot be helped here: a launcher that finds no socket, or gets no answer within a minute,
takes the node for healthy.

Source: NVIDIA/nvidia-resiliency-ext, src/nvidia_resiliency_ext/shared_utils/proto/nvhcd.proto (the messages) and
shared_utils/health_check.py, class NodeHealthCheck (what a client makes of them: healthy is `success` and a member
`fail_count` of 0 in the JSON of `output`; `failed_checks` is logged). Verified with a gRPC client of these messages,
not with the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from checks.contract import Status
from checks.printable import printable_line
from healthd.core import wire
from healthd.core.errors import ConfigError
from healthd.core.http import server as web
from healthd.core.model import Health, NodeState, Reason
from healthd.integrations.nvrx.settings import NvrxSettings
from healthd.node.http.health import Demand, verdict
from healthd.node.protobuf import field
from healthd.node.services import DaemonParts
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

SERVICE, METHOD = "nvhcd.HealthCheckService", "RunHealthCheck"
MAX_FAILURES = 16
"""Of an answer: the worst. `fail_count` counts all."""
MAX_REQUEST_BYTES = 64 * 1024
MAX_CALLS = 16  # at a time; a node has one launcher of each job
# As `healthd check`: a fault is known, or nothing is.
EXIT_FAILED, EXIT_UNKNOWN = 1, 3


def failures(state: NodeState, demand: Demand | None) -> tuple[str, ...]:
    """
    Why the node must not take part, worst first; empty when it may.

    By the node's own rules, by which evidence of active checks does not expire while a job has the devices, and by what
    is demanded besides. That a job has the node is no reason: it is the job that asks.
    """
    found: dict[str, None] = {}
    if state.quarantine is not None:
        found[f"quarantine: {state.quarantine.owner}: {state.quarantine.reason}"] = None
    for asked in (None, demand) if demand is not None else (None,):
        health, reasons = verdict(state, asked)
        if health in (Health.UNKNOWN, Health.UNHEALTHY):
            found.update(dict.fromkeys(_told(reasons) or [f"health: the node is {health.value}"]))
    return tuple(found)


def _told(reasons: tuple[Reason, ...]) -> list[str]:
    return [
        printable_line(f"{reason.check or 'node'}: {reason.message}")
        for reason in reasons
        if reason.status in (Status.FAIL, Status.UNKNOWN)
    ]


def response(state: NodeState, demand: Demand | None) -> bytes:
    """The HealthCheckResponse."""
    found = failures(state, demand)
    known = state.quarantine is not None or Health.UNHEALTHY in {verdict(state, asked)[0] for asked in (None, demand)}
    output = {
        "fail_count": len(found),
        "failed_checks": found[:MAX_FAILURES],
        "node": state.node,
        "health": state.health.value,
        "injected_faults": state.faults,
    }
    exit_code = 0 if not found else EXIT_FAILED if known else EXIT_UNKNOWN
    parts = [field(1, not found), field(2, exit_code), field(3, wire.encode(output))]
    return b"".join([*parts, field(4, found[0])] if found else parts)


def service(parts: DaemonParts) -> AbstractAsyncContextManager[None]:
    """The hook of a daemon."""
    settings = parts.settings.of("nvrx", NvrxSettings)
    return health_hook(parts.store, settings, stop_seconds=parts.stop_seconds)


@contextlib.asynccontextmanager
async def health_hook(store: NodeStore, settings: NvrxSettings, *, stop_seconds: float) -> AsyncIterator[None]:
    """
    Serve the hook on its socket, which every user of the host may ask; nothing where no socket is set.

    ConfigError without grpcio, ListenError for a path that cannot be used.
    """
    if settings.socket is None:
        yield
        return
    try:
        import grpc
        import grpc.aio
    except ImportError:
        raise ConfigError(
            "node.nvrx.socket: needs grpcio; run 'pip install grpcio' in healthd's environment, or leave it out"
        ) from None
    demand = None if settings.tier is None else Demand(tier=settings.tier, max_age_seconds=settings.max_age_seconds)

    async def run_health_check(_request: bytes, _context: object) -> bytes:
        return response(store.snapshot(), demand)

    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", MAX_REQUEST_BYTES), ("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    # Without serializers the messages are bytes.
    handler = grpc.unary_unary_rpc_method_handler(run_health_check)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    with _free_path(settings.socket) as path:
        server.add_insecure_port(f"unix:{path}")
        path.chmod(0o666)  # launchers run as the users of jobs; the answer is no secret
        await server.start()
        log.info("the node health hook of NVRx answers on %s", path)
        try:
            yield
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await server.stop(stop_seconds)


@contextlib.contextmanager
def _free_path(path: Path) -> Iterator[Path]:
    """The path, absolute, on which nobody listens; removed at the end."""
    absolute = Path(os.path.abspath(path))
    web.bind_unix(absolute).close()
    absolute.unlink()
    try:
        yield absolute
    finally:
        absolute.unlink(missing_ok=True)
