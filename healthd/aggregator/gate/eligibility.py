"""
Where one node stands for one gate: pure, total, with a sentence for everything that is not "ready".

Never takes not knowing for health, and never calls a node unhealthy for a fault that is not its own.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass

from checks.contract import Status, Tier
from healthd.aggregator.gate import name_resolution
from healthd.aggregator.model import ClaimKind, FleetNode, Gate, Judged, RunStatus, Snapshot
from healthd.aggregator.model.policy import Policy
from healthd.core.evidence import aged, judge_tier, reason
from healthd.core.model import FINAL_STATUSES, Allocation, Health, NodeState, OrderStatus, Reason


class Eligibility(enum.Enum):
    """How a node stands to a gate, the best first."""

    READY = "ready"
    """Fresh evidence says that it is fit."""
    NEEDS_RUN = "needs run"
    """Its evidence must be renewed."""
    RUNNING = "running"
    """A run that this gate ordered is under way on it."""
    UNHEARD = "unheard"
    """Not heard of yet, or only in one direction."""
    BUSY = "busy"
    """Another gate or job has it."""
    EXCLUDED = "excluded"
    """This gate does not take it."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """
    One node for one gate. `reasons` is empty only when READY without warnings.

    `final`: the gate is done with the node (kept in `Gate.failed`). `run_over`: the ordered run needs no listing any
    more. `own`: BUSY with an earlier attempt of the same job. `wake_at`: when this changes if nothing is heard.
    """

    node: str
    eligibility: Eligibility
    reasons: tuple[Reason, ...] = ()
    age_seconds: float | None = None
    address: str | None = None
    final: bool = False
    run_over: bool = False
    own: bool = False
    wake_at: float = math.inf


def judge(node: FleetNode, tier: Tier, max_age_seconds: float, require: tuple[str, ...]) -> Judged:
    """The strict verdict on a node as of now; one without a state is unknown."""
    if node.state is None:
        return Judged(
            health=Health.UNKNOWN,
            reasons=(reason("NotYetRun", "nothing reported yet", node=node.node),),
            age_seconds=None,
        )
    health, reasons, age = judge_tier(aged(node.state, node.behind_seconds), tier, max_age_seconds, require=require)
    return Judged(health=health, reasons=reasons, age_seconds=age)


class JudgeCache:
    """
    `judge` with a memory: the same answers, at the price of a look-up while a node's evidence is the same.

    Judges a state once without a bound of age; while its oldest result is young enough that is also the strict
    answer, and its age the answer's age, which may then be that of a check beyond the tier: never younger than the
    truth. Bounded: the memory is dropped whole when it is full.
    """

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._assess_known: dict[tuple[str, Tier, tuple[str, ...]], tuple[int, Judged, float]] = {}

    def __call__(self, node: FleetNode, tier: Tier, max_age_seconds: float, require: tuple[str, ...]) -> Judged:
        """As `judge`."""
        if node.state is None:
            return judge(node, tier, max_age_seconds, require)
        if node.oldest_seconds is not None and not require and tier in node.judged:
            oldest = node.oldest_seconds + node.behind_seconds
            if not oldest <= max_age_seconds:
                return judge(node, tier, max_age_seconds, require)
            found = node.judged[tier]
            if found.age_seconds is None:
                return found
            return Judged(health=found.health, reasons=found.reasons, age_seconds=oldest)
        key = (node.node, tier, require)
        known = self._assess_known.get(key)
        if known is None or known[0] != node.version:
            if len(self._assess_known) >= self._limit:
                self._assess_known.clear()
            health, reasons, age = judge_tier(node.state, tier, math.inf, require=require)
            oldest = max((r.age_seconds for r in node.state.results), default=0.0)
            oldest = math.inf if any(math.isnan(r.age_seconds) for r in node.state.results) else oldest
            known = (node.version, Judged(health=health, reasons=reasons, age_seconds=age), oldest)
            self._assess_known[key] = known
        judged, counted = known[1], node.oldest_seconds is not None
        oldest = (known[2] if node.oldest_seconds is None else node.oldest_seconds) + node.behind_seconds
        # Results of heavier tiers may be older than what is asked; then only the strict way can tell.
        if not oldest <= max_age_seconds:
            return judge(node, tier, max_age_seconds, require)
        age = judged.age_seconds
        if age is not None:
            age = oldest if counted else age + node.behind_seconds
        return Judged(health=judged.health, reasons=judged.reasons, age_seconds=age)


def assess(gate: Gate, snapshot: Snapshot, policy: Policy, name: str) -> Assessment:
    """Where the node of this name stands for the gate."""
    if name in gate.failed:
        return Assessment(node=name, eligibility=Eligibility.EXCLUDED, reasons=gate.failed[name], final=True)
    node = snapshot.nodes.get(name)
    found = (
        _assess_unknown(gate, snapshot, policy, name) if node is None else _assess_known(gate, snapshot, policy, node)
    )
    if found.eligibility is not Eligibility.EXCLUDED:
        # Also a node that nobody heard of yet may be promised to somebody already.
        found = _claimed_by_other(gate, snapshot, found)
    if found.eligibility is Eligibility.EXCLUDED or node is None or node.heard_seconds is None:
        return found
    # Silence is noticed without being told.
    return dataclasses.replace(
        found, wake_at=min(found.wake_at, snapshot.now + policy.silent_seconds - node.heard_seconds)
    )


def _assess_known(gate: Gate, snapshot: Snapshot, policy: Policy, node: FleetNode) -> Assessment:
    """A node with a name that somebody reported: kept out, away, in use, or as good as its evidence."""
    found = _quarantined_or_duplicate(snapshot.now, node) or _out_of_contact(gate, snapshot, policy, node)
    if found is not None:
        return _with_fault(found, gate, snapshot, policy, node)
    assert node.state is not None  # _away answers for nodes without a state
    found = _by_evidence(gate, snapshot, policy, node, node.state)
    taken = _in_use(gate, node.state)
    # A fault in fresh evidence shows on a busy node too, so that nobody waits for a bad node.
    if taken is None or (found.eligibility is Eligibility.EXCLUDED and not found.final):
        return found
    own = any(le.job == gate.request.job and le.attempt < gate.request.attempt for le in node.state.leases)
    return Assessment(node=node.node, eligibility=Eligibility.BUSY, reasons=(taken,), own=own)


def _with_fault(found: Assessment, gate: Gate, snapshot: Snapshot, policy: Policy, node: FleetNode) -> Assessment:
    """What a rule keeps out: people read first what is wrong with it now, if anything is, then that it is kept out."""
    kept = node.quarantine
    if (
        found.eligibility is not Eligibility.EXCLUDED
        or node.state is None
        or (kept is not None and kept.owner_kind != "rule")
    ):
        return found
    if found.reasons[0].code != "Quarantined":
        return found
    judged = snapshot.judge(node, gate.terms.tier, gate.terms.max_age_seconds, policy.require)
    if judged.health is not Health.UNHEALTHY:
        return found
    return dataclasses.replace(found, reasons=(*judged.reasons, *found.reasons), age_seconds=judged.age_seconds)


def _claimed_by_other(gate: Gate, snapshot: Snapshot, found: Assessment) -> Assessment:
    """BUSY when another gate or job has the node, else as it was found."""
    claim = snapshot.claims.get(found.node)
    if claim is None or claim.gate == gate.id:
        return found
    what, code = ("leased to", "Allocated") if claim.kind is ClaimKind.LEASED else ("reserved by", "Reserved")
    text = f"{found.node} is {what} job {claim.job} attempt {claim.attempt} (gate {claim.gate})"
    own = claim.job == gate.request.job and claim.attempt < gate.request.attempt
    why = reason(code, text, node=found.node)
    return Assessment(node=found.node, eligibility=Eligibility.BUSY, reasons=(why,), own=own)


def _assess_unknown(gate: Gate, snapshot: Snapshot, policy: Policy, name: str) -> Assessment:
    until = gate.since + policy.node_grace_seconds
    settled = snapshot.settling is None and snapshot.recovering is None
    if settled and (unclear := name_resolution.unresolved_text(gate, snapshot, name)):
        return Assessment(
            node=name, eligibility=Eligibility.EXCLUDED, reasons=(reason("UnknownNode", unclear, node=name),)
        )
    if not settled or snapshot.now < until:
        text = f"{name} has never reported; waiting up to {policy.node_grace_seconds:.0f} s for it"
        wake_at = until if until > snapshot.now else math.inf
        return Assessment(
            node=name,
            eligibility=Eligibility.UNHEARD,
            reasons=(reason("UnknownNode", text, node=name),),
            wake_at=wake_at,
        )
    text = f"{name}: no node of this name has ever reported"
    return Assessment(node=name, eligibility=Eligibility.EXCLUDED, reasons=(reason("UnknownNode", text, node=name),))


def _quarantined_or_duplicate(now: float, node: FleetNode) -> Assessment | None:
    """Quarantined or a duplicate: out at once, whatever the evidence."""
    kept = node.quarantine
    if kept is None and node.state is not None and node.state.quarantine is not None:
        # A node may keep itself out by a rule of its own; a person's word is the aggregator's to keep.
        own = node.state.quarantine
        kept = own if own.owner_kind == "rule" else None
    if kept is not None and (kept.until is None or kept.until > now):
        text = f"{node.node} is quarantined by {kept.owner}: {kept.reason}"
        return Assessment(
            node=node.node,
            eligibility=Eligibility.EXCLUDED,
            reasons=(reason("Quarantined", text, node=node.node, status=Status.FAIL),),
            wake_at=kept.until or math.inf,
        )
    if node.duplicate:
        text = (
            f"two daemons call themselves {node.node}: stop the wrong one, then 'healthd fleet forget {node.node}'; "
            "or 'rekey' it where its machine was replaced"
        )
        return Assessment(
            node=node.node, eligibility=Eligibility.EXCLUDED, reasons=(reason("DuplicateNode", text, node=node.node),)
        )
    return None


def _out_of_contact(gate: Gate, snapshot: Snapshot, policy: Policy, node: FleetNode) -> Assessment | None:
    """Silent, not heard since our start, or heard in one direction only."""
    name = node.node
    if node.heard_seconds is None:
        until = gate.since + policy.silent_seconds
        waiting = snapshot.settling is not None or snapshot.recovering is not None or snapshot.now < until
        text = f"{name} has not reported since the aggregator started"
        return Assessment(
            node=name,
            eligibility=Eligibility.UNHEARD if waiting else Eligibility.EXCLUDED,
            reasons=(reason("Silent", text, node=name),),
            wake_at=until if until > snapshot.now else math.inf,
        )
    if node.heard_seconds > policy.silent_seconds:
        text = (
            f"{name} was last heard {node.heard_seconds:.0f} s ago; "
            f"a node may be silent for {policy.silent_seconds:.0f} s"
        )
        return Assessment(node=name, eligibility=Eligibility.EXCLUDED, reasons=(reason("Silent", text, node=name),))
    if not node.confirmed or node.state is None:
        text = f"{name} is heard but has not confirmed an answer yet, so the age of its evidence is not known"
        return Assessment(
            node=name,
            eligibility=Eligibility.UNHEARD,
            reasons=(reason("Silent", text, node=name),),
            wake_at=snapshot.now + policy.silent_seconds - node.heard_seconds,
        )
    return None


def _in_use(gate: Gate, state: NodeState) -> Reason | None:
    """Who has the devices, by the node's own word; our own lease and our own job do not count."""
    if any(lease.gate == gate.id for lease in state.leases):
        return None
    for lease in state.leases:
        text = f"{state.node} still holds a lease of job {lease.job} attempt {lease.attempt}"
        return reason("Allocated", text, node=state.node)
    for allocation in state.allocated:
        if not _is_own_allocation(gate, allocation, state.node):
            text = f"{state.node} is in use (by {allocation.by}: {allocation.holder})"
            return reason("Allocated", text, node=state.node)
    return None


def _is_own_allocation(gate: Gate, allocation: Allocation, node: str) -> bool:
    """The scheduler or a process holds the devices for the very job that asks: a prolog runs inside its allocation."""
    return bool(allocation.holder) and allocation.holder in (gate.request.job, gate.workload_on(node))


def _by_evidence(gate: Gate, snapshot: Snapshot, policy: Policy, node: FleetNode, state: NodeState) -> Assessment:
    name, terms = node.node, gate.terms
    max_age = terms.max_age_seconds
    if name in gate.granted:
        # Under its lease a node is not measured again: what was fresh when the lease was granted stands.
        max_age += snapshot.now - gate.granted[name].granted_at
    run = gate.ordered.get(name)
    if run is not None:
        # What this gate had measured stays good for it while it waits for others.
        max_age = max(max_age, snapshot.now - run.ordered_at)
    judged = snapshot.judge(node, terms.tier, max_age, policy.require)
    if judged.health is Health.UNHEALTHY or (judged.health is Health.DEGRADED and not policy.admit_degraded):
        return Assessment(
            node=name, eligibility=Eligibility.EXCLUDED, reasons=judged.reasons, age_seconds=judged.age_seconds
        )
    if run is not None and run.status is RunStatus.OPEN and name in gate.reserved:
        return _run_in_progress(snapshot.now, gate, policy, node, state, judged)
    if judged.health is not Health.UNKNOWN:
        return _ready(snapshot.now, max_age, judged, state)
    if name in gate.granted:
        return Assessment(node=name, eligibility=Eligibility.EXCLUDED, reasons=judged.reasons, final=True)
    return _needs_run(policy, name, judged, 0 if run is None else run.round)


def _ready(now: float, max_age: float, judged: Judged, state: NodeState, *, run_over: bool = False) -> Assessment:
    return Assessment(
        node=state.node,
        eligibility=Eligibility.READY,
        reasons=judged.reasons,
        age_seconds=judged.age_seconds,
        address=state.address,
        run_over=run_over,
        wake_at=math.inf if judged.age_seconds is None else now + max_age - judged.age_seconds,
    )


def _needs_run(policy: Policy, name: str, judged: Judged, rounds: int, *, run_over: bool = False) -> Assessment:
    if rounds >= policy.max_rounds:
        return Assessment(
            node=name, eligibility=Eligibility.EXCLUDED, reasons=judged.reasons, final=True, run_over=run_over
        )
    return Assessment(node=name, eligibility=Eligibility.NEEDS_RUN, reasons=judged.reasons, run_over=run_over)


def _run_in_progress(
    now: float, gate: Gate, policy: Policy, node: FleetNode, state: NodeState, judged: Judged
) -> Assessment:
    """A run of ours is open: its report decides whether the evidence is that of the run."""
    name, run = node.node, gate.ordered[node.node]
    report = node.orders.get(run.order_id)
    status = report.status if report is not None else None
    if status in FINAL_STATUSES and judged.health is not Health.UNKNOWN:
        return _ready(now, gate.terms.max_age_seconds, judged, state, run_over=True)
    if status == OrderStatus.DONE:
        return Assessment(
            node=name, eligibility=Eligibility.EXCLUDED, reasons=judged.reasons, final=True, run_over=True
        )
    if status is not None and status in FINAL_STATUSES:
        message = report.message if report is not None else ""
        why = reason("Busy", f"{name} did not run tier {gate.terms.tier.value}: {message or status}", node=name)
        judged = Judged(health=judged.health, reasons=(why, *judged.reasons), age_seconds=judged.age_seconds)
        return _needs_run(policy, name, judged, run.round, run_over=True)
    until = run.ordered_at + run.deadline_seconds
    if now >= until:
        text = f"{name} did not finish the ordered run of tier {gate.terms.tier.value} in {run.deadline_seconds:.0f} s"
        return Assessment(
            node=name,
            eligibility=Eligibility.EXCLUDED,
            reasons=(reason("Timeout", text, node=name),),
            final=True,
            run_over=True,
        )
    text = (
        f"{name} runs tier {gate.terms.tier.value}"
        if status == OrderStatus.RUNNING
        else f"{name} is to run tier {gate.terms.tier.value}"
    )
    why = reason("NotYetRun", f"{text} ({judged.reasons[0].message})" if judged.reasons else text, node=name)
    return Assessment(node=name, eligibility=Eligibility.RUNNING, reasons=(why,), wake_at=until)
