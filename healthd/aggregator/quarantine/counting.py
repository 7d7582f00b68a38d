"""Results and accusations taken into the record: what is counted, what latches, what passes again. Pure."""

from __future__ import annotations

import dataclasses

from checks.contract import Tier
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantine_facts import Facts, Fault, Outcome
from healthd.aggregator.model.quarantines import (
    COLLECTIVES,
    HARD_ACTIONS,
    CountedResult,
    Effect,
    FailureCount,
    HistoryNote,
    LastCounted,
    Latch,
    Rule,
    RuleRecord,
)

SLACK_SECONDS = 5.0
"""The age of one and the same result may be told with so much difference: what was on the way is added to it."""
SAME_SLACK_SECONDS = 0.5
"""The same where the result says that it is of another run."""
LONGEST_WINDOW_SECONDS = 7 * 86400.0
"""A check that runs less often than five times a week cannot fail often; a limit on everything."""
MOST_MARKS = 100
MOST_LATCHES = 32
"""Of one node: two for each of 16 devices. What is beyond adds nothing to a node that is out."""


def count_results(record: RuleRecord, facts: Facts, policy: Policy, effects: list[Effect]) -> RuleRecord:
    """Take in every result that is a new one."""
    seen, again = dict(record.seen), False
    for outcome in facts.outcomes:
        before = seen.get(outcome.check)
        fresh = before is None or _is_new(outcome, before)
        if before is None or fresh:
            by_age = before is not None and before.started_at == outcome.started_at
            seen[outcome.check] = LastCounted(at=outcome.measured_at, started_at=outcome.started_at, by_age=by_age)
        elif before.by_age and before.started_at != outcome.started_at:
            seen[outcome.check] = dataclasses.replace(before, started_at=outcome.started_at, by_age=False)
        if fresh:
            record = _count(record, facts, policy, outcome, effects)
            again = again or (outcome.active and outcome.passed is False)
    if again:
        # Its quick tier did not pass: the row of passes of an accused node is broken.
        counts = tuple(dataclasses.replace(c, passes=0) if c.rule is Rule.ACCUSED else c for c in record.counts)
        record = dataclasses.replace(record, counts=counts)
    return dataclasses.replace(record, seen=seen)


def _is_new(outcome: Outcome, before: LastCounted) -> bool:
    """
    Whether it was not counted before. Ages alone tell a new run only when it is much younger; its start tells more.
    """
    other_run = not before.by_age and before.started_at != outcome.started_at
    slack = SAME_SLACK_SECONDS if other_run else max(SLACK_SECONDS, min(outcome.interval_seconds / 2, 60.0))
    return outcome.measured_at > before.at + slack


def _count(record: RuleRecord, facts: Facts, policy: Policy, outcome: Outcome, effects: list[Effect]) -> RuleRecord:
    """One new result: faults that latch, faults that are counted, a pass for what failed before."""
    hard = [fault for fault in outcome.faults if fault.action in HARD_ACTIONS]
    soft = [fault for fault in outcome.faults if fault.action not in HARD_ACTIONS]
    for fault in hard:
        record = latch(record, facts, fault, outcome.tier, outcome.measured_at, effects)
    window = min(
        max(policy.soft_window_seconds, policy.soft_results * outcome.interval_seconds), LONGEST_WINDOW_SECONDS
    )
    if soft:
        first = FailureCount(
            rule=Rule.SOFT,
            fault=soft[0],
            tier=outcome.tier,
            active=outcome.active,
            since=outcome.measured_at,
            last_at=outcome.measured_at,
            window_seconds=window,
        )
        return _fail(record, policy, first, effects)
    counts = []
    for count in record.counts:
        if count.rule is Rule.SOFT and count.fault.check == outcome.check:
            if outcome.passed is True:
                count = _pass(count, outcome.measured_at, policy, effects)
            else:
                count = dataclasses.replace(count, passes=0)
        counts.append(count)
    return dataclasses.replace(record, counts=tuple(counts))


def _fail(record: RuleRecord, policy: Policy, new: FailureCount, effects: list[Effect]) -> RuleRecord:
    """A failure more of what is counted already, or the first one."""
    counts, found = [], False
    for count in record.counts:
        same = (count.rule, count.fault.check, count.fault.injected)
        if same == (new.rule, new.fault.check, new.fault.injected):
            found = True
            if count.passes >= policy.clear_passes:
                effects.append(_failed(new.fault))
            count = dataclasses.replace(
                count,
                fault=new.fault,
                tier=max(count.tier, new.tier, key=lambda tier: tier.rank),
                last_at=new.last_at,
                window_seconds=new.window_seconds,
                fails=count.fails + 1,
                passes=0,
                marks=(*count.marks, CountedResult(at=new.last_at, failed=True))[-MOST_MARKS:],
            )
        counts.append(count)
    if not found:
        effects.append(_failed(new.fault))
        counts.append(dataclasses.replace(new, fails=1, marks=(CountedResult(at=new.last_at, failed=True),)))
    return dataclasses.replace(record, counts=tuple(counts))


def _failed(fault: Fault) -> HistoryNote:
    injected = " (injected)" if fault.injected else ""
    return HistoryNote(kind="failed", message=f"{fault.check} {fault.target} {fault.code}: {fault.message}{injected}")


def _pass(count: FailureCount, at: float, policy: Policy, effects: list[Effect]) -> FailureCount:
    passes = count.passes + 1
    if passes == policy.clear_passes:
        text = f"{count.fault.check} passes again, {passes} times in a row ({count.fault.code} before)"
        effects.append(HistoryNote(kind="passed again", message=text))
    marks = (
        count.marks if count.rule is Rule.ACCUSED else (*count.marks, CountedResult(at=at, failed=False))[-MOST_MARKS:]
    )
    return dataclasses.replace(count, passes=min(passes, MOST_MARKS), marks=marks)


def latch(record: RuleRecord, facts: Facts, fault: Fault, tier: Tier, at: float, effects: list[Effect]) -> RuleRecord:
    """A hard fault, seen for the first time or again."""
    identity = facts.identity_of(fault.device)
    key = (identity, fault.code, fault.check, fault.injected)
    latches, found = [], False
    for latch in record.latches:
        if (latch.identity, latch.fault.code, latch.fault.check, latch.fault.injected) == key:
            found = True
            latch = dataclasses.replace(
                latch,
                fault=fault,
                tier=max(latch.tier, tier, key=lambda one: one.rank),
                node=facts.node,
                boot_id=facts.boot_id,
                last_at=max(at, latch.last_at),
                times=latch.times + 1,
            )
        latches.append(latch)
    if not found and len(latches) < MOST_LATCHES:
        effects.append(_failed(fault))
        latches.append(
            Latch(
                identity=identity,
                fault=fault,
                tier=tier,
                node=facts.node,
                boot_id=facts.boot_id,
                since=at,
                last_at=at,
                times=1,
            )
        )
    return dataclasses.replace(record, latches=tuple(latches))


def accused(now: float, fault: Fault, policy: Policy) -> FailureCount:
    """The count of a node that a validation names, with nothing counted yet."""
    return FailureCount(
        rule=Rule.ACCUSED,
        fault=fault,
        tier=Tier.QUICK,
        active=True,
        since=now,
        last_at=now,
        window_seconds=policy.accused_window_seconds,
    )


def count_accusations(
    now: float, record: RuleRecord, facts: Facts, policy: Policy, effects: list[Effect]
) -> RuleRecord:
    """New accusations, and passes of the quick tier that speak for an accused node."""
    for fault in facts.accusations:
        if fault.action in HARD_ACTIONS:
            record = latch(record, facts, fault, Tier.QUICK, now, effects)
            continue
        new = accused(now, fault, policy)
        record = _fail(record, policy, new, effects)
    if facts.quick_at is None or not any(count.rule is Rule.ACCUSED for count in record.counts):
        return record
    before = record.seen.get(COLLECTIVES)
    after = max([count.last_at for count in record.counts if count.rule is Rule.ACCUSED])
    if before is not None:
        after = max(after, before.at)
    if facts.quick_at <= after + SLACK_SECONDS:
        return record
    counts = tuple(
        _pass(count, facts.quick_at, policy, effects) if count.rule is Rule.ACCUSED else count
        for count in record.counts
    )
    seen = {**record.seen, COLLECTIVES: LastCounted(at=facts.quick_at, started_at=0.0, by_age=True)}
    return dataclasses.replace(record, counts=counts, seen=seen)
