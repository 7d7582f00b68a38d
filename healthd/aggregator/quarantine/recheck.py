"""Which run to order on a node that the rules keep out, because nothing else would show that it is well. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from checks.contract import Tier
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantine_facts import Facts
from healthd.aggregator.model.quarantines import BY_BOOT, Mode, RecheckRun, Rule, RuleRecord
from healthd.aggregator.quarantine.causes import Cause, rebooted
from healthd.core.model import FINAL_STATUSES, OrderStatus

AGAIN_SECONDS = 30.0
"""After a run that helped: the next pass in the row."""
RETRY_SECONDS = 600.0
"""After a run that was refused or did not help, at least: whoever has the devices may keep them for long."""


def next_probe(now: float, record: RuleRecord, facts: Facts, policy: Policy, causes: tuple[Cause, ...]) -> RuleRecord:
    """The record with the run that is under way or to be ordered now, if any."""
    word, probe = record.word, record.probe
    if probe is not None:
        over = facts.probe_status in FINAL_STATUSES or now >= probe.ordered_at + probe.deadline_seconds
        if not over and causes and word is not None and not facts.allocated:
            return record
        helped = facts.probe_status == OrderStatus.DONE and any(count.passes for count in record.counts)
        again = AGAIN_SECONDS if helped else max(RETRY_SECONDS, word.until - word.since if word is not None else 0.0)
        return dataclasses.replace(record, probe=None, probe_after=now + again)
    if not policy.rules or not policy.rules_probe or not causes or facts.allocated or now < record.probe_after:
        return record
    if word is None or word.mode is not Mode.ENFORCED or now < word.until:
        return record
    tiers = list(_tiers(record, facts, policy))
    if not tiers or None in tiers:
        return record
    tier = max((one for one in tiers if one is not None), key=lambda one: one.rank)
    order_id = f"rule:{facts.node}:{int(now * 1000):x}"
    within = policy.run_seconds[tier] + facts.compile_seconds
    found = RecheckRun(order_id=order_id, tier=tier, ordered_at=now, deadline_seconds=within)
    return dataclasses.replace(record, probe=found)


def _tiers(record: RuleRecord, facts: Facts, policy: Policy) -> Iterator[Tier | None]:
    """The tier that each cause waits for; None for one that no run can take away."""
    for latch in record.latches:
        if latch.fault.action not in BY_BOOT or not rebooted(latch, facts):
            yield None
        elif latch.tier is not Tier.PASSIVE:
            yield latch.tier
    if record.owed:
        yield Tier.DEEP
    for count in record.counts:
        if count.tripped and count.passes < policy.clear_passes and (count.active or count.rule is Rule.ACCUSED):
            yield count.tier if count.tier is not Tier.PASSIVE else Tier.QUICK


def due_at(record: RuleRecord) -> float:
    """When time alone may change something of the record, though nothing is heard; in the past: at the next word."""
    word = record.word
    if word is None:
        return float("inf")
    if word.clear:
        return word.until
    times = [word.until, record.probe_after]
    if record.probe is not None:
        times = [record.probe.ordered_at + record.probe.deadline_seconds]
    return max(times)
