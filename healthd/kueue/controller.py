"""
One pass over all Workloads: judge each, ask gates, label nodes, write checks, release what no Workload keeps.

A pass begins from what Kueue and the aggregator say now, and remembers nothing that a restart would miss. Each thing
that it does may be repeated; a write onto a Workload that has changed meanwhile does nothing, and the next pass judges
anew.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from healthd.core.errors import ConfigError, HealthdError
from healthd.core.http.client import RefusedError
from healthd.core.model import Claim, GateRequest
from healthd.core.tasks import LogOnce
from healthd.core.text import plain
from healthd.core.workload import KUEUE
from healthd.kueue.judge import Answer, Known, Step, Write, judge, workload_id
from healthd.kueue.workloads import AdmissionCheck, Condition, Flavor, Workload

log = logging.getLogger(__name__)

MESSAGE_SECONDS = 30.0
"""How often the sentence of a gate that holds is written anew: each write goes to etcd, and to every watch."""
MOST_ASKED = 64
"""Gates that are asked in one pass; the others in the next ones, those that waited longest first."""
POLL_SECONDS = 2.0
"""How often open gates are asked."""
LABELS_SECONDS = 60.0
"""How often nodes are looked through for labels of gates that are over, beside when one is released."""
FAILURES = 3
"""Passes in a row in which the aggregator did not answer until Kueue is told to reserve no more quota."""
WATCHED_SECONDS = 10.0
"""How often the nodes of running Workloads are looked at, where a check acts on them."""


class Gates(Protocol):
    """The aggregator; see `healthd.kueue.gates`. HealthdError where it gives no answer."""

    async def claims(self, prefix: str) -> tuple[Claim, ...]:
        """The open gates and the leases of workloads whose names begin so."""

    async def ask(self, request: GateRequest) -> Answer:
        """Open a gate, or find the same one again."""

    async def follow(self, gate: str) -> Answer:
        """The answer of a gate as it is now."""

    async def release(self, gate: str) -> None:
        """Withdraw a gate, or give its nodes back."""

    async def unfit(self, nodes: Iterable[str]) -> Mapping[str, str]:
        """What is wrong with those of these nodes that are bad."""


@dataclass(frozen=True, kw_only=True)
class Queues:
    """What Kueue's objects say now. `cluster` tells this cluster from others."""

    cluster: str
    checks: Mapping[str, AdmissionCheck] = field(default_factory=dict)
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    workloads: Mapping[str, Workload] = field(default_factory=dict)


class Cluster(Protocol):
    """The API server; see `healthd.kueue.cluster`. HealthdError where it gives no answer."""

    async def write_state(self, workload: Workload, check: str, write: Write) -> bool:
        """Write the state of a check onto this version of a Workload; False where it has changed or is gone."""

    async def write_condition(self, check: AdmissionCheck, condition: Condition) -> None:
        """Write the condition Active of an AdmissionCheck."""

    async def labels(self, node: str) -> Mapping[str, str] | None:
        """The labels of a node; None where there is none of this name."""

    async def bind(self, node: str, gate: str) -> None:
        """Label a node with the gate whose pods are to run there."""

    async def bound(self) -> Mapping[str, str]:
        """The nodes that have such a label, and its value."""

    async def unbind(self, node: str, gate: str) -> None:
        """Take this label away; nothing where the node has another one by now, or is gone."""


class Controller:
    """See the module."""

    def __init__(self, gates: Gates, cluster: Cluster) -> None:
        self._gates = gates
        self._cluster = cluster
        self._failures = 0
        self._why: Condition | None = None
        self._trouble = LogOnce(log)
        self._said_at: dict[str, float] = {}  # UID -> when the sentence of its gate was written
        self._asked_at: dict[str, float] = {}  # UID -> when its gate was asked last
        self._unfit: Mapping[str, str] = {}
        self._looked_at = -math.inf
        self._labels_seen_at = -math.inf

    async def run_pass(self, queues: Queues, now: float) -> float:
        """
        One pass; how many seconds later something is due without a change. HealthdError of the API server.

        While the aggregator does not answer nothing is released and nobody is admitted.
        """
        prefix = f"{KUEUE}{queues.cluster}/"
        try:
            claims: tuple[Claim, ...] | None = await self._gates.claims(prefix)
            self._is_there()
        except HealthdError as error:
            claims = None
            self._is_away(error)
        await self._write_conditions(queues)
        mine: dict[str, list[Claim]] = {}
        for claim in claims or ():
            mine.setdefault(claim.workload, []).append(claim)
        await self._look_at_nodes(queues, mine, now)
        kept: set[str] = set()
        due = math.inf
        left = MOST_ASKED
        known_uids = set()
        for workload in sorted(queues.workloads.values(), key=self._turn):
            known_uids.add(workload.uid)
            claimed = mine.get(workload_id(workload, queues.cluster), [])
            names = [state.name for state in workload.checks if state.name in queues.checks]
            if not names and workload.admitted and not workload.finished:
                kept.update(claim.gate for claim in claimed)  # its check was deleted while it runs
            for name in names:
                may_ask = claims is not None and left > 0
                step = await self._one(workload, queues.checks[name], queues, claimed, may_ask, now)
                due = min(due, step.due - now)
                asked = None
                if step.ask is not None:
                    left, due = left - 1, min(due, POLL_SECONDS)
                    asked = (step.ask.job, step.ask.attempt)  # also where it could not be asked just now
                kept.update(claim.gate for claim in claimed if step.keep_all or (claim.job, claim.attempt) == asked)
                kept.update(filter(None, (step.keep,)))
        for memory in (self._said_at, self._asked_at):
            for uid in [uid for uid in memory if uid not in known_uids]:
                del memory[uid]
        if claims is not None:
            await self._release(claims, kept, now)
        return due

    def _turn(self, workload: Workload) -> tuple[float, str]:
        return self._asked_at.get(workload.uid, -math.inf), workload.key

    async def _one(
        self,
        workload: Workload,
        check: AdmissionCheck,
        queues: Queues,
        claimed: list[Claim],
        may_ask: bool,
        now: float,
    ) -> Step:
        """Judge one Workload for one check, ask what is to be asked, and do what follows."""
        held = {node for claim in claimed for node in claim.nodes}
        known = Known(
            flavors=queues.flavors,
            ours=frozenset(queues.checks),
            cluster=queues.cluster,
            unfit={node: text for node, text in self._unfit.items() if node in held},
        )
        step = judge(workload, check, known, now)
        if step.ask is not None and may_ask:
            self._asked_at[workload.uid] = now
            asked = step.ask
            claim = next((one for one in claimed if (one.job, one.attempt) == (asked.job, asked.attempt)), None)
            try:
                answer = await (self._gates.ask(asked) if claim is None else self._gates.follow(claim.gate))
            except HealthdError as error:
                self._trouble.say(f"{workload.key}: {error}")
                return step
            age = 0.0 if claim is None or claim.open else claim.age_seconds
            known = dataclasses.replace(known, answer=answer, age_seconds=age)
            step = judge(workload, check, known, now)
            if step.binding is not None and step.write is None:
                known = dataclasses.replace(known, labels=await self._labels(step.binding.nodes))
                step = judge(workload, check, known, now)
        if step.write is not None and not await self._write(workload, check, step, step.write, now):
            # What was judged is not how it is any more, so nothing is taken from the Workload either.
            return dataclasses.replace(step, keep_all=True, due=now)
        return step

    async def _write(self, workload: Workload, check: AdmissionCheck, step: Step, write: Write, now: float) -> bool:
        """False: the Workload has changed since it was judged."""
        before = workload.state_of(check.name)
        if before is not None and (write.state, write.since) == (before.state, before.since):
            if now - self._said_at.get(workload.uid, -math.inf) < MESSAGE_SECONDS:
                return True
            self._said_at[workload.uid] = now
        if step.binding is not None:
            for node in step.binding.nodes:
                await self._cluster.bind(node, step.binding.gate)
        written = await self._cluster.write_state(workload, check.name, write)
        if written and write.state != "Pending":
            log.info("%s: check %s is %s: %s", workload.key, check.name, write.state, write.message)
        return written

    async def _labels(self, nodes: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        found: dict[str, Mapping[str, str]] = {}
        for node in nodes:
            labels = await self._cluster.labels(node)
            if labels is not None:
                found[node] = labels
        return found

    async def _look_at_nodes(self, queues: Queues, claims: Mapping[str, list[Claim]], now: float) -> None:
        """Look at the nodes of running Workloads, where a check acts on what befalls them."""
        acting = {name for name, check in queues.checks.items() if check.terms.after_admission == "retry"}
        nodes = sorted(
            {
                node
                for workload in queues.workloads.values()
                if workload.admitted and acting & {state.name for state in workload.checks}
                for claim in claims.get(workload_id(workload, queues.cluster), ())
                for node in claim.nodes
            }
        )
        if not nodes:
            self._unfit = {}
            return
        if now - self._looked_at < WATCHED_SECONDS:
            return
        self._looked_at = now
        try:
            self._unfit = await self._gates.unfit(nodes)
        except HealthdError as error:
            self._unfit = {}  # not knowing is no fault
            self._trouble.say(str(error))

    async def _release(self, claims: Iterable[Claim], kept: set[str], now: float) -> None:
        """End the gates that no Workload keeps; their labels go first, or those of the next gate would."""
        over = {claim.gate for claim in claims} - kept
        if over or now - self._labels_seen_at >= LABELS_SECONDS:
            self._labels_seen_at = now
            for node, gate in (await self._cluster.bound()).items():
                if gate not in kept:
                    await self._cluster.unbind(node, gate)
        for gate in sorted(over):
            try:
                await self._gates.release(gate)
                log.info("gate %s is released: no Workload keeps it", gate)
            except HealthdError as error:
                self._trouble.say(f"gate {gate} cannot be released yet: {error}")

    # --- whether the aggregator can be asked ------------------------------------------------------------------------

    def _is_there(self) -> None:
        self._failures = 0
        self._trouble.clear()

    def _is_away(self, error: HealthdError) -> None:
        refused = isinstance(error, RefusedError | ConfigError)
        self._failures = FAILURES if refused else self._failures + 1
        self._trouble.say(str(error))
        self._why = Condition(
            active=False,
            reason="AggregatorRefuses" if refused else "AggregatorUnreachable",
            message=plain(" ".join(str(error).split()), 500),
        )

    async def _write_conditions(self, queues: Queues) -> None:
        for check in queues.checks.values():
            wanted = self._condition(check)
            if wanted is not None and wanted != check.condition:
                await self._cluster.write_condition(check, wanted)

    def _condition(self, check: AdmissionCheck) -> Condition | None:
        """What the condition Active of a check has to be; None: as it is, until more is known."""
        if check.problem:
            return Condition(active=False, reason="BadAnnotation", message=check.problem)
        if self._failures >= FAILURES:
            return self._why
        if self._failures:
            return None
        return Condition(active=True, reason="Active", message="the aggregator answers")
