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
    """Number of nodes; None: from the launcher, or 1 if no launcher is found."""

    node_rank: int | None = None
    """Rank of this node; None: from the launcher."""

    main: str | None = None
    """Address of rank 0; None: from the launcher."""

    port: int = 8099
    """Port of the aggregator on the main node, if `main` names none."""

    token_file: Path | None = None
    """File with a token that all nodes of the job share; None: anyone who reaches the port may join."""

    job: str | None = None
    """The job's name; None: from the launcher."""

    attempt: int | None = None
    """Number of this attempt; None: from the launcher."""

    min_nodes: int | None = None
    """Minimum number of healthy nodes to start on; None: all."""

    tier: Tier = Tier.QUICK
    """Tier of the required evidence."""

    max_age_seconds: float = 3600.0
    """Maximum age of the evidence. Executors start without any, so this bounds how long one waits for another."""

    wait_seconds: float = 600.0
    """How long to wait for all nodes and their checks, from the start of the hook. The value of rank 0 applies."""

    acknowledge_seconds: float = 30.0
    """Time for admitted nodes to confirm the start. It takes milliseconds, so after half a minute a node is gone."""

    gone_seconds: float = 20.0
    """The main node counts as gone after this long without an answer, once it has answered."""

    linger_seconds: float = 15.0
    """How long the main node waits at the end until all nodes that joined have received the answer."""

    mode: Mode = Mode.ENFORCE
    """enforce or observe."""

    collective: bool = True
    """Run collectives over the nodes together first, if there is more than one."""

    run: bool = False
    """Stay as the parent of the command, as `healthd run` does, and explain a bad end. The aggregator of rank 0
    lives as long as rank 0's command and receives the notes of all nodes."""

    exit_style: Literal["command", "verdict"] = "command"
    """With `run`, the exit code after a command that failed: its own code, or one that says whether a retry can
    help."""

    def __post_init__(self) -> None:
        check_attempt(self.attempt)
        if self.exit_style == "verdict" and not self.run:
            raise ValueError("exit_style: verdict needs run, which finds out why a job died")
