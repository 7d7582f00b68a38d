"""
`GET /health` as application/health+json, rendered from the one snapshot: pure.

Without a demand the answer is the node's health, with active evidence suspended while a job has the devices. With a
demand (`tier`, `max_age`) it is the strict answer. It says what is wrong and counts the rest; with `verbose` it has
every check with its numbers.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from checks.contract import Finding, Measurement, Status, Tier
from checks.limits import unit
from healthd.core.config.values import parse_duration
from healthd.core.errors import BadInputError
from healthd.core.evidence import expired, judge_tier
from healthd.core.model import CheckResult, CheckSpec, Health, NodeState, Reason
from healthd.node.occupancy.model import describe

MEDIA_TYPE = "application/health+json"
STATUS = {Health.HEALTHY: "pass", Health.DEGRADED: "warn", Health.UNKNOWN: "fail", Health.UNHEALTHY: "fail"}
_WORD = {Status.PASS: "pass", Status.WARN: "warn", Status.UNKNOWN: "fail", Status.FAIL: "fail", Status.SKIP: "fail"}
MAX_REASONS = 16
"""Of an answer that is not verbose: the worst."""
# The maximum age of a demand that names none: the default of gates.
DEFAULT_MAX_AGE_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The strict question: is there evidence of `tier` that is not older than `max_age_seconds`?"""

    tier: Tier
    max_age_seconds: float


def parse_query(query: dict[str, list[str]]) -> tuple[Demand | None, bool]:
    """The demand in a query of /health, and whether it is verbose. BadInputError as of `parse_demand`."""
    return parse_demand({name: values for name, values in query.items() if name != "verbose"}), "verbose" in query


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
        raise BadInputError(f"tier={word[:40]!r} is not a tier; there are: {', '.join(tiers)}")
    text = query.get("max_age", [str(DEFAULT_MAX_AGE_SECONDS)])[0]
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise BadInputError(f"max_age: {error}") from None
    if not math.isfinite(seconds):
        raise BadInputError(f"max_age={text[:40]!r} is not a duration; write 600 or 10m")
    return Demand(tier=Tier(word), max_age_seconds=seconds)


def verdict(state: NodeState, demand: Demand | None) -> tuple[Health, tuple[Reason, ...]]:
    """The health and the reasons of the answer."""
    if demand is None:
        return state.health, state.reasons
    health, reasons, _ = judge_tier(state, demand.tier, demand.max_age_seconds)
    return health, reasons


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
        content["more"] = "?verbose has every check with its numbers"
    return (503 if status == "fail" else 200), content


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
        return f"suspended while {describe(state.allocated)} has the devices, {age} old"
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


def iso(seconds: float) -> str:
    """A time as RFC 3339 in UTC, to the second."""
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def people_age(seconds: float) -> str:
    """An age for display: `42 s`, `5 min`, `3.1 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
