"""Settings of the hooks of a job without a standing aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checks.words import Tier
from healthd.cli.settings.gate import check_attempt
from healthd.core.model import Mode


@dataclass(frozen=True, kw_only=True)
class PreflightSettings:
    """What `healthd preflight` asks. Every key is an option of that command."""

    nnodes: int | None = None
    """How many nodes; None: from the launcher, and 1 where nothing shows that there is one."""

    node_rank: int | None = None
    """Which of them this is; None: from the launcher."""

    main: str | None = None
    """Where rank 0 is; None: from the launcher."""

    port: int = 8099
    """The port of the aggregator on the main node, where `main` names none."""

    token_file: Path | None = None
    """A token that all nodes of the job share; None: everybody who reaches the port may speak."""

    job: str | None = None
    """The job's name; None: from the launcher."""

    attempt: int | None = None
    """Which attempt; None: from the launcher."""

    min_nodes: int | None = None
    """Minimum number of healthy nodes to start on; None: all."""

    tier: Tier = Tier.QUICK
    """Evidence asked."""

    max_age_seconds: float = 3600.0
    """How old it may be. The executors start with nothing, so this bounds how long one waits for another."""

    wait_seconds: float = 600.0
    """How long to wait for all nodes and their checks, from the start of the hook. That of rank 0 counts."""

    acknowledge_seconds: float = 30.0
    """How long admitted nodes may take to confirm the start. They do within milliseconds: half a minute means gone."""

    gone_seconds: float = 20.0
    """After how long without an answer the main node counts as gone, once it has answered."""

    linger_seconds: float = 15.0
    """How long the main node waits at the end for all others that have come to hear it."""

    mode: Mode = Mode.ENFORCE
    """enforce or observe."""

    collective: bool = True
    """Run collectives over the nodes together first, where there is more than one."""

    run: bool = False
    """Stay as the parent of the command, as `healthd run` does, and say after a bad end why the job died. The
    aggregator of rank 0 lives as long as rank 0's command and receives the notes of all nodes."""

    exit_style: Literal["command", "verdict"] = "command"
    """What a command that ended badly exits with, with `run`: its own code, or one by what a retry can do."""

    def __post_init__(self) -> None:
        check_attempt(self.attempt)
        if self.exit_style == "verdict" and not self.run:
            raise ValueError("exit_style: verdict needs run, which finds out why a job died")
