"""
Assesses one node for one gate. Pure and total, with a sentence for everything that is not "ready".

It never takes missing evidence for health, and never calls a node unhealthy for a fault that is not its own.

Also here:

- resolves the names by which a gate asks for its nodes. Pure. A scheduler may call a node by another name than its
  daemon.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from checks.contract import Status, Tier
from healthd.aggregator.fleet.records import FleetNode, moved_text
from healthd.aggregator.gate.records import ClaimKind, Gate, RunStatus, Snapshot
from healthd.aggregator.policy import Policy
from healthd.core.evidence import Judged, aged, judge_tier, reason
from healthd.core.model import FINAL_STATUSES, Allocation, Health, NodeState, OrderStatus, Reason
from healthd.core.text import span
from healthd.core.workload import names_of

MOST_RUNS = 3
"""How many runs one gate may order on one node until it gives the node back. Three: its evidence may age while others
are waited for."""
MOST_NAMED = 32
"""Names that get a sentence each: as many as the reasons at the top of a decision."""


def resolve_names(gate: Gate, snapshot: Snapshot) -> Gate:
    """The gate with own names in place of other names of nodes; the same gate where there are none."""
    if gate.request.join is not None or snapshot.settling is not None or snapshot.recovering is not None:
        return gate
    wanted = set(gate.request.nodes)
    own: dict[str, str] = {}
    for name in gate.request.nodes:
        if name in snapshot.nodes:
            continue
        found = snapshot.called.get(name, ())
        if len(found) == 1 and found[0] not in wanted:
            own[name] = found[0]
            wanted.add(found[0])
    if not own:
        return gate
    nodes = tuple(own.get(name, name) for name in gate.request.nodes)
    asked = {**gate.asked, **{node: name for name, node in own.items()}}
    return dataclasses.replace(gate, request=dataclasses.replace(gate.request, nodes=nodes), asked=asked)


def names_found(gate: Gate, called: Callable[[str], Sequence[str]], heard: Collection[str]) -> bool:
    """Whether a node that was just heard is known by a name that the gate has not resolved; `called` tells by which."""
    if gate.decision is not None or not heard or gate.request.join is not None:
        return False
    return any(
        name not in heard and one != name and one in heard for name in gate.request.nodes for one in called(name)
    )


def unknown_node_reasons(gate: Gate, snapshot: Snapshot, names: Iterable[str]) -> tuple[Reason, ...]:
    """A reason for each name that no node has, with the nearest known names or why it cannot be resolved."""
    known = list(snapshot.nodes)
    reasons: list[Reason] = []
    for name in sorted(names)[:MOST_NAMED]:
        # Looking for near names takes time in a large fleet; the first few show what kind of mistake it is.
        near = difflib.get_close_matches(name, known, n=3) if len(reasons) < 3 else []
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        text = unresolved_text(gate, snapshot, name) or f"{name}: no node of this name has ever reported{hint}"
        reasons.append(reason("UnknownNode", text, node=name))
    return tuple(reasons)


def assess(gate: Gate, snapshot: Snapshot, policy: Policy, name: str) -> Assessment:
    """The node of this name, as the gate sees it."""
    if name in gate.failed:
        return Assessment(node=name, eligibility=Eligibility.EXCLUDED, reasons=gate.failed[name], final=True)
    node = snapshot.nodes.get(name)
    found = (
        _assess_unknown(gate, snapshot, policy, name) if node is None else _assess_known(gate, snapshot, policy, node)
    )
    if found.eligibility is not Eligibility.EXCLUDED:
        # A node that has never reported may be reserved for another gate already.
        found = _removed(gate, snapshot, _claimed_by_other(gate, snapshot, found))
    if found.eligibility is Eligibility.EXCLUDED or node is None or node.heard_seconds is None:
        return found
    # Nothing is heard when a node falls silent, so look again at that time.
    return dataclasses.replace(
        found, wake_at=min(found.wake_at, snapshot.now + policy.silent_seconds - node.heard_seconds)
    )


def unresolved_text(gate: Gate, snapshot: Snapshot, name: str) -> str:
    """Why a name cannot be resolved; empty where no node is known by it."""
    nodes = snapshot.called.get(name, ())
    if len(nodes) > 1:
        return ambiguous_text(name, nodes)
    if len(nodes) == 1 and nodes[0] != name and nodes[0] in gate.request.nodes:
        also = f", as {gate.asked[nodes[0]]}" if nodes[0] in gate.asked else ""
        return f"{name} is another name of {nodes[0]}, which was also requested{also}; name each node once"
    return ""


def ambiguous_text(name: str, nodes: Sequence[str]) -> str:
    """Why a name by which several nodes are known cannot be resolved."""
    rest = f" and {len(nodes) - 2} more" if len(nodes) > 2 else ""
    text = f"{name}: {nodes[0]} and {nodes[1]}{rest} both have this name"
    return f"{text}; use the node's own name, or correct the aliases"


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """One node, as one gate sees it. `reasons` is empty only for a READY node without warnings."""

    node: str
    eligibility: Eligibility
    reasons: tuple[Reason, ...] = ()
    age_seconds: float | None = None
    """The age of the oldest result that was counted; None where nothing was counted."""
    address: str | None = None
    """Where the node can be reached, as it says itself."""
    final: bool = False
    """The gate has excluded the node for good, see `Gate.failed`."""
    run_over: bool = False
    """The run that the gate ordered is over and need not be listed any more."""
    own: bool = False
    """BUSY with an earlier attempt of the same job."""
    wake_at: float = math.inf
    """When this changes if nothing is heard."""


class Eligibility(enum.Enum):
    """Whether a gate can use a node, the best first."""

    READY = "ready"
    """Fresh evidence says that it is fit."""
    NEEDS_RUN = "needs run"
    """Its evidence must be renewed."""
    RUNNING = "running"
    """A run that this gate ordered is under way on it."""
    UNHEARD = "unheard"
    """Not heard of yet, or only in one direction."""
    BUSY = "busy"
    """Another gate or job has it, or it is out of the scheduler's way for a while."""
    EXCLUDED = "excluded"
    """This gate does not take it."""


def judge(node: FleetNode, tier: Tier, max_age_seconds: float, require: tuple[str, ...]) -> Judged:
    """
    What the evidence of a node says of a tier as of now: as `judge_tier`, at the price of a look-up where it can be.

    While even the oldest result is young enough, the verdict that leaves ages out is also the strict one; it is
    remembered with the evidence. Its age is then that of the oldest result, which may belong to a heavier tier, so it
    is never younger than the truth.
    """
    if node.state is None:
        why = reason("NotYetRun", "nothing reported yet", node=node.node)
        return Judged(health=Health.UNKNOWN, reasons=(why,), age_seconds=None)
    oldest = math.nan if node.oldest_seconds is None else node.oldest_seconds + node.behind_seconds
    if not oldest <= max_age_seconds:  # also where nobody counted
        return judge_tier(aged(node.state, node.behind_seconds), tier, max_age_seconds, require=require)
    found = node.judged.get((tier, require))
    if found is None:
        found = node.judged[tier, require] = judge_tier(node.state, tier, math.inf, require=require)
    return found if found.age_seconds is None else found._replace(age_seconds=oldest)


def _out(
    name: str,
    code: str,
    text: str,
    *,
    status: Status = Status.UNKNOWN,
    wake_at: float = math.inf,
    injected: bool = False,
) -> Assessment:
    """EXCLUDED for one reason."""
    why = reason(code, text, node=name, status=status, injected=injected)
    return Assessment(node=name, eligibility=Eligibility.EXCLUDED, reasons=(why,), wake_at=wake_at)


def _unheard(name: str, code: str, text: str, *, wake_at: float) -> Assessment:
    why = reason(code, text, node=name)
    return Assessment(node=name, eligibility=Eligibility.UNHEARD, reasons=(why,), wake_at=wake_at)


def _assess_known(gate: Gate, snapshot: Snapshot, policy: Policy, node: FleetNode) -> Assessment:
    """A node that has reported: excluded, out of contact, in use, or as good as its evidence."""
    found = (
        _quarantined_or_duplicate(snapshot.now, node)
        or _in_maintenance(node)
        or _out_of_contact(gate, snapshot, policy, node)
    )
    if found is not None:
        return _with_fault(found, gate, snapshot, policy, node)
    assert node.state is not None  # _out_of_contact answers for nodes without a state
    found = _by_evidence(gate, snapshot, policy, node, node.state)
    taken = _in_use(gate, node.state)
    # A busy node with a fault in fresh evidence is excluded too, so that no job waits for a bad node.
    if taken is None or (found.eligibility is Eligibility.EXCLUDED and not found.final):
        return found
    own = any(le.job == gate.request.job and le.attempt < gate.request.attempt for le in node.state.leases)
    return Assessment(node=node.node, eligibility=Eligibility.BUSY, reasons=(taken,), own=own)


def _with_fault(found: Assessment, gate: Gate, snapshot: Snapshot, policy: Policy, node: FleetNode) -> Assessment:
    """Where a rule keeps a node out, put first what is wrong with the node now, if anything is."""
    by_person = node.quarantine is not None and node.quarantine.owner_kind != "rule"
    if found.reasons[0].code != "Quarantined" or by_person or node.state is None:
        return found
    judged = judge(node, gate.terms.tier, gate.terms.max_age_seconds, policy.require)
    if judged.health is not Health.UNHEALTHY:
        return found
    return dataclasses.replace(found, reasons=(*judged.reasons, *found.reasons), age_seconds=judged.age_seconds)


def _claimed_by_other(gate: Gate, snapshot: Snapshot, found: Assessment) -> Assessment:
    """BUSY when another gate or job has the node, else the assessment as it was."""
    claim = snapshot.claims.get(found.node)
    if claim is None or claim.gate in (gate.id, gate.past):
        return found
    what, code = ("leased to", "Allocated") if claim.kind is ClaimKind.LEASED else ("reserved by", "Reserved")
    text = f"{found.node} is {what} job {claim.job} attempt {claim.attempt} (gate {claim.gate})"
    own = claim.job == gate.request.job and claim.attempt < gate.request.attempt
    why = reason(code, text, node=found.node)
    return Assessment(node=found.node, eligibility=Eligibility.BUSY, reasons=(why,), own=own)


def _removed(gate: Gate, snapshot: Snapshot, found: Assessment) -> Assessment:
    """
    BUSY for a gate of a pool while the scheduler must not place jobs on the node: its pods would wait there. Who names
    a node has its reasons.
    """
    until = snapshot.removed.get(found.node)
    if until is None or gate.request.pool is None or found.node in gate.granted:
        return found
    why = reason("Removed", f"{found.node} is removed from scheduling by healthd until {until}", node=found.node)
    return Assessment(node=found.node, eligibility=Eligibility.BUSY, reasons=(why,))


def _assess_unknown(gate: Gate, snapshot: Snapshot, policy: Policy, name: str) -> Assessment:
    """A node that has never reported: the gate waits for it for a while."""
    until = gate.since + policy.node_grace_seconds
    settled = snapshot.settling is None and snapshot.recovering is None
    if settled and (unclear := unresolved_text(gate, snapshot, name)):
        return _out(name, "UnknownNode", unclear)
    if not settled or snapshot.now < until:
        text = f"{name} has never reported; waiting up to {policy.node_grace_seconds:.0f} s for it"
        return _unheard(name, "UnknownNode", text, wake_at=until if until > snapshot.now else math.inf)
    return _out(name, "UnknownNode", f"{name}: no node of this name has ever reported")


def _quarantined_or_duplicate(now: float, node: FleetNode) -> Assessment | None:
    """
    A node that is quarantined or has a duplicate is excluded at once, whatever its evidence says. What it says itself
    of a quarantine is what it was told last, and may be over.
    """
    kept = node.quarantine
    if kept is not None and (kept.until is None or kept.until > now):
        text = f"{node.node} is quarantined by {kept.owner}: {kept.reason}"
        wake_at = kept.until or math.inf
        return _out(node.node, "Quarantined", text, status=Status.FAIL, wake_at=wake_at, injected=kept.injected)
    if node.duplicate:
        text = (
            f"two daemons use the name {node.node}: stop the wrong one, then run 'healthd fleet forget {node.node}'; "
            "or 'rekey' if its machine was replaced"
        )
        return _out(node.node, "DuplicateNode", text)
    return None


def _in_maintenance(node: FleetNode) -> Assessment | None:
    """A node that its platform has taken out of service, also while it reboots and is not heard."""
    if node.state is None or node.state.maintenance is None:
        return None
    return _out(node.node, "InMaintenance", f"{node.node} is in maintenance: {node.state.maintenance}")


def _out_of_contact(gate: Gate, snapshot: Snapshot, policy: Policy, node: FleetNode) -> Assessment | None:
    """
    A node that is silent, that was not heard since this aggregator started, or that is heard in one direction only.
    """
    name = node.node
    if node.heard_seconds is None:
        until = gate.since + policy.silent_seconds
        waiting = snapshot.settling is not None or snapshot.recovering is not None or snapshot.now < until
        text = f"{name} has not reported since the aggregator started"
        if node.moved_to is not None:
            text = moved_text(name, node.moved_to)
        return (_unheard if waiting else _out)(
            name, "Silent", text, wake_at=until if until > snapshot.now else math.inf
        )
    if node.heard_seconds > policy.silent_seconds:
        text = f"{name} last reported {node.heard_seconds:.0f} s ago; at most {policy.silent_seconds:.0f} s are allowed"
        if node.moved_to is not None:
            text = moved_text(name, node.moved_to)
        return _out(name, "Silent", text)
    if not node.confirmed or node.state is None:
        text = f"{name} reports but has not confirmed an answer yet, so the age of its evidence is unknown"
        return _unheard(name, "Silent", text, wake_at=snapshot.now + policy.silent_seconds - node.heard_seconds)
    return None


def _in_use(gate: Gate, state: NodeState) -> Reason | None:
    """Who has the devices according to the node. The lease of this gate and its own job do not count."""
    if any(lease.gate == gate.id for lease in state.leases):
        return None
    for lease in state.leases:
        if lease.gate == gate.past:
            continue
        text = f"{state.node} still holds a lease of job {lease.job} attempt {lease.attempt}"
        return reason("Allocated", text, node=state.node)
    for allocation in state.allocated:
        if allocation.by == "lease" and gate.past is not None:
            continue  # by now all its leases are those of the job that has died
        if not _is_own_allocation(gate, allocation, state.node):
            text = f"{state.node} is in use (by {allocation.by}: {allocation.holder})"
            return reason("Allocated", text, node=state.node)
    return None


def _is_own_allocation(gate: Gate, allocation: Allocation, node: str) -> bool:
    """Whether the devices are allocated to the very job that asks: a prolog runs inside its allocation."""
    return bool(allocation.holder) and allocation.holder in (gate.request.job, *names_of(gate.workload_on(node)))


def _by_evidence(gate: Gate, snapshot: Snapshot, policy: Policy, node: FleetNode, state: NodeState) -> Assessment:
    """What the evidence of the node says for this gate."""
    name, terms = node.node, gate.terms
    max_age = terms.max_age_seconds
    if name in gate.granted:
        # A node is not measured again under its lease: evidence that was fresh when it was granted stays valid.
        max_age += snapshot.now - gate.granted[name].granted_at
    run = gate.ordered.get(name)
    if run is not None and run.ordered_at > gate.returned.get(name, -math.inf):
        # A run that this gate ordered stays valid for it while it has the node and waits for others.
        max_age = max(max_age, snapshot.now - run.ordered_at)
    judged = judge(node, terms.tier, max_age, policy.require)
    if judged.health is Health.UNHEALTHY or (judged.health is Health.DEGRADED and not policy.admit_degraded):
        return Assessment(
            node=name, eligibility=Eligibility.EXCLUDED, reasons=judged.reasons, age_seconds=judged.age_seconds
        )
    event_out, event_at = _scheduled_event(snapshot.now, gate, node)
    if event_out is not None:
        return event_out
    if run is not None and run.status is RunStatus.OPEN and name in gate.reserved:
        return _run_in_progress(snapshot.now, gate, node, state, judged)
    if judged.health is not Health.UNKNOWN:
        ready = _ready(snapshot.now, max_age, judged, state)
        return dataclasses.replace(ready, wake_at=min(ready.wake_at, event_at))
    if name in gate.granted:
        return Assessment(node=name, eligibility=Eligibility.EXCLUDED, reasons=judged.reasons, final=True)
    return _needs_run(name, judged, 0 if run is None else run.counted_rounds)


def _scheduled_event(now: float, gate: Gate, node: FleetNode) -> tuple[Assessment | None, float]:
    """
    EXCLUDED where AWS has scheduled something before the job's expected end, or may have; and when that could change.

    The end counts from the lease once there is one, so that a node that was granted is not given back for the time that
    the other nodes take.
    """
    runtime, event = gate.terms.runtime_seconds, node.event
    if not runtime or event is None:
        return None, math.inf
    ends_in = runtime if node.node not in gate.granted else gate.granted[node.node].granted_at + runtime - now
    if event.seconds is None:
        text = f"{node.node}: {event.message}; the job declares a runtime of {span(runtime)}, so this must be known"
    elif event.seconds < ends_in:
        text = f"{node.node}: {event.message}; the job would still be running then (it declares {span(runtime)})"
    else:
        return None, math.inf if node.node in gate.granted else now + event.seconds - runtime
    return _out(node.node, "ScheduledEvent", text, status=Status.WARN), math.inf


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


def _needs_run(name: str, judged: Judged, rounds: int, *, run_over: bool = False) -> Assessment:
    if rounds >= MOST_RUNS:
        return Assessment(
            node=name, eligibility=Eligibility.EXCLUDED, reasons=judged.reasons, final=True, run_over=run_over
        )
    return Assessment(node=name, eligibility=Eligibility.NEEDS_RUN, reasons=judged.reasons, run_over=run_over)


def _run_in_progress(now: float, gate: Gate, node: FleetNode, state: NodeState, judged: Judged) -> Assessment:
    """A run that this gate ordered is open: the report on it decides whether the evidence is that of the run."""
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
        judged = judged._replace(reasons=(why, *judged.reasons))
        return _needs_run(name, judged, run.counted_rounds, run_over=True)
    until = run.ordered_at + run.deadline_seconds
    if now >= until:
        text = (
            f"{name} did not finish the ordered run of tier {gate.terms.tier.value} within {run.deadline_seconds:.0f} s"
        )
        return dataclasses.replace(_out(name, "Timeout", text), final=True, run_over=True)
    text = (
        f"{name} is running tier {gate.terms.tier.value}"
        if status == OrderStatus.RUNNING
        else f"{name} has been ordered to run tier {gate.terms.tier.value}"
    )
    why = reason("NotYetRun", f"{text} ({judged.reasons[0].message})" if judged.reasons else text, node=name)
    return Assessment(node=name, eligibility=Eligibility.RUNNING, reasons=(why,), wake_at=until)
