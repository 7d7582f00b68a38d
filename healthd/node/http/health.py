"""
`GET /health` as application/health+json, rendered from the one snapshot: pure.

Without a demand the answer is the node's health, with active evidence suspended while a job has the devices. With a
demand (`tier`, `max_age`) it is the strict answer. It says what is wrong and counts the rest; with `verbose` it has
every check with its numbers.

Also here:

- `GET /readyz`: whether the node is fit for a job now, and if not, why; rendered from the one snapshot: pure.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import Finding, Measurement, Status, Tier
from checks.limits import unit
from checks.printable import printable_line
from healthd.core.config import parse_duration
from healthd.core.errors import BadInputError
from healthd.core.evidence import expired, judge_tier
from healthd.core.model import CheckResult, CheckSpec, Health, NodeState, Reason
from healthd.core.node_name import is_called
from healthd.node.occupancy.model import Workload, describe, foreign

MEDIA_TYPE = "application/health+json"
STATUS = {Health.HEALTHY: "pass", Health.DEGRADED: "warn", Health.UNKNOWN: "fail", Health.UNHEALTHY: "fail"}
_WORD = {Status.PASS: "pass", Status.WARN: "warn", Status.UNKNOWN: "fail", Status.FAIL: "fail", Status.SKIP: "fail"}
MAX_REASONS = 16
"""Of an answer that is not verbose: the worst."""
# The maximum age of a demand that names none: the default of gates.
DEFAULT_MAX_AGE_SECONDS = 3600.0

PARAMETERS = ("verbose", "exclude", "node", "workload", "tier", "max_age")
SIGNS = (
    "[+] met  [-] not met: the node is not ready because of it  [!] a problem that does not count here  [ ] not "
    "applicable"
)
_DEMAND = ("tier", "max_age")


def parse_query(query: dict[str, list[str]]) -> tuple[Demand | None, bool]:
    """The demand in a query of /health, and whether it is verbose. BadInputError as of `parse_demand`."""
    return parse_demand({name: values for name, values in query.items() if name != "verbose"}), "verbose" in query


def document(state: NodeState, demand: Demand | None, *, verbose: bool = False) -> tuple[int, dict[str, Any]]:
    """HTTP status and the document."""
    health, reasons = verdict(state, demand)
    status = STATUS[health]
    specs = {spec.name: spec for spec in state.checks}
    shown = reasons if verbose else reasons[:MAX_REASONS]
    content: dict[str, Any] = {
        "status": status,
        "serviceId": state.node,
        "health": health.value,
        "output": reasons[0].message if reasons else "",
        "reasons": shown,
        "reasonsLeftOut": len(reasons) - len(shown),
        "observedAt": iso(state.observed_at),
        "expiresAt": _expires_at(state, demand),
        "allocated": state.allocated,
        "injectedFaults": state.faults,
    }
    if demand is not None:
        content["demand"] = {"tier": demand.tier.value, "max_age_seconds": demand.max_age_seconds}
    content["counts"] = _counts(state, demand)
    if verbose:
        content["checks"] = _checks(state, specs, demand)
    else:
        content["more"] = "?verbose shows every check with its numbers"
    return (503 if status == "fail" else 200), content


def iso(seconds: float) -> str:
    """A time as RFC 3339 in UTC, to the second."""
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def people_age(seconds: float) -> str:
    """An age for display: `42 s`, `5 min`, `3.1 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def parse_question(query: Mapping[str, Sequence[str]]) -> Question:
    """The question in a query. BadInputError names the parameter and what would be right."""
    if unknown := query.keys() - set(PARAMETERS):
        raise BadInputError(f"unknown query parameter {min(unknown)!r}; /readyz has: {', '.join(PARAMETERS)}")
    for name in ("node", "workload"):
        if len(query.get(name, ())) > 1 or query.get(name) == [""]:
            raise BadInputError(f"{name} is empty or given several times; give it once")
    return Question(
        verbose="verbose" in query,
        excluded=frozenset(name for value in query.get("exclude", ()) for name in value.split(",")),
        node=next(iter(query.get("node", ())), None),
        workload=next(iter(query.get("workload", ())), None),
        demand=parse_demand({name: list(values) for name, values in query.items() if name in _DEMAND}),
    )


def parse_demand(query: dict[str, list[str]]) -> Demand | None:
    """The demand in a query, None without one. BadInputError names the parameter and what would be right."""
    if unknown := query.keys() - {"tier", "max_age"}:
        raise BadInputError(f"unknown query parameter {min(unknown)!r}; /health has: tier, max_age, verbose")
    for name, values in query.items():
        if len(values) != 1:
            raise BadInputError(f"{name} is given {len(values)} times; give it once")
    if not query:
        return None
    word = query.get("tier", [Tier.QUICK.value])[0]
    tiers = [tier.value for tier in Tier]
    if word not in tiers:
        raise BadInputError(f"tier={word[:40]!r} is not a tier; choose from: {', '.join(tiers)}")
    text = query.get("max_age", [str(DEFAULT_MAX_AGE_SECONDS)])[0]
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise BadInputError(f"max_age: {error}") from None
    if not math.isfinite(seconds):
        raise BadInputError(f"max_age={text[:40]!r} is not a duration; write 600 or 10m")
    return Demand(tier=Tier(word), max_age_seconds=seconds)


def readiness(
    state: NodeState,
    question: Question | None = None,
    *,
    workloads: Sequence[Workload] = (),
    quarantine_unknown: str = "",
    unwritable: str = "",
) -> dict[str, str]:
    """
    The conditions of being fit for a job now, each with the reason why it is not met (empty: it is met).

    `workloads` are those of the host's schedulers. `quarantine_unknown` says why it is not known whether the node is
    quarantined; empty where it is known. It counts only for a client that names the node and so relies on the node
    alone: otherwise all nodes would be drained while the aggregator is away. `unwritable` says why no lease can be
    stored, so that each gate would be refused here; empty where it can.
    """
    asked = question or Question()
    conditions = dict.fromkeys((spec.name for spec in state.checks), "")
    conditions["health"] = ""
    for demand in (asked.demand, None) if asked.demand is not None else (None,):
        health, reasons = verdict(state, demand)
        if health in (Health.UNKNOWN, Health.UNHEALTHY):
            _readiness_note(conditions, reasons)
    claims = foreign(state.allocated, workloads, {asked.workload} if asked.workload else ())
    conditions["allocated"] = f"taken by {describe(claims)}" if claims else ""
    conditions["leases"] = unwritable
    if state.accused is not None:
        conditions["accused"] = ""  # a warning: only between nodes it shows what is wrong, and gates try it again
    quarantine = state.quarantine
    conditions["quarantine"] = "" if quarantine is None else f"{quarantine.owner}: {quarantine.reason}"
    if quarantine is None and asked.node is not None:
        conditions["quarantine"] = quarantine_unknown
    if state.maintenance is not None:
        conditions["maintenance"] = f"in maintenance: {state.maintenance}"
    if asked.node is not None:
        conditions["node"] = "" if is_called(state, asked.node) else f"this is {state.node}, not {asked.node[:80]}"
    return conditions


def verdict(state: NodeState, demand: Demand | None) -> tuple[Health, tuple[Reason, ...]]:
    """The health and the reasons of the answer."""
    if demand is None:
        return state.health, state.reasons
    health, reasons, _ = judge_tier(state, demand.tier, demand.max_age_seconds)
    return health, reasons


def readiness_document(state: NodeState, conditions: Mapping[str, str], question: Question) -> tuple[bool, str]:
    """Whether the node is ready, and the text that says so. BadInputError for an excluded condition that is none."""
    for name in sorted(question.excluded - conditions.keys()):
        raise BadInputError(f"exclude={name[:60]!r} is not a condition; choose from: {', '.join(conditions)}")
    failed = {name: why for name, why in conditions.items() if why and name not in question.excluded}
    lines = []
    if question.verbose:
        shown = _shown(state)
        for name, why in conditions.items():
            if name in question.excluded:
                line = f"[ ] {name} excluded"
            else:
                line = f"[-] {name} failed: {why}" if why else shown.get(name, f"[+] {name} ok")
            lines.append(line)
    else:
        lines = [f"{name}: {why}" for name, why in failed.items()]
        if state.accused is not None and "accused" not in question.excluded:
            lines.append(f"warning: accused {state.accused.code}: {state.accused.message}")
    lines.append(f"{state.node} is {'not ready' if failed else 'ready'}")
    if question.verbose:
        lines.append(SIGNS)
    return not failed, "".join(f"{printable_line(line)}\n" for line in lines)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a node."""

    verbose: bool = False
    excluded: frozenset[str] = frozenset()
    """Conditions that do not count."""
    node: str | None = None
    """The name by which the client knows this node; None where it does not say."""
    workload: str | None = None
    """The client's own job as the host's schedulers name it (`slurm:7`): what is allocated to it is no obstacle."""
    demand: Demand | None = None
    """The evidence that is wanted; None for the node's own rules."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The strict question: is there evidence of `tier` that is not older than `max_age_seconds`?"""

    tier: Tier
    max_age_seconds: float


def _counts(state: NodeState, demand: Demand | None) -> dict[str, int]:
    """How many checks came to what; a result that is too old, or suspended by a job, is counted as that alone."""
    results = {result.check: result for result in state.results}
    counts: Counter[str] = Counter()
    for spec in state.checks:
        result = results.get(spec.name)
        if result is None:
            counts["notRun"] += 1
        elif demand is not None and result.age_seconds > demand.max_age_seconds:
            counts["stale"] += 1
        elif _suspended(state, spec):
            counts["suspended"] += 1
        else:
            counts["stale" if expired(spec, result) else result.status.value] += 1
    return dict(counts)


def _expires_at(state: NodeState, demand: Demand | None) -> str | None:
    """When this answer expires if there are no new results; None when nothing in it expires."""
    left = []
    for spec in state.checks:
        result = next((r for r in state.results if r.check == spec.name), None)
        if result is None:
            continue
        if demand is not None and spec.tier.rank <= demand.tier.rank:
            left.append(demand.max_age_seconds - result.age_seconds)
        elif demand is None and spec.expires_seconds is not None and not _suspended(state, spec):
            left.append(spec.expires_seconds - result.age_seconds)
    return iso(state.observed_at + max(0.0, min(left))) if left else None


def _checks(state: NodeState, specs: dict[str, CheckSpec], demand: Demand | None) -> dict[str, list[dict[str, Any]]]:
    content: dict[str, list[dict[str, Any]]] = {}
    for result in state.results:
        spec = specs[result.check]
        note = _note(state, spec, result, demand)
        for finding in result.findings:
            if finding.status is Status.SKIP and finding.reason == "NotApplicable":
                continue
            for key, entry in _entries(state, result, finding):
                if note:
                    entry["output"] = f"{note}: {entry['output']}" if entry.get("output") else note
                content.setdefault(key, []).append(entry)
    for name, spec in specs.items():
        if all(result.check != name for result in state.results) and spec.tier in (Tier.PASSIVE, Tier.QUICK):
            content[name] = [{"componentId": "node", "status": "fail", "output": f"{name} has not run yet"}]
    return content


def _note(state: NodeState, spec: CheckSpec, result: CheckResult, demand: Demand | None) -> str:
    """A note on the age of a result; empty where there is nothing to note."""
    age = people_age(result.age_seconds)
    if demand is not None and result.age_seconds > demand.max_age_seconds:
        return f"stale, {age} old"
    if _suspended(state, spec):
        return f"suspended while {describe(state.allocated)} uses the devices, {age} old"
    if expired(spec, result):
        return f"stale, {age} old"
    return ""


def _suspended(state: NodeState, spec: CheckSpec) -> bool:
    return bool(state.allocated) and spec.tier is not Tier.PASSIVE


def _entries(state: NodeState, result: CheckResult, finding: Finding) -> list[tuple[str, dict[str, Any]]]:
    """One entry for each number of a finding, else one for the finding."""
    entry: dict[str, Any] = {
        "componentId": finding.target,
        "status": _WORD[finding.status],
        "time": iso(state.observed_at - result.age_seconds),
    }
    if finding.status is not Status.PASS:
        entry["output"] = f"{finding.message} ({finding.reason})" if finding.reason else finding.message
    if result.injected:
        entry["injected"] = True
    if not finding.measurements:
        return [(result.check, entry)]
    return [(_key(result.check, m), {**entry, **_observed(m)}) for m in finding.measurements]


def _key(check: str, measurement: Measurement) -> str:
    """`matmul:flops_per_second` for matmul_flops_per_second."""
    return f"{check}:{measurement.name.removeprefix(check + '_')}"


def _observed(measurement: Measurement) -> dict[str, Any]:
    observed: dict[str, Any] = {
        "observedValue": measurement.value,
        "observedUnit": unit(measurement.name) or ("ratio" if measurement.name.endswith("_ratio") else "1"),
    }
    if measurement.labels:
        observed["labels"] = measurement.labels
    return observed


def _readiness_note(conditions: dict[str, str], reasons: Sequence[Reason]) -> None:
    """Add each reason against the node to the condition of its check."""
    for reason in reversed(reasons):  # the worst is written last
        if reason.status.value in ("unknown", "fail"):
            name = reason.check if reason.check in conditions else "health"
            conditions[name or "health"] = reason.message


def _shown(state: NodeState) -> dict[str, str]:
    """The line of each check that is no obstacle, and of the health: met where it has passed, and nowhere else."""
    results = {result.check: result for result in state.results}
    lines = {}
    if state.health is not Health.HEALTHY:  # each reason is with its check, so that one of these can be excluded
        named = dict.fromkeys(reason.check for reason in state.reasons if reason.check is not None)
        lines["health"] = f"[!] health {state.health.value}: {', '.join(named) or 'see /health'}"
    for spec in state.checks:
        result = results.get(spec.name)
        if result is None:
            lines[spec.name] = f"[ ] {spec.name} has not run"
        elif result.status is not Status.PASS:
            said = next((finding for finding in result.findings if finding.status is result.status), None)
            code = (said.reason if said is not None else None) or result.status.value
            word = "not applicable" if code == "NotApplicable" else f"{result.status.value} {code}"
            sign = " " if result.status is Status.SKIP else "!"
            lines[spec.name] = f"[{sign}] {spec.name} {word}: {said.message if said is not None else result.error}"
    if state.accused is not None:
        lines["accused"] = f"[!] accused {state.accused.code}: {state.accused.message}"
    return lines
