"""
A gate for one job with no standing service: what runs beside each node's command.

The hook (`hook`) starts the keeper (`sidecar`) as its child and waits for its word. The keeper runs this node's checks
on order (the node daemon without its HTTP port), on the main node starts an aggregator that lives for this gate
(`main_node`), asks the gate, and ends in two steps: once the decision is there every included node acknowledges, and
only when all have is any told to go. The hook then becomes the job's command. Nodes are named `rank-R`, because a hook
knows only itself and the number of its peers; people are shown their hosts, which the ranks tell in the roll call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from healthd.core.model import Decision, GateRequest

Plain = str | bool | int | float | list[str] | list[int] | dict[str, float]
"""What a setting of the gate's aggregator can be."""

NOT_ADMITTED, IMPOSSIBLE, USAGE = 75, 1, 2

_NODE_NAME = re.compile(r"\brank-(\d{1,9})\b")


@dataclass(frozen=True, kw_only=True)
class Task:
    """
    What the keeper is to do.

    `began` is when the hook was started, by CLOCK_MONOTONIC: `wait_seconds` counts from there. `port` is the
    aggregator's; `parent` the hook's process id. `acknowledge_seconds` is how long the included have to confirm the
    start, `gone_seconds` after how long without an answer the main node counts as gone, `linger_seconds` how long the
    main node waits for the others to hear the end. `main_counts`: the launcher takes the exit code of rank 0 for the
    job's, so that nothing may start without it. `policy` is what the gate's aggregator goes by, by keys of
    `[policy]`; what is not named is as always.
    """

    rank: int
    size: int
    main: str
    port: int
    local_rank: int
    local_size: int
    request: GateRequest
    wait_seconds: float
    began: float
    acknowledge_seconds: float
    gone_seconds: float
    linger_seconds: float
    token: str | None
    parent: int
    main_counts: bool = False
    policy: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def node(self) -> str:
        """The name of this node in the gate."""
        return node_name(self.rank)

    @property
    def url(self) -> str:
        """The aggregator's URL."""
        host = f"[{self.main}]" if ":" in self.main else self.main
        return f"http://{host}:{self.port}"

    @property
    def probes(self) -> bool:
        """Whether this process checks the node: one on each node does."""
        return self.local_rank == 0

    @property
    def leads(self) -> bool:
        """Whether this process runs the aggregator."""
        return self.rank == 0 and self.local_rank == 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """
    What the hook is to do: `run` the command as number `rank` of `size` with `main` and `hosts`, `park` until the
    keeper ends, or `exit` with `code`. `decision` is shown. `run` is told twice: first to print the decision and write
    the host file, and then, when all have confirmed that, to start.
    """

    kind: str
    code: int
    rank: int | None = None
    size: int | None = None
    main: str | None = None
    hosts: tuple[str, ...] = ()
    decision: Decision | None = None
    message: str = ""
    hosts_of: Mapping[str, str] = field(default_factory=dict)
    """The hosts of the ranks that the decision or the message names, as far as they are known; for people."""


def node_name(rank: int) -> str:
    """`rank-3`: how a preflight names its nodes."""
    return f"rank-{rank}"


def ranks_in(text: str) -> list[int]:
    """The ranks of the nodes that a text names, each once."""
    return list(dict.fromkeys(int(rank) for rank in _NODE_NAME.findall(text)))


def with_hosts(text: str, hosts_of: Mapping[str, str]) -> str:
    """The text with nodes named by their hosts: `gpu-17 (rank 3)` for `rank-3`, where the host is known."""
    return _NODE_NAME.sub(lambda m: f"{hosts_of[m[1]]} (rank {m[1]})" if m[1] in hosts_of else m[0], text)
