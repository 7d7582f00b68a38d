"""What integrations run in the node daemon."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import Metric

from healthd.core.config import record_at
from healthd.core.errors import ConfigError
from healthd.core.model import StepBlock
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


class StepSource(Protocol):
    """What the jobs of this node tell of their steps, on the event loop alone."""

    @property
    def on(self) -> bool:
        """Whether `run` is to be started, as a supervised task."""

    @property
    def jobs(self) -> Collection[str]:
        """The jobs that report now."""

    def waiting(self) -> tuple[StepBlock, ...]:
        """What the aggregator has not been told."""

    def told(self, blocks: tuple[StepBlock, ...]) -> None:
        """The aggregator has been told these."""

    def metrics(self) -> Iterable[Metric]:
        """For `/metrics`."""

    async def run(self) -> None:
        """Take reports for ever."""


class MakeStepSource(Protocol):
    """Makes the source of steps of a daemon."""

    def __call__(self, settings: NodeSettings, clock: Clock) -> StepSource:
        """The source."""


class Credential(Protocol):
    """Writes who this machine is into a file of a directory, which its owner alone may read. ConfigError."""

    def __call__(self, run_dir: Path, environ: Mapping[str, str]) -> Path:
        """The file."""


def write_credential(run_dir: Path, environ: Mapping[str, str]) -> Path:
    """The credential that the platform of this machine gives it. ConfigError where there is none."""
    for one in INTEGRATIONS:
        if one.node_credential is not None:
            write: Credential = record_at(one.node_credential)
            return write(run_dir, environ)
    raise ConfigError("node.sync.instance_identity: no integration of this healthd has identity documents; remove it")


def step_source(settings: NodeSettings, clock: Clock) -> StepSource | None:
    """What tells of the steps of jobs; None where no integration does."""
    for one in INTEGRATIONS:
        if one.step_source is not None:
            make: MakeStepSource = record_at(one.step_source)
            return make(settings, clock)
    return None


def check_params(settings: NodeSettings) -> dict[str, Mapping[str, Any]]:
    """The parameters of checks that integrations give, by check."""
    found: dict[str, Mapping[str, Any]] = {}
    for one in INTEGRATIONS:
        if one.check_params is not None:
            found |= record_at(one.check_params)(settings)
    return found


@contextlib.asynccontextmanager
async def integrated(parts: DaemonParts) -> AsyncIterator[None]:
    """The services of all integrations."""
    async with contextlib.AsyncExitStack() as stack:
        for one in INTEGRATIONS:
            if one.node_service is not None:
                service: NodeService = record_at(one.node_service)
                await stack.enter_async_context(service(parts))
        yield
