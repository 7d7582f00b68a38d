"""
What is to be done about one Workload: pure. What is asked of the gate, what is kept, what is written into its check.

Nothing is remembered here. A reservation of quota is told from any other by its time and by how often the Workload was
evicted before: that is the attempt of the gate, so an answer for one reservation can never admit another. A state is
written only while quota is reserved, before an eviction, and onto the version of the Workload that was judged; Kueue
keeps whatever is written at another time and uses it later, unasked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from checks.contract import Status
from healthd.core.asked import why_unanswered
from healthd.core.model import Decision, GateRequest, Verdict
from healthd.core.text import counted, plain, span
from healthd.integrations.kueue.workloads import (
    ATTEMPT,
    GATE,
    POOL,
    AdmissionCheck,
    CheckState,
    Flavor,
    PodSet,
    State,
    Terms,
    Workload,
)

READY_SECONDS = 60.0
"""How long a Ready may wait for Kueue's admission until it is taken back. The other checks are Ready by then, so Kueue
admits within a second; a minute means that something has changed."""
RETRY_SECONDS, MOST_RETRY_SECONDS = 5, 60
"""Pauses before a Workload is queued again, doubled with each for the same cause. Kueue keeps quota and nodes reserved
during a pause, so that a long one keeps others waiting."""
EVICT_SECONDS = 1
"""The pause before a running Workload is evicted whose node turned bad: Kueue evicts at its end. The node is marked by
then, so that nothing has to be waited for."""
WATCH_SECONDS = 2.0
"""How often nodes are looked at: of a running Workload that is evicted when one of them turns bad, and of one that is
Ready and waits for Kueue."""
TAKEN_BACK_SECONDS = 5.0
"""So long Kueue has to admit before a Ready is taken back because a node turned bad; usually it needs one second. An
override may grant bad nodes, and Kueue needs some time in which such a grant stands."""
MARK_SECONDS = 60
"""So often at most a running Workload's bad nodes are asked about by another gate."""
LEASE_SECONDS = 30 * 86400.0
"""The longest lease that there is: this controller ends it with its Workload."""
MOST_CHARACTERS = 1000
MOST_SENTENCES = 3
"""Of a decision, and of nodes whose former pods are ending."""
MOST_SKEW_SECONDS = 3600.0
"""How far the clocks of Kueue and of this controller may be apart."""

EPOCH = 1735689600
"""2025-01-01. Attempts count seconds from then, to 2042: an attempt has 31 bits."""
PER_SECOND = 4
"""Attempts of one second: reservations within it are told apart by the number of evictions before them."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The aggregator does not take the question. `again`: the gate of this attempt is over, and another one may do."""

    message: str
    again: bool


Answer = Decision | Refusal


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The nodes that are to carry the id of a gate as a label, before pods are sent there."""

    gate: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Write:
    """
    A state of the check. `gate` and `attempt`: what pods of `pod_sets` are annotated with. `leased`: they are labelled
    with it too, since the gate's nodes stay leased until they have ended. `bind`: they also select its nodes. `cause`
    of a Retry: what tells it from one for another reason; `bad`: the nodes at fault.
    """

    state: State
    message: str
    since: float
    requeue_after_seconds: int | None = None
    gate: str | None = None
    attempt: int | None = None
    pod_sets: tuple[str, ...] = ()
    bind: bool = False
    leased: bool = False
    cause: str = ""
    bad: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """
    What is to be done. `ask` is the gate that has to be open or decided. `keep` is the gate that the Workload keeps,
    `keep_all`: all that it has. Every other gate of the Workload is released once its pods have ended, an open one
    withdrawn.
    """

    ask: GateRequest | None = None
    keep: str | None = None
    keep_all: bool = False
    binding: Binding | None = None
    write: Write | None = None
    due: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Ending:
    """
    A node that is still leased to a Workload that is over, because a pod there has not ended; `text` says so.
    `overdue`: it should have ended long ago.
    """

    node: str
    pool: str | None
    text: str
    overdue: bool = False


@dataclass(frozen=True, kw_only=True)
class Retried:
    """The last Retry of a Workload: why, how often in a row for the same cause, and the nodes at fault."""

    cause: str
    times: int
    bad: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Known:
    """
    What is known beside the Workload. `answer` is the gate's, None before it was asked or while it cannot be.

    `labels` are those of the nodes that the answer admits, without those that the cluster does not have; None before
    they were looked at. `unfit` says what is wrong now with nodes that pods of this Workload run on, or will once Kueue
    acts on a Ready.
    `recovered`: a node for which its last gate was rejected is healthy again.
    """

    flavors: Mapping[str, Flavor]
    answer: Answer | None = None
    age_seconds: float = 0.0
    """How long ago the gate leased its nodes."""
    labels: Mapping[str, Mapping[str, str]] | None = None
    unfit: Mapping[str, str] = field(default_factory=dict)
    ending: tuple[Ending, ...] = ()
    refused: str = ""
    """Why the aggregator refuses all questions of this check, such as a tier that its token may not ask for."""
    retried: Retried | None = None
    recovered: bool = False
    ours: frozenset[str] = frozenset()
    """The names of all admission checks of this controller."""
    cluster: str = ""
    """What tells this cluster from others that ask the same aggregator."""


def workload_id(workload: Workload, cluster: str) -> str:
    """The name of the job for those who see its end: this controller alone."""
    return f"kueue:{cluster}/{workload.key}/{workload.uid}"


def attempt_of(workload: Workload, state: CheckState) -> int:
    """The attempt that is to be asked: a check that was taken back asks anew, in the same reservation."""
    reserved_at = workload.reserved_at or 0.0
    return _attempt_at(max(reserved_at, state.since)) + workload.evictions % PER_SECOND


def is_of_reservation(workload: Workload, attempt: int) -> bool:
    """Whether an attempt was asked in the reservation that the Workload has."""
    since = _attempt_at(workload.reserved_at or 0.0)
    return attempt >= since and attempt % PER_SECOND == workload.evictions % PER_SECOND


def _attempt_at(at: float) -> int:
    return max(0, int(at) - EPOCH) * PER_SECOND


def judge(workload: Workload, check: AdmissionCheck, known: Known, now: float) -> Step:
    """What is to be done about a Workload that has this check."""
    state = workload.state_of(check.name)
    if state is None or workload.finished:
        return Step()
    if workload.reserved_at is None:
        # Kueue reserves nothing for a queue whose check is not active. A sentence changes no state.
        waits = state.state == "Pending" and not (workload.evicted or workload.deleted) and workload.active
        why = _unusable(check, known)
        return Step(write=_Say(workload, state, known, now).message(why)) if waits and why else Step()
    if workload.evicted or workload.deleted or not workload.active:
        # Its pods may still run, and do until the reservation is gone. What was only asked is dropped at once.
        return Step(keep_all=workload.admitted)
    if state.state == "Ready":
        return _ready(workload, check, state, known, now)
    if workload.admitted:
        return Step(keep_all=True)  # it runs, and Kueue is about to act on the state
    if state.state == "Retry" and known.recovered:
        text = "taken back: a node that was bad is healthy again; the gate is asked again"
        return Step(write=_renewed(workload, state, text, now))
    if state.state != "Pending":
        return Step()
    return _pending(workload, check, state, known, now)


def _ready(workload: Workload, check: AdmissionCheck, state: CheckState, known: Known, now: float) -> Step:
    placed = any(one.hosts is not None for one in workload.pod_sets)
    keep = state.gate if state.bound or placed else None
    if workload.admitted:
        return dataclasses.replace(_after_admission(workload, check, state, known, now), keep=keep)
    if _nothing_left(workload, known.flavors):
        return Step()
    stale = state.attempt is None or not is_of_reservation(workload, state.attempt)
    if stale or state.since > now + READY_SECONDS or now - state.since >= READY_SECONDS:
        why = (
            "it was granted for another quota reservation" if stale else f"Kueue did not admit in {span(READY_SECONDS)}"
        )
        return Step(write=_renewed(workload, state, f"taken back: {why}; the gate is asked again", now))
    if keep is not None and known.unfit and now - state.since >= TAKEN_BACK_SECONDS:  # Kueue is away, or slow
        why = f"a node turned bad before Kueue admitted: {_told(known.unfit)}"
        return Step(write=_renewed(workload, state, f"taken back: {why}; the gate is asked again", now))
    return Step(keep=keep, due=min(state.since + READY_SECONDS, now + WATCH_SECONDS))


def _told(unfit: Mapping[str, str]) -> str:
    return "; ".join(f"node {node}: {text}" for node, text in sorted(unfit.items()))


def may_evict(workload: Workload, check: AdmissionCheck) -> bool:
    """Whether a running Workload is evicted when a node of it turns bad."""
    state = workload.state_of(check.name)
    running = workload.admitted and not (workload.evicted or workload.finished or workload.deleted)
    # Kueue replaces unhealthy nodes itself, and ignores a Retry meanwhile (kueue issue 10660).
    wanted = check.terms.after_admission == "retry" and not workload.unhealthy_nodes
    return running and wanted and state is not None and state.state == "Ready"


def _after_admission(workload: Workload, check: AdmissionCheck, state: CheckState, known: Known, now: float) -> Step:
    """
    A node of a running Workload turned bad. A gate of the bad nodes is asked: its reject has them marked, and is held
    back until the marks stand, so that Kueue does not choose these nodes again.
    """
    if not may_evict(workload, check):
        return Step()
    if not known.unfit:
        return Step(due=now + WATCH_SECONDS)
    request = GateRequest(
        job=f"{workload.key}/turned-bad",
        attempt=_attempt_at(now - now % MARK_SECONDS),
        nodes=tuple(sorted(known.unfit)),
        tier=check.terms.tier,
        max_age_seconds=check.terms.max_age_seconds,
        wait_seconds=0.0,
        lease_seconds=LEASE_SECONDS,
        workload=workload_id(workload, known.cluster),
    )
    if known.answer is None or (isinstance(known.answer, Decision) and known.answer.decision is Verdict.HOLD):
        return Step(ask=request)
    if isinstance(known.answer, Refusal) and known.answer.again:
        return Step(due=now + WATCH_SECONDS)  # other nodes have turned bad in the same minute: the next one is asked
    if isinstance(known.answer, Decision) and known.answer.decision is Verdict.ADMIT:
        return Step(due=now + WATCH_SECONDS)  # observe mode, an override, or they are healthy again
    return Step(
        write=Write(
            state="Retry",
            message=plain(f"a node turned bad after the admission: {_told(known.unfit)}", MOST_CHARACTERS),
            since=max(now, state.since + 1),
            requeue_after_seconds=EVICT_SECONDS,
        )
    )


def _pending(workload: Workload, check: AdmissionCheck, state: CheckState, known: Known, now: float) -> Step:
    say = _Say(workload, state, known, now)
    others = [one for one in workload.checks if one.name != check.name]
    if mine := sorted(one.name for one in others if one.name in known.ours and one.name < check.name):
        return say.wait(f"check {mine[0]} already gates this Workload: remove one of the two from the ClusterQueue")
    if why := _unusable(check, known):
        return say.wait(why)
    if waiting := [one.name for one in others if one.state != "Ready" and one.name not in known.ours]:
        return say.wait(f"asked once the other checks are Ready: {', '.join(waiting)}")
    if workload.delayed or not all(one.flavors or not one.count for one in workload.pod_sets):
        return say.wait("asked once flavors and topology are assigned")
    if _nothing_left(workload, known.flavors):
        return Step(write=say.state("Ready", "all of its pods have succeeded: there is nothing to check"))
    gated, problem = _gated(workload, known.flavors)
    if problem:
        return Step(write=say.retry(problem))
    if conflict := _conflict(gated, others, known.flavors):
        return Step(write=say.state("Rejected", conflict))
    request = _request(workload, check.terms, gated, known, attempt_of(workload, state))
    if isinstance(request, str):
        return Step(write=say.retry(request))
    return _answered(request, gated, check.terms, known, say)


def _unusable(check: AdmissionCheck, known: Known) -> str:
    """Why no gate can be asked with the terms of this check; empty where it can."""
    why = check.problem or known.refused
    return f"AdmissionCheck {check.name}: {why}" if why else ""


def _nothing_left(workload: Workload, flavors: Mapping[str, Flavor]) -> bool:
    """Whether all pods that a gate would be asked for have succeeded: Kueue counts those that are still to run."""
    left = [one for one in workload.pod_sets if one.count]
    over = [one for one in workload.pod_sets if not one.count]
    if any(name not in flavors or flavors[name].pool for one in left for name in one.flavors):
        return False
    return bool(over) and (not left or any(flavors[n].pool for one in over for n in one.flavors if n in flavors))


def _gated(workload: Workload, flavors: Mapping[str, Flavor]) -> tuple[tuple[PodSet, ...], str]:
    """The pod sets whose nodes are in a pool, or why that cannot be told."""
    gated = []
    for pods in workload.pod_sets:
        if unknown := [name for name in pods.flavors if name not in flavors]:
            return (), f"ResourceFlavor {unknown[0]} does not exist"
        if pods.count and any(flavors[name].pool for name in pods.flavors):
            gated.append(pods)
    if not gated:
        named = sorted({name for pods in workload.pod_sets for name in pods.flavors})
        return (), f"its flavors have no known pool: annotate ResourceFlavor {', '.join(named)} with {POOL}"
    return tuple(gated), ""


def _conflict(gated: tuple[PodSet, ...], others: list[CheckState], flavors: Mapping[str, Flavor]) -> str:
    """Why Kueue would fail the Workload for ever: a key that is added must not be there with another value."""
    for pods in gated:
        for key in (GATE, ATTEMPT):
            if key in pods.node_selector or key in pods.keys:
                return f"pod set {pods.name} has {key} in its template: remove it there; this controller sets it"
        if named := [name for name in pods.flavors if GATE in flavors[name].labels]:
            return f"ResourceFlavor {named[0]} has the node label {GATE}: remove it there; this controller sets it"
    if taken := [one.name for one in others if one.keys & {GATE, ATTEMPT}]:
        return f"check {taken[0]} also sets {GATE}: remove one of the two from the ClusterQueue"
    return ""


def _request(
    workload: Workload, terms: Terms, gated: tuple[PodSet, ...], known: Known, attempt: int
) -> GateRequest | str:
    """The question, or why it cannot be asked."""
    nodes: tuple[str, ...] = ()
    pool: str | None = None
    count: int | None = None
    if any(one.hosts is not None or one.topology for one in gated):
        if told := next((one.topology for one in gated if one.topology), ""):
            return told
        if unplaced := [one.name for one in gated if one.hosts is None]:
            return f"pod set {unplaced[0]} has no topology but others have: give all of them one"
        nodes = tuple(dict.fromkeys(host for one in gated for host in one.hosts or ()))
    else:
        pools = sorted({known.flavors[name].pool or "" for one in gated for name in one.flavors} - {""})
        if len(pools) > 1:
            return f"its pods are in the pools {', '.join(pools)}, but a gate takes nodes of one pool"
        pool, count = pools[0], math.ceil(sum(one.count for one in gated) / terms.pods_per_node)
    return GateRequest(
        job=workload.key,
        attempt=attempt,
        nodes=nodes,
        pool=pool,
        count=count,
        tier=terms.tier,
        max_age_seconds=terms.max_age_seconds,
        wait_seconds=terms.wait_seconds,
        lease_seconds=LEASE_SECONDS,
        workload=workload_id(workload, known.cluster),
    )


def _answered(request: GateRequest, gated: tuple[PodSet, ...], terms: Terms, known: Known, say: _Say) -> Step:
    answer = known.answer
    if answer is None:
        return Step(ask=request)
    if isinstance(answer, Refusal):
        if answer.again:
            return Step(write=say.renewed(answer.message))
        return Step(write=say.retry(answer.message))
    told = "; ".join((*_still_ending(request, known.ending), _sentence(answer)))
    if answer.decision is Verdict.HOLD:
        return Step(ask=request, keep=answer.id, write=say.message(told))
    if answer.decision is Verdict.REJECT:
        if not answer.retryable and terms.impossible == "reject":
            return Step(write=say.state("Rejected", told))
        bad = (one.node for one in answer.excluded if any(reason.status is Status.FAIL for reason in one.reasons))
        return Step(write=dataclasses.replace(say.retry(told, cause=_cause(answer)), bad=tuple(bad)))
    if why := why_unanswered(request, answer):
        return Step(write=say.retry(f"gate {answer.id}: its answer admits but {why}", cause=why))
    if known.age_seconds >= READY_SECONDS:
        told = f"its admission was {span(known.age_seconds)} old when it arrived; the gate is asked again"
        return Step(write=say.renewed(told))
    return _admitted(request, answer, gated, known, say)


def _admitted(request: GateRequest, answer: Decision, gated: tuple[PodSet, ...], known: Known, say: _Say) -> Step:
    """Ready, with the nodes that were checked. What a gate admits in any case (observe, an override) binds no pods."""
    names = tuple(one.asked or one.node for one in answer.nodes)
    bind = request.pool is not None and answer.would is None
    if bind:
        if known.labels is None:
            return Step(ask=request, keep=answer.id, binding=Binding(gate=answer.id, nodes=names))
        if wrong := _elsewhere(names, gated, known.flavors, known.labels):
            return Step(write=say.retry(wrong))
    some = f"{counted(len(names), 'node')}: {', '.join(names[:16])}" + (" ..." if len(names) > 16 else "")
    regardless = "" if answer.would is None else f"; enforce mode would decide {answer.would.value}, so no pod is bound"
    return Step(
        ask=request,
        keep=answer.id,
        binding=Binding(gate=answer.id, nodes=names) if bind else None,
        write=Write(
            state="Ready",
            message=plain(f"gate {answer.id} admits {some}{regardless}", MOST_CHARACTERS),
            since=say.now,
            gate=answer.id,
            attempt=request.attempt,
            pod_sets=tuple(one.name for one in gated),
            bind=bind,
            leased=answer.would is None or request.pool is None,
        ),
    )


def _elsewhere(
    names: tuple[str, ...],
    gated: tuple[PodSet, ...],
    flavors: Mapping[str, Flavor],
    labels: Mapping[str, Mapping[str, str]],
) -> str:
    """Why pods could not run on the nodes of an admission; empty where they can."""
    for node in names:
        if node not in labels:
            return f"the gate admits node {node}, which this cluster does not have: is its pool in another cluster too?"
        for pods in gated:
            wanted = {**pods.node_selector}
            for flavor in pods.flavors:
                wanted.update(flavors[flavor].labels)
            for key, value in sorted(wanted.items()):
                if labels[node].get(key) != value:
                    return (
                        f"the gate admits node {node}, which lacks the label {key}={value} required by pod set "
                        f"{pods.name}: use a pool for its ResourceFlavor that only contains such nodes"
                    )
    return ""


@dataclass(frozen=True)
class _Say:
    """The states that follow a Pending one."""

    workload: Workload
    before: CheckState
    known: Known
    now: float

    def message(self, text: str) -> Write | None:
        """Pending as before, with another message."""
        text = plain(text, MOST_CHARACTERS)
        return None if text == self.before.message else Write(state="Pending", message=text, since=self.before.since)

    def wait(self, text: str) -> Step:
        """Nothing is asked yet."""
        return Step(write=self.message(text))

    def state(self, state: State, text: str, requeue_after_seconds: int | None = None) -> Write:
        """Another state."""
        message = plain(text, MOST_CHARACTERS)
        return Write(state=state, message=message, since=self.now, requeue_after_seconds=requeue_after_seconds)

    def retry(self, text: str, *, cause: str = "") -> Write:
        """Retry; the pauses grow while the cause, by default the text, is the same."""
        cause, last = cause or text, self.known.retried
        times = last.times if last is not None and last.cause == cause else 0
        made = self.state("Retry", text, min(RETRY_SECONDS * 2 ** min(times, 10), MOST_RETRY_SECONDS))
        return dataclasses.replace(made, since=max(self.now, self.before.since + 1), cause=cause)

    def renewed(self, text: str) -> Write:
        """Pending from now on, so that the gate is asked by another attempt."""
        return _renewed(self.workload, self.before, text, self.now)


def _renewed(workload: Workload, state: CheckState, text: str, now: float) -> Write:
    before = state.since if state.state in ("Pending", "Retry") else 0.0
    since = max(math.ceil(now), int(max(before, workload.reserved_at or 0.0)) + 1, _after(state, now))
    return Write(state="Pending", message=plain(text, MOST_CHARACTERS), since=float(since))


def _after(state: CheckState, now: float) -> int:
    """The first second whose attempt is later than the one that a state was given for."""
    if state.attempt is None or state.attempt > _attempt_at(now + MOST_SKEW_SECONDS):
        return 0  # none of ours
    return EPOCH + state.attempt // PER_SECOND + 1


def _sentence(answer: Decision) -> str:
    """The first sentences of a decision, which name the nodes; each once."""
    reasons = answer.reasons or tuple(reason for one in answer.excluded for reason in one.reasons[:1])
    told: list[str] = []
    for text in (" ".join(reason.message.split()) for reason in reasons):
        if not any(text in one for one in told):
            told.append(text)
    return f"gate {answer.id}: {'; '.join(told[:MOST_SENTENCES]) or answer.decision.value}"


def _still_ending(request: GateRequest, ending: tuple[Ending, ...]) -> tuple[str, ...]:
    """Of the nodes that are asked for: those whose former pods have not ended."""
    return tuple(
        one.text
        for one in ending
        if one.node in request.nodes or (request.pool is not None and request.pool == one.pool)
    )[:MOST_SENTENCES]


def _cause(answer: Decision) -> str:
    """What tells the reason of a reject from another: its codes and nodes, without figures and times."""
    excluded = sorted(f"{one.node}:{reason.code}" for one in answer.excluded for reason in one.reasons[:1])
    return " ".join(excluded) or " ".join(reason.code for reason in answer.reasons[:MOST_SENTENCES])
