"""
Kueue's part in the life of a Workload, as the recordings show it (recordings/README.md): what it may do next. Pure.

`moves` says what Kueue may make of an object; who plays chooses one of them, and may do in between what people and jobs
do: `preempted`, `finished`, `activated`. tests/integrations/kueue/test_player.py holds it against every recording.
"""

from __future__ import annotations

import datetime
import marshal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Object = dict[str, Any]
Change = Callable[[Object], None]

CHECK = "healthd"
FLAVOR = {"cpu": "trn"}


def copied(found: Object) -> Object:
    """The same once more; many times faster than `copy.deepcopy`, for objects of JSON."""
    made: Object = marshal.loads(marshal.dumps(found))
    return made


def stamp(now: float) -> str:
    return datetime.datetime.fromtimestamp(int(now), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def workload(
    name: str, uid: str, *, count: int = 2, namespace: str = "default", selector: Mapping[str, str] = {}
) -> Object:
    """A Workload as Kueue makes it for a suspended Job."""
    template: Object = {"metadata": {}, "spec": {"containers": [{"name": "main", "image": "busybox"}]}}
    if selector:
        template["spec"]["nodeSelector"] = dict(selector)
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": "1", "generation": 1},
        "spec": {
            "active": True,
            "queueName": "lq",
            "podSets": [{"name": "main", "count": count, "template": template}],
        },
        "status": {},
    }


def condition(found: Mapping[str, Any], kind: str) -> Object:
    """A condition; empty where there is none."""
    return next((one for one in found.get("status", {}).get("conditions", ()) if one["type"] == kind), {})


def holds(found: Mapping[str, Any], kind: str) -> bool:
    return bool(condition(found, kind).get("status") == "True")


def check_of(found: Mapping[str, Any], name: str = CHECK) -> Object:
    """The state of a check; empty where there is none."""
    return next((one for one in found.get("status", {}).get("admissionChecks", ()) if one["name"] == name), {})


def moves(found: Object, now: float, *, quota: bool, checks: tuple[str, ...] = (CHECK,)) -> dict[str, Object]:
    """What Kueue may make of a Workload now, by what it does. `quota`: whether there is quota for it."""
    made: dict[str, Object] = {}
    for name, change in _changes(found, now, quota, checks):
        after = copied(found)
        after.setdefault("status", {})
        change(after)
        if after != found:
            made[name] = after
    return made


def _changes(found: Object, now: float, quota: bool, checks: tuple[str, ...]) -> Iterator[tuple[str, Change]]:
    if holds(found, "Finished"):
        if found["metadata"].get("finalizers"):
            yield "let go", lambda after: after["metadata"].pop("finalizers")
        return
    if missing := [name for name in checks if not check_of(found, name)]:
        yield "begin checks", lambda after: _begin(after, missing, now)
    if not condition(found, "PodsReady"):
        yield "wait for pods", lambda after: put(after, "PodsReady", "False", "WaitForStart", now)
    if holds(found, "QuotaReserved"):
        yield from _with_quota(found, now, ready=not missing and _ready(found))
    else:
        yield from _without_quota(found, now, quota=quota, ready=not missing and _ready(found))


def _ready(found: Object) -> bool:
    states = found.get("status", {}).get("admissionChecks", [])
    return bool(states) and all(one["state"] == "Ready" for one in states)


def _with_quota(found: Object, now: float, *, ready: bool) -> Iterator[tuple[str, Change]]:
    if holds(found, "Evicted"):
        yield "give quota back", lambda after: _unreserve(after, now)
        return
    active, admitted = found["spec"].get("active", True), holds(found, "Admitted")
    if not ready and not condition(found, "Admitted"):
        yield "see checks", lambda after: put(after, "Admitted", "False", "UnsatisfiedAdmissionChecks", now)
    if ready and not admitted and active:
        yield "admit", lambda after: put(after, "Admitted", "True", "Admitted", now)
    if admitted and conflict(found):
        yield "fail to start", lambda after: put(after, "Finished", "True", "FailedToStart", now)
    yield from _acts_on_states(found, now, active)


def _without_quota(found: Object, now: float, *, quota: bool, ready: bool) -> Iterator[tuple[str, Change]]:
    active, requeued = found["spec"].get("active", True), condition(found, "Requeued")
    waiting = found.get("status", {}).get("requeueState", {}).get("requeueAt")
    reason = condition(found, "QuotaReserved").get("reason")
    if waiting and now >= seconds(waiting):
        yield "end the pause", lambda after: after["status"].pop("requeueState")
    if not active:
        if holds(found, "Evicted"):
            yield "stay deactivated", lambda after: put(after, "QuotaReserved", "False", "Deactivated", now)
    elif requeued.get("status") == "False":
        why = "Reactivated" if requeued["reason"].startswith("Deactivated") else "BackoffFinished"
        if not waiting:
            yield "queue again", lambda after: put(after, "Requeued", "True", why, now)
    else:
        if reason == "Deactivated":
            yield "look again", lambda after: put(after, "QuotaReserved", "False", "PendingEvaluation", now)
        if quota and not waiting:
            yield "reserve", lambda after: _reserve(after, ready, now)
        elif not quota and reason != "WaitingForQuota":
            yield "no quota", lambda after: _no_quota(after, now)


def _acts_on_states(found: Object, now: float, active: bool) -> Iterator[tuple[str, Change]]:
    """What Kueue does about Retry, Rejected and a deactivation of a Workload that has quota."""
    states = found.get("status", {}).get("admissionChecks", [])
    retry = next((one for one in states if one["state"] == "Retry"), None)
    if retry is not None:
        pause = retry.get("requeueAfterSeconds")
        until = found["status"].get("requeueState", {}).get("requeueAt")
        if pause and until is None:
            at = stamp(seconds(retry["lastTransitionTime"]) + pause)
            yield "note the pause", lambda after: after["status"].update(requeueState={"requeueAt": at})
        elif not pause or now >= seconds(until):
            yield "evict for Retry", lambda after: evict(after, "AdmissionCheck", now)
    if any(one["state"] == "Rejected" for one in states):
        if not active:
            yield "evict for Rejected", lambda after: evict(after, "DeactivatedDueToAdmissionCheck", now)
        elif holds(found, "DeactivationTarget"):
            yield "deactivate", lambda after: activated(after, active=False)
        else:
            yield "want it deactivated", lambda after: put(after, "DeactivationTarget", "True", "AdmissionCheck", now)
    elif not active:
        yield "evict deactivated", lambda after: evict(after, "Deactivated", now)


def put(after: Object, kind: str, status: str, reason: str, now: float) -> None:
    """A condition, in place; its time changes with its status alone."""
    conditions = after["status"].setdefault("conditions", [])
    known = next((one for one in conditions if one["type"] == kind), None)
    since = known["lastTransitionTime"] if known is not None and known["status"] == status else stamp(now)
    entry = {"type": kind, "status": status, "reason": reason, "message": reason, "lastTransitionTime": since}
    if known is None:
        conditions.append(entry)
    else:
        conditions[conditions.index(known)] = entry


def _begin(after: Object, names: list[str], now: float) -> None:
    states = after["status"].setdefault("admissionChecks", [])
    states += [{"name": name, "state": "Pending", "message": "", "lastTransitionTime": stamp(now)} for name in names]


def _reserve(after: Object, ready: bool, now: float) -> None:
    done = {one["name"]: one["count"] for one in after["status"].get("reclaimablePods", ())}
    assigned = [
        {"name": one["name"], "count": one["count"] - done.get(one["name"], 0), "flavors": dict(FLAVOR)}
        for one in after["spec"]["podSets"]
    ]
    put(after, "QuotaReserved", "True", "QuotaReserved", now)
    after["status"]["admission"] = {"clusterQueue": "cq", "podSetAssignments": assigned}
    after["status"].pop("resourceRequests", None)
    if holds(after, "Evicted"):
        put(after, "Evicted", "False", "QuotaReserved", now)
    if ready:
        put(after, "Admitted", "True", "Admitted", now)
    elif condition(after, "Admitted"):
        put(after, "Admitted", "False", "UnsatisfiedAdmissionChecks", now)


def _no_quota(after: Object, now: float) -> None:
    put(after, "QuotaReserved", "False", "WaitingForQuota", now)
    put(after, "Admitted", "False", "NoReservation", now)


def evict(after: Object, reason: str, now: float) -> None:
    """In place: Evicted, and every state that is not Pending is reset."""
    put(after, "Evicted", "True", reason, now)
    status = after["status"]
    status["conditions"] = [one for one in status["conditions"] if one["type"] != "DeactivationTarget"]
    for one in status.get("admissionChecks", []):
        if one["state"] == "Pending":
            continue
        if one["state"] == "Retry":
            one["retryCount"] = one.get("retryCount", 0) + 1
        one["message"] = f"Reset to Pending after eviction. Previously: {one['state']}"
        one.update(state="Pending", lastTransitionTime=stamp(now))
        one.pop("podSetUpdates", None)
    counts = status.setdefault("schedulingStats", {}).setdefault("evictions", [])
    short = "Deactivated" if reason.startswith("Deactivated") else reason
    known = next((one for one in counts if one["reason"] == short), None)
    if known is None:
        counts.append({"reason": short, "underlyingCause": "", "count": 1})
    else:
        known["count"] += 1


def _unreserve(after: Object, now: float) -> None:
    status, reason = after["status"], condition(after, "Evicted")["reason"]
    put(after, "QuotaReserved", "False", "PendingEvaluation", now)
    put(after, "Admitted", "False", "NoReservation", now)
    put(after, "Requeued", "False" if reason != "Preempted" else "True", reason, now)
    status.pop("admission", None)


def conflict(found: Mapping[str, Any]) -> bool:
    """Whether a check adds a node selector that the template has with another value."""
    templates = {one["name"]: one["template"]["spec"].get("nodeSelector", {}) for one in found["spec"]["podSets"]}
    return any(
        templates.get(update["name"], {}).get(key, value) != value
        for state in found["status"].get("admissionChecks", ())
        for update in state.get("podSetUpdates", ())
        for key, value in update.get("nodeSelector", {}).items()
    )


# What others than Kueue's queue and its checks do.


def activated(after: Object, *, active: bool) -> None:
    """In place: a person, or Kueue for Rejected, sets `spec.active`."""
    after["spec"]["active"] = active
    after["metadata"]["generation"] = after["metadata"].get("generation", 1) + 1


def preempted(after: Object, now: float) -> None:
    """In place: another Workload takes its quota."""
    evict(after, "Preempted", now)


def finished(after: Object, now: float) -> None:
    """In place: its Job has ended."""
    put(after, "Finished", "True", "Succeeded", now)
