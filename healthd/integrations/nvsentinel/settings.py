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
    """Unix socket of its platform connector, usually `/var/run/nvsentinel/nvsentinel.sock` of the host. None:
    nothing is sent. Needs grpcio."""

    strategy: NvsentinelStrategy = NvsentinelStrategy.STORE_ONLY
    """store_only: events are stored and shown. execute_remediation: NVSentinel may cordon, drain and repair the node
    by its rules, except for injected faults and while a job has the node. Use it once the stored events have proved
    right."""
