"""
What Kueue's objects say, as far as the gate needs it: Workloads, AdmissionChecks, ResourceFlavors. Pure.

An object of another form is never taken for a good one: what is missing is None or empty, and the judge waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, get_args

from checks.contract import Tier
from healthd.clients.kubernetes import members, records
from healthd.core.config import parse_duration

CONTROLLER = "healthd.internal/gate"
GROUP = "kueue.x-k8s.io"
VERSION = "v1beta2"
API_VERSION = f"{GROUP}/{VERSION}"

GATE = "healthd.internal/gate"
"""Label of a node, and label, annotation and node selector of pods: the gate that admitted the pods to the node."""
ATTEMPT = "healthd.internal/gate-attempt"
"""Annotation of pods: the attempt of the gate, which says for which reservation of quota it was asked."""
POOL = "healthd.internal/pool"
"""Annotation of a ResourceFlavor: the pool of healthd that its nodes are in. Pods of other flavors are not gated."""

HOST = "kubernetes.io/hostname"

State = Literal["Pending", "Ready", "Retry", "Rejected"]
AfterAdmission = Literal["none", "retry"]
Impossible = Literal["reject", "retry"]

MOST_PODS_PER_NODE = 1000
MOST_HOSTS = 20_000

TERMS = ("tier", "max-age", "wait", "pods-per-node", "after-admission", "impossible")
PREFIX = "healthd.internal/"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """
    What an AdmissionCheck asks of the gate, by its annotations `healthd.internal/KEY`.

    They are annotations because `spec.parameters` has to name an object of an API group, so that it cannot be a
    ConfigMap. None means the policy of the aggregator.
    """

    tier: Tier | None = None
    max_age_seconds: float | None = None
    wait_seconds: float | None = None
    pods_per_node: int = 1
    """How many pods of a Workload share a node. 1: a training job has one pod on each node."""
    after_admission: AfterAdmission = "none"
    """What follows when a node of an admitted Workload turns bad. none: only its message says so, since a health check
    must never hurt a job. retry: Kueue evicts the Workload and queues it again."""
    impossible: Impossible = "reject"
    """What follows when the gate can never be admitted as asked, such as when a pool is too small. reject: Kueue
    deactivates the Workload. retry: it is queued again, for pools that grow."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The condition `Active` of an AdmissionCheck."""

    active: bool
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class AdmissionCheck:
    """
    An AdmissionCheck of this controller. `problem` says which annotation cannot be read; empty for none.

    `since` is when its condition became what it is, as the API server has it.
    """

    name: str
    generation: int
    terms: Terms
    problem: str = ""
    condition: Condition | None = None
    since: str = ""


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """A ResourceFlavor: which labels its nodes have, and which pool of healthd they are; None: they are not gated."""

    name: str
    labels: Mapping[str, str]
    pool: str | None


@dataclass(frozen=True, kw_only=True)
class PodSet:
    """
    Pods of a Workload that are alike. `flavors` are empty before they are assigned.

    `count` is how many are still to run, 0 once all have succeeded. `keys` are the labels and annotations of their
    template. `hosts` are the nodes that topology-aware scheduling chose for its pods; None where it chose none.
    `topology` says why they cannot be read; empty for no reason.
    """

    name: str
    count: int
    node_selector: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    flavors: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    topology: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckState:
    """
    The state of one admission check of a Workload; `since` in seconds since the epoch.

    `gate` and `attempt` are what this controller wrote into it; None where it did not. `bound`: its pods have to run on
    the nodes of that gate. `keys` are the node selectors, labels and annotations that the check adds to pods.
    """

    name: str
    state: str
    message: str = ""
    since: float = 0.0
    retries: int = 0
    gate: str | None = None
    attempt: int | None = None
    bound: bool = False
    keys: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """
    A Workload. `reserved_at` is when it got the quota that it has, in seconds since the epoch; None while it has none.

    `evictions` counts all that befell it, `version` is what a write has to be based on. `delayed`: its topology is
    assigned later. `unhealthy_nodes`: Kueue is looking for nodes in the place of these.
    """

    namespace: str
    name: str
    uid: str
    version: str
    active: bool = True
    deleted: bool = False
    reserved_at: float | None = None
    evicted: bool = False
    admitted: bool = False
    finished: bool = False
    evictions: int = 0
    pod_sets: tuple[PodSet, ...] = ()
    delayed: bool = False
    checks: tuple[CheckState, ...] = ()
    unhealthy_nodes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """NAMESPACE/NAME, which is also the name of the job."""
        return f"{self.namespace}/{self.name}"

    def state_of(self, check: str) -> CheckState | None:
        """The state of an admission check; None where the Workload does not have it."""
        return next((one for one in self.checks if one.name == check), None)


@dataclass(frozen=True, kw_only=True)
class GatedPod:
    """
    A pod that a gate admitted and that has not ended. `node` is empty before it was placed. `ends_at`: when its grace
    period is over, in seconds since the epoch; None while nobody has deleted it.
    """

    namespace: str
    name: str
    gate: str
    node: str
    ends_at: float | None = None


def parse_pod(found: Mapping[str, object]) -> GatedPod | None:
    """A pod with the label of a gate; None once its containers have ended for good."""
    if members(found, "status", "phase") in ("Succeeded", "Failed"):
        return None
    return GatedPod(
        namespace=_text(found, "metadata", "namespace"),
        name=_text(found, "metadata", "name"),
        gate=_texts(found, "metadata", "labels").get(GATE, ""),
        node=_text(found, "spec", "nodeName"),
        ends_at=_time(found, "metadata", "deletionTimestamp"),
    )


def is_ours(found: Mapping[str, object]) -> bool:
    """Whether an AdmissionCheck is this controller's."""
    return members(found, "spec", "controllerName") == CONTROLLER


def parse_admission_check(found: Mapping[str, object]) -> AdmissionCheck:
    """An AdmissionCheck with its terms, or with what is wrong with them."""
    name, generation = _text(found, "metadata", "name"), members(found, "metadata", "generation")
    terms, problem = Terms(), ""
    try:
        terms = parse_terms(_texts(found, "metadata", "annotations"))
    except ValueError as error:
        problem = str(error)
    condition = next((one for one in records(found, "status", "conditions") if one.get("type") == "Active"), None)
    return AdmissionCheck(
        name=name,
        generation=generation if isinstance(generation, int) else 0,
        terms=terms,
        problem=problem,
        condition=None
        if condition is None
        else Condition(
            active=condition.get("status") == "True",
            reason=_text(condition, "reason"),
            message=_text(condition, "message"),
        ),
        since="" if condition is None else _text(condition, "lastTransitionTime"),
    )


def parse_terms(annotations: Mapping[str, str]) -> Terms:
    """The terms that annotations name; ValueError says which one cannot be read, and what would be right."""
    given = {key.removeprefix(PREFIX): value for key, value in annotations.items() if key.startswith(PREFIX)}
    if unknown := sorted(given.keys() - set(TERMS)):
        raise ValueError(f"annotation {PREFIX}{unknown[0]} is unknown; use one of: {', '.join(TERMS)}")
    try:
        tier = Tier(given["tier"]) if "tier" in given else None
    except ValueError:
        raise ValueError(f"annotation {PREFIX}tier: {given['tier']!r} is not a tier; write quick or deep") from None
    pods = given.get("pods-per-node", "1")
    if not (pods.isascii() and pods.isdigit() and 1 <= int(pods[:6]) <= MOST_PODS_PER_NODE):
        raise ValueError(f"annotation {PREFIX}pods-per-node: must be 1 to {MOST_PODS_PER_NODE}, not {pods[:20]!r}")
    after, impossible = given.get("after-admission", "none"), given.get("impossible", "reject")
    if after not in get_args(AfterAdmission):
        raise ValueError(f"annotation {PREFIX}after-admission: must be none or retry, not {after[:20]!r}")
    if impossible not in get_args(Impossible):
        raise ValueError(f"annotation {PREFIX}impossible: must be reject or retry, not {impossible[:20]!r}")
    return Terms(
        tier=tier,
        max_age_seconds=_duration(given, "max-age"),
        wait_seconds=_duration(given, "wait"),
        pods_per_node=int(pods),
        after_admission="retry" if after == "retry" else "none",
        impossible="retry" if impossible == "retry" else "reject",
    )


def _duration(given: Mapping[str, str], key: str) -> float | None:
    if key not in given:
        return None
    try:
        return parse_duration(given[key])
    except ValueError as error:
        raise ValueError(f"annotation {PREFIX}{key}: {error}") from None


def parse_flavor(found: Mapping[str, object]) -> Flavor:
    """A ResourceFlavor."""
    return Flavor(
        name=_text(found, "metadata", "name"),
        labels=_texts(found, "spec", "nodeLabels"),
        pool=_texts(found, "metadata", "annotations").get(POOL) or None,
    )


def parse_workload(found: Mapping[str, object]) -> Workload:
    """A Workload, whatever is missing in it."""
    conditions = {_text(one, "type"): one for one in records(found, "status", "conditions")}
    holding = {name: _text(one, "status") == "True" for name, one in conditions.items()}
    reserved_at = _time(conditions.get("QuotaReserved", {}), "lastTransitionTime")
    evictions = [members(one, "count") for one in records(found, "status", "schedulingStats", "evictions")]
    assigned = {_text(one, "name"): one for one in records(found, "status", "admission", "podSetAssignments")}
    return Workload(
        namespace=_text(found, "metadata", "namespace"),
        name=_text(found, "metadata", "name"),
        uid=_text(found, "metadata", "uid"),
        version=_text(found, "metadata", "resourceVersion"),
        active=members(found, "spec", "active") is not False,
        deleted=members(found, "metadata", "deletionTimestamp") is not None,
        reserved_at=reserved_at if holding.get("QuotaReserved") else None,
        evicted=holding.get("Evicted", False),
        admitted=holding.get("Admitted", False),
        finished=holding.get("Finished", False),
        evictions=sum(count for count in evictions if isinstance(count, int)),
        pod_sets=tuple(
            _pod_set(one, assigned.get(_text(one, "name"), {})) for one in records(found, "spec", "podSets")
        ),
        delayed=any(
            one.get("delayedTopologyRequest") == "Pending" and "topologyAssignment" not in one
            for one in assigned.values()
        ),
        checks=tuple(_check_state(one) for one in records(found, "status", "admissionChecks")),
        unhealthy_nodes=tuple(_text(one, "name") for one in records(found, "status", "unhealthyNodes")),
    )


def _pod_set(found: Mapping[str, object], assignment: Mapping[str, object]) -> PodSet:
    counts = [one for one in (assignment.get("count"), found.get("count"), 1) if isinstance(one, int)]
    hosts: tuple[str, ...] | None = None
    topology = ""
    if (assigned := assignment.get("topologyAssignment")) is not None:
        try:
            hosts = _hosts(assigned)
        except ValueError as error:
            topology = str(error)
    return PodSet(
        name=_text(found, "name"),
        count=counts[0],
        node_selector=_texts(found, "template", "spec", "nodeSelector"),
        keys=frozenset(
            key for kind in ("labels", "annotations") for key in _texts(found, "template", "metadata", kind)
        ),
        flavors=tuple(dict.fromkeys(_texts(assignment, "flavors").values())),
        hosts=hosts,
        topology=topology,
    )


def _hosts(assigned: object) -> tuple[str, ...]:
    """The nodes of a topology assignment, whose values Kueue writes without what they have in common. ValueError."""
    levels = members(assigned, "levels")
    if not isinstance(levels, list) or HOST not in levels:
        raise ValueError(f"its topology ends above {HOST}: add that level to the Topology, so that its nodes are known")
    place = levels.index(HOST)
    found: dict[str, None] = {}
    for part in records(assigned, "slices"):
        values = records(part, "valuesPerLevel")
        domains = part.get("domainCount")
        if len(values) <= place or not isinstance(domains, int):
            raise ValueError("its topology assignment cannot be read")
        value = values[place]
        universal, roots = value.get("universal"), members(value, "individual", "roots")
        if isinstance(universal, str):
            found[universal] = None
        elif isinstance(roots, list) and len(roots) == domains:
            ends = [members(value, "individual", end) for end in ("prefix", "suffix")]
            before, after = (end if isinstance(end, str) else "" for end in ends)
            found.update(dict.fromkeys(f"{before}{root}{after}" for root in roots))
        else:
            raise ValueError("its topology assignment cannot be read")
        if len(found) > MOST_HOSTS:
            raise ValueError(f"its topology assignment has more than {MOST_HOSTS} nodes")
    if not found:
        raise ValueError("its topology assignment lists no node")
    return tuple(found)


def _check_state(found: Mapping[str, object]) -> CheckState:
    updates = records(found, "podSetUpdates")
    annotations = {key: value for one in updates for key, value in _texts(one, "annotations").items()}
    selectors = {key: value for one in updates for key, value in _texts(one, "nodeSelector").items()}
    labels = {key for one in updates for key in _texts(one, "labels")}
    attempt, retries = annotations.get(ATTEMPT, ""), found.get("retryCount")
    return CheckState(
        name=_text(found, "name"),
        state=_text(found, "state"),
        message=_text(found, "message"),
        since=_time(found, "lastTransitionTime") or 0.0,
        retries=retries if isinstance(retries, int) else 0,
        gate=annotations.get(GATE),
        attempt=int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) <= 10 else None,
        bound=GATE in selectors,
        keys=frozenset((*selectors, *labels, *annotations)),
    )


def _text(found: object, *path: str) -> str:
    value = members(found, *path)
    return value if isinstance(value, str) else ""


def _texts(found: object, *path: str) -> dict[str, str]:
    value = members(found, *path)
    if not isinstance(value, dict):
        return {}
    return {key: text for key, text in value.items() if isinstance(key, str) and isinstance(text, str)}


def _time(found: object, *path: str) -> float | None:
    """Seconds since the epoch; None where there is no time."""
    try:
        at = datetime.fromisoformat(_text(found, *path)).timestamp()
    except (ValueError, OverflowError):
        return None
    return at if math.isfinite(at) else None
