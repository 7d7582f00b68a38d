"""
How right the gate is: figures from how jobs ended, held against what the gate had said of their nodes. Pure.

Every share comes with its count and a 95 % interval, and where there is nothing to count there is no share: three jobs
prove little, and the report must say so. False alarms can only be seen where a job ran in spite of a failing check: in
observe mode, and by an override, whose jobs were chosen because their nodes looked bad.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from healthd.aggregator.calibration.shares import Share, quantile, share, wilson
from healthd.aggregator.inventory.ungated import UngatedFigure
from healthd.aggregator.model.calibration import STARTED, WORDS, Counts, DecisionRow, EndRow, GateEnding
from healthd.core.model import Verdict

MOST_NODES = 10
"""Nodes that the report lists: those to look at first."""


@dataclass(frozen=True, kw_only=True)
class ExitRule:
    """When observe mode has shown enough to go on to enforce."""

    min_jobs: int = 50
    """Jobs that must have been observed to their end: fewer are no picture of what a fleet runs."""

    most_false_ratio: float = 0.02
    """The upper end of the interval must be below it, for failing checks and for all that enforce would have stopped.
    One good job in fifty: with no alarm at all that takes 189 successful jobs, and fewer cannot show it."""


@dataclass(frozen=True, kw_only=True)
class CheckFigure:
    """How often a check had failed on a node of a job that ran all the same, by how the job ended."""

    check: str
    before_ok: Share | None
    before_infra: Share | None


@dataclass(frozen=True, kw_only=True)
class WaitFigure:
    """Seconds from the question to the decision, by nearest rank."""

    way: GateEnding
    n: int
    p50_seconds: float
    p95_seconds: float


@dataclass(frozen=True, kw_only=True)
class NodeFigure:
    """A node that gates left out. `reasons` are the codes, the most frequent first."""

    node: str
    gates: int
    reasons: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Whether observe mode has shown enough. `why` are sentences, one for each condition."""

    ready: bool
    why: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """
    All figures. A share is None where there is nothing to count.

    `jobs` have told their end, `untold` were admitted and have not. `success` counts `infra` as not successful,
    `success_without_infra` leaves it out. `false_alarms`: of the successful jobs that could have shown one (observed or
    overridden), those that had a failing check; then each by itself. `misses`: of the jobs that a device, link or host
    stopped, those that the gate had admitted with all evidence passing; `infra_after_clean` is the same, of all jobs
    admitted so. `stopped_ok` and `stopped_infra`: of the jobs observed, those that enforce would not have admitted.
    `ungated`: jobs that started without any gate; None where that is not counted.
    """

    days: float
    since: float | None
    jobs: int
    untold: int
    ended: Mapping[str, int]
    success: Share | None
    success_without_infra: Share | None
    false_alarms: Share | None
    false_alarms_observed: Share | None
    false_alarms_overridden: Share | None
    misses: Share | None
    infra_after_clean: Share | None
    stopped_ok: Share | None
    stopped_infra: Share | None
    checks: tuple[CheckFigure, ...]
    decisions: tuple[DecisionRow, ...]
    waits: tuple[WaitFigure, ...]
    nodes: tuple[NodeFigure, ...]
    device_seconds: float | None
    device_seconds_per_gate: float | None
    exit: Exit
    ungated: UngatedFigure | None = None


def report_of(
    counts: Counts, *, days: float, rule: ExitRule | None = None, ungated: UngatedFigure | None = None
) -> Report:
    """All figures of what was counted."""
    ends = [row for row in counts.ends if row.way in STARTED]
    told = Counter[str]()
    for row in ends:
        told[word_of(row.status)] += row.count
    started = sum(row.count for row in counts.decisions if row.way in STARTED)
    jobs, gates = sum(told.values()), sum(row.count for row in counts.decisions)
    cost = sum(row.device_seconds for row in counts.decisions)
    observed = _of(ends, ways=(GateEnding.OBSERVED,))
    open_to_alarm = _of(ends, ways=(GateEnding.OBSERVED, GateEnding.OVERRIDDEN))
    ok, infra = _of(ends, word="ok"), _of(ends, word="infra")
    return Report(
        days=days,
        since=counts.since,
        jobs=jobs,
        untold=max(0, started - jobs),
        ended={word: told[word] for word in ("ok", "failed", "infra", "other") if told[word]},
        success=share(told["ok"], told["ok"] + told["failed"] + told["infra"]),
        success_without_infra=share(told["ok"], told["ok"] + told["failed"]),
        false_alarms=_alarms(_of(open_to_alarm, word="ok")),
        false_alarms_observed=_alarms(_of(observed, word="ok")),
        false_alarms_overridden=_alarms(_of(ok, ways=(GateEnding.OVERRIDDEN,))),
        misses=share(sum(row.count for row in infra if row.clean), _sum(infra)),
        infra_after_clean=share(
            sum(row.count for row in infra if row.clean),
            sum(row.count for row in ends if row.clean and word_of(row.status) != "other"),
        ),
        stopped_ok=_stopped(_of(observed, word="ok")),
        stopped_infra=_stopped(_of(observed, word="infra")),
        checks=_checks(counts.failed, _sum(_of(open_to_alarm, word="ok")), _sum(_of(open_to_alarm, word="infra"))),
        decisions=tuple(sorted(counts.decisions, key=lambda row: (-row.count, row.way.value, row.would.value))),
        waits=tuple(
            WaitFigure(way=way, n=len(found), p50_seconds=quantile(found, 0.5), p95_seconds=quantile(found, 0.95))
            for way, found in sorted(counts.waits.items(), key=lambda item: list(GateEnding).index(item[0]))
            if found
        ),
        nodes=_nodes(counts.excluded, counts.out),
        device_seconds=cost if gates else None,
        device_seconds_per_gate=cost / gates if gates else None,
        exit=exit_of(observed, rule or ExitRule()),
        ungated=ungated,
    )


def word_of(status: str) -> str:
    """What a launcher's word counts as: ok, failed, infra or other."""
    return WORDS.get(status.strip().lower(), "other")


def exit_of(observed: Sequence[EndRow], rule: ExitRule) -> Exit:
    """
    Whether to go on from observe to enforce, by what was observed, and what is missing.

    Two shares must be small for certain: of successful jobs that had a failing check, and of successful jobs that
    enforce would not have admitted, which counts missing evidence too.
    """
    known = [row for row in observed if word_of(row.status) != "other"]
    jobs, good = _sum(known), _of(known, word="ok")
    if not jobs:
        return Exit(ready=False, why=("no job was observed to its end: run gates in observe mode and tell outcomes",))
    enough = jobs >= rule.min_jobs
    why = [f"{jobs} observed jobs have ended, {'at least' if enough else 'below'} the {rule.min_jobs} that are wanted"]
    ready = enough
    alarms = sum(row.count for row in good if row.alarmed)
    stopped = sum(row.count for row in good if row.would is not Verdict.ADMIT)
    for count, what in ((alarms, "had a failing check"), (stopped, "would not have been admitted by enforce")):
        small, text = _bounded(count, _sum(good), what, rule)
        ready = ready and small
        why.append(text)
    return Exit(ready=ready, why=tuple(why))


def _bounded(count: int, of: int, what: str, rule: ExitRule) -> tuple[bool, str]:
    """Whether a share is below the bound for certain, and the sentence that says so."""
    most = f"{100 * rule.most_false_ratio:g} %"
    if not of:
        return False, f"no observed job was successful, so that nothing is known of how many {what}"
    high = wilson(count, of)[1]
    text = f"{count} of {of} successful jobs {what}: at most {100 * high:.1f} % (95 %)"
    if high < rule.most_false_ratio:
        return True, f"{text}, below {most}"
    if count / of >= rule.most_false_ratio:
        return False, f"{text}; it must be below {most}: look at what failed before jobs that were fine"
    return False, f"{text}; to be sure of less than {most}, {needed(count, rule) - of} more without one are needed"


def needed(count: int, rule: ExitRule) -> int:
    """How many successful jobs it takes, `count` of them alarmed, until the upper end is below the rule's."""
    low, high = max(1, count), max(2, 2 * count)
    while wilson(count, high)[1] >= rule.most_false_ratio:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wilson(count, middle)[1] < rule.most_false_ratio else (middle, high)
    return high


def _of(rows: Iterable[EndRow], *, word: str | None = None, ways: Sequence[GateEnding] = STARTED) -> list[EndRow]:
    return [row for row in rows if row.way in ways and word in (None, word_of(row.status))]


def _sum(rows: Iterable[EndRow]) -> int:
    return sum(row.count for row in rows)


def _alarms(rows: Sequence[EndRow]) -> Share | None:
    return share(sum(row.count for row in rows if row.alarmed), _sum(rows))


def _stopped(rows: Sequence[EndRow]) -> Share | None:
    return share(sum(row.count for row in rows if row.would is not Verdict.ADMIT), _sum(rows))


def _checks(failed: Iterable[tuple[str, str, int]], ok: int, infra: int) -> tuple[CheckFigure, ...]:
    """By check; those that failed most before jobs that were fine come first."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for check, status, count in failed:
        counts[check][word_of(status)] += count
    figures = [
        CheckFigure(check=check, before_ok=share(seen["ok"], ok), before_infra=share(seen["infra"], infra))
        for check, seen in counts.items()
        if seen["ok"] or seen["infra"]
    ]
    return tuple(sorted(figures, key=lambda one: (-counts[one.check]["ok"], -counts[one.check]["infra"], one.check)))


def _nodes(excluded: Iterable[tuple[str, str, int]], out: Mapping[str, int]) -> tuple[NodeFigure, ...]:
    codes: dict[str, dict[str, int]] = defaultdict(dict)
    for node, code, count in excluded:
        codes[node][code] = count
    worst = sorted(out, key=lambda node: (-out[node], node))[:MOST_NODES]
    return tuple(
        NodeFigure(
            node=node,
            gates=out[node],
            reasons=dict(sorted(codes[node].items(), key=lambda item: (-item[1], item[0]))),
        )
        for node in worst
    )
