"""
`judge`: what the rules make of one node, given what they remember of it and what is seen of it now. Pure.

The same facts again change nothing: results are counted once, by when they were measured. What is not known never
clears a node, and only what the node itself is to blame for is ever among the facts' faults.
"""

from __future__ import annotations

import dataclasses

from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantine_facts import Facts, Fault
from healthd.aggregator.model.quarantines import (
    BY_BOOT,
    COLLECTIVES,
    DeviceSlot,
    Effect,
    FailureCount,
    HistoryNote,
    LastCounted,
    ReplacementProof,
    Rule,
    RuleRecord,
)
from healthd.aggregator.quarantine.causes import causes_of, rebooted
from healthd.aggregator.quarantine.counting import count_accusations, count_results
from healthd.aggregator.quarantine.facts import in_force
from healthd.aggregator.quarantine.lifecycle import speak
from healthd.aggregator.quarantine.recheck import next_probe

MOST_COUNTS = 64
"""Checks of one node that are counted: some twice as many as there are."""


def judge(now: float, record: RuleRecord, facts: Facts, policy: Policy) -> tuple[RuleRecord, tuple[Effect, ...]]:
    """
    What is remembered from now on, and what is to be done. `record.latches` are those that are on the node's
    identities or in its seats now.

    A latch of `facts.identities` that is missing in the answer was cleared; others only left the node.
    """
    effects: list[Effect] = []
    record = _without_cleared_faults(record, facts)
    record = _replaced(now, record, facts, effects)
    record = count_results(record, facts, policy, effects)
    record = count_accusations(now, record, facts, policy, effects)
    record = _unlatched(record, facts, effects)
    record = dataclasses.replace(record, counts=_in_time(now, record, policy), seats=_seats(record, facts))
    causes = causes_of(record, facts, policy)
    word, repeats, last_at = speak(now, record, facts, policy, causes, effects)
    record = dataclasses.replace(record, word=word, repeats=repeats, last_at=last_at)
    if word is None:
        record = dataclasses.replace(record, counts=tuple(one for one in record.counts if not one.tripped))
    record = dataclasses.replace(record, seen=_still_needed(record, facts))
    return next_probe(now, record, facts, policy, causes), tuple(effects)


# --- what goes ------------------------------------------------------------------------------------------------------


def _without_cleared_faults(record: RuleRecord, facts: Facts) -> RuleRecord:
    """What injected faults did is undone once they are cleared."""

    def stays(fault: Fault) -> bool:
        return not fault.injected or in_force(fault.check, facts.injected)

    return dataclasses.replace(
        record,
        counts=tuple(one for one in record.counts if stays(one.fault)),
        latches=tuple(one for one in record.latches if stays(one.fault)),
    )


def _replaced(now: float, record: RuleRecord, facts: Facts, effects: list[Effect]) -> RuleRecord:
    """Where a latched device was, another one is: the fault went with the device, and the new one must prove itself."""
    here = set(facts.identities)
    gone: set[str] = set()
    owed = {one.target: one for one in record.owed}
    for seat in record.seats:
        other = _other_in(seat, facts)
        if seat.identity in here or other is None:
            continue
        gone.add(seat.identity)
        if not any(latch.identity == seat.identity for latch in record.latches):
            continue
        owed[seat.target] = ReplacementProof(target=seat.target, identity=other, instead_of=seat.identity, since=now)
        text = f"{seat.target}: {other} is in the place of {seat.identity}, which was latched; it needs a deep pass"
        effects.append(HistoryNote(kind="replaced", message=text))
    for target, one in list(owed.items()):
        now_there = _other_in(DeviceSlot(target=target, identity=one.identity), facts)
        if now_there is not None:
            owed[target] = dataclasses.replace(one, identity=now_there, since=now)
        elif facts.deep_at is not None and facts.deep_at > one.since:
            del owed[target]
            effects.append(HistoryNote(kind="proved", message=f"{target}: {one.identity} has passed the deep tier"))
    return dataclasses.replace(
        record,
        owed=tuple(owed.values()),
        seats=tuple(seat for seat in record.seats if seat.identity not in gone),
        latches=tuple(latch for latch in record.latches if latch.identity not in gone),
    )


def _other_in(seat: DeviceSlot, facts: Facts) -> str | None:
    """Whose the seat is now, if that is known to be somebody else."""
    if seat.target == "node":
        known = seat.identity.startswith("instance:") and facts.identity.startswith("instance:")
        return facts.identity if known and facts.identity != seat.identity else None
    serial = facts.serials.get(seat.target)
    return f"serial:{serial}" if serial and f"serial:{serial}" != seat.identity else None


def _unlatched(record: RuleRecord, facts: Facts, effects: list[Effect]) -> RuleRecord:
    """A new boot has done what was to be done, and a fresh pass of the same tier shows it."""
    kept = []
    for held in record.latches:
        fresh = (
            held.fault.action in BY_BOOT
            and held.identity in facts.identities
            and rebooted(held, facts)
            and any(
                one.check == held.fault.check
                and one.passed is True
                and one.tier.rank >= held.tier.rank
                and one.measured_at > held.last_at
                for one in facts.outcomes
            )
        )
        if fresh:
            text = f"{held.fault.check} {held.fault.target} passed after a reboot: {held.fault.code} is cleared"
            effects.append(HistoryNote(kind="unlatched", message=text))
        else:
            kept.append(held)
    return dataclasses.replace(record, latches=tuple(kept))


def _in_time(now: float, record: RuleRecord, policy: Policy) -> tuple[FailureCount, ...]:
    """Counts with the marks that still count, and whether they are too many; those without any are forgotten."""
    kept = []
    for count in record.counts:
        marks = tuple(mark for mark in count.marks if now - mark.at <= count.window_seconds)
        if count.rule is Rule.SOFT:
            marks = marks[-policy.soft_results :]
        least = policy.soft_fails if count.rule is Rule.SOFT else policy.accused_fails
        tripped = count.tripped or sum(mark.failed for mark in marks) >= least
        if tripped or any(mark.failed for mark in marks):
            kept.append(dataclasses.replace(count, marks=marks, tripped=tripped))
    return tuple(kept[-MOST_COUNTS:])


# --- what is kept ---------------------------------------------------------------------------------------------------


def _seats(record: RuleRecord, facts: Facts) -> tuple[DeviceSlot, ...]:
    """Where each latched device is, or was when it was seen last."""
    targets = {f"serial:{serial}": target for target, serial in facts.serials.items() if serial}
    here = set(facts.identities)
    seats = {}
    for identity in dict.fromkeys(held.identity for held in record.latches if held.identity in here):
        seats[identity] = DeviceSlot(target=targets.get(identity, "node"), identity=identity)
    for seat in record.seats:
        if seat.identity not in here and any(latch.identity == seat.identity for latch in record.latches):
            seats[seat.identity] = seat
    return tuple(sorted(seats.values(), key=lambda seat: seat.identity))


def _still_needed(record: RuleRecord, facts: Facts) -> dict[str, LastCounted]:
    """Of results that did not pass, and of checks that something is remembered of: when they were counted last."""
    wanted = {count.fault.check for count in record.counts} | {latch.fault.check for latch in record.latches}
    wanted |= {outcome.check for outcome in facts.outcomes if outcome.passed is False}
    if any(count.rule is Rule.ACCUSED for count in record.counts):
        wanted.add(COLLECTIVES)
    return {check: seen for check, seen in record.seen.items() if check in wanted}


def released(record: RuleRecord) -> RuleRecord:
    """A person lets the node in: all is forgiven but the number of repeats; what was counted is not counted again."""
    return dataclasses.replace(record, counts=(), latches=(), seats=(), owed=(), word=None, probe=None)
