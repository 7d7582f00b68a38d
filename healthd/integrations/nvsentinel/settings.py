"""Settings of health events for NVSentinel: `[node.nvsentinel]`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path


class NvsentinelStrategy(str, enum.Enum):
    """What NVSentinel may do with a health event."""

    STORE_ONLY = "store_only"
    EXECUTE_REMEDIATION = "execute_remediation"


@dataclass(frozen=True, kw_only=True)
class NvsentinelSettings:
    """Health events for NVSentinel, of each check that fails and that passes again."""

    socket: Path | None = None
    """Unix socket of its platform connector, `/var/run/nvsentinel/nvsentinel.sock` of the host as a rule. None: nothing
    is sent. Needs grpcio."""

    strategy: NvsentinelStrategy = NvsentinelStrategy.STORE_ONLY
    """store_only: events are stored and shown. execute_remediation: NVSentinel may cordon, drain and repair the node by
    its rules, but for injected faults and while a job has the node. Take it when the stored events have been right."""
