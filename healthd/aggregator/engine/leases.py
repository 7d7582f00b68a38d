"""
Leases: reconciles the leases in memory with what nodes report, and detects the loss of the database.

A node that took orders from another database, or holds a lease or quarantine that this database must have created but
does not contain, is a witness of the loss. A node can report anything, so a share of the fleet decides, and only for a
while after the database was opened: later it cannot have been replaced. Without a witness that holds such a lease or
quarantine nothing was lost, as after a new installation. What a single node claims counts for that node
alone.

Also here:

- brings the leases in memory in line with what nodes report, and tells the nodes their orders.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from healthd.aggregator.engine.bulkheads import Where, contained
from healthd.aggregator.engine.memory import Batch, FleetState, orders_for
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate.records import LeaseRow, LeaseState
from healthd.aggregator.policy import Policy
from healthd.aggregator.store import ForgetNode, Loaded, PutMeta, PutNode
from healthd.core.model import FINAL_STATUSES, Lease, NodeState, OrderStatus, Quarantine
from healthd.core.text import span

RECOVERY_RATIO = 0.1
"""The share of the fleet that must know another database before this one counts as lost. A tenth: more than a job's
nodes may say when a copy is an hour old, and nothing that one node can fake."""
LEAST_WITNESSES = 2
"""Nodes that must be witnesses in the smallest fleet: one alone is never believed about the others."""

GONE_SECONDS = 86400.0
"""A node that was silent for so long counts neither as one of its pool nor among those that are kept out of it. A day:
a machine in repair for an afternoon is still there, one that was terminated blocks nothing for longer."""
STAMP_SECONDS = GONE_SECONDS / 8
"""How much later than on disk a node was heard before that is written: some hours are enough to tell days by."""

UNWATCHED_SECONDS = 30.0
"""How often the leases of nodes without a daemon are looked through: their times are hours."""

_LEASE_ID = re.compile(r"(?P<gate>[^:]+):lease:\d+:(?P<node>.+)", re.DOTALL)
"""The id of a lease as aggregators give it (see `gate` and `answers`)."""


class Recovery:
    """See the module. What outlives a restart is kept in the database as `recovering_until` and `established`."""

    def __init__(self, policy: Policy, meta: Mapping[str, str], *, started_at: float) -> None:
        self._policy = policy
        self._established = "established" in meta
        self._proved_at = started_at + policy.recovery_seconds
        # A clock that was set back since must not make it longer than all of it.
        self._until = min(float(meta.get("recovering_until", "-inf")), started_at + policy.recovery_seconds)
        self._witnesses: set[str] = set()
        self._with_leases: set[str] = set()

    @property
    def established(self) -> bool:
        """Whether the database has proved itself, now or before a restart."""
        return self._established

    def why(self, now: float) -> str | None:
        """Why nothing is admitted; None in good days."""
        if now >= self._until:
            return None
        return (
            "nodes report leases or quarantines that this database does not contain, so it may have been lost: "
            f"nothing is admitted for {self._policy.recovery_seconds:.0f} s, or until 'healthd fleet recover' is run"
        )

    def ends(self) -> Iterator[float]:
        """When time alone changes something."""
        yield self._until
        if not self._established:
            yield self._proved_at

    def prove(self, batch: Batch) -> None:
        """The time of proof is over, and nothing speaks against the database."""
        if not self._established and batch.now >= max(self._proved_at, self._until):
            self._set(batch, until=-math.inf, established=True)

    def witness(self, node: str, *, has_lease: bool) -> None:
        """
        Take in that this node knows another database, or another state of this one; `has_lease`: and has a lease or a
        quarantine of it.
        """
        self._witnesses.add(node)
        if has_lease:
            self._with_leases.add(node)

    def forget(self, node: str) -> None:
        """Drop what a node said that is gone."""
        self._witnesses.discard(node)
        self._with_leases.discard(node)

    def judge(self, batch: Batch, size: Callable[[], int]) -> None:
        """Begin to recover when enough nodes of the fleet are witnesses; `size`: how many were heard within a day."""
        if batch.now < self._until or batch.now >= self._proved_at or len(self._witnesses) < LEAST_WITNESSES:
            return
        if not self._with_leases:
            return
        fleet = size()
        if len(self._witnesses) >= math.ceil(RECOVERY_RATIO * fleet):
            self._set(batch, until=batch.now + self._policy.recovery_seconds, established=False)
            some = ", ".join(sorted(self._witnesses)[:3])
            text = (
                f"{len(self._witnesses)} of {fleet} nodes ({some}, ...) know another database, and "
                f"{min(self._with_leases)} has a lease or quarantine from it"
            )
            batch.event("fleet", "recovering", text)

    def end(self, batch: Batch, owner: str) -> bool:
        """A person says that the fleet is known again; false when nothing was to recover from."""
        was = batch.now < self._until
        self._set(batch, until=-math.inf, established=True)
        self._proved_at = batch.now
        batch.event("fleet", "recovered", f"by {owner}")
        return was

    def _set(self, batch: Batch, *, until: float, established: bool) -> None:
        self._until, self._established = until, established
        batch.changes.append(PutMeta(key="recovering_until", value=str(until)))
        if established:
            batch.changes.append(PutMeta(key="established", value="yes"))


class LeaseReconciler:
    """See the module. `started_at` is when this aggregator started to hear nodes."""

    def __init__(
        self, fleet_state: FleetState, registry: Fleet, policy: Policy, loaded: Loaded, *, started_at: float
    ) -> None:
        self._fleet_state = fleet_state
        self._registry = registry
        self._policy = policy
        self._settled_at = started_at + policy.tuning.settle_seconds
        self._recovery = Recovery(policy, loaded.meta, started_at=started_at)
        self._unwatched_at = -math.inf
        self._reconciled: set[str] = set()
        self._without_lease: dict[str, int] = {}  # the version of a node's state that has none
        self._taken_over: dict[str, Quarantine] = {}
        self._taken_over_on_disk: dict[str, Quarantine] = {}
        self._labels: dict[str, Mapping[str, str]] = {row.node: row.labels for row in loaded.nodes}
        # No node was silent while no aggregator listened: count from when the last of all nodes was heard.
        last = max((row.last_seen for row in loaded.nodes), default=started_at)
        self._heard_at = {row.node: started_at - (last - row.last_seen) for row in loaded.nodes}
        self._written = dict(self._heard_at)

    # --- the database as a whole --------------------------------------------------------------------------------------

    def recovering(self, now: float) -> str | None:
        """Why nothing is admitted; None in good days."""
        return self._recovery.why(now)

    def settling(self, now: float) -> str | None:
        """Why nothing is called impossible yet; None once nodes had time to report."""
        return "the aggregator has just started" if now < self._settled_at else None

    def unsure(self, now: float) -> bool:
        """Whether nodes may be out for reasons that this database does not know, or does not know yet."""
        return not self._recovery.established or self.recovering(now) is not None or self.settling(now) is not None

    def next_due(self, now: float) -> float:
        """When one of the two ends, for all gates."""
        return min((at for at in (*self._recovery.ends(), self._settled_at) if at > now), default=math.inf)

    def recover(self, batch: Batch, owner: str) -> bool:
        """A person ends the recovery."""
        return self._recovery.end(batch, owner)

    def forget(self, batch: Batch, node: str, owner: str) -> None:
        """Forget a node that is gone: its leases and its quarantine end."""
        for lease_id in self._fleet_state.leases_of.get(node, ()):
            self._fleet_state.close_lease(batch, self._fleet_state.leases[lease_id], "the node was forgotten")
        if node in self._fleet_state.quarantines:
            self._fleet_state.put_quarantine(batch, node, None, why=f"the node was forgotten by {owner}")
        self._fleet_state.end_screening(node)
        batch.changes.append(ForgetNode(node=node))
        batch.event(node, "forgotten", f"by {owner}")
        batch.forgotten.add(node)

    def pool_of(self, node: str) -> str | None:
        """The pool of a node as it said last; None for one without, or never heard of."""
        return self._labels.get(node, {}).get("pool")

    # --- who is still there -------------------------------------------------------------------------------------------

    def present(self, node: str, now: float) -> bool:
        """Whether the node was heard within a day, by this aggregator or the one before it."""
        return now - self._heard_at.get(node, -math.inf) <= GONE_SECONDS

    def silent(self, now: float, seconds: float) -> list[str]:
        """Nodes that were heard once, but not for so long; not duplicates, which a person has to decide about."""
        old = [name for name, at in self._heard_at.items() if now - at > seconds]
        return [name for name in old if (node := self._registry.node(name)) is None or not node.duplicate]

    def go_on_from(self, before: LeaseReconciler) -> None:
        """
        Copy from former memory what is not on disk: when nodes were last heard, which is hours old there, and which of
        their quarantines were taken over and written, since somebody may have ended these by now.
        """
        self._taken_over.update(before._taken_over_on_disk)
        self._taken_over_on_disk.update(before._taken_over_on_disk)
        self._heard_at.update((node, at) for node, at in before._heard_at.items() if node in self._heard_at)

    def unwritten_times(self) -> list[PutNode]:
        """When nodes were last heard, where that has to be written for the next aggregator."""
        return [
            PutNode(node=node, labels=self._labels[node], seen_at=at)
            for node, at in self._heard_at.items()
            if node in self._labels and at - self._written.get(node, -math.inf) > STAMP_SECONDS
        ]

    def mark_written(self, unwritten_times: Iterable[PutNode]) -> None:
        """Note that these times are on disk."""
        self._written.update((one.node, one.seen_at) for one in unwritten_times)

    # --- what was heard -----------------------------------------------------------------------------------------------

    def reconcile(self, batch: Batch, heard: Iterable[str], nodes: Mapping[str, FleetNode]) -> None:
        """Apply the reports of the nodes that were heard; `nodes` are as this pass sees them."""
        self._recovery.prove(batch)
        self._end_unwatched(batch)
        for name in sorted(heard):
            with contained(Where.NODE, name):
                self._reconcile_node(batch, name, nodes.get(name))
        self._recovery.judge(batch, lambda: sum(self.present(name, batch.now) for name in self._heard_at))

    def _end_unwatched(self, batch: Batch) -> None:
        """End the leases whose time is over of nodes that never had a daemon: nobody sees the end of their jobs."""
        if batch.now < self._unwatched_at:
            return
        self._unwatched_at = batch.now + UNWATCHED_SECONDS
        for row in list(self._fleet_state.leases.values()):
            most = row.lease.max_seconds
            if batch.now >= row.granted_at + most and not self._registry.has_daemon(row.node):
                why = f"its time of {span(most)} is over, and its node has no daemon that observes the job"
                self._fleet_state.close_lease(batch, row, why)

    def is_at_rest(self, name: str, now: float) -> bool:
        """Whether nothing is open between the node and this database: neither knows of a lease there."""
        return (
            name in self._reconciled
            and self._without_lease.get(name) == self._registry.version(name)
            and not self._fleet_state.leases_of.get(name)
            and not self.unsure(now)
        )

    def note_heard(self, name: str, now: float) -> None:
        """The node has reported, and is as it was."""
        self._heard_at[name] = now

    def catch_up(self, batch: Batch, name: str) -> None:
        """Apply the newest report of one node at once: a person speaks of it, and no pass has come to it yet."""
        self._reconcile_node(batch, name, self._registry.node(name, batch.now))

    def _reconcile_node(self, batch: Batch, name: str, node: FleetNode | None) -> None:
        """Apply the report of one node: leases, quarantine, labels."""
        if node is not None and node.heard_seconds is not None:
            self._heard_at[name] = batch.now - node.heard_seconds  # also of a duplicate: it is there
        if node is None or node.state is None or node.duplicate:
            return
        self._without_lease.pop(name, None)
        if not node.state.leases:
            self._without_lease[name] = node.version
        self._move_leases(batch, node, node.state)
        self._adopt(batch, node, node.state)
        self._follow_leases(batch, node, node.state)
        labels = node.state.labels
        if self._labels.get(name) != labels or name in batch.forgotten:
            batch.changes.append(PutNode(node=name, labels=labels, seen_at=batch.now))

    def _follow_leases(self, batch: Batch, node: FleetNode, state: NodeState) -> None:
        """Update the leases of this database: stored, refused, ended by the node, or gone."""
        held_leases = {lease.id for lease in state.leases}
        for lease_id in self._fleet_state.leases_of.get(node.node, ()):
            row = self._fleet_state.leases[lease_id]
            report = node.orders.get(lease_id)
            status = None if report is None else report.status
            if status in FINAL_STATUSES and report is not None:
                self._fleet_state.close_lease(
                    batch, row, f"{status} by the node: {report.message or 'no reason given'}"
                )
            elif row.state is LeaseState.GRANTED and status == OrderStatus.ACCEPTED and lease_id in held_leases:
                self._fleet_state.put_lease(batch, dataclasses.replace(row, state=LeaseState.ACKNOWLEDGED))
            elif row.state is LeaseState.ENDING and lease_id not in held_leases and report is None and node.confirmed:
                # A standing lease that is missing has not ended: the node stores it again, or reports its end.
                self._fleet_state.close_lease(batch, row, "the node no longer holds it")

    def _adopt(self, batch: Batch, node: FleetNode, state: NodeState) -> None:
        """Adopt leases and a quarantine that another database gave, or this one before an old copy was restored."""
        foreign = [lease for lease in state.leases if self._unknown(node, lease)]
        for lease in foreign:
            self._adopt_lease(batch, node, lease)
        self._end_again(batch, node, state.leases)
        self._adopt_from_newer_copy(batch, node, state.quarantine, foreign)
        self._adopt_from_other_database(batch, node, state.quarantine, foreign)

    def _adopt_lease(self, batch: Batch, node: FleetNode, lease: Lease) -> None:
        report = node.orders.get(lease.id)
        # While the node looks at who has the devices, nobody was told that the job may start.
        taken = report is None or report.status == OrderStatus.ACCEPTED
        row = LeaseRow(
            node=node.node,
            lease=dataclasses.replace(lease, age_seconds=0.0),
            state=LeaseState.ACKNOWLEDGED if taken else LeaseState.GRANTED,
            granted_at=batch.now - lease.age_seconds,
            adopted=True,
        )
        self._fleet_state.put_lease(batch, row)

    def _end_again(self, batch: Batch, node: FleetNode, held: Iterable[Lease]) -> None:
        """Leases that have ended here and that the node still holds, as one that was forgotten while it was away."""
        for ended in filter(None, (self._fleet_state.ended_lease(lease.id) for lease in held)):
            if node.confirmed and self._is_of(node.node, ended.node):
                again = dataclasses.replace(ended, node=node.node, state=LeaseState.ENDING, closed_at=None)
                self._fleet_state.put_lease(batch, again)

    def _adopt_from_newer_copy(
        self, batch: Batch, node: FleetNode, quarantine: Quarantine | None, foreign: Sequence[Lease]
    ) -> None:
        """Where this database is an older copy of itself: the node knows what it said and has lost since."""
        lost = node.issuer == self._fleet_state.store_id and self._not_in_this_copy(node.node, quarantine)
        if lost and quarantine is not None:
            self._fleet_state.count_quarantine(batch, node.node, quarantine.number)
            self._take_over(batch, node.node, quarantine)
        if lost or any(lease.issuer == self._fleet_state.store_id for lease in foreign):
            self._recovery.witness(node.node, has_lease=True)

    def _adopt_from_other_database(
        self, batch: Batch, node: FleetNode, quarantine: Quarantine | None, foreign: Sequence[Lease]
    ) -> None:
        """Where the node has taken orders from another database: that may be the one which this one replaces."""
        other = node.issuer is not None and node.issuer != self._fleet_state.store_id
        if other and quarantine is not None:
            self._take_over(batch, node.node, quarantine)
        if not self._recovery.established and (other or foreign):
            lasting = quarantine is not None and (quarantine.until or math.inf) > batch.now
            self._recovery.witness(node.node, has_lease=bool(foreign) or lasting)

    def _not_in_this_copy(self, node: str, quarantine: Quarantine | None) -> bool:
        """Whether this database was told of the quarantine and has lost it: it is an older copy of itself."""
        if quarantine is None:
            return False
        names = (node, *self._registry.former_names(node))
        return quarantine.number > max(self._fleet_state.last_quarantine(name) for name in names)

    def _take_over(self, batch: Batch, node: str, quarantine: Quarantine) -> None:
        """
        Take over what another database, or this one before an old copy was restored, said of a node: once, because the
        node repeats it until it has read our own statement, and somebody may have ended it by then.
        """
        if self._taken_over.get(node) == quarantine or (quarantine.until or math.inf) <= batch.now:
            return
        self._taken_over[node] = quarantine
        known = self._fleet_state.quarantines.get(node)
        if quarantine.owner_kind == "rule":
            batch.inherited[node] = quarantine
        elif known is None or known.owner_kind == "rule":
            self._fleet_state.put_quarantine(batch, node, quarantine)

    def _unknown(self, node: FleetNode, lease: Lease) -> bool:
        """
        Whether this database has no record of the lease: another one granted it, or this one before an old copy was
        put back. False for a lease that the node cannot claim, because it is of another node that is known here.
        """
        if lease.id in self._fleet_state.leases or self._fleet_state.ended_lease(lease.id) is not None:
            return False
        named = _LEASE_ID.fullmatch(lease.id)
        return named is None or self._is_of(node.node, named["node"]) or self._registry.node(named["node"]) is None

    def _move_leases(self, batch: Batch, node: FleetNode, state: NodeState) -> None:
        """Leases that the machine holds, or says the end of, come with it when it has another name now."""
        for lease_id in dict.fromkeys((*(lease.id for lease in state.leases), *node.orders)):
            row = self._fleet_state.leases.get(lease_id)
            if row is not None and row.node != node.node and self._is_of(node.node, row.node):
                self._fleet_state.move_lease(batch, row, node.node)

    def _is_of(self, node: str, name: str) -> bool:
        """Whether this is a name of the node's machine: its own, or one under which it spoke before with its key."""
        return name == node or name in self._registry.former_names(node)

    def look_up(self, heard: Iterable[str]) -> tuple[str, ...]:
        """Leases that these nodes hold and of which only the store can tell whether they have ended."""
        held: dict[str, None] = {}
        for name in heard:
            with contained(Where.NODE, name):
                held.update(dict.fromkeys(self._registry.lease_ids(name)))
        return self._fleet_state.leases_to_look_up(held)

    # --- what is told -------------------------------------------------------------------------------------------------

    def publish(self, batch: Batch, heard: Iterable[str], nodes: Mapping[str, FleetNode]) -> None:
        """
        Once the pass is on disk: give nodes their orders, and acknowledge final reports.

        `nodes` are as `reconcile` saw them: what they have reported since is for the next pass.
        """
        reconciled = set(heard)
        for name in batch.forgotten:
            self._reconciled.discard(name)
            self._recovery.forget(name)
            for kept in (self._labels, self._heard_at, self._written, self._taken_over, self._without_lease):
                kept.pop(name, None)
        self._taken_over_on_disk = dict(self._taken_over)
        for name in sorted(reconciled | batch.touched):
            node = nodes.get(name)
            if name in reconciled and node is not None and node.state is not None and not node.duplicate:
                self._labels[name] = node.state.labels
                if name not in self._reconciled:
                    self._reconciled.add(name)
                    batch.touched.add(name)
            if name in batch.touched:
                self._registry.set_quarantine(name, self._fleet_state.quarantines.get(name))
            # A node whose own leases are not known here yet must not be told that it has none.
            orders = orders_for(self._fleet_state, name) if name in self._reconciled else ()
            if name in self._reconciled and name in batch.touched:
                self._registry.set_orders(name, orders)
            if node is not None and node.orders:
                listed = {order.id for order in orders}
                over = [
                    key for key, report in node.orders.items() if report.status in FINAL_STATUSES and key not in listed
                ]
                if over:
                    self._registry.acknowledge(name, over)
