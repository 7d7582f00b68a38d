"""
How right the gate is: what it decided, held against how the jobs ended. Pure.

`facts_of` says what is kept of each decided gate, `counts_of` and `report_of` make the figures of a report from it.
Each share has its confidence interval, because the numbers are small.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checks.contract import Status, Tier
from healthd.aggregator.gate.records import Closing, Gate
from healthd.aggregator.jobs.outcome_records import (
    STARTED,
    WORDS,
    Counts,
    DecisionRow,
    EndRow,
    Fault,
    GateEnding,
    GateFacts,
)
from healthd.aggregator.jobs.ungated import UngatedFigure
from healthd.aggregator.validation import consequence
from healthd.core.evidence import judge_tier
from healthd.core.model import Decision, Mode, NodeState, Reason, Verdict

Z_95 = 1.959964
"""Of the normal distribution, two-sided 95 %."""
MOST_FAULTS = 512
"""Faults kept of one gate: a pool that fails as a whole need not be written down node by node."""
MOST_DEVICES = 1024
"""Of a node, as far as its costs go."""
MOST_NODES = 10
"""Nodes that the report lists: those to look at first."""
MOST_EXCLUDED_ROWS = 20_000
"""Nodes, and (node, reason) pairs, that one report looks at: a fleet of 10,000 with two reasons each."""

# Somebody else has the node: that is not a word about its health, and in a busy fleet it would drown all others.
_TAKEN = frozenset({"Reserved", "Allocated"})


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


def counts_of(found: Iterable[tuple[GateFacts, str | None]]) -> Counts:
    """What a report is made of: the facts of gates, each with the outcome that a launcher reported of its job."""
    since: float | None = None
    ends = Counter[tuple[str, GateEnding, Verdict, bool, bool]]()
    gates = Counter[tuple[GateEnding, Verdict]]()
    cost: dict[tuple[GateEnding, Verdict], float] = defaultdict(float)
    failed, out, excluded = Counter[tuple[str, str]](), Counter[str](), Counter[tuple[str, str]]()
    waits: dict[GateEnding, list[float]] = defaultdict(list)
    for facts, status in found:
        since = facts.decided_at if since is None else min(since, facts.decided_at)
        gates[facts.way, facts.would] += 1
        cost[facts.way, facts.would] += facts.device_seconds
        waits[facts.way].append(facts.wait_seconds)
        out.update({fault.node for fault in facts.faults if fault.out})
        excluded.update({(fault.node, fault.code) for fault in facts.faults if fault.out})
        if status is None:
            continue
        ends[status, facts.way, facts.would, facts.alarmed, facts.clean] += 1
        if facts.way in STARTED:
            failed.update({(fault.check, status) for fault in facts.faults if not fault.out})
    return Counts(
        since=since,
        ends=[
            EndRow(status=status, way=way, would=would, alarmed=alarmed, clean=clean, count=count)
            for (status, way, would, alarmed, clean), count in ends.items()
        ],
        decisions=[
            DecisionRow(way=way, would=would, count=count, device_seconds=cost[way, would])
            for (way, would), count in gates.items()
        ],
        failed=[(check, status, count) for (check, status), count in failed.items()],
        excluded=[(node, code, count) for (node, code), count in excluded.most_common(MOST_EXCLUDED_ROWS)],
        out=dict(out.most_common(MOST_EXCLUDED_ROWS)),
        waits={way: sorted(seconds) for way, seconds in waits.items()},
    )


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
        return Exit(ready=False, why=("no observed job has ended: run gates in observe mode and report outcomes",))
    enough = jobs >= rule.min_jobs
    why = [f"{jobs} observed jobs have ended, {'at least' if enough else 'below'} the {rule.min_jobs} required"]
    ready = enough
    alarms = sum(row.count for row in good if row.alarmed)
    stopped = sum(row.count for row in good if row.would is not Verdict.ADMIT)
    for count, what in ((alarms, "had a failing check"), (stopped, "would not have been admitted by enforce")):
        small, text = _bounded(count, _sum(good), what, rule)
        ready = ready and small
        why.append(text)
    return Exit(ready=ready, why=tuple(why))


def needed(count: int, rule: ExitRule) -> int:
    """How many successful jobs it takes, `count` of them alarmed, until the upper end is below the rule's."""
    low, high = max(1, count), max(2, 2 * count)
    while wilson(count, high)[1] >= rule.most_false_ratio:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wilson(count, middle)[1] < rule.most_false_ratio else (middle, high)
    return high


def _bounded(count: int, of: int, what: str, rule: ExitRule) -> tuple[bool, str]:
    """Whether a share is below the bound for certain, and the sentence that says so."""
    most = f"{100 * rule.most_false_ratio:g} %"
    if not of:
        return False, f"no observed job was successful, so it is unknown how many {what}"
    high = wilson(count, of)[1]
    text = f"{count} of {of} successful jobs {what}: at most {100 * high:.1f} % (95 %)"
    if high < rule.most_false_ratio:
        return True, f"{text}, below {most}"
    if count / of >= rule.most_false_ratio:
        return False, f"{text}; it must be below {most}: find out what failed before jobs that succeeded"
    return False, f"{text}; to show less than {most}, {needed(count, rule) - of} more jobs without one are needed"


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


# --- what is kept of a decided gate -----------------------------------------------------------------------------------


def facts_of(gate: Gate, states: Iterable[NodeState]) -> GateFacts | None:
    """
    The facts of a gate; None of one that is open, or that asked for an answer and no nodes: no job will end there.

    `states` are those that the decision went by.
    """
    decision = gate.decision
    if decision is None or not gate.request.lease:
        return None
    way = way_of(gate, decision)
    would = decision.would or decision.decision
    known = {state.node: state for state in states}
    faults = dict.fromkeys(_left_out(decision))
    if way in (GateEnding.OBSERVED, GateEnding.OVERRIDDEN) and would is not Verdict.ADMIT:
        faults.update(dict.fromkeys(_run_on(gate, decision, known)))
    alarmed = any(not fault.out for fault in faults)
    kept = sorted(faults, key=lambda fault: fault.out)[:MOST_FAULTS]
    return GateFacts(
        gate=gate.id,
        decided_at=decision.decided_at,
        way=way,
        would=would,
        alarmed=alarmed,
        clean=way in STARTED and would is Verdict.ADMIT and not alarmed,
        wait_seconds=max(0.0, decision.duration_seconds),
        device_seconds=device_seconds(gate, known),
        faults=tuple(kept),
    )


def way_of(gate: Gate, decision: Decision) -> GateEnding:
    """How it ended."""
    codes = {reason.code for reason in decision.reasons[:1]}
    if decision.decision is not Verdict.ADMIT:
        return GateEnding.WITHDRAWN if codes & {closing.value for closing in Closing} else GateEnding.REJECTED
    if "Override" in codes:
        return GateEnding.OVERRIDDEN
    return GateEnding.OBSERVED if gate.terms.mode is Mode.OBSERVE else GateEnding.ADMITTED


def _left_out(decision: Decision) -> Iterator[Fault]:
    for excluded in decision.excluded:
        for why in excluded.reasons[:4]:
            if why.code not in _TAKEN:
                yield Fault(node=excluded.node, check=why.check or "", code=why.code, out=True)


def _run_on(gate: Gate, decision: Decision, states: Mapping[str, NodeState]) -> Iterator[Fault]:
    """What had failed on the nodes that the job was given all the same, of the evidence that the gate asks for."""
    given = {node.node for node in decision.nodes}
    found: list[Reason] = []
    for name in sorted(given & states.keys()):
        state = states[name]
        if any(result.status is Status.FAIL for result in state.results):
            found.extend(judge_tier(state, gate.terms.tier, gate.terms.max_age_seconds)[1])
    for validation in gate.validations:
        if validation.verdict is not None:
            found.extend(consequence(validation).out.values())
    for why in found:
        if why.status is Status.FAIL and why.node in given:
            yield Fault(node=why.node, check=why.check or "collectives", code=why.code, out=False)


# --- what it cost -----------------------------------------------------------------------------------------------------


def device_seconds(gate: Gate, states: Mapping[str, NodeState]) -> float:
    """Seconds of devices that the gate's runs and collectives have taken, as far as the nodes' states tell."""
    runs = sum(run_seconds(gate, name, states[name]) for name in gate.ordered if name in states)
    return runs + sum(
        tested.seconds * sum(validation.ranks.get(name, 0) for name in tested.members)
        for validation in gate.validations
        for tested in validation.history
    )


def run_seconds(gate: Gate, name: str, state: NodeState) -> float:
    """Of the active checks that a node has run since the gate ordered it to; `state` has ages as of the decision."""
    if gate.decision is None or name not in gate.ordered:
        return 0.0
    since = gate.decision.decided_at - gate.ordered[name].ordered_at
    active = {spec.name for spec in state.checks if spec.tier is not Tier.PASSIVE}
    devices = (state.inventory.device_count if state.inventory is not None else None) or 1
    # Numbers of a node's own, which go into sums that are kept: none is more than it can be.
    return min(max(1, devices), MOST_DEVICES) * sum(
        min(max(0.0, result.duration_seconds), since)
        for result in state.results
        if result.check in active and result.age_seconds <= since
    )


# --- shares of small numbers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Share:
    """`count` of `of`, with Wilson's 95 % interval. There is none of nothing: `of` is above 0."""

    count: int
    of: int
    ratio: float
    low: float
    high: float


def share(count: int, of: int) -> Share | None:
    """A share with its interval; None of nothing."""
    if of <= 0:
        return None
    low, high = wilson(count, of)
    return Share(count=count, of=of, ratio=count / of, low=low, high=high)


def wilson(count: int, of: int, *, z: float = Z_95) -> tuple[float, float]:
    """
    The interval of a share of which `count` of `of` were seen; (0, 1) of nothing.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927). Unlike
    the usual one it is right for small numbers, and for none or all.
    """
    if of <= 0:
        return 0.0, 1.0
    ratio = count / of
    middle = ratio + z * z / (2 * of)
    half = z * math.sqrt(ratio * (1 - ratio) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    low = 0.0 if count <= 0 else max(0.0, (middle - half) / scale)
    high = 1.0 if count >= of else min(1.0, (middle + half) / scale)
    return low, high


def quantile(ascending: Sequence[float], q: float) -> float:
    """By nearest rank: a value that was seen. ValueError of nothing."""
    if not ascending:
        raise ValueError("no quantile of an empty list")
    return ascending[max(0, math.ceil(q * len(ascending)) - 1)]
