"""What a node tells of a rule's quarantine out of a database that was lost. Pure."""

from __future__ import annotations

import dataclasses

from checks.contract import Action, Tier
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantine_facts import Facts, Fault
from healthd.aggregator.model.quarantines import (
    HARD_ACTIONS,
    INHERITED,
    CountedResult,
    Effect,
    Mode,
    Rule,
    RuleRecord,
    RuleVerdict,
)
from healthd.aggregator.quarantine.counting import accused, latch
from healthd.aggregator.quarantine.judge import judge
from healthd.core.model import Quarantine

_CODE = "Quarantined"


def judge_inherited(
    now: float, record: RuleRecord, facts: Facts, spoken: Quarantine, policy: Policy
) -> tuple[RuleRecord, tuple[Effect, ...]]:
    """
    As `judge`, of this quarantine alone.

    Results are left for the next look: they count only from a node whose contact is confirmed, and a quarantine is
    taken over from the first word of the node on. Neither the share of the pool nor its breaker stops it: it was
    within the share when it began, and how large the pool is shows only when its nodes have come.
    """
    room = dataclasses.replace(facts.room, kept=0, most=1, open=False)
    bare = dataclasses.replace(facts, outcomes=(), quick_at=None, deep_at=None, room=room)
    return judge(now, _inherited(now, record, facts, spoken, policy), bare, policy)


def _inherited(now: float, record: RuleRecord, facts: Facts, spoken: Quarantine, policy: Policy) -> RuleRecord:
    """What a hard rule said is latched; the others count as accused. One with an end has nothing left but time."""
    name = spoken.owner.removeprefix("rule:")
    rule = Rule(name) if name in {known.value for known in Rule} else Rule.HARD
    if spoken.until is not None:
        word = RuleVerdict(
            rule=rule,
            mode=Mode.ENFORCED,
            code=_CODE,
            reason=spoken.reason,
            lead="",
            since=spoken.since,
            until=spoken.until,
            clear=True,
            injected=False,
            repeats_before=0,
            last_before=None,
        )
        return dataclasses.replace(record, word=word, repeats=1, last_at=spoken.since)
    fault = Fault(
        code=_CODE,
        check=INHERITED,
        target="node",
        message=spoken.reason,
        action=HARD_ACTIONS[0] if rule is Rule.HARD else Action.INSPECT,
        device=None,
        injected=False,
    )
    if rule is Rule.HARD:
        quiet: list[Effect] = []
        return latch(record, facts, fault, Tier.QUICK, now, quiet)
    mark = CountedResult(at=now, failed=True)
    count = dataclasses.replace(accused(now, fault, policy), fails=1, marks=(mark,), tripped=True)
    return dataclasses.replace(record, counts=(*record.counts, count))
