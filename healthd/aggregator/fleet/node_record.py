"""
What the aggregator remembers of one node, and how a sync changes it: ages, order of arrival, identity. No I/O.

Ages cross the wire, not clocks. The present age is the age at sending, plus the time since arrival, plus the longest
time that the message can have taken: the time between the departure of our last answer and this arrival that the node
does not account for. If a node cannot name an answer of ours, that time is unbounded, so the node is not confirmed.

`NodeRecord` keeps the last state as a `CompactState`: the evidence as bytes, the rest as objects. A hook may run the
active checks in the job's own container while its gate is open: `joined` then merges its state with the daemon's, and
`shared` divides the orders between the two.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checks.contract import Finding, Status, Tier
from healthd.aggregator.fleet.packed_records import EVIDENCE, Since, kept_state, pack, with_age
from healthd.aggregator.fleet.records import Duplicate, FleetNode, ScheduledEvent, Verdicts, moved_text
from healthd.core import wire
from healthd.core.errors import BadInputError
from healthd.core.evidence import aged, health_of, judge_health, judge_tier, reason, reason_of
from healthd.core.model import (
    FINAL_STATUSES,
    LARGEST_ATTEMPT,
    Health,
    Lease,
    NodeState,
    Order,
    OrderKind,
    OrderReport,
    OrderStatus,
    Quarantine,
    Reason,
    SyncRequest,
    Use,
)
from healthd.core.text import plain

EVENTS_CHECK = "scheduled_events"
"""The check that says what AWS has scheduled for the machine."""
MOST_IDENTITY = 128
"""Characters of a serial number or instance id: real ones have some forty, and the database has room for so many."""
AMENDED = ("job_steps",)
"""Checks whose results may be amended beside those that have digests."""
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
VERSIONS = 1 << 32
"""Versions of an executor's evidence are counted above those of its daemon's."""

_HEALTH_RANK: Mapping[Health, int] = {health: rank for rank, health in enumerate(Health)}
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
    an answer remembers the revision that it told, so that a lost answer is told again; `read` is the newest one that
    the node has shown to have read. `refused_key_hash` is the last
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
    proven: bool = False  # it has read an answer of ours
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
    read: int = -1
    answers: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
    held: Callable[[], None] | None = None  # answers the request that waits
    # by whose word this daemon is the node: the pod, what no other pod has, and which pods were the node before
    vouched: str | None = None
    vouched_id: str | None = None
    launched: str | None = None
    former_pods: tuple[str, ...] = ()
    replaced_at: float = float("-inf")
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
        """The record shown in the UI and the API: the daemon's, or a hook's where there never was a daemon."""
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
        self.proven = self.proven or known
        if sent is not None:
            self.read = max(self.read, sent[1])
        unaccounted = max(0.0, now - sent[0] - since) if sent is not None and since is not None else 0.0
        based_at = now - unaccounted
        self.heard_at = based_at if self.heard_at is None else max(self.heard_at, based_at)
        if request.state is not None:
            self.version = next(_versions)
            self.state, self.digest = CompactState(request.state, based_at), request.digest
            self.state.amend(self.shown_by_peers)
            self.confirmed = known
        elif request.use is not None and request.use.since == self.digest and self.state is not None:
            self.version = next(_versions)
            self.state.used(request.use, request.ages, based_at)
            self.digest, self.confirmed = request.digest, known
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

    def is_as_before(self, request: SyncRequest, now: float, silent_seconds: float) -> bool:
        """
        Whether a sync, which is about to be taken in, brings nothing new: the state is the same, it has become neither
        stale nor silent, and there is nothing about an order.
        """
        return (
            request.state is None
            and request.use is None
            and not (request.orders or self.reports or request.steps)
            and request.step_jobs is None
            and self.state is not None
            and request.digest == self.digest
            and request.incarnation == self.incarnation
            and self.confirmed
            and self.duplicate is None
            and self.member is None
            and self.heard_at is not None
            and now - self.heard_at <= silent_seconds
            and now <= self.state.stale_at
        )

    def amend(self, findings: Mapping[str, tuple[Finding, ...]]) -> bool:
        """What other nodes show of this one from now on; whether its evidence is another by that."""
        self.shown_by_peers = findings
        if self.state is None or not self.state.amend(findings):
            return False
        self.version = next(_versions)
        return True

    def _order_of_arrival(self, request: SyncRequest) -> Arrival:
        proven = False
        if request.incarnation == self.incarnation:
            return Arrival.OLD if request.seq <= self.seq else Arrival.TAKEN
        if request.incarnation in self.former:
            given = self.former[request.incarnation]
            # A request of before the restart may come late; one that has read what we answered to that cannot.
            if given is None or request.last_answer != given:
                return Arrival.FORMER
            if self.proven:
                self.duplicate = "two daemons with the same key sync alternately under this name"
                return Arrival.DUPLICATE
            # The other one has read nothing of ours: it was its request that came late, to an aggregator that had heard
            # neither before.
            del self.former[request.incarnation]
            proven = True
        if self.incarnation is not None:
            self.former[self.incarnation] = None
            if len(self.former) > REMEMBERED_INCARNATIONS:
                del self.former[next(iter(self.former))]
        self.incarnation, self.proven = request.incarnation, proven
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
            own.append(reason("Silent", "no report since the aggregator started", node=self.node))
        elif silent:
            text = f"last report {now - self.heard_at:.0f} s ago; at most {silent_seconds:.0f} s are allowed"
            own.append(reason("Silent", text, node=self.node))
        elif self.state is None:
            own.append(reason("NoData", "the node has not sent its state yet", node=self.node))
        elif not self.confirmed:
            own.append(
                reason("Recovering", "no answer confirmed yet, so the age of its evidence is unknown", node=self.node)
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
        held, self.held = self.held, None
        if held is not None:
            held()

    def changed(self) -> None:
        """There is something new to tell the node."""
        self.revision += 1
        self.wake()


def _check(node: str, request: SyncRequest) -> None:
    """Numbers and names that types cannot bound; msgspec has refused what is no finite number."""
    if request.state is not None and request.state.node != node:
        raise BadInputError(f"the state is from {request.state.node[:80]!r}, but the path names {node!r}")
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
    if request.use is not None:
        _check_use(request, request.use)


def _check_use(request: SyncRequest, use: Use) -> None:
    if request.state is not None:
        raise BadInputError("a sync has a state or says who uses the node, not both")
    if len(use.since) > 128:
        raise BadInputError("use.since has at most 128 characters")
    _check_leases(use.leases)


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


# --- the last state of a node -----------------------------------------------------------------------------------------


class CompactState:
    """
    A state whose ages are as of `at`, by the clock of the registry.

    `judged` is the memory of verdicts on this evidence, see `FleetNode`.
    """

    __slots__ = (
        "_added",
        "_ages",
        "_amendable",
        "_counted",
        "_event",
        "_event_age",
        "_expiring",
        "_oldest_seconds",
        "_own",
        "_packed",
        "_received_at",
        "_rest",
        "_stale_at",
        "_use",
        "at",
        "drill",
        "failing",
        "health",
        "judged",
        "machine",
    )

    def __init__(self, state: NodeState, at: float) -> None:
        # Digests are kept by who compares them.
        bare = tuple(dataclasses.replace(r, digests=()) if r.digests else r for r in state.results)
        self._packed = pack(dataclasses.replace(state, results=bare))
        self._rest = {name: value for name, value in vars(state).items() if name not in EVIDENCE}
        self._ages: Mapping[str, float] = {}
        self._received_at = self.at = at
        self.health = state.health
        self.machine = machine_of(state)
        self.failing = failing(state)
        self.drill = bool(state.faults)
        self._use: Use | None = None
        # Results that expire: check, age when sent, bound, and whether it expires while the node is in use.
        bounds = {spec.name: spec for spec in state.checks if spec.expires_seconds is not None}
        self._expiring = tuple(
            (sys.intern(r.check), r.age_seconds, spec.expires_seconds or 0.0, spec.tier is Tier.PASSIVE)
            for r in state.results
            if (spec := bounds.get(r.check)) is not None
        )
        self._counted = tuple((sys.intern(r.check), r.age_seconds) for r in state.results)
        # Judged now, while the state is decoded, for the tier that gates ask for most.
        self.judged: Verdicts = {(Tier.QUICK, ()): judge_tier(state, Tier.QUICK, math.inf)}
        self._oldest_seconds: float | None = None
        self._stale_at: float | None = None
        checks = {spec.name for spec in state.checks}
        self._amendable = {  # whether a fault was injected, by check
            sys.intern(r.check): r.injected
            for r in state.results
            if r.check in checks and (r.digests or r.check in AMENDED)
        }
        self._event = scheduled_event(state)
        self._event_age = next((r.age_seconds for r in state.results if r.check == EVENTS_CHECK), 0.0)
        self._own = (self.health, self.failing)
        self._added: Mapping[str, tuple[Finding, ...]] = {}

    def amend(self, findings: Mapping[str, tuple[Finding, ...]]) -> bool:
        """
        Add findings to results, by check, in the place of those that were added before; whether anything is another.

        A check without a result here is left out: then there is nothing that could be taken for a pass.
        """
        added = {check: some for check, some in findings.items() if check in self._amendable and some}
        if added == self._added:
            return False
        self._added = added
        self.judged = {}  # another one: who was given the former judges by the former evidence
        health, failing = self._own
        self.health = max(health, health_of(self._reasons()), key=_HEALTH_RANK.__getitem__)
        self.failing = failing or any(one.status is Status.FAIL for some in added.values() for one in some)
        return True

    def event(self, now: float) -> ScheduledEvent | None:
        """What AWS has scheduled for the machine first, as of `now`; None where there is nothing."""
        found = self._event
        if found is None or found.seconds is None:
            return found
        # The seconds are of the state that came, so they count from its age, whatever the check has found since.
        return dataclasses.replace(found, seconds=found.seconds - self._event_age - (now - self._received_at))

    def _reasons(self) -> tuple[Reason, ...]:
        """What was added, as reasons."""
        node = self._rest["node"]
        return tuple(
            reason_of(node, check, one, one.status, injected=self._amendable[check])
            for check, some in self._added.items()
            for one in some
        )

    @property
    def oldest_seconds(self) -> float:
        """
        The age of the oldest result as of `at`: infinite where one has no age, 0 without results. Computed once a sync.
        """
        if self._oldest_seconds is not None:
            return self._oldest_seconds
        ages, moved = self._ages, self.at - self._received_at
        oldest = 0.0
        for check, age in self._counted:
            now = ages.get(check, age + moved)
            if not now <= oldest:  # NaN is older than everything
                oldest = now if now == now else math.inf
        self._oldest_seconds = oldest
        return oldest

    def refresh(self, ages: Mapping[str, float], at: float) -> None:
        """Set newer ages of the same state; results that are not among them grow older."""
        self._ages, self.at = ages, at
        self._oldest_seconds = self._stale_at = None

    def used(self, use: Use, ages: Mapping[str, float], at: float) -> None:
        """Another one uses the node from now on; else it is the same state with newer ages."""
        self.refresh(ages, at)
        # Their ages are as of now; those of a state are as of when it came.
        leases = tuple(with_age(lease, lease.age_seconds - (at - self._received_at)) for lease in use.leases)
        self._use = dataclasses.replace(use, leases=leases)
        self._rest = {**self._rest, "allocated": use.allocated, "leases": leases, "running": use.running}

    def open(self) -> NodeState:
        """The state, with ages as of `at`; a later `refresh` does not change it."""
        since = Since(
            health=self.health,
            moved_seconds=self.at - self._received_at,
            ages=self._ages,
            added=self._added,
            reasons=self._reasons(),
            use=self._use,
        )
        return kept_state(self._packed, self._rest, since)

    @property
    def stale_at(self) -> float:
        """When the first result expires if nothing more is heard; infinite where none does. Computed once a sync."""
        if self._stale_at is None:
            ages, at, taken_at, in_use = self._ages, self.at, self._received_at, bool(self._rest["allocated"])
            self._stale_at = min(
                (
                    bound + (at - ages[check] if check in ages else taken_at - age)
                    for check, age, bound, passive in self._expiring
                    if passive or not in_use
                ),
                default=math.inf,
            )
        return self._stale_at


# --- which machine a node is, and what its state says of it -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a node is made of: `devices` are targets and their serial numbers."""

    instance_id: str | None
    boot_id: str | None
    devices: tuple[tuple[str, str | None], ...]


def machine_of(state: NodeState) -> str:
    """The machine that a node is as a short text, to compare and to keep: a `Machine` as JSON."""
    devices = state.inventory.devices if state.inventory is not None else ()
    found = Machine(
        instance_id=name_of(state.instance_id),
        boot_id=name_of(state.boot_id),
        devices=tuple((plain(device.target, MOST_IDENTITY), name_of(device.serial)) for device in devices),
    )
    return wire.encode(found).decode()


def machine_identity(state: NodeState) -> str:
    """The machine by its instance id, where it has one; names get reused."""
    instance = name_of(state.instance_id)
    return f"instance:{instance}" if instance else f"node:{state.node}"


def identities_in(machine: str, node: str) -> tuple[str, ...]:
    """All that a latch on this machine may be on (see `Facts.identities`)."""
    found = wire.decode(machine.encode(), Machine, what="machine")
    serials = (f"serial:{serial}" for _, serial in found.devices if serial)
    instance = (f"instance:{found.instance_id}",) if found.instance_id else ()
    return (f"node:{node}", *instance, *serials)


def differences(before: str, after: str) -> Iterator[tuple[str, str]]:
    """What became of a machine, as kinds and messages of its history; what is not known has not changed."""
    old = wire.decode(before.encode(), Machine, what="machine")
    new = wire.decode(after.encode(), Machine, what="machine")
    if None not in (old.instance_id, new.instance_id) and old.instance_id != new.instance_id:
        yield "other machine", f"instance {old.instance_id} became {new.instance_id}"
    if None not in (old.boot_id, new.boot_id) and old.boot_id != new.boot_id:
        yield "booted", f"boot {new.boot_id}"
    serials = dict(old.devices)
    for target, serial in new.devices:
        known = serials.get(target)
        if known is not None and serial is not None and known != serial:
            yield "device replaced", f"{target}: {known} became {serial}"
    if old.devices and new.devices and serials.keys() != dict(new.devices).keys():
        yield "devices changed", f"{len(old.devices)} devices became {len(new.devices)}"


def name_of(text: str | None) -> str | None:
    """A serial number, instance or boot id as it may be kept; None for what cannot be one."""
    return text if text and len(text) <= MOST_IDENTITY and text.isprintable() else None


def failing(state: NodeState) -> bool:
    """Whether any result has failed: a node without that gives the rules nothing to begin with."""
    return any(result.status is Status.FAIL for result in state.results)


def scheduled_event(state: NodeState) -> ScheduledEvent | None:
    """
    What AWS has scheduled for the machine first, as of when the check ran; None where there is nothing.

    Only a pass, or a machine that is not on EC2, says that there is nothing.
    """
    result = next((result for result in state.results if result.check == EVENTS_CHECK), None)
    if result is None or not result.findings:
        return ScheduledEvent(seconds=None, message=f"{EVENTS_CHECK} has not run")
    events = [
        ScheduledEvent(seconds=measured.value, message=finding.message)
        for finding in result.findings
        if finding.reason == "ScheduledEvent"
        for measured in finding.measurements
        if measured.name == "scheduled_event_seconds" and measured.value is not None
    ]
    if events:
        return min(events, key=lambda event: event.seconds or 0.0)
    (finding, *_) = result.findings
    not_on_ec2 = finding.reason == "NotApplicable" and not finding.measurements
    return None if result.status is Status.PASS or not_on_ec2 else ScheduledEvent(seconds=None, message=finding.message)


# --- an executor beside the daemon ------------------------------------------------------------------------------------


def joined(daemon: FleetNode, executor: FleetNode | None) -> FleetNode:
    """
    The node as its gate sees it. `executor` None: it is expected but not connected, so the node is unconfirmed.

    The ages of both are as they were received, so they are brought to the same moment here.
    """
    if executor is None or executor.state is None:
        return dataclasses.replace(daemon, confirmed=False)
    if daemon.state is None:
        return dataclasses.replace(
            executor, quarantine=daemon.quarantine, duplicate=daemon.duplicate, version=_version(daemon, executor)
        )
    return dataclasses.replace(
        executor,
        state=_state(daemon, executor, daemon.state, executor.state),
        version=_version(daemon, executor),
        behind_seconds=0.0,
        oldest_seconds=None,
        judged={},
        confirmed=daemon.confirmed and executor.confirmed,
        heard_seconds=_later(daemon.heard_seconds, executor.heard_seconds),
        duplicate=daemon.duplicate,
        quarantine=daemon.quarantine,
        # Of a lease that both have, the daemon's word counts: it is the one that keeps it.
        orders={**executor.orders, **daemon.orders},
        issuer=daemon.issuer,
        machine=daemon.machine,
        failing=daemon.failing,
        event=daemon.event,
    )


def shared(
    orders: Iterable[Order] | None,
    *,
    executing: bool,
    has_daemon: bool,
    own: Mapping[str, OrderReport],
    hooks: Mapping[str, OrderReport],
) -> tuple[tuple[Order, ...] | None, tuple[Order, ...] | None]:
    """
    Which orders the daemon gets and which the executor; `own` and `hooks` are what either reported last.

    Work is the executor's. A lease is the daemon's, where there is one; but the executor takes it first, because only
    then its ranks are off the devices, where the daemon would take them for somebody else's. One that the daemon has
    spoken of stays with it until it has ended.
    """
    if orders is None:
        return None, None
    orders = tuple(orders)
    if not executing:
        return orders, ()
    leases = tuple(order for order in orders if order.kind == OrderKind.LEASE)
    if not has_daemon:
        return leases, orders
    taken = {key for key, report in hooks.items() if report.status == OrderStatus.ACCEPTED}
    return (
        tuple(order for order in leases if order.id in own or order.id in taken),
        tuple(order for order in orders if order.kind != OrderKind.LEASE or order.id in hooks or order.id not in own),
    )


def _state(daemon: FleetNode, executor: FleetNode, own: NodeState, hooks: NodeState) -> NodeState:
    own_now, hooks_now = daemon.current() or own, executor.current() or hooks
    passive = {spec.name for spec in own.checks if spec.tier is Tier.PASSIVE}
    return dataclasses.replace(
        own_now,
        inventory=hooks.inventory,
        versions={**own.versions, **hooks.versions},
        checks=(
            *(spec for spec in own.checks if spec.name in passive),
            *(spec for spec in hooks.checks if spec.name not in passive),
        ),
        results=(
            *(result for result in own_now.results if result.check in passive),
            *(result for result in hooks_now.results if result.check not in passive),
        ),
        # Processes that the daemon sees may be the executor's own workers; the executor sees those in its container.
        # The executor's lease is the one that the daemon is about to get.
        allocated=(
            *(one for one in hooks.allocated if one.by != "lease"),
            *(one for one in own.allocated if one.by == "scheduler"),
        ),
        faults=(*own.faults, *(fault for fault in hooks.faults if fault not in own.faults)),
        running=hooks.running,
        peer_address=hooks.peer_address,
        address=hooks.address,
        compile_seconds=hooks.compile_seconds,
    )


def _version(daemon: FleetNode, executor: FleetNode) -> int:
    return executor.version * VERSIONS + daemon.version


def _later(one: float | None, other: float | None) -> float | None:
    """The longer silence of the two; None where one was never heard."""
    return None if one is None or other is None else max(one, other)
