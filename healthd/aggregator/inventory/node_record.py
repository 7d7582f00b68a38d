"""
What the aggregator remembers of one node, and what a sync does to it: ages, order of arrival, who speaks. No I/O.

Ages cross the wire, not clocks. An age now is the age at sending, plus the time since arrival, plus what the way here
may have taken: the time between our last answer's departure and this arrival that the node does not account for. A
node that cannot name an answer of ours has an unbounded way behind it, so it is not confirmed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import itertools
from collections.abc import Mapping, Sequence

from checks.contract import Finding
from healthd.aggregator.inventory.compact_state import CompactState
from healthd.aggregator.model.nodes import Duplicate, FleetNode, moved_text
from healthd.core.errors import BadInputError
from healthd.core.evidence import aged, judge_health, reason
from healthd.core.model import (
    FINAL_STATUSES,
    LARGEST_ATTEMPT,
    Health,
    Lease,
    Order,
    OrderReport,
    Quarantine,
    Reason,
    SyncRequest,
)

# Answers remembered of a node: it may have a held and an urgent request under way, and some answers get lost.
REMEMBERED_ANSWERS = 8
# Former incarnations remembered: one that speaks again after so many restarts passes for a new one for one sync.
REMEMBERED_INCARNATIONS = 8
# Reports that one sync may carry; an aggregator never has nearly as many orders open on one node.
MAX_REPORTS = 1000
# Leases that a node may hold: a daemon takes one at a time, and one that is ending may be beside it.
MAX_LEASES = 16
# Of their texts, as the columns of the database have them; a job's as in a request.
LEASE_LENGTHS = {"id": 400, "gate": 64, "job": 256, "issuer": 64}
MAX_PROOF_LENGTH = 128


_versions = itertools.count(1)
"""Of evidence, whoever's: no two have the same, whatever daemon or executor has a name, now or before."""


class Arrival(enum.Enum):
    """
    What a sync came to. TAKEN: it brought something. OLD: it was overtaken by a later one and has no effect.
    FORMER: an earlier incarnation speaks; nothing of it is taken. DUPLICATE: that incarnation is proven alive.
    """

    TAKEN = "taken"
    OLD = "old"
    FORMER = "former"
    DUPLICATE = "duplicate"


@dataclasses.dataclass(slots=True)
class NodeRecord:
    """
    One node. Mutable, on the event loop alone; `now` is always the registry's clock.

    `synced`: a daemon or a hook has spoken under this name, in this process or as the store knows. `listed`: the roster
    lists it as a member. `orders` None means that no statement is made. `revision` counts what the node is to be told;
    an answer remembers the revision that it told, so that a lost answer is told again. `refused_key_hash` is the last
    key that was not the node's. `kept_duplicate` is what is on disk of `duplicate`. `moved_to` is the name under which
    a daemon with the same key started since this name was last heard.
    """

    node: str
    key_hash: str | None = None
    refused_key_hash: str | None = None
    moved_to: str | None = None
    pool: str | None = None
    synced: bool = False
    listed: bool = False
    # what the node says
    incarnation: str | None = None
    seq: int = -1
    digest: str | None = None
    state: CompactState | None = None
    version: int = 0
    heard_at: float | None = None
    confirmed: bool = False
    duplicate: str | None = None
    kept_duplicate: Duplicate | None = None
    reports: Mapping[str, OrderReport] = dataclasses.field(default_factory=dict)
    issuer: str | None = None
    former: dict[str, str | None] = dataclasses.field(default_factory=dict)
    # what other nodes show of it, by check
    shown_by_peers: Mapping[str, tuple[Finding, ...]] = dataclasses.field(default_factory=dict)
    # what we say
    orders: tuple[Order, ...] | None = None
    quarantine: Quarantine | None = None
    acknowledged: frozenset[str] = frozenset()
    revision: int = 0
    answers: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
    held: asyncio.Future[None] | None = None
    # a hook that runs the node's checks: what it says, who it is, and who is to be it now
    executor: NodeRecord | None = None
    member: str | None = None
    expected: str | None = None
    all_orders: tuple[Order, ...] | None = None

    @property
    def executing(self) -> bool:
        """Whether the hook that is to run the checks of this node is there."""
        return self.expected is not None and self.executor is not None and self.executor.member == self.expected

    @property
    def fleet_member(self) -> bool:
        """Whether the node is a member of the fleet: it has synced, or somebody keeps it out before it has."""
        return self.synced or self.quarantine is not None

    @property
    def shown(self) -> NodeRecord:
        """Whose word people see: the daemon's, or that of a hook where there never was a daemon."""
        return self.executor if self.executor is not None and self.incarnation is None else self

    def take(self, request: SyncRequest, now: float) -> Arrival:
        """Take in a sync whose key was checked. BadInputError when it makes no sense; then nothing was changed."""
        _check(self.node, request)
        arrival = self._order_of_arrival(request)
        if arrival is not Arrival.TAKEN:
            return arrival
        self.seq = request.seq
        sent = self.answers.get(request.last_answer or "")
        since = request.since_answer_seconds
        known = sent is not None and since is not None
        unaccounted = max(0.0, now - sent[0] - since) if sent is not None and since is not None else 0.0
        based_at = now - unaccounted
        self.heard_at = based_at if self.heard_at is None else max(self.heard_at, based_at)
        if request.state is not None:
            self.version = next(_versions)
            self.state, self.digest = CompactState(request.state, based_at), request.digest
            self.state.amend(self.shown_by_peers)
            self.confirmed = known
        elif request.digest == self.digest and self.state is not None and (known or not self.confirmed):
            # Ages with an unbounded way behind them say less than older ages whose way was bounded.
            self.state.refresh(request.ages, based_at)
            self.confirmed = known
        # What an order came to is in the state (results; that a lease is gone): before that state is here, the order
        # has not ended. The node says it again with it.
        whole = request.digest == self.digest and self.state is not None
        self.reports = {i: r for i, r in request.orders.items() if whole or r.status not in FINAL_STATUSES}
        self.issuer = request.issuer
        if self.acknowledged:
            self.acknowledged &= request.orders.keys()
        return Arrival.TAKEN

    def amend(self, findings: Mapping[str, tuple[Finding, ...]]) -> bool:
        """What other nodes show of this one from now on; whether its evidence is another by that."""
        self.shown_by_peers = findings
        if self.state is None or not self.state.amend(findings):
            return False
        self.version = next(_versions)
        return True

    def _order_of_arrival(self, request: SyncRequest) -> Arrival:
        if request.incarnation == self.incarnation:
            return Arrival.OLD if request.seq <= self.seq else Arrival.TAKEN
        if request.incarnation in self.former:
            given = self.former[request.incarnation]
            # A request of before the restart may come late; one that has read what we answered to that cannot.
            if given is not None and request.last_answer == given:
                self.duplicate = "two daemons that hold the same key sync under this name in turn"
                return Arrival.DUPLICATE
            return Arrival.FORMER
        if self.incarnation is not None:
            self.former[self.incarnation] = None
            if len(self.former) > REMEMBERED_INCARNATIONS:
                del self.former[next(iter(self.former))]
        self.incarnation = request.incarnation
        self.answers.clear()
        self.digest, self.confirmed = None, False
        return Arrival.TAKEN

    def view(self, now: float) -> FleetNode:
        """The node as the gate sees it."""
        return FleetNode(
            node=self.node,
            state=None if self.state is None else self.state.open(),
            version=self.version,
            oldest_seconds=None if self.state is None else self.state.oldest_seconds,
            judged={} if self.state is None else self.state.judged,
            machine=None if self.state is None else self.state.machine,
            failing=None if self.state is None else self.state.failing,
            event=None if self.state is None else self.state.event(now),
            behind_seconds=0.0 if self.state is None else max(0.0, now - self.state.at),
            heard_seconds=None if self.heard_at is None else max(0.0, now - self.heard_at),
            confirmed=self.confirmed,
            duplicate=self.duplicate is not None,
            quarantine=self.quarantine,
            orders={i: r for i, r in self.reports.items() if i not in self.acknowledged},
            issuer=self.issuer,
            moved_to=self.moved_to,
        )

    def health(self, now: float, silent_seconds: float) -> Health:
        """The node's own word, as long as it was heard lately, both ways, and its evidence has not expired since."""
        if self.state is None or self.heard_at is None or now - self.heard_at > silent_seconds or self.duplicate:
            return Health.UNKNOWN
        if self.state.health is Health.UNHEALTHY:
            return Health.UNHEALTHY
        if not self.confirmed or now > self.state.stale_at:
            return Health.UNKNOWN
        return self.state.health

    def reasons(self, now: float, silent_seconds: float) -> tuple[Reason, ...]:
        """Why `health` is what it is: what the aggregator adds comes first."""
        own: list[Reason] = []
        if self.duplicate:
            own.append(reason("DuplicateNode", f"{self.duplicate}; an admin must decide", node=self.node))
        silent = self.heard_at is None or now - self.heard_at > silent_seconds
        if silent and self.moved_to is not None:
            own.append(reason("Silent", moved_text(self.node, self.moved_to), node=self.node))
        elif self.heard_at is None:
            own.append(reason("Silent", "not heard of since the aggregator started", node=self.node))
        elif silent:
            text = f"last heard {now - self.heard_at:.0f} s ago, may be silent for {silent_seconds:.0f} s"
            own.append(reason("Silent", text, node=self.node))
        elif self.state is None:
            own.append(reason("NoData", "the node has not sent its state yet", node=self.node))
        elif not self.confirmed:
            own.append(
                reason("Recovering", "heard in one direction only: its ages are not bounded yet", node=self.node)
            )
        if self.state is None:
            return tuple(own)
        state = self.state.open()
        if now > self.state.stale_at:
            return (*own, *judge_health(aged(state, now - self.state.at))[1])
        return (*own, *state.reasons)

    def remember_answer(self, answer: str, now: float) -> None:
        """An answer leaves now; it tells the present revision."""
        self.answers[answer] = (now, self.revision)
        if len(self.answers) > REMEMBERED_ANSWERS:
            del self.answers[next(iter(self.answers))]

    def told(self, last_answer: str | None) -> bool:
        """Whether the node has read all that it is to be told."""
        sent = self.answers.get(last_answer or "")
        return sent is not None and sent[1] == self.revision

    def wake(self) -> None:
        """Answer the held request now."""
        if self.held is not None and not self.held.done():
            self.held.set_result(None)
        self.held = None

    def changed(self) -> None:
        """There is something new to tell the node."""
        self.revision += 1
        self.wake()


def _check(node: str, request: SyncRequest) -> None:
    """Numbers and names that types cannot bound; msgspec has refused what is no finite number."""
    if request.state is not None and request.state.node != node:
        raise BadInputError(f"the state is that of {request.state.node[:80]!r}, but the path says {node!r}")
    since = request.since_answer_seconds
    if since is not None and since < 0:
        raise BadInputError(f"since_answer_seconds is {since}, must not be negative")
    if request.seq < 0 or not request.incarnation or len(request.incarnation) > 128 or len(request.digest) > 128:
        raise BadInputError("seq must not be negative; incarnation and digest have at most 128 characters")
    if len(request.orders) > MAX_REPORTS:
        raise BadInputError(f"{len(request.orders)} order reports in one sync; at most {MAX_REPORTS}")
    for check, age in request.ages.items():
        if age < 0:
            raise BadInputError(f"the age of {check[:80]!r} is {age} s, must not be negative")
    if request.state is not None:
        for result in request.state.results:
            if result.age_seconds < 0:
                raise BadInputError(f"the age of {result.check[:80]!r} is {result.age_seconds} s, must not be negative")
        _check_leases(request.state.leases)


def _check_leases(leases: Sequence[Lease]) -> None:
    """What a node claims to hold is kept, so it has the bounds of what is kept."""
    if len(leases) > MAX_LEASES:
        raise BadInputError(f"{len(leases)} leases on one node; at most {MAX_LEASES}")
    for lease in leases:
        names = {"id": lease.id, "gate": lease.gate, "job": lease.job, "issuer": lease.issuer}
        for name, text in names.items():
            if not text or len(text) > LEASE_LENGTHS[name]:
                raise BadInputError(f"lease {lease.id[:80]!r}: {name} must have 1 to {LEASE_LENGTHS[name]} characters")
        if not 0 <= lease.attempt <= LARGEST_ATTEMPT:
            raise BadInputError(
                f"lease {lease.id[:80]!r}: attempt must be from 0 to {LARGEST_ATTEMPT}, not {lease.attempt}"
            )
        if len(lease.proof) > MAX_PROOF_LENGTH:
            raise BadInputError(f"lease {lease.id[:80]!r}: proof must have at most {MAX_PROOF_LENGTH} characters")
        if lease.age_seconds < 0:
            raise BadInputError(f"lease {lease.id[:80]!r}: its age is {lease.age_seconds} s, must not be negative")
