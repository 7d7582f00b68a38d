"""Why a node is to be kept out, as the record stands: each cause with its sentence. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantine_facts import Facts
from healthd.aggregator.model.quarantines import (
    BY_BOOT,
    COLLECTIVES,
    INHERITED,
    FailureCount,
    Latch,
    ReplacementProof,
    Rule,
    RuleRecord,
)
from healthd.core.text import moment, span

_ORDER = {Rule.HARD: 0, Rule.ACCUSED: 1, Rule.SOFT: 2}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One reason to keep the node out. `key` stays while it is the same cause. `observed`: its rule may only watch."""

    rule: Rule
    code: str
    key: str
    reason: str
    injected: bool
    observed: bool


def causes_of(record: RuleRecord, facts: Facts, policy: Policy) -> tuple[Cause, ...]:
    """All that keeps the node out now: those that mean it first, then by rule."""
    found = [_latched(latch, facts, policy) for latch in record.latches]
    found += [_owed(one, policy) for one in record.owed]
    for count in record.counts:
        if count.tripped and count.passes < policy.clear_passes:
            found.append(_counted(count, policy))
    return tuple(sorted(found, key=lambda one: (one.observed, _ORDER[one.rule], one.injected, one.key)))


def rebooted(latch: Latch, facts: Facts) -> bool:
    """Whether this is known to be another boot than that in which the fault was seen."""
    return latch.boot_id is not None and facts.boot_id is not None and latch.boot_id != facts.boot_id


def _cause(rule: Rule, code: str, key: str, reason: str, policy: Policy, *, injected: bool) -> Cause:
    observed = rule.value in policy.rules_observe or code in policy.rules_observe
    text = reason.removesuffix(" (injected)") + (" (injected)" if injected else "")
    return Cause(
        rule=rule, code=code, key=f"{rule.value} {key}", reason=text[:900], injected=injected, observed=observed
    )


def _latched(latch: Latch, facts: Facts, policy: Policy) -> Cause:
    fault = latch.fault
    often = "once" if latch.times == 1 else f"{latch.times} times, last {moment(latch.last_at)}"
    if latch.identity not in facts.identities:
        where = f"{latch.identity}, which is not seen any more"
    else:
        where = latch.identity
    if fault.action in BY_BOOT and rebooted(latch, facts):
        until = f"until {fault.check} passes in tier {latch.tier.value}"
    elif fault.action in BY_BOOT:
        until = f"until a reboot and a pass of {fault.check} in tier {latch.tier.value}"
    else:
        until = "until somebody releases it"
    if fault.check == INHERITED:
        reason = f"a rule said so before the database was lost, kept {until}: {fault.message}"
    else:
        reason = (
            f"{fault.check} {fault.target} {fault.code}: {fault.message}; seen {often} since {moment(latch.since)}, "
            f"latched on {where} {until}"
        )
    key = f"{latch.identity} {fault.check} {fault.code} {until}"
    return _cause(Rule.HARD, fault.code, key, reason, policy, injected=fault.injected)


def _owed(owed: ReplacementProof, policy: Policy) -> Cause:
    reason = (
        f"{owed.target}: {owed.identity} took the place of {owed.instead_of}, which was latched, and has not passed "
        f"the deep tier since {moment(owed.since)}"
    )
    return _cause(Rule.HARD, "NotYetRun", f"{owed.target} {owed.identity}", reason, policy, injected=False)


def _counted(count: FailureCount, policy: Policy) -> Cause:
    fault, failed = count.fault, sum(mark.failed for mark in count.marks)
    within = span(count.window_seconds)
    if fault.check == INHERITED:
        reason = f"a rule said so before the database was lost: {fault.message}"
    elif count.rule is Rule.ACCUSED:
        reason = (
            f"{fault.check} {fault.code}: {fault.message}; accused by {failed or count.fails} validations within "
            f"{within}, since {moment(count.since)}"
        )
    else:
        reason = (
            f"{fault.check} {fault.target} {fault.code}: {fault.message}; failed {failed} of its last "
            f"{len(count.marks)} results within {within}, {count.fails} times since {moment(count.since)}"
        )
    key = f"{fault.check} {fault.code} {fault.target if fault.check != COLLECTIVES else ''}"
    return _cause(count.rule, fault.code, key, reason, policy, injected=fault.injected)
