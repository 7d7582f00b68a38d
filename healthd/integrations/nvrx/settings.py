"""Settings of the node health hook: `[node.nvrx]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checks.contract import Tier


@dataclass(frozen=True, kw_only=True)
class NvrxSettings:
    """The node health hook of NVIDIA's resiliency extension, which `ft_launcher` asks before each rendezvous."""

    socket: Path | None = None
    """Unix socket of the hook, for `ft_launcher --ft-node-health-check-endpoint`; every user of the host may call
    it. None: there is no hook, and a launcher that is configured to call it treats the node as healthy. Needs
    grpcio."""

    tier: Tier | None = None
    """Evidence that is required in addition to the node's own rules: of this tier, not older than `max_age`. None:
    only those rules, by which evidence of active checks does not expire while a job has the devices. With a tier, a
    job that has run for longer than `max_age` would never come back from a restart."""

    max_age_seconds: float = 86400.0
    """Maximum age of that evidence. A day: that is the interval of the checks that run least often."""

    def __post_init__(self) -> None:
        if not self.max_age_seconds > 0:
            raise ValueError(f"max_age: must be above 0 s, not {self.max_age_seconds:g} s")
