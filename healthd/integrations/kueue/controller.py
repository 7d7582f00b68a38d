"""
One pass over all Workloads: judge each, ask gates, label nodes, write checks, release what no Workload keeps.

A pass begins from what Kueue and the aggregator say now, and remembers nothing that a restart would miss. Each thing
that it does may be repeated; a write onto a Workload that has changed meanwhile does nothing, and the next pass judges
anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from checks.printable import some
from healthd.core.errors import ConfigError, HealthdError
from healthd.core.http.client import RefusedError
from healthd.core.model import Claim, Decision, GateRequest
from healthd.core.tasks import LogOnce
from healthd.core.text import counted, moment, plain
from healthd.core.workload import KUEUE
from healthd.integrations.kueue.judge import Answer, Ending, Known, Retried, Step, Write, judge, may_evict, workload_id
from healthd.integrations.kueue.workloads import (
    AdmissionCheck,
    CheckState,
    Condition,
    Flavor,
    GatedPod,
    Terms,
    Workload,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

MESSAGE_SECONDS = 30.0
"""How often the sentence of a gate that holds is written anew: each write goes to etcd, and to every watch."""
MOST_ASKED = 64
"""Gates that are asked in one pass; the others in the next ones, those that waited longest first."""
POLL_SECONDS = 2.0
"""How often open gates are asked."""
LABELS_SECONDS = 60.0
"""How often nodes are looked through for labels of gates that are over, beside when one is released."""
AT_ONCE = 16
"""Nodes that are read or labelled at a time."""
MOST_TROUBLES = 3
"""Failures of one pass that are logged."""
UNREACHABLE, REFUSES = "AggregatorUnreachable", "AggregatorRefuses"
UNKNOWN_POOL = "UnknownPool"
MOST_CHARACTERS = 500
REFUSED_SECONDS = 60.0
"""How long a refusal of a question counts: without quota no Workload would ask again."""
ASK_AGAIN_SECONDS = 50.0
"""When Workloads that have quota ask again after a refusal, before it counts no more."""
OVERDUE_SECONDS = 60.0
"""How long after its grace period a pod may still be there until the controller says so: its kubelet is away then."""
MOST_PROBED = 4
"""Nodes of a reject that are looked at, to see whether one of them is healthy again."""
FAILURES = 3
"""Passes in a row in which the aggregator did not answer until Kueue is told to reserve no more quota."""
INACTIVE_SECONDS = 5.0
"""How long a check is not Active at least. Kueue (0.17) looks at queues once a second: of one that was not active for
less than that it does not see the return, and Workloads that came meanwhile wait until anything else happens."""


class Gates(Protocol):
    """The aggregator; see `healthd.integrations.kueue.gates`. HealthdError where it gives no answer."""

    async def claims(self, prefix: str) -> tuple[Claim, ...]:
        """The open gates and the leases of workloads whose names begin so."""

    async def ask(self, request: GateRequest) -> Answer:
        """Open a gate, or find the same one again."""

    async def follow(self, gate: str) -> Answer:
        """The answer of a gate as it is now."""

    async def release(self, gate: str, nodes: Collection[str] = ()) -> None:
        """Withdraw a gate, or give its nodes back; with `nodes` these alone."""

    async def is_fit(self, node: str) -> bool:
        """Whether a node is known to be healthy now."""


@dataclass(frozen=True, kw_only=True)
class _Refused:
    """The aggregator refused a question with these terms at `at`."""

    terms: Terms
    condition: Condition
    at: float


@dataclass(frozen=True, kw_only=True)
class Queues:
    """What Kueue's objects say now. `cluster` tells this cluster from others."""

    cluster: str
    checks: Mapping[str, AdmissionCheck] = field(default_factory=dict)
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    workloads: Mapping[str, Workload] = field(default_factory=dict)


class Cluster(Protocol):
    """The API server; see `healthd.integrations.kueue.cluster`. HealthdError where it gives no answer."""

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

    async def pods(self, gates: Collection[str]) -> Collection[GatedPod]:
        """The pods that these gates admitted and that have not ended, as they are now."""


def _kept(step: Step, claimed: Iterable[Claim]) -> set[str]:
    """The gates that a Workload keeps after a step."""
    asked = None if step.ask is None else (step.ask.job, step.ask.attempt)  # also where it could not be asked just now
    kept = {claim.gate for claim in claimed if step.keep_all or (claim.job, claim.attempt) == asked}
    return kept if step.keep is None else kept | {step.keep}


def _not_active(error: HealthdError) -> Condition:
    """The condition of checks whose gates cannot be asked."""
    reason = REFUSES if isinstance(error, RefusedError | ConfigError) else UNREACHABLE
    return Condition(active=False, reason=reason, message=plain(" ".join(str(error).split()), MOST_CHARACTERS))


def _ending(claimed: Mapping[str, Claim], pods: Iterable[GatedPod], now: float) -> Iterator[Ending]:
    """The nodes of gates that are over on which pods have not ended, with the pod that should have ended first."""
    told = set()
    for pod in sorted(pods, key=lambda one: (one.ends_at or math.inf, one.name)):
        if (pod.gate, pod.node) in told:
            continue
        told.add((pod.gate, pod.node))
        claim = claimed[pod.gate]
        text = f"{pod.node or 'no node yet'}: pods of job {claim.job} are still ending"
        overdue = pod.ends_at is not None and now >= pod.ends_at + OVERDUE_SECONDS
        if overdue and pod.ends_at is not None:
            text += (
                f"; pod {pod.namespace}/{pod.name} should have ended at {moment(pod.ends_at)}: delete its node if that"
            )
            text += " is gone, or the pod with kubectl delete --force"
        elif pod.ends_at is None:
            text += f"; pod {pod.namespace}/{pod.name} is still running: delete it if it does not end"
        yield Ending(node=pod.node, pool=claim.pool, text=text, overdue=overdue)


async def at_once(calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """The results of calls in their order, some at a time; the first error ends them."""
    results: list[T] = []
    waiting = iter(calls)
    while some := tuple(itertools.islice(waiting, AT_ONCE)):
        results += await asyncio.gather(*some)
    return results


class Controller:
    """See the module."""

    def __init__(self, gates: Gates, cluster: Cluster) -> None:
        self._gates = gates
        self._cluster = cluster
        self._failures = 0
        self._why: Condition | None = None
        self._refused: dict[str, _Refused] = {}  # by the name of the check
        self._inactive_at: dict[str, float] = {}  # by the name of the check: when it was written that it is not Active
        self._unknown_pools: dict[tuple[str, str], str] = {}  # check and pool -> what the aggregator says of it
        self._away = LogOnce(log)
        self._troubles: list[str] = []
        self._trouble = LogOnce(log)
        self._said_at: dict[str, float] = {}  # UID -> when the sentence of its gate was written
        self._asked_at: dict[str, float] = {}  # UID -> when its gate was asked last
        self._retried: dict[str, Retried] = {}  # UID -> its last Retry
        self._ending: tuple[Ending, ...] = ()
        self._overdue = ""
        self._late = LogOnce(log)
        self._labels_seen_at = -math.inf

    async def run_pass(self, queues: Queues, now: float) -> float:
        """
        One pass; how many seconds later something is due without a change.

        While the aggregator does not answer nothing is released and nobody is admitted. What fails for one Workload
        is tried again in the next pass, and keeps no other one waiting.
        """
        try:
            claims: tuple[Claim, ...] | None = await self._gates.claims(f"{KUEUE}{queues.cluster}/")
            self._is_there()
        except HealthdError as error:
            claims = None
            self._is_away(error)
        conditions_due = await self._write_conditions(queues, now)
        of_workload: dict[str, list[Claim]] = {}
        for claim in claims or ():
            of_workload.setdefault(claim.workload, []).append(claim)
        kept: set[str] = set()
        due = min(conditions_due, math.inf if claims is not None else POLL_SECONDS)
        left = MOST_ASKED if claims is not None else 0
        for workload in sorted(queues.workloads.values(), key=self._turn):
            claimed = of_workload.get(workload_id(workload, queues.cluster), [])
            names = [state.name for state in workload.checks if state.name in queues.checks]
            if not names and workload.admitted and not workload.finished:
                kept.update(claim.gate for claim in claimed)  # its check was deleted while it runs
            for name in names:
                step = await self._one(workload, queues.checks[name], queues, claimed, left > 0, now)
                left -= step.ask is not None
                due = min(due, step.due - now, POLL_SECONDS if step.ask is not None else math.inf)
                kept |= _kept(step, claimed)
        if claims is not None and await self._release(claims, kept, now):
            due = min(due, POLL_SECONDS)
        self._forget(queues)
        self._log_troubles()
        return due

    def _log_troubles(self) -> None:
        """What failed in this pass, in one line, where it is another one than before."""
        if self._troubles:
            self._trouble.say(some(sorted(self._troubles), MOST_TROUBLES))
        else:
            self._trouble.clear()
        self._troubles.clear()

    def _forget(self, queues: Queues) -> None:
        """Drop what is remembered of Workloads that are gone."""
        named = {flavor.pool for flavor in queues.flavors.values()}
        for key in [key for key in self._unknown_pools if key[0] not in queues.checks or key[1] not in named]:
            del self._unknown_pools[key]
        for name in self._inactive_at.keys() - queues.checks.keys():
            del self._inactive_at[name]
        known = {workload.uid for workload in queues.workloads.values()}
        memories: tuple[dict[str, float] | dict[str, Retried], ...] = (self._said_at, self._asked_at, self._retried)
        for memory in memories:
            for uid in memory.keys() - known:
                del memory[uid]

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
        known = Known(
            flavors=queues.flavors,
            ours=frozenset(queues.checks),
            cluster=queues.cluster,
            ending=self._ending,
            refused=self._refusal(check, now, ASK_AGAIN_SECONDS),
            retried=self._retried.get(workload.uid),
        )
        step = Step(keep_all=True)
        try:
            if any(claim.unfit for claim in claimed):
                known = dataclasses.replace(known, unfit=await self._unfit(workload, check, claimed))
            waits = may_ask and self._waits_for_recovery(workload, check)
            if waits:
                known = dataclasses.replace(known, recovered=await self._recovered(workload))
            step = judge(workload, check, known, now)
            if waits:
                step = dataclasses.replace(step, due=now + POLL_SECONDS)
            if step.ask is not None and may_ask:
                step = await self._asked(workload, check, known, step.ask, claimed, now)
            if step.write is not None and not await self._write(workload, check, step, step.write, now):
                # What was judged is not how it is any more, so nothing is taken from the Workload either.
                return dataclasses.replace(step, keep_all=True, due=now)
        except HealthdError as error:
            self._troubles.append(f"{workload.key}: {error}")
            return dataclasses.replace(step, keep_all=True, due=now + POLL_SECONDS)
        return step

    async def _asked(
        self,
        workload: Workload,
        check: AdmissionCheck,
        known: Known,
        request: GateRequest,
        claimed: list[Claim],
        now: float,
    ) -> Step:
        """The step that the answer of the gate leads to. HealthdError."""
        self._asked_at[workload.uid] = now
        claim = next((one for one in claimed if (one.job, one.attempt) == (request.job, request.attempt)), None)
        try:
            answer = await (self._gates.ask(request) if claim is None else self._gates.follow(claim.gate))
        except RefusedError as error:
            refused = _Refused(terms=check.terms, condition=_not_active(error), at=now)
            self._refused[check.name] = refused
            self._away.say(f"AdmissionCheck {check.name}: {refused.condition.message}")
            kept = judge(workload, check, dataclasses.replace(known, refused=refused.condition.message), now)
            return dataclasses.replace(kept, keep_all=True)
        self._refused.pop(check.name, None)
        self._note_pool(check, request, answer)
        age = 0.0 if claim is None or claim.open else claim.age_seconds
        known = dataclasses.replace(known, answer=answer, age_seconds=age)
        step = judge(workload, check, known, now)
        if step.binding is None or step.write is not None:
            return step
        nodes = step.binding.nodes
        found = await at_once(self._cluster.labels(node) for node in nodes)
        labels = {node: one for node, one in zip(nodes, found, strict=True) if one is not None}
        return judge(workload, check, dataclasses.replace(known, labels=labels), now)

    async def _write(self, workload: Workload, check: AdmissionCheck, step: Step, write: Write, now: float) -> bool:
        """False: the Workload has changed since it was judged."""
        before = workload.state_of(check.name)
        if before is not None and (write.state, write.since) == (before.state, before.since):
            if now - self._said_at.get(workload.uid, -math.inf) < MESSAGE_SECONDS:
                return True
            self._said_at[workload.uid] = now
        if step.binding is not None:
            await at_once(self._cluster.bind(node, step.binding.gate) for node in step.binding.nodes)
        written = await self._cluster.write_state(workload, check.name, write)
        if written:
            self._note(workload, before, write)
        if written and write.state != "Pending":
            log.info("%s: check %s is %s: %s", workload.key, check.name, write.state, write.message)
        return written

    def _note(self, workload: Workload, before: CheckState | None, write: Write) -> None:
        """Remember a Retry, for the next one; a Ready, or a Retry that was taken back, ends the row."""
        last = self._retried.pop(workload.uid, None)
        if write.state == "Retry":
            times = last.times if last is not None and last.cause == write.cause else 0
            self._retried[workload.uid] = Retried(cause=write.cause, times=times + 1, bad=write.bad)
        elif last is not None and write.state == "Pending" and before is not None and before.state == "Pending":
            self._retried[workload.uid] = last

    async def _unfit(self, workload: Workload, check: AdmissionCheck, claimed: Collection[Claim]) -> Mapping[str, str]:
        """
        What is wrong with the nodes of a Ready that Kueue has not acted on, and with those of a running Workload that
        may be evicted: nodes on which its pods run; all, where they have other names there.
        """
        state = workload.state_of(check.name)
        if not workload.admitted and state is not None and state.state == "Ready":
            return next((claim.unfit for claim in claimed if claim.gate == state.gate), {})
        if not may_evict(workload, check):
            return {}
        places = {pod.node for pod in await self._cluster.pods([claim.gate for claim in claimed])}
        same_names = not places.isdisjoint(node for claim in claimed for node in claim.nodes)
        unfit = {node: text for claim in claimed for node, text in claim.unfit.items()}
        return {node: text for node, text in unfit.items() if places and (node in places or not same_names)}

    def _waits_for_recovery(self, workload: Workload, check: AdmissionCheck) -> bool:
        """Whether a Retry because of bad nodes was written that Kueue has not acted on."""
        state, last = workload.state_of(check.name), self._retried.get(workload.uid)
        reserved = workload.reserved_at is not None and not (workload.admitted or workload.evicted)
        return reserved and state is not None and state.state == "Retry" and last is not None and bool(last.bad)

    async def _recovered(self, workload: Workload) -> bool:
        """Whether a node for which the last gate of a Workload was rejected is healthy again. HealthdError."""
        last = self._retried[workload.uid]
        return any(await at_once(self._gates.is_fit(node) for node in last.bad[:MOST_PROBED]))

    async def _release(self, claims: Iterable[Claim], kept: set[str], now: float) -> bool:
        """
        End the gates that no Workload keeps; their labels go first, or those of the next gate would. A node whose pods
        have not ended stays leased. Returns whether there are such nodes.
        """
        claimed = {claim.gate: claim for claim in claims if claim.gate not in kept}
        over = claimed.keys()
        try:
            if over or now - self._labels_seen_at >= LABELS_SECONDS:
                bound = await self._cluster.bound()
                await at_once(self._cluster.unbind(node, gate) for node, gate in bound.items() if gate not in kept)
                self._labels_seen_at = now
            listed = await self._cluster.pods(over) if over else ()
            # Anyone may set a label: only pods beside the Workload count.
            pods = [pod for pod in listed if claimed[pod.gate].job.startswith(f"{pod.namespace}/")]
            for gate in sorted(over):
                await self._give_back(claimed[gate], {pod.node for pod in pods if pod.gate == gate})
            ending = tuple(_ending(claimed, pods, now))
            if ending != self._ending:
                self._ending = ending
                self._said_at.clear()  # what others wait for is another thing now
                self._say_overdue()
        except HealthdError as error:
            self._troubles.append(f"{counted(len(over), 'gate')} cannot be released yet: {error}")
        return bool(self._ending)

    def _say_overdue(self) -> None:
        """Pods that should have ended long ago hold nodes: in the log once, and in the condition of the checks."""
        overdue = [one.text for one in self._ending if one.overdue]
        self._overdue = "; ".join(overdue[:MOST_TROUBLES])
        if overdue:
            self._late.say(self._overdue)
        else:
            self._late.clear()

    async def _give_back(self, claim: Claim, in_use: set[str]) -> None:
        """End a gate on those of its nodes that are not in use any more. HealthdError."""
        if not in_use:
            await self._gates.release(claim.gate)
            log.info("gate %s is released: no Workload needs it", claim.gate)
        elif in_use <= set(claim.nodes) and (free := [node for node in claim.nodes if node not in in_use]):
            await self._gates.release(claim.gate, free)
            log.info("gate %s is released on %s: its pods there have ended", claim.gate, some(free, MOST_TROUBLES))

    # --- whether the aggregator can be asked ------------------------------------------------------------------------

    def _is_there(self) -> None:
        self._failures = 0
        self._away.clear()

    def _is_away(self, error: HealthdError) -> None:
        self._why = _not_active(error)
        self._failures = FAILURES if self._why.reason == REFUSES else self._failures + 1
        self._away.say(str(error))

    async def _write_conditions(self, queues: Queues, now: float) -> float:
        """How many seconds later a check may be Active again; infinite where none waits for that."""
        due = math.inf
        for check in queues.checks.values():
            wanted = self._condition(check, now)
            if wanted is None or wanted == check.condition:
                continue
            left = self._inactive_at.get(check.name, -math.inf) + INACTIVE_SECONDS - now
            if wanted.active and left > 0:
                due = min(due, left)
                continue
            try:
                await self._cluster.write_condition(check, wanted)
            except HealthdError as error:
                self._troubles.append(f"AdmissionCheck {check.name}: {error}")
                continue
            if not wanted.active and (check.condition is None or check.condition.active):
                self._inactive_at[check.name] = now
        return due

    def _refusal(self, check: AdmissionCheck, now: float, seconds: float) -> str:
        """What the aggregator said when it refused a question with these terms, for so long; else empty."""
        last = self._refused.get(check.name)
        stands = last is not None and last.terms == check.terms and now - last.at < seconds
        return last.condition.message if last is not None and stands else ""

    def _note_pool(self, check: AdmissionCheck, request: GateRequest, answer: Answer) -> None:
        """Remember what the aggregator says of a pool that it does not know."""
        if request.pool is None or not isinstance(answer, Decision):
            return
        self._unknown_pools.pop((check.name, request.pool), None)
        if unknown := next((one.message for one in answer.reasons if one.code == UNKNOWN_POOL), ""):
            self._unknown_pools[check.name, request.pool] = unknown

    def _condition(self, check: AdmissionCheck, now: float) -> Condition | None:
        """What the condition Active of a check has to be; None: as it is, until more is known."""
        if check.problem:
            return Condition(active=False, reason="BadAnnotation", message=check.problem)
        if self._failures >= FAILURES:
            return self._why
        if self._failures:
            return None
        if self._refusal(check, now, REFUSED_SECONDS):
            return self._refused[check.name].condition
        if unknown := [text for (name, _), text in sorted(self._unknown_pools.items()) if name == check.name]:
            return Condition(active=True, reason="UnknownPool", message=plain("; ".join(unknown), MOST_CHARACTERS))
        if self._overdue:
            return Condition(active=True, reason="PodsOverdue", message=plain(self._overdue, MOST_CHARACTERS))
        return Condition(active=True, reason="Active", message="the aggregator answers")
