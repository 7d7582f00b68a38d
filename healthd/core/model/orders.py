"""Orders: what an aggregator wants of a node, and how far the node is with it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checks.contract import Finding, Tier
from healthd.core.model.node import Lease

RANK_READY = "ready"
"""`RankReport.last` of a rank whose process is up and that has not given a sign of life in the check yet."""


class OrderKind(enum.StrEnum):
    """What a node can be asked to do."""

    RUN = "run"
    LEASE = "lease"
    COLLECTIVE = "collective"


class OrderStatus(enum.StrEnum):
    """
    How far a node is with an order. The last three are final.

    A lease is ACCEPTED once it is stored there and nobody else was seen to have the devices.
    """

    ACCEPTED = "accepted"
    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"


FINAL_STATUSES = frozenset({OrderStatus.DONE, OrderStatus.REFUSED, OrderStatus.CANCELLED})
"""Nothing changes any more; the node says it again until that is on disk."""


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """
    Run a tier now (only `checks` of it when given). Accepting it is a short claim on the node until it ends.

    `workload` is the job that asks: that the host's scheduler has given it the devices is no obstacle. None: none is.
    `past` is the gate of a job that has died: its lease on the node is no obstacle either.
    """

    tier: Tier
    checks: tuple[str, ...] = ()
    workload: str | None = None
    past: str | None = None


@dataclass(frozen=True, kw_only=True)
class NccomGroup:
    """
    That `nccom-test` runs over the nodes of a group, in place of ranks of torch.

    `mode` is how its processes get onto the nodes: ssh or slurm. `hosts` are the addresses of `nodes` (in Slurm their
    names), both in the order of ranks; the first runs nccom-test.
    """

    mode: str
    hosts: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CollectiveOrder:
    """
    Be the ranks from `first_rank` on, `ranks` of them, of a group of `size`, and run `checks` in it one by one.

    `group` is used once. The node's ranks stay for the next order of the same `validation`, and go when another one
    comes, when a job gets the node or when none comes for a while. Rank 0 is on the node that `main` is the address
    of, and waits on `port` there for the others for at most `join_seconds`; each check then has `timeout_seconds`.
    `whole_rank` is this node's first rank in the first whole group: injected faults name ranks by it. `seed` is common.
    `workload` is the job that asks, and `past` the gate of one that has died, as in a `RunOrder`. `nccom` None: torch
    carries it. `compile_seconds` is how much longer the checks may take together because ranks compile in the middle of
    them, here or on another node; with 0 none may.
    """

    validation: str
    group: str
    checks: tuple[str, ...]
    first_rank: int
    ranks: int
    size: int
    whole_rank: int
    main: str
    port: int
    seed: int
    join_seconds: float
    timeout_seconds: float
    workload: str | None = None
    nccom: NccomGroup | None = None
    compile_seconds: float = 0.0
    past: str | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """
    Something that a node is to do. `kind` is an OrderKind; a node refuses one that it does not know.

    `deadline_seconds` counts from when the node first reads it. An order stays listed as long as it stands: work that
    is no longer listed is cancelled. A lease goes on when it is no longer listed, because the aggregator's database may
    be an old copy that does not know it. One that is `withdrawn` is cancelled, a lease too, whoever gave it, and stays
    listed so that the node repeats how it ended until that is on disk.
    """

    id: str
    kind: str
    deadline_seconds: float
    withdrawn: bool = False
    run: RunOrder | None = None
    lease: Lease | None = None
    collective: CollectiveOrder | None = None


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """
    What one rank of a group has said of one check.

    `events` counts its signs of life in the check (every rank passes the same ones) and `last` is the newest, as in
    `all_reduce/1024 entered`; before the first it is RANK_READY, or empty while the process starts. `key` and `data`
    are its evidence, None before it ended well. `reason` (Crashed, Timeout, CheckError, MissingDevice ... as of
    `checks.contract.Missing`) and `message` say why there will be none. `cold`: it has graphs to compile first.
    """

    rank: int
    target: str
    check: str
    events: int
    last: str = ""
    key: str | None = None
    data: Mapping[str, Any] | None = None
    reason: str | None = None
    message: str = ""
    injected: bool = False
    cold: bool = False


@dataclass(frozen=True, kw_only=True)
class OrderReport:
    """
    How far a node is with an order.

    A lease is done when the node ended it because the workload is gone. `message` says why it was refused or ended.
    Results are in the node's state, but for those of a collective: `ranks` says for each rank and check how far it
    is, and what it found. Where nccom-test carries it, the main node says by check what it found in `findings`.
    """

    status: OrderStatus
    message: str = ""
    ranks: tuple[RankReport, ...] = ()
    findings: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
