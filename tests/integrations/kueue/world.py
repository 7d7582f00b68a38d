"""
Kueue, an aggregator and nodes in memory, for the controller: every call may fail, and everything may happen between two
calls. It notes what must never be: an admission by a gate that was not asked for this reservation of quota.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from healthd.core.errors import UnreachableError
from healthd.core.model import AdmittedNode, Claim, Decision, GateRequest, Reason, Verdict
from healthd.integrations.kueue.cluster import state_object
from healthd.integrations.kueue.controller import LABELS_SECONDS, Controller, Queues
from healthd.integrations.kueue.judge import READY_SECONDS, Answer, Refusal, Write
from healthd.integrations.kueue.workloads import (
    AdmissionCheck,
    Condition,
    Flavor,
    GatedPod,
    Terms,
    Workload,
    parse_workload,
)
from tests.integrations.kueue import player

POOL = "a"
SETTLE_ROUNDS = 40
LABELS = {"flavor": "trn"}


class KilledError(Exception):
    """The controller is killed at this call."""


@dataclass
class HeldGate:
    request: GateRequest
    epoch: tuple[str, int]
    """The reservation that the Workload had when it was asked."""
    verdict: Verdict = Verdict.HOLD
    retryable: bool = True
    nodes: tuple[str, ...] = ()
    decided_at: float = 0.0
    over: bool = False
    """Withdrawn, superseded, or given back."""
    given_back: set[str] = field(default_factory=set)
    pods: set[str] = field(default_factory=set)
    """The nodes on which its pods have not ended."""

    @property
    def leased(self) -> tuple[str, ...]:
        return () if self.over else tuple(node for node in self.nodes if node not in self.given_back)


@dataclass
class World:
    """See the module. `nodes` are those of the pool; `slots` how many Workloads have quota at once."""

    rng: random.Random
    nodes: tuple[str, ...] = ("n1", "n2", "n3", "n4")
    slots: int = 1
    terms: Terms = field(default_factory=Terms)
    now: float = 1_800_000_000.0
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)  # UID -> how many reservations it has had
    gates: dict[str, HeldGate] = field(default_factory=dict)
    labelled: dict[str, str] = field(default_factory=dict)
    condition: Condition | None = None
    wrong: list[str] = field(default_factory=list)
    unfit_nodes: dict[str, str] = field(default_factory=dict)
    grace_ends_at: float = 0.0
    foreign: tuple[GatedPod, ...] = ()
    """When the grace period of all pods that are ending is over."""
    failing: float = 0.0
    killing: float = 0.0
    moving: float = 0.0
    hasty: bool = False
    """Gates admit at once."""
    _version: int = 1
    _read: dict[str, Workload] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.controller = Controller(self, self)
        self._seen = dict(self.objects)

    # --- Kueue ------------------------------------------------------------------------------------------------------

    def put(self, found: dict[str, Any]) -> None:
        """Store an object as its next version."""
        key = f"{found['metadata']['namespace']}/{found['metadata']['name']}"
        before = self.objects.get(key)
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = found
        uid = found["metadata"]["uid"]
        if player.holds(found, "QuotaReserved") and not (before and player.holds(before, "QuotaReserved")):
            self.epochs[uid] = self.epochs.get(uid, 0) + 1
        if player.holds(found, "Admitted") and not (before and player.holds(before, "Admitted")):
            self._check_admission(found)

    def submit(self, name: str, uid: str, **more: Any) -> None:
        self.put(player.workload(name, uid, **more))

    def free_quota(self) -> bool:
        taken = sum(map(reserved, self.objects.values()))
        return taken < self.slots

    def kueue(self) -> str | None:
        """One move of Kueue, of those that it may do; what it was."""
        choices = []
        for found in self.objects.values():
            for move, after in player.moves(found, self.now, quota=self.free_quota()).items():
                choices.append((move, after))
        if not choices:
            return None
        move, after = self.rng.choice(choices)
        self.put(after)
        return move

    def people(self) -> str | None:
        """Something that jobs, people and other Workloads do."""
        if not self.objects:
            return None
        key = self.rng.choice(sorted(self.objects))
        after = player.copied(self.objects[key])
        reserved = player.holds(after, "QuotaReserved") and not player.holds(after, "Evicted")
        over = player.holds(after, "Finished")
        what = self.rng.choice(("preempt", "deactivate", "activate", "finish", "delete"))
        if what == "preempt" and reserved and not over:
            player.preempted(after, self.now)
        elif what == "deactivate" and after["spec"]["active"] and not over:
            player.activated(after, active=False)
        elif what == "activate" and not after["spec"]["active"]:
            player.activated(after, active=True)
        elif what == "finish" and player.holds(after, "Admitted") and not over:
            player.finished(after, self.now)
        elif what == "delete" and self.rng.random() < 0.3:
            del self.objects[key]
            return what
        else:
            return None
        self.put(after)
        return what

    def _check_admission(self, found: dict[str, Any]) -> None:
        """The promise: what admits is an answer that was given for this very reservation, lately, and stands."""
        key, uid = found["metadata"]["name"], found["metadata"]["uid"]
        state = player.check_of(found)
        update = next(iter(state.get("podSetUpdates", ())), {})
        gate = self.gates.get(update.get("annotations", {}).get("healthd.internal/gate", ""))
        if gate is None:
            self.wrong.append(f"{key} was admitted without a gate: {state}")
        elif gate.epoch != (uid, self.epochs[uid]):
            self.wrong.append(f"{key} was admitted by a gate of reservation {gate.epoch}, and has {self.epochs[uid]}")
        elif gate.verdict is not Verdict.ADMIT or gate.over:
            self.wrong.append(f"{key} was admitted by a gate that does not admit: {gate}")
        elif any(self.labelled.get(node) != self.id_of(gate) for node in gate.nodes):
            self.wrong.append(f"{key} was admitted before its nodes {gate.nodes} were labelled: {self.labelled}")
        else:
            for other in self.gates.values():
                if shared := other.pods & set(gate.nodes):
                    self.wrong.append(f"{key} was admitted on {shared}, where pods of {other.request.job} are ending")
            gate.pods = set(gate.nodes)

    def end_pods(self, job: str, *nodes: str) -> None:
        """Pods of a job have ended on these nodes; on all where none is named."""
        for gate in self.gates.values():
            if gate.request.job == job:
                gate.pods -= set(nodes or gate.pods)

    def _is_ending(self, gate: HeldGate) -> bool:
        """Whether the pods of a gate are on their way out: their Workload has lost its quota, has ended or is gone."""
        for found in self.objects.values():
            if (found["metadata"]["uid"], self.epochs.get(found["metadata"]["uid"])) == gate.epoch:
                return not player.holds(found, "Admitted") or player.holds(found, "Finished")
        return True

    def id_of(self, gate: HeldGate) -> str:
        return next(one for one, held in self.gates.items() if held is gate)

    def queues(self, *, fresh: bool) -> Queues:
        """What the controller sees: all, or what it saw before (its watch is late)."""
        if fresh:
            self._seen = dict(self.objects)
        return Queues(
            cluster="c",
            checks={
                player.CHECK: AdmissionCheck(
                    name=player.CHECK, generation=1, terms=self.terms, condition=self.condition
                )
            },
            flavors={"trn": Flavor(name="trn", labels=LABELS, pool=POOL)},
            workloads={key: self._parsed(found) for key, found in self._seen.items()},
        )

    def _parsed(self, found: dict[str, Any]) -> Workload:
        version = found["metadata"]["resourceVersion"]
        if version not in self._read:
            self._read[version] = parse_workload(found)
        return self._read[version]

    # --- what may go wrong at each call -----------------------------------------------------------------------------

    def _call(self) -> None:
        chance = self.rng.random()
        if chance < self.killing:
            raise KilledError
        if chance < self.killing + self.failing:
            raise UnreachableError("away")
        if chance > 1 - self.moving:
            self.kueue()

    # --- the aggregator ---------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Gates go on: those that hold are decided, nodes end leases by themselves."""
        for name, gate in self.gates.items():
            if gate.over or gate.verdict is not Verdict.HOLD:
                continue
            busy = {node for other in self.gates.values() for node in other.leased}
            free = [node for node in self.nodes if node not in busy and node not in self.unfit_nodes]
            if gate.request.nodes:  # about nodes that turned bad
                gate.verdict = Verdict.REJECT
                continue
            chance = 0.0 if self.hasty else self.rng.random()
            if chance < 0.5 and len(free) >= (gate.request.count or 0):
                gate.verdict, gate.decided_at = Verdict.ADMIT, self.now
                gate.nodes = tuple(free[: gate.request.count])
            elif chance > 0.9:
                gate.verdict, gate.retryable = Verdict.REJECT, chance < 0.97
            assert name
        for gate in self.gates.values():
            if not self.hasty and self._is_ending(gate):
                gate.pods = {node for node in gate.pods if self.rng.random() < 0.5}

    async def claims(self, prefix: str) -> tuple[Claim, ...]:
        self._call()
        return tuple(
            Claim(
                gate=name,
                job=gate.request.job,
                attempt=gate.request.attempt,
                workload=str(gate.request.workload),
                open=gate.verdict is Verdict.HOLD,
                nodes=gate.leased,
                age_seconds=self.now - gate.decided_at,
                pool=POOL,
                unfit={node: text for node, text in self.unfit_nodes.items() if node in gate.leased},
            )
            for name, gate in self.gates.items()
            if not gate.over and gate.verdict is not Verdict.REJECT and str(gate.request.workload).startswith(prefix)
        )

    async def ask(self, request: GateRequest) -> Answer:
        self._call()
        of_job = {name: gate for name, gate in self.gates.items() if gate.request.job == request.job}
        for name, gate in of_job.items():
            if gate.request.attempt == request.attempt:
                if gate.request != request or (gate.over and gate.nodes):
                    return Refusal(message="asked before with another request, or its lease has ended", again=True)
                return self._answer(name)
        name = f"g-{len(self.gates) + 1}"
        newest = max((gate.request.attempt for gate in of_job.values()), default=-1)
        uid = str(request.workload).rpartition("/")[2]
        gate = self.gates[name] = HeldGate(request=request, epoch=(uid, self.epochs.get(uid, 0)))
        if newest > request.attempt:
            gate.verdict, gate.over = Verdict.REJECT, True
        else:
            for other in of_job.values():
                other.over = other.over or other.verdict is not Verdict.ADMIT
        if self.hasty:
            self.turn()
        return self._answer(name)

    async def follow(self, gate: str) -> Answer:
        self._call()
        return self._answer(gate) if gate in self.gates else Refusal(message="no such gate", again=True)

    def _answer(self, name: str) -> Decision:
        gate = self.gates[name]
        verdict = Verdict.REJECT if gate.over and gate.verdict is Verdict.HOLD else gate.verdict
        said = "it takes its time" if verdict is Verdict.HOLD else "two are bad"
        return Decision(
            id=name,
            decision=verdict,
            reasons=() if verdict is Verdict.ADMIT else (sentence(said),),
            nodes=tuple(AdmittedNode(node=node, evidence_age_seconds=1.0) for node in gate.nodes),
            excluded=(),
            policy={},
            retryable=gate.retryable,
            decided_at=gate.decided_at,
            duration_seconds=1.0,
            request=gate.request,
        )

    async def release(self, gate: str, nodes: Collection[str] = ()) -> None:
        self._call()
        held = self.gates[gate]
        held.given_back.update(nodes)
        held.over = held.over or not nodes or not held.leased

    async def is_fit(self, node: str) -> bool:
        self._call()
        return node not in self.unfit_nodes

    # --- the API server ---------------------------------------------------------------------------------------------

    async def write_state(self, workload: Workload, check: str, write: Write) -> bool:
        self._call()
        known = self.objects.get(workload.key)
        if known is None or known["metadata"]["resourceVersion"] != workload.version:
            return False
        after = player.copied(known)
        entry = player.check_of(after, check)
        for key in ("podSetUpdates", "requeueAfterSeconds"):
            entry.pop(key, None)
        entry.update(state_object(check, write))
        self.put(after)
        return True

    async def write_condition(self, check: AdmissionCheck, condition: Condition) -> None:
        self._call()
        self.condition = condition

    async def labels(self, node: str) -> Mapping[str, str] | None:
        self._call()
        return LABELS if node in self.nodes else None

    async def bind(self, node: str, gate: str) -> None:
        self._call()
        self.labelled[node] = gate

    async def bound(self) -> Mapping[str, str]:
        self._call()
        return dict(self.labelled)

    async def pods(self, gates: Collection[str]) -> tuple[GatedPod, ...]:
        self._call()
        return self.foreign + tuple(
            GatedPod(
                namespace="default",
                name=f"pod-{node}",
                gate=name,
                node=node,
                ends_at=self.grace_ends_at if self._is_ending(gate) else None,
            )
            for name, gate in self.gates.items()
            if name in gates
            for node in sorted(gate.pods)
        )

    async def unbind(self, node: str, gate: str) -> None:
        self._call()
        if self.labelled.get(node) == gate:
            del self.labelled[node]

    # --- the controller ---------------------------------------------------------------------------------------------

    async def run_pass(self, *, fresh: bool = True) -> None:
        """One pass; one that is killed begins anew without memory."""
        try:
            await self.controller.run_pass(self.queues(fresh=fresh), self.now)
        except KilledError:
            self.controller = Controller(self, self)
            self._seen = dict(self.objects)

    async def settle(self) -> None:
        """Nothing fails any more, and time goes on until each Workload runs, waits for one that does, or is over."""
        self.failing = self.killing = self.moving = 0.0
        self.unfit_nodes.clear()
        self.hasty = True
        for _ in range(SETTLE_ROUNDS):
            for gate in filter(self._is_ending, self.gates.values()):
                gate.pods.clear()
            self.turn()
            await self.run_pass()
            while self.kueue() is not None:
                pass
            waiting = [one for one in self.objects.values() if unsettled(one)]
            if not any(map(reserved, waiting)) and not (waiting and self.free_quota()):
                break
            self.now += self.rng.choice((1.0, READY_SECONDS, 301.0))
        self.now += LABELS_SECONDS
        await self.run_pass()

    def held(self) -> list[str]:
        return [name for name, gate in self.gates.items() if not gate.over and gate.verdict is not Verdict.REJECT]


def reserved(found: dict[str, Any]) -> bool:
    return player.holds(found, "QuotaReserved") and not player.holds(found, "Finished")


def unsettled(found: dict[str, Any]) -> bool:
    """Whether something is still to happen to a Workload; one that runs, or that nobody wants to run, is settled."""
    if player.holds(found, "Finished"):
        return False
    admitted = player.holds(found, "Admitted") and not player.holds(found, "Evicted")
    state = player.check_of(found).get("state")
    if not found["spec"]["active"]:
        return reserved(found)
    return not admitted or state != "Ready"


def sentence(text: str) -> Reason:
    """A reason of a gate."""
    from healthd.core.evidence import reason

    return reason("NotYetRun", text)
