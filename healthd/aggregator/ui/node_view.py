"""What the page of one node shows, made out of its state and of what the aggregator remembers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checks.contract import SEVERITY, Blame, Finding, Measurement, Status, worst
from checks.limits import quantity, unit
from healthd.aggregator.model.quarantines import RuleRecord
from healthd.aggregator.ui.rendering import brief, natural
from healthd.aggregator.ui.samples import HIGH, WIDE, Chart, Samples, chart, leading, worst_finding
from healthd.core.model import CheckResult, NodeState, Reason

MOST_REASONS = 24
MOST_DEVICES = 256
MOST_FINDINGS = 12
MOST_MEASURED = 8
# A chart's limit is that of its number, whichever side it is on.
MOST_CHECKS = 100


@dataclass(frozen=True, kw_only=True)
class Why:
    """A reason; `since` is when the check began to fail, as far as the aggregator remembers, None: it does not."""

    reason: Reason
    since: float | None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A device in the map. `status` None: no result speaks of it. `said` is the worst of what is said."""

    target: str
    kind: str
    serial: str | None
    memory_bytes: int | None
    status: Status | None
    said: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """A check: its last result (None: it has not run), what to show of it, and its chart."""

    name: str
    tier: str
    doc: str
    result: CheckResult | None
    stale: bool
    lead: Measurement | None
    message: str
    findings: tuple[Finding, ...]
    chart: Chart | None
    told: str
    limit: str

    @property
    def skipped(self) -> bool:
        """Whether it had nothing to judge here."""
        return self.result is not None and not self.stale and self.result.status is Status.SKIP

    @property
    def passed(self) -> bool:
        """Whether it passed, lately enough."""
        return self.result is not None and not self.stale and self.result.status is Status.PASS


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A number of a check over time. `limit` in words, empty without one; `reach_seconds`: how far back it goes."""

    check: str
    status: Status
    lead: Measurement
    limit: str
    chart: Chart | None
    told: str
    reach_seconds: float


def whys(reasons: Sequence[Reason], record: RuleRecord | None) -> list[Why]:
    """The reasons, the node's own fault first, each with its beginning where it is remembered."""
    ordered = sorted(reasons, key=lambda r: (-SEVERITY[r.status], r.blame is not Blame.NODE))
    return [Why(reason=reason, since=_since(reason, record)) for reason in ordered[:MOST_REASONS]]


def _since(reason: Reason, record: RuleRecord | None) -> float | None:
    if record is None:
        return None
    alike = [c.since for c in record.counts if c.fault.check == reason.check and c.fault.code == reason.code]
    alike += [x.since for x in record.latches if x.fault.check == reason.check and x.fault.code == reason.code]
    return min(alike, default=None)


def tiles(state: NodeState) -> list[Tile]:
    """The device map: every device of the inventory, and targets that only findings name when they are not well."""
    said: dict[str, list[Finding]] = {}
    for result in state.results:
        for finding in result.findings:
            if finding.status is not Status.SKIP:
                said.setdefault(finding.target, []).append(finding)
    found = []
    devices = state.inventory.devices if state.inventory is not None else ()
    for device in devices[:MOST_DEVICES]:
        status, text = _worst(said.pop(device.target, []))
        found.append(
            Tile(
                target=device.target,
                kind=device.kind,
                serial=device.serial,
                memory_bytes=device.memory_bytes,
                status=status,
                said=text,
            )
        )
    for target in sorted(said, key=natural)[:MOST_DEVICES]:
        status, text = _worst(said[target])
        if target not in ("node", "") and status not in (None, Status.PASS):
            found.append(Tile(target=target, kind="", serial=None, memory_bytes=None, status=status, said=text))
    return found


def _worst(findings: Sequence[Finding]) -> tuple[Status | None, str]:
    if not findings:
        return None, "no result speaks of it"
    status = worst(finding.status for finding in findings)
    if status is Status.PASS:
        return status, f"{len(findings)} findings, all pass"
    return status, next(finding.message for finding in findings if finding.status is status)


def rows(state: NodeState, samples: Samples) -> list[Row]:
    """The checks, what is not well first, then by tier and name; also those that have not run yet."""
    results = {result.check: result for result in state.results}
    found = [
        _row(state, samples, spec.name, spec.tier.value, spec.doc, results.pop(spec.name, None), spec.expires_seconds)
        for spec in state.checks
    ]
    found += [_row(state, samples, name, r.tier.value, "", r, None) for name, r in results.items()]
    weight = {"passive": 0, "quick": 1, "deep": 2, "soak": 3}
    found.sort(key=lambda row: (-_severity(row), weight.get(row.tier, 9), row.name))
    return found[:MOST_CHECKS]


def measured(state: NodeState, samples: Samples) -> list[Measured]:
    """What active checks measure, and what is not well, over time: the worst first."""
    found = []
    for result in state.results:
        lead = leading(result)
        bad = SEVERITY[result.status] > SEVERITY[Status.PASS]
        if lead is None or result.status is Status.SKIP or not (bad or result.tier.value != "passive"):
            continue
        if not (bad or unit(lead.name) or lead.name.endswith("_ratio")):
            continue  # counts of what was done say nothing over time
        limit = lead.lower if lead.lower is not None else lead.upper
        points = samples.of(state.node, result.check)
        words = _limit_in_words(lead)
        found.append(
            Measured(
                check=result.check,
                status=result.status,
                lead=lead,
                limit=words,
                chart=chart(points, limit, width=WIDE, height=HIGH),
                told=f"{len(points)} results, now {quantity(lead.name, lead.value)}, {words or 'no limit'}",
                reach_seconds=points[-1].at - points[0].at if len(points) > 1 else 0.0,
            )
        )
    found.sort(key=lambda one: (-SEVERITY[one.status], one.check))
    return found[:MOST_MEASURED]


def _limit_in_words(lead: Measurement) -> str:
    """`at least 50 GFLOP/s (learned)`."""
    words = [f"at least {quantity(lead.name, lead.lower)}"] if lead.lower is not None else []
    words += [f"at most {quantity(lead.name, lead.upper)}"] if lead.upper is not None else []
    return f"{' and '.join(words)} ({brief(lead.origin, 30)})" if words else ""


def _severity(row: Row) -> int:
    if row.result is None or (row.stale and row.result.status is not Status.FAIL):
        return SEVERITY[Status.UNKNOWN]
    return max(SEVERITY[row.result.status], SEVERITY[Status.PASS])


def _row(
    state: NodeState,
    samples: Samples,
    name: str,
    tier: str,
    doc: str,
    result: CheckResult | None,
    expires: float | None,
) -> Row:
    lead = leading(result) if result is not None else None
    limit = (lead.lower if lead.lower is not None else lead.upper) if lead is not None else None
    points = samples.of(state.node, name)
    bad = sum(point.status in (Status.FAIL, Status.UNKNOWN) for point in points)
    worst_one = worst_finding(result) if result is not None else None
    active = tier != "passive"
    suspended = bool(state.allocated) and active
    return Row(
        name=name,
        tier=tier,
        doc=doc.strip().split("\n", 1)[0],
        result=result,
        stale=result is not None and expires is not None and not suspended and result.age_seconds > expires,
        lead=lead,
        message=(result.error or "")
        if worst_one is None and result is not None
        else (worst_one.message if worst_one else ""),
        findings=_shown(result),
        chart=chart(points, limit),
        told=f"{len(points)} results kept, {bad} of them not well",
        limit=_limit_in_words(lead) if lead is not None else "",
    )


def _shown(result: CheckResult | None) -> tuple[Finding, ...]:
    if result is None:
        return ()
    return tuple(sorted(result.findings, key=lambda f: -SEVERITY[f.status])[:MOST_FINDINGS])
