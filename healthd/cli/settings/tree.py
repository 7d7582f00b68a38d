"""
All settings in one tree, and what each part of healthd gets of it.

Apart from `options`, because `healthd check` needs its own part alone, and not what the aggregator's takes to load.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from healthd.aggregator.drain import ActuatorSettings
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.settings import AggregatorSettings
from healthd.cli.settings.checks import CheckSettings
from healthd.cli.settings.hooks import GateSettings, PreflightSettings
from healthd.core.http.addresses import aggregators_in
from healthd.kueue.settings import KueueSettings
from healthd.node.settings import KubernetesSettings, NodeSettings, NvrxSettings, NvsentinelSettings, Unprompted

if TYPE_CHECKING:
    from healthd.core.http.client import Endpoint


@dataclass(frozen=True, kw_only=True)
class Settings(CheckSettings):
    """The whole tree: one table of the file each."""

    aggregator: AggregatorSettings = field(default_factory=AggregatorSettings)
    """The aggregator."""

    policy: Policy = field(default_factory=Policy)
    """What gates go by."""

    gate: GateSettings = field(default_factory=GateSettings)
    """The gate's hook."""

    preflight: PreflightSettings = field(default_factory=PreflightSettings)
    """The gate with no standing service."""

    kueue: KueueSettings = field(default_factory=KueueSettings)
    """The controller of Kueue's AdmissionChecks."""

    actuator: ActuatorSettings = field(default_factory=ActuatorSettings)
    """How the aggregator gets bad nodes out of a scheduler's way; off by default."""

    def endpoint(self) -> Endpoint:
        """The aggregators that hooks and people ask, and how to speak to them. ConfigError."""
        from healthd.core.http.client import Endpoint

        urls = aggregators_in(self.gate.aggregator, where="--aggregator")
        return Endpoint(urls=urls, token=None, ca_file=self.gate.ca_file, token_file=self.gate.token_file)

    def executor(
        self,
        name: str,
        urls: tuple[str, ...],
        folder: Path,
        *,
        address: str,
        ask_seconds: float,
        token_file: Path | None,
    ) -> NodeSettings:
        """The node daemon as the executor of a preflight: it keeps nothing, and works on order alone."""
        from healthd.node.occupancy.own import inside_a_job

        sync = dataclasses.replace(
            self.node.sync,
            aggregators=urls,
            token_file=token_file,
            instance_identity=False,
            ca_file=None,
            wait_seconds=ask_seconds,
        )
        return dataclasses.replace(
            self.node,
            name=name,
            aliases=(socket.gethostname(),),
            state_dir=folder,
            run_dir=folder,
            listen="127.0.0.1:0",
            address=address,
            active=dataclasses.replace(self.node.active, unprompted=Unprompted.OFF),
            # Inside of a job the devices that can be seen are its own; what others have of the host does not matter.
            allocations=dataclasses.replace(
                self.node.allocations, read=self.node.allocations.read and not inside_a_job(os.environ)
            ),
            sync=sync,
            kubernetes=KubernetesSettings(),
            nvrx=NvrxSettings(),
            nvsentinel=NvsentinelSettings(),
        )
