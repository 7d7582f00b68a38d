"""
The memory of the engine: open gates, reservations, leases, quarantines and overrides as they are on disk; what one pass
changes of them; and the orders of each node that follow.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from healthd.aggregator.gate.records import (
    Accuse,
    Claim,
    ClaimKind,
    Effect,
    Gate,
    GrantLease,
    LeaseRow,
    LeaseState,
    Override,
    RevokeLease,
    RunStatus,
    Waiting,
)
from healthd.aggregator.jobs.calibration import facts_of
from healthd.aggregator.policy import Policy
from healthd.aggregator.quarantine.repair_records import Repair
from healthd.aggregator.store import (
    Change,
    Kind,
    Loaded,
    PutEvent,
    PutEvidence,
    PutGate,
    PutLease,
    PutQuarantined,
    PutRecord,
)
from healthd.aggregator.validation import orders_of
from healthd.aggregator.validation.records import Group
from healthd.core.model import Lease, NodeState, Order, OrderKind, Quarantine, RunOrder
from healthd.core.text import counted, plain

MOST_MESSAGE = 4096
"""Characters of a line of the audit trail: people read it, and sentences of ours stay far below."""

MOST_DECIDED = 2000
"""Decided gates kept in memory for those who ask again; older ones are read from the store."""
MOST_ENDED = 4096
"""Leases of which it is kept in memory whether they have ended; of others that is read from the store."""
MOST_QUARANTINED = 20_000
"""Nodes of which the number of their last quarantine is kept, also after they were forgotten."""


@dataclass
class Batch:
    """What one pass changes."""

    now: float
    changes: list[Change] = field(default_factory=list)
    """What is written to the database."""
    touched: set[str] = field(default_factory=set)
    """Nodes whose orders may have changed."""
    freed: set[str] = field(default_factory=set)
    """Nodes that another gate may be able to reserve now."""
    decided: list[Gate] = field(default_factory=list)
    """Gates that were decided."""
    ready: list[Gate] = field(default_factory=list)
    """Gates that have granted their first leases."""
    accused: list[Accuse] = field(default_factory=list)
    """What validations said of nodes."""
    inherited: dict[str, Quarantine] = field(default_factory=dict)
    """By node: what the rules of another database said of it, as the node tells."""
    forgotten: set[str] = field(default_factory=set)
    """Nodes that are gone for good."""
    quarantined: bool = False
    """Whether a quarantine was set or lifted."""
    repaired: list[Repair] = field(default_factory=list)
    """Repairs that were closed."""

    def event(self, subject: str, kind: str, message: str) -> None:
        """Add a line to the audit trail; it is one line whatever a node has put into it."""
        self.changes.append(PutEvent(at=self.now, subject=subject, kind=kind, message=plain(message, MOST_MESSAGE)))


class FleetState:
    """The memory of the engine; see the module. `store_id` is the issuer of leases."""

    def __init__(self, loaded: Loaded, *, store_id: str, policy: Policy) -> None:
        self.store_id = store_id
        self.policy = policy
        self.gates: dict[str, Gate] = {gate.id: gate for gate in loaded.gates}
        self.decided: OrderedDict[str, Gate] = OrderedDict()
        self.keys: dict[tuple[str, int], str] = dict(loaded.keys)
        self.gate_ids: set[str] = set(self.keys.values())
        self.newest: dict[str, int] = {}
        self.leases: dict[str, LeaseRow] = {}
        self.leases_of: dict[str, tuple[str, ...]] = {}
        self.adopted: set[str] = set()
        self._lease_key = loaded.meta.get("lease_key", "").encode()
        self._proven: dict[tuple[str, int], frozenset[str]] = {}  # adopted leases that this database granted
        self._ended: OrderedDict[str, LeaseRow | None] = OrderedDict()  # None: the store does not know the lease
        self._granted_now: set[str] = set()  # by this process, to gates that are open
        self.reserved: dict[str, str] = {}
        self.claims: dict[str, Claim] = {}
        self._current_claims: Mapping[str, Claim] | None = None
        self.quarantines: dict[str, Quarantine] = dict(loaded.quarantines)
        self.quarantine_changes = 0
        """How many were set or lifted since these were loaded."""
        self._quarantined: dict[str, int] = dict(loaded.quarantined)
        self.overrides: dict[str, Override] = dict(loaded.overrides)
        self.probes: dict[str, Order] = {}
        self.screenings: dict[str, tuple[Order, ...]] = {}
        """By node what it runs while it is free. Not on disk: a screening ends with the aggregator that ordered it."""
        self._yielded: set[str] = set()
        self.last_id = max(self.gate_ids, default="")
        for job, attempt in self.keys:
            self.newest[job] = max(attempt, self.newest.get(job, attempt))
        for row in loaded.leases:
            self._index(row)
        for gate in loaded.gates:
            self.reserved.update(dict.fromkeys(gate.held, gate.id))
        for node in {*self.reserved, *self.leases_of}:
            self._claim(node)

    def new_id(self, now: float) -> str:
        """A gate id that sorts after all ids before it, whatever the clock does."""
        milliseconds = int(now * 1000)
        if self.last_id:
            milliseconds = max(milliseconds, int(self.last_id.split("-")[1], 16) + 1)
        self.last_id = f"g-{milliseconds:012x}-{secrets.token_hex(5)}"
        return self.last_id

    # --- gates --------------------------------------------------------------------------------------------------------

    def add(self, gate: Gate) -> None:
        """Add a new gate."""
        self.gates[gate.id] = gate
        for node in gate.request.nodes:
            self.end_screening(node)
        key = (gate.request.job, gate.request.attempt)
        self.keys[key] = gate.id
        self.gate_ids.add(gate.id)
        self.newest[key[0]] = max(key[1], self.newest.get(key[0], key[1]))

    def carry_out(self, batch: Batch, gate: Gate, effects: Iterable[Effect], states: Iterable[NodeState]) -> None:
        """Apply a step of a gate; `states` are the evidence of its decision."""
        before, effects = self.gates.get(gate.id), tuple(effects)
        self.gates[gate.id] = gate
        for effect in effects:
            self._carry_out(batch, gate, effect)
        self._follow(batch, before or dataclasses.replace(gate, progress=Waiting(), ordered={}), gate)
        if before is not None and not before.grants and any(isinstance(effect, GrantLease) for effect in effects):
            batch.ready.append(gate)
        batch.changes.append(PutGate(gate=gate))
        if gate.decision is not None:
            del self.gates[gate.id]
            self._granted_now.difference_update(grant.lease_id for grant in (before or gate).granted.values())
            batch.decided.append(gate)
            states = tuple(states)
            batch.changes.append(PutEvidence(gate=gate.id, states=states))
            if (facts := facts_of(gate, states)) is not None:
                batch.changes.append(PutRecord(kind=Kind.FACTS, key=gate.id, record=facts))
            why = (
                gate.decision.reasons[0].message if gate.decision.reasons else counted(len(gate.decision.nodes), "node")
            )
            batch.event(f"job:{gate.request.job}", gate.decision.decision.value, f"gate {gate.id}: {why}")

    def known(self, gate_id: str) -> Gate | None:
        """A gate that is open, or was decided lately; None for any other, which may be in the store."""
        return self.gates.get(gate_id) or self.decided.get(gate_id)

    def update_members(self, gate: Gate) -> None:
        """Replace a gate of which only the times when its members were heard have changed; these are not written."""
        self.gates[gate.id] = gate

    def go_on_from(self, before: FleetState, now: float) -> None:
        """
        Copy from former memory of this process what is not on disk: which leases it has granted, and when members were
        heard (`now` for gates that it has not).
        """
        self._granted_now.update(before._granted_now)
        for node, orders in before.screenings.items():
            if self.is_idle(node):
                self.screenings[node] = orders
        for gate in self.gates.values():
            if gate.group is None:
                continue
            known = before.gates.get(gate.id)
            update_members = {one.member: one.heard_at for one in known.members} if known is not None else {}
            members = tuple(dataclasses.replace(m, heard_at=update_members.get(m.member, now)) for m in gate.members)
            group = dataclasses.replace(gate.group, members=members)
            self.gates[gate.id] = dataclasses.replace(gate, group=group)

    def remember(self, gate: Gate) -> None:
        """Keep a decided gate for those who ask again."""
        self.decided[gate.id] = gate
        self.decided.move_to_end(gate.id)
        while len(self.decided) > MOST_DECIDED:
            self.decided.popitem(last=False)

    def _carry_out(self, batch: Batch, gate: Gate, effect: Effect) -> None:
        if isinstance(effect, Accuse):
            batch.accused.append(effect)
            batch.event(effect.node, "accused", f"job {gate.request.job}: {effect.reason.message}")
        elif isinstance(effect, GrantLease):
            known = self.leases.get(effect.lease_id)
            self._granted_now.add(effect.lease_id)
            if known is None or known.node != effect.node:
                self.put_lease(batch, self._new_lease(batch, gate, effect))
        elif isinstance(effect, RevokeLease):
            self.end_lease(batch, effect.lease_id, effect.why)

    def _follow(self, batch: Batch, before: Gate, gate: Gate) -> None:
        """What follows from a gate: the nodes that it has reserved are its own, and have to do what it says."""
        for node in set(gate.held).difference(before.held):
            self.reserved[node] = gate.id
            self._claim(node)
        for node in set(before.held).difference(gate.held):
            if self.reserved.get(node) == gate.id:
                del self.reserved[node]
                self._claim(node)
                batch.freed.add(node)
            batch.touched.add(node)
        if gate.ordered is not before.ordered:
            nodes = gate.ordered.keys() | before.ordered.keys()
            batch.touched.update(node for node in nodes if before.ordered.get(node) != gate.ordered.get(node))
        if (groups := _groups(gate)) != (former := _groups(before)):
            batch.touched.update(node for group in (*groups, *former) for node in group.members)

    # --- leases -------------------------------------------------------------------------------------------------------

    def _new_lease(self, batch: Batch, gate: Gate, effect: GrantLease) -> LeaseRow:
        lease = Lease(
            id=effect.lease_id,
            gate=gate.id,
            job=gate.request.job,
            attempt=gate.request.attempt,
            issuer=self.store_id,
            workload=gate.workload_on(effect.node),
            grace_seconds=self.policy.lease_grace_seconds,
            max_seconds=gate.terms.lease_seconds,
            age_seconds=0.0,
            proof=self._proof(effect.lease_id, gate.id, gate.request.job, gate.request.attempt),
        )
        return LeaseRow(node=effect.node, lease=lease, state=LeaseState.GRANTED, granted_at=batch.now)

    def _proof(self, lease_id: str, gate: str, job: str, attempt: int) -> str:
        """What a lease carries so that this database recognizes it, also a copy from before the lease was granted."""
        if not self._lease_key:
            return ""
        said = "\n".join((lease_id, gate, str(attempt), job)).encode()
        return hmac.digest(self._lease_key, said, "sha256").hex()

    def granted_here(self, lease: Lease) -> bool:
        """Whether this database granted the lease, whatever of that it still knows."""
        proof = self._proof(lease.id, lease.gate, lease.job, lease.attempt)
        return bool(proof) and hmac.compare_digest(lease.proof.encode(), proof.encode())

    def leases_from_before(self, gate: Gate) -> tuple[LeaseRow, ...]:
        """
        The leases that an open gate, or its job and attempt, had before this process started. Nobody knows whether the
        job was admitted with them: the database may be a copy, and the admission in what it has lost.

        They are those that the gate granted, and adopted ones that this database granted, too. For a gate that names
        its nodes, adopted ones of other nodes count only if they are of this very gate. Gates of a group count their
        own attempts, so there only those of this gate do.
        """
        named, group = gate.request.nodes, gate.group is not None
        proven = self._proven.get((gate.request.job, gate.request.attempt), ())
        found = {
            row.lease.id: row
            for row in (self.leases[lease_id] for lease_id in proven)
            if row.lease.gate == gate.id or (not group and (not named or row.node in named))
        }
        for grant in gate.granted.values():
            if grant.lease_id not in self._granted_now and self.lease_stands(grant.lease_id):
                found[grant.lease_id] = self.leases[grant.lease_id]
        return tuple(found[lease_id] for lease_id in sorted(found))

    def gates_with_proven_leases(self) -> set[str]:
        """The open gates that have such leases."""
        return {self.keys[key] for key in self._proven if self.keys.get(key) in self.gates}

    def leases_to_look_up(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        """Those of which it is not known here whether they have ended."""
        return tuple(one for one in lease_ids if one not in self.leases and one not in self._ended)

    def note_looked_up(self, lease_ids: Iterable[str], found: Iterable[LeaseRow]) -> None:
        """Take in what the store knows of these leases."""
        rows = {row.lease.id: row for row in found if row.state is LeaseState.CLOSED}
        for lease_id in lease_ids:
            self._note_ended(lease_id, rows.get(lease_id))

    def ended_lease(self, lease_id: str) -> LeaseRow | None:
        """A lease that has ended by a record of this database; None where it has no such record."""
        return self._ended.get(lease_id)

    def _note_ended(self, lease_id: str, row: LeaseRow | None) -> None:
        self._ended[lease_id] = row
        self._ended.move_to_end(lease_id)
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def leases_of_job(self, gate: Gate) -> tuple[LeaseRow, ...]:
        """Every lease of a gate, and adopted ones of the same job and attempt."""
        asked = (gate.request.job, gate.request.attempt)
        return tuple(
            row
            for row in self.leases.values()
            if row.lease.gate == gate.id or (row.adopted and (row.lease.job, row.lease.attempt) == asked)
        )

    def move_lease(self, batch: Batch, row: LeaseRow, node: str) -> None:
        """The machine that holds a lease has another name now."""
        self._index(dataclasses.replace(row, node=node))
        self._claim(row.node)
        batch.freed.add(row.node)
        batch.touched.add(row.node)
        of_job = f"the lease of job {row.lease.job} attempt {row.lease.attempt}"
        batch.event(row.node, "renamed", f"the machine with its key is now named {node}; {of_job} moved with it")
        batch.event(node, "renamed", f"by its key, this machine was {row.node}; {of_job} came with it")
        self.put_lease(batch, self.leases[row.lease.id])

    def put_lease(self, batch: Batch, row: LeaseRow) -> None:
        """Add or replace a lease. A closed one is dropped from memory."""
        known = self.leases.get(row.lease.id)
        if known is None or known.state is not row.state:
            came = known is None and row.adopted and row.state in (LeaseState.GRANTED, LeaseState.ACKNOWLEDGED)
            batch.event(
                row.node,
                "lease adopted" if came else f"lease {row.state.value}",
                f"job {row.lease.job} attempt {row.lease.attempt}" + (f": {row.why}" if row.why else ""),
            )
        self._index(row)
        self._claim(row.node)
        batch.touched.add(row.node)
        batch.changes.append(PutLease(row=row))
        if row.state is LeaseState.CLOSED:
            batch.freed.add(row.node)

    def end_lease(self, batch: Batch, lease_id: str, why: str) -> None:
        """Withdraw a lease; its node is free once it says that it has let go of it."""
        row = self.leases.get(lease_id)
        if row is not None and row.state in (LeaseState.GRANTED, LeaseState.ACKNOWLEDGED):
            self.put_lease(batch, dataclasses.replace(row, state=LeaseState.ENDING, why=why, ended_at=batch.now))

    def close_lease(self, batch: Batch, row: LeaseRow, why: str) -> None:
        """Close a lease that is gone on its node too."""
        ended = row.why or why
        self.put_lease(batch, dataclasses.replace(row, state=LeaseState.CLOSED, closed_at=batch.now, why=ended))

    def lease_stands(self, lease_id: str) -> bool:
        """Whether the lease is granted or acknowledged."""
        row = self.leases.get(lease_id)
        return row is not None and row.state in (LeaseState.GRANTED, LeaseState.ACKNOWLEDGED)

    def _index(self, row: LeaseRow) -> None:
        lease_id, key = row.lease.id, (row.lease.job, row.lease.attempt)
        before = self.leases.get(lease_id)
        if before is not None:
            others = tuple(one for one in self.leases_of[before.node] if one != lease_id)
            self.leases_of[before.node] = others
            if not others:
                del self.leases_of[before.node]
        self.adopted.discard(lease_id)
        if proven := self._proven.pop(key, frozenset()) - {lease_id}:
            self._proven[key] = proven
        if row.state is LeaseState.CLOSED:
            self.leases.pop(lease_id, None)
            self._note_ended(lease_id, row)
            return
        self._ended.pop(lease_id, None)
        self.leases[lease_id] = row
        self.leases_of[row.node] = (*self.leases_of.get(row.node, ()), lease_id)
        if row.adopted:
            self.adopted.add(lease_id)
            if row.state is not LeaseState.ENDING and self.granted_here(row.lease):
                self._proven[key] = self._proven.get(key, frozenset()) | {lease_id}

    def current_claims(self) -> Mapping[str, Claim]:
        """Who has which node now, as a mapping that later changes do not touch."""
        if self._current_claims is None:
            self._current_claims = dict(self.claims)
        return self._current_claims

    def _claim(self, node: str) -> None:
        """Recompute who has a node: a lease comes before a reservation."""
        self._current_claims = None
        held = self.leases_of.get(node, ())
        gate = self.gates.get(self.reserved.get(node, ""))
        if held:
            lease = self.leases[held[0]].lease
            claim = Claim(kind=ClaimKind.LEASED, gate=lease.gate, job=lease.job, attempt=lease.attempt)
            self.claims[node] = claim
        elif gate is not None:
            request = gate.request
            self.claims[node] = Claim(kind=ClaimKind.RESERVED, gate=gate.id, job=request.job, attempt=request.attempt)
        else:
            self.claims.pop(node, None)
            return
        self.end_screening(node)

    # --- screenings ---------------------------------------------------------------------------------------------------

    def is_idle(self, node: str) -> bool:
        """Whether no gate, lease, quarantine or rule has the node. A gate that waits and names it is another matter."""
        return node not in self.claims and node not in self.quarantines and node not in self.probes

    def put_screening(self, batch: Batch, node: str, orders: tuple[Order, ...]) -> None:
        """Let a free node run these, until somebody wants it."""
        if self.is_idle(node):
            self.screenings[node] = orders
            batch.touched.add(node)

    def end_screening(self, node: str) -> None:
        """Somebody wants the node, or its screening is over: its orders are withdrawn in this pass."""
        if self.screenings.pop(node, None) is not None:
            self._yielded.add(node)

    def yielded(self) -> set[str]:
        """The nodes whose screening ended since this was last asked: they are to be told."""
        found, self._yielded = self._yielded, set()
        return found

    # --- quarantines, overrides -------------------------------------------------------------------------------

    def last_quarantine(self, node: str) -> int:
        """The number of the newest quarantine of a node that this database knows, lifted or not; 0: of none."""
        return self._quarantined.get(node, 0)

    def count_quarantine(self, batch: Batch, node: str, number: int) -> None:
        """Remember that quarantines of a node are known up to this number."""
        self._quarantined.pop(node, None)  # the newest are the last ones
        self._quarantined[node] = number
        batch.changes.append(PutQuarantined(node=node, number=number))
        if len(self._quarantined) > MOST_QUARANTINED:
            oldest = next(iter(self._quarantined))
            del self._quarantined[oldest]
            batch.changes.append(PutQuarantined(node=oldest, number=None))

    def put_quarantine(
        self, batch: Batch, node: str, quarantine: Quarantine | None, *, why: str = ""
    ) -> Quarantine | None:
        """Quarantine a node, or lift its quarantine (None); `why` is for people. Returns it with its number."""
        known = self.quarantines.get(node)
        self.quarantine_changes += 1
        if quarantine is None:
            self.quarantines.pop(node, None)
            batch.event(node, "quarantine lifted", why)
        else:
            quarantine = dataclasses.replace(quarantine, number=self.last_quarantine(node) + 1)
            self.count_quarantine(batch, node, quarantine.number)
            self.quarantines[node] = quarantine
            self.end_screening(node)
            if known is None or (known.owner, known.reason) != (quarantine.owner, quarantine.reason):
                batch.event(node, "quarantined", f"by {quarantine.owner}: {quarantine.reason}")
        batch.freed.add(node)
        batch.touched.add(node)
        batch.quarantined = True
        batch.changes.append(PutRecord(kind=Kind.QUARANTINE, key=node, record=quarantine))
        return quarantine

    def set_probe(self, node: str, order: Order | None) -> None:
        """Set the run that a rule ordered on a node that it keeps out; None: there is none."""
        if order is None:
            self.probes.pop(node, None)
        else:
            self.probes[node] = order
            self.end_screening(node)

    def drop(self, gate_ids: Iterable[str]) -> None:
        """Forget gates that are no longer in the store: their job and attempt may be asked for again."""
        gone = set(gate_ids)
        self.keys = {key: gate_id for key, gate_id in self.keys.items() if gate_id not in gone}
        self.gate_ids -= gone
        jobs = {job for job, _ in self.keys}
        self.newest = {job: attempt for job, attempt in self.newest.items() if job in jobs}
        for gate_id in gone:
            self.decided.pop(gate_id, None)

    def put_override(self, batch: Batch, job: str, override: Override | None) -> None:
        """Set the override of a job, or delete it (None)."""
        if override is None:
            self.overrides.pop(job, None)
            batch.event(f"job:{job}", "override ended", "")
        else:
            self.overrides[job] = override
            batch.event(f"job:{job}", "override", f"by {override.owner}: {override.reason}")
        batch.changes.append(PutRecord(kind=Kind.OVERRIDE, key=job, record=override))


def _groups(gate: Gate) -> tuple[Group, ...]:
    """The groups that its validation tests now."""
    return () if gate.validation is None else gate.validation.groups


def orders_for(fleet: FleetState, node: str) -> tuple[Order, ...]:
    """
    All open orders of a node. They follow from what is on disk, so they are the same after a restart; only a screening
    ends by one.
    """
    found = []
    gate = fleet.gates.get(fleet.reserved.get(node, ""))
    run = gate.ordered.get(node) if gate is not None else None
    if gate is not None and run is not None and run.status is RunStatus.OPEN:
        work = RunOrder(tier=gate.terms.tier, workload=gate.asker_on(node), past=gate.past)
        found.append(Order(id=run.order_id, kind=OrderKind.RUN, deadline_seconds=run.deadline_seconds, run=work))
    if gate is not None and gate.validation is not None:
        workload = gate.asker_on(node)
        found.extend(orders_of(gate.validation, node, fleet.policy, workload=workload, past=gate.past))
    if node in fleet.probes:
        found.append(fleet.probes[node])
    found.extend(fleet.screenings.get(node, ()))
    within = fleet.policy.tuning.lease_ack_seconds
    for lease_id in fleet.leases_of.get(node, ()):
        # A node keeps a lease until it is told with its id that it is over.
        row, ended = fleet.leases[lease_id], not fleet.lease_stands(lease_id)
        order = Order(id=lease_id, kind=OrderKind.LEASE, deadline_seconds=within, withdrawn=ended, lease=row.lease)
        found.append(order)
    return tuple(found)
