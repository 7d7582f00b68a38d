"""
The engine: everything that can be asked of gates (`gates`), nodes, leases, quarantines and overrides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from healthd.aggregator.controller.bulkheads import Fault
from healthd.aggregator.controller.gates import Gates
from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.model.claims import LeaseRow, LeaseState, Override
from healthd.aggregator.model.quarantines import Breaker, RuleRecord
from healthd.core.errors import ConflictError
from healthd.core.model import Quarantine
from healthd.core.text import ago


@dataclass(frozen=True, kw_only=True)
class Gone:
    """What went with a node that was forgotten: its quarantine, what the rules remembered, leases that were ending."""

    quarantine: Quarantine | None
    rules: RuleRecord | None
    leases: tuple[LeaseRow, ...]


class Engine(Gates):
    """
    Make it with a store and a registry and run `run()` as a task. All on one event loop.

    Methods that change something return once the change is on disk, and raise StoreError when it could not be written.
    """

    async def release_node(self, node: str, owner: str) -> tuple[LeaseRow, ...]:
        """End every lease on a node, whoever gave it; those that end now, or did before and the node still holds."""
        held = self._leases(lambda row: row.node == node)
        await self.submit(lambda batch: self._end(batch, held, f"released by {owner}"))
        return held

    async def quarantine(self, node: str, quarantine: Quarantine | None, *, why: str = "") -> None:
        """
        Keep a node out of admissions from now on. Gates that have it see it at once.

        None lifts the quarantine, and the rules drop all that they hold against the node; `why` is for people.
        """

        def act(batch: Batch) -> None:
            if quarantine is None:
                self._memory.rules.release(batch, node)
            if quarantine is not None or node in self._memory.fleet_state.quarantines:
                self._memory.fleet_state.put_quarantine(batch, node, quarantine, why=why)
            self._memory.rules.look_again(batch, node)

        await self.submit(act)

    async def override(self, job: str, override: Override | None) -> None:
        """Admit a job whatever its nodes are; None ends that. It is written into the audit trail."""

        def act(batch: Batch) -> None:
            self._memory.fleet_state.put_override(batch, job, override)
            self._memory.stepper.dirty.update(
                gate.id for gate in self._memory.fleet_state.gates.values() if gate.request.job == job
            )

        await self.submit(act)

    async def recover(self, owner: str) -> bool:
        """End the recovery because a person says so. False when there was none."""
        return await self.submit(lambda batch: self._memory.reconciler.recover(batch, owner))

    async def forget(self, node: str, owner: str) -> Gone:
        """
        Forget a node that is gone for good: its quarantine ends, and its key is free. Returns what went with it.

        ConflictError while a job has it, and while it is quarantined and syncs: it would come back without quarantine.
        """

        def act(batch: Batch) -> Gone:
            held = self._leases(lambda row: row.node == node and row.state is not LeaseState.ENDING)
            if held:
                job = held[0].lease.job
                raise ConflictError(
                    f"{node} is leased to job {job!r}; end that first: healthd fleet release-lease {node}"
                )
            kept = self._memory.fleet_state.quarantines.get(node)
            found = self._registry.node(node)
            heard = math.inf if found is None or found.heard_seconds is None else found.heard_seconds
            if kept is not None and heard <= self.policy.silent_seconds:
                raise ConflictError(
                    f"{node} is quarantined by {kept.owner} ({kept.reason}) and still reports "
                    f"(last heard {ago(heard)}): it would come back without the quarantine; end that first: "
                    f"healthd fleet release {node}; or stop its daemon and wait {self.policy.silent_seconds:g} s"
                )
            gone = Gone(
                quarantine=kept,
                rules=self._memory.rules.remembered(node),
                leases=self._leases(lambda row: row.node == node),
            )
            self._memory.rules.forget(batch, node)
            self._memory.reconciler.forget(batch, node, owner)
            return gone

        return await self.submit(act)

    async def reset_breaker(self, owner: str, pool: str | None) -> tuple[str, ...]:
        """Let the rules quarantine again where their breaker has tripped; the pools where it had ("": no pool)."""
        return await self.submit(lambda batch: self._memory.rules.breakers.reset(batch, owner, pool))

    def breakers(self) -> Mapping[str, Breaker]:
        """The tripped breakers of the rules, by pool ("": nodes without one)."""
        return self._memory.rules.breakers.all()

    def faults(self) -> tuple[Fault, ...]:
        """
        What internal errors stop, the newest first: gates, nodes, or the loop and everything with it. Each is tried
        again.
        """
        return self._bulkheads.faults()

    def internal_errors(self) -> Mapping[str, int]:
        """Unforeseen exceptions since the start, by what they stopped."""
        return dict(self._bulkheads.counted)

    def quarantines(self) -> Mapping[str, Quarantine]:
        """All quarantines, by node; those whose time is over may still be among them."""
        return dict(self._memory.fleet_state.quarantines)

    def pool_of(self, node: str) -> str | None:
        """The pool of a node as it said last; None for one without, or never heard of."""
        return self._memory.reconciler.pool_of(node)

    async def note(self, subject: str, kind: str, message: str) -> None:
        """Add a line to the history of a node or job."""
        await self.submit(lambda batch: batch.event(subject, kind, message))

    def remembered(self, node: str) -> RuleRecord | None:
        """What the rules remember of a node; None where nothing is."""
        return self._memory.rules.remembered(node)

    def rule_words(self) -> Mapping[tuple[str, str], int]:
        """How often each rule reached a verdict, and what came of it, since the start."""
        return dict(self._memory.rules.counted)

    def leases(self) -> tuple[LeaseRow, ...]:
        """All leases that are not closed."""
        return tuple(self._memory.fleet_state.leases.values())

    def overrides(self) -> tuple[Override, ...]:
        """The overrides in force."""
        now = self._clock()
        return tuple(override for override in self._memory.fleet_state.overrides.values() if override.until > now)

    def now(self) -> float:
        """Seconds since the epoch by the clock that gates, quarantines and overrides go by; see `steady_clock`."""
        return self._clock()

    def present(self, node: str) -> bool:
        """Whether the node was heard within a day."""
        return self._memory.reconciler.present(node, self._clock())

    def unsure(self) -> bool:
        """Whether nodes may be out for reasons that are not known here, or not yet."""
        return self._stale or self._memory.reconciler.unsure(self._clock())

    def recovering(self) -> str | None:
        """Why nothing is admitted at all; None in good days."""
        if self._stale:
            return "a write failed, and what is on disk could not be read since"
        return self._memory.reconciler.recovering(self._clock())
