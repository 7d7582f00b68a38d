"""The sync protocol between a node and its aggregator, and how errors are reported over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from healthd.core.model.node import Allocation, Lease, NodeState, Quarantine
from healthd.core.model.orders import Order, OrderReport
from healthd.core.model.reasons import Reason

PROTOCOL = 1


@dataclass(frozen=True, kw_only=True)
class StepBlock:
    """
    The own time of a node's `ranks` in the steps of a running job of `size` ranks, for the comparison of its nodes.

    `own_seconds` is of each step from `first_step` on; None: not known. See docs/stragglers.md.
    """

    job: str
    size: int
    ranks: tuple[int, ...]
    first_step: int
    own_seconds: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Use:
    """
    Who uses a node: all that differs between its state and the one with the digest `since`, which was sent before.

    A gate makes each of its nodes confirm a lease, and later its end: a whole state each time is a hundred times this.
    """

    since: str
    allocated: tuple[Allocation, ...]
    leases: tuple[Lease, ...]
    running: str | None


@dataclass(frozen=True, kw_only=True)
class SyncRequest:
    """
    What a node says to the aggregator.

    `incarnation` is new at every start of the daemon; `seq` counts requests within it. `last_answer` is the id of the
    newest answer received and `since_answer_seconds` how long ago that was, by CLOCK_BOOTTIME: what lies between is
    what the aggregator adds to all ages. `state` is None when nothing but ages changed; then `digest` names the state
    that was sent last, and `ages` maps checks to ages. Where nothing else changed than who uses the node, `use` says so
    instead of a state. `issuer` is the database that last made a statement to the node:
    its quarantine is that one's word. None: none ever did. `steps` are those of running jobs since the last answer,
    and `step_jobs` all jobs that report their steps on the node now: another one is over there. None: it does not say.
    """

    protocol: int
    incarnation: str
    seq: int
    last_answer: str | None
    since_answer_seconds: float | None
    state: NodeState | None
    digest: str
    ages: Mapping[str, float]
    orders: Mapping[str, OrderReport]
    issuer: str | None
    steps: tuple[StepBlock, ...] = ()
    step_jobs: tuple[str, ...] | None = None
    use: Use | None = None


@dataclass(frozen=True, kw_only=True)
class SyncAnswer:
    """
    What the aggregator answers.

    `seq` counts answers to this node: an older one than the newest read is dropped. `orders` lists all open orders, or
    is None when the aggregator makes no statement (it does not know the node again yet): then nothing is cancelled.
    `acknowledged` lists final order reports that need not be repeated. `hold_seconds` is for how long the next request
    should ask to be held; None: as the node likes. `quarantine` is the aggregator's word, and
    `accused` the accusation by a validation that stands against the node.
    """

    answer: str
    seq: int
    issuer: str
    orders: tuple[Order, ...] | None
    acknowledged: tuple[str, ...]
    send_all: bool
    retry_after_seconds: float
    quarantine: Quarantine | None = None
    accused: Reason | None = None
    hold_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An error over HTTP: application/problem+json (RFC 9457)."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    extra: Mapping[str, Any] = field(default_factory=dict)
