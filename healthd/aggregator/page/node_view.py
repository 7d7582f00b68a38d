"""What the page of one node shows, made out of its state and of what the aggregator remembers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checks.contract import SEVERITY, Blame, Finding, Measurement, Status, Tier, worst
from checks.limits import quantity, unit
from healthd.aggregator.page.rendering import brief, natural
from healthd.aggregator.page.samples import (
    HEIGHT,
    HIGH,
    WIDE,
    WIDTH,
    Chart,
    Point,
    Samples,
    chart,
    largest_first,
    leading,
    worst_finding,
)
from healthd.aggregator.quarantine.records import RuleRecord
from healthd.core.model import CheckResult, DeviceRecord, NodeState, Reason

MOST_REASONS = 24
MOST_DEVICES = 256
MOST_FINDINGS = 12
MOST_MEASURED = 8
# A chart's limit is that of its number, whichever side it is on.
MOST_CHECKS = 100


@dataclass(frozen=True, kw_only=True)
class Row:
    """
    A check: its last result (None: it has not run), what to show of it, and what it gave lately.

    `lead` is the number to draw, and `limit` its limit in words, empty without one.
    """

    name: str
    tier: Tier
    result: CheckResult | None
    stale: bool
    lead: Measurement | None
    message: str
    findings: tuple[Finding, ...]
    points: Sequence[Point]
    limit: str

    @property
    def skipped(self) -> bool:
        """Whether it had nothing to judge here."""
        return self.result is not None and not self.stale and self.result.status is Status.SKIP

    @property
    def passed(self) -> bool:
        """Whether it passed, lately enough."""
        return self.result is not None and not self.stale and self.result.status is Status.PASS

    @property
    def severity(self) -> int:
        """How much it is to be looked at: old or missing as much as unknown."""
        if self.result is None or (self.stale and self.result.status is not Status.FAIL):
            return SEVERITY[Status.UNKNOWN]
        return max(SEVERITY[self.result.status], SEVERITY[Status.PASS])

    @property
    def told(self) -> str:
        """The charts in words."""
        bad = sum(point.status in (Status.FAIL, Status.UNKNOWN) for point in self.points)
        return f"{len(self.points)} results kept, {bad} of them not passing"

    @property
    def reach_seconds(self) -> float:
        """How far back the charts go."""
        return self.points[-1].at - self.points[0].at if len(self.points) > 1 else 0.0

    def chart(self, width: float = WIDTH, height: float = HEIGHT) -> Chart | None:
        """What it gave lately, as a drawing of this size."""
        limit = None if self.lead is None else self.lead.lower if self.lead.lower is not None else self.lead.upper
        return chart(self.points, limit, width=width, height=height)

    def large_chart(self) -> Chart | None:
        """The same for the top of the page."""
        return self.chart(WIDE, HIGH)


def whys(reasons: Sequence[Reason], record: RuleRecord | None) -> list[tuple[Reason, float | None]]:
    """The reasons, the node's own fault first, each with when its check began to fail; None: nobody remembers."""
    ordered = sorted(reasons, key=lambda r: (-SEVERITY[r.status], r.blame is not Blame.NODE))
    return [(reason, _since(reason, record)) for reason in ordered[:MOST_REASONS]]


def _since(reason: Reason, record: RuleRecord | None) -> float | None:
    if record is None:
        return None
    alike = [c.since for c in record.counts if c.fault.check == reason.check and c.fault.code == reason.code]
    alike += [x.since for x in record.latches if x.fault.check == reason.check and x.fault.code == reason.code]
    return min(alike, default=None)


def tiles(state: NodeState) -> list[tuple[DeviceRecord, Status | None, str]]:
    """
    The device map: every device of the inventory, and targets that only findings name when they are not well.

    Each with its status (None: no result speaks of it) and the worst of what is said of it.
    """
    said: dict[str, list[Finding]] = {}
    for result in state.results:
        for finding in result.findings:
            if finding.status is not Status.SKIP:
                said.setdefault(finding.target, []).append(finding)
    devices = state.inventory.devices if state.inventory is not None else ()
    found = [(device, *_worst(said.pop(device.target, []))) for device in devices[:MOST_DEVICES]]
    for target in sorted(said, key=natural)[:MOST_DEVICES]:
        status, text = _worst(said[target])
        if target not in ("node", "") and status not in (None, Status.PASS):
            named = DeviceRecord(target=target, kind="", serial=None, cores=None, memory_bytes=None)
            found.append((named, status, text))
    return found


def _worst(findings: Sequence[Finding]) -> tuple[Status | None, str]:
    if not findings:
        return None, "no result mentions it"
    status = worst(finding.status for finding in findings)
    if status is Status.PASS:
        return status, f"{len(findings)} findings, all pass"
    return status, next(finding.message for finding in findings if finding.status is status)


def rows(state: NodeState, samples: Samples) -> list[Row]:
    """The checks, what is not well first, then by tier and name; also those that have not run yet."""
    results = {result.check: result for result in state.results}
    found = [
        _row(state, samples, spec.name, spec.tier, results.pop(spec.name, None), spec.expires_seconds)
        for spec in state.checks
    ]
    found += [_row(state, samples, name, result.tier, result, None) for name, result in results.items()]
    found.sort(key=lambda row: (-row.severity, row.tier.rank, row.name))
    return found[:MOST_CHECKS]


def measured(rows: Sequence[Row]) -> list[Row]:
    """What active checks measure, and what is not well, over time: the worst first."""
    found = []
    for row in rows:
        if row.result is None or row.lead is None or row.result.status is Status.SKIP:
            continue
        # Counts of what was done say nothing over time.
        telling = row.tier is not Tier.PASSIVE and (unit(row.lead.name) or row.lead.name.endswith("_ratio"))
        if telling or SEVERITY[row.result.status] > SEVERITY[Status.PASS]:
            found.append((row.result.status, row))
    found.sort(key=lambda one: (-SEVERITY[one[0]], one[1].name))
    return [row for _, row in found[:MOST_MEASURED]]


def _limit_in_words(lead: Measurement) -> str:
    """`at least 50 GFLOP/s (learned)`."""
    words = [f"at least {quantity(lead.name, lead.lower)}"] if lead.lower is not None else []
    words += [f"at most {quantity(lead.name, lead.upper)}"] if lead.upper is not None else []
    return f"{' and '.join(words)} ({brief(lead.origin, 30)})" if words else ""


def _row(
    state: NodeState, samples: Samples, name: str, tier: Tier, result: CheckResult | None, expires: float | None
) -> Row:
    lead = leading(result) if result is not None else None
    worst_one = worst_finding(result) if result is not None else None
    suspended = bool(state.allocated) and tier is not Tier.PASSIVE
    said = worst_one.message if worst_one is not None else result.error if result is not None else None
    return Row(
        name=name,
        tier=tier,
        result=result,
        stale=result is not None and expires is not None and not suspended and result.age_seconds > expires,
        lead=lead,
        message=said or "",
        findings=_shown(result),
        points=samples.of(state.node, name),
        limit=_limit_in_words(lead) if lead is not None else "",
    )


def _shown(result: CheckResult | None) -> tuple[Finding, ...]:
    if result is None:
        return ()
    return tuple(sorted(largest_first(result.findings), key=lambda f: -SEVERITY[f.status])[:MOST_FINDINGS])
