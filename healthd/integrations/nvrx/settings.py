"""Settings of the node health hook: `[node.nvrx]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checks.contract import Tier


@dataclass(frozen=True, kw_only=True)
class NvrxSettings:
    """The node health hook of NVIDIA's resiliency extension, which `ft_launcher` asks before each rendezvous."""

    socket: Path | None = None
    """Unix socket on which it is served, for `ft_launcher --ft-node-health-check-endpoint`; every user of the host may
    ask. None: none is served, and a launcher that is told of one takes the node for healthy. Needs grpcio."""

    tier: Tier | None = None
    """Evidence that is demanded besides what the node's own rules want: of this tier, not older than `max_age`. None:
    those rules alone, by which evidence of active checks does not expire while a job has the devices; a job that has
    run for longer than `max_age` would never come back from a restart."""

    max_age_seconds: float = 86400.0
    """How old that evidence may be. A day: the checks that run least often have an interval of as long."""

    def __post_init__(self) -> None:
        if not self.max_age_seconds > 0:
            raise ValueError(f"max_age: must be above 0 s, not {self.max_age_seconds:g} s")
