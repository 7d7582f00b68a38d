"""
`judge`: the verdict of the rules on one node, from their record and the current facts. Pure.

The same facts change nothing a second time: results are counted once, by the time they were measured. Unknown results
never clear a node, and only faults of the node itself are among the facts.

`causes_of` gives the reasons to keep the node out, `speak` begins, changes and ends the verdict, and `next_probe`
chooses the run to order when nothing else would show that the node is healthy. `judge_inherited` takes over a
quarantine that a node reports from a database that was lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Action, Tier
from healthd.aggregator.policy import HISTORY_DAYS, Policy
from healthd.aggregator.quarantine.counting import (
    ACCUSED_FAILS,
    CLEAR_PASSES,
    MOST_LATCHES,
    SOFT_FAILS,
    SOFT_RESULTS,
    accused,
    count_accusations,
    count_results,
    devices_at_fault,
    in_force,
)
from healthd.aggregator.quarantine.counting import latch as latch_fault
from healthd.aggregator.quarantine.records import (
    BY_BOOT,
    COLLECTIVES,
    HARD_ACTIONS,
    INHERITED,
    CountedResult,
    DeviceSlot,
    Effect,
    Facts,
    FailureCount,
    Fault,
    HistoryNote,
    LastCounted,
    Latch,
    LiftQuarantine,
    OpenBreaker,
    PoolLimit,
    RecheckRun,
    ReplacementProof,
    Rule,
    RuleMode,
    RuleRecord,
    RuleVerdict,
    SetQuarantine,
)
from healthd.core.model import FINAL_STATUSES, OrderStatus, Quarantine
from healthd.core.text import moment, span

_ORDER = {Rule.HARD: 0, Rule.ACCUSED: 1, Rule.SOFT: 2}
MOST_DEVICES = 4
"""Devices of a node that may be at fault at once without the node being at fault: a quarter of 16."""
COOLDOWN_SECONDS = 600.0
"""How long a rule's first quarantine lasts at least. Ten minutes: nobody's job starts and dies in between."""
COOLDOWN_FACTOR = 4.0
"""How much longer each repeat lasts. Four: 10 min, 40 min, 2.7 h, 10.7 h, a day."""
COOLDOWN_MAX_SECONDS = 86400.0
"""The longest least time. A day: somebody should have looked by then."""
MOST_REPEATS = 1000
AGAIN_SECONDS = 30.0
"""After a run that helped: the next pass in the row."""
RETRY_SECONDS = 600.0
"""After a run that was refused or did not help, at least: whoever has the devices may keep them for long."""
MOST_COUNTS = 64
"""Checks of one node that are counted: some twice as many as there are."""

_CODE = "Quarantined"


def judge(now: float, record: RuleRecord, facts: Facts, policy: Policy) -> tuple[RuleRecord, tuple[Effect, ...]]:
    """
    What is remembered from now on, and what is to be done. `record.latches` are those that are on the node's
    identities or in its seats now.

    A latch of `facts.identities` that is missing in the answer was cleared; others only left the node.
    """
    effects: list[Effect] = []
    told = facts
    if facts.maintenance or record.maintenance:
        facts = _blameless(facts)
    record = dataclasses.replace(_without_cleared_faults(record, facts), maintenance=facts.maintenance)
    record = _replaced(now, record, facts, effects)
    record = count_results(record, facts, effects)
    record = count_accusations(now, record, facts, effects)
    record = _unlatched(record, facts, effects)
    record = dataclasses.replace(record, counts=_in_time(now, record), seats=_seats(record, facts))
    causes = causes_of(record, facts, policy)
    word, repeats, last_at = speak(now, record, facts, causes, effects)
    record = dataclasses.replace(record, word=word, repeats=repeats, last_at=last_at)
    if word is None:
        record = dataclasses.replace(record, counts=tuple(one for one in record.counts if not one.tripped))
    record = dataclasses.replace(record, seen=_still_needed(record, told))
    return next_probe(now, record, facts, policy, causes), tuple(effects)


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
    return judge(now, _inherited(now, record, facts, spoken), bare, policy)


def released(record: RuleRecord) -> RuleRecord:
    """A person lets the node in: all is forgiven but the number of repeats; what was counted is not counted again."""
    return dataclasses.replace(record, counts=(), latches=(), seats=(), owed=(), word=None, probe=None)


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


def _blameless(facts: Facts) -> Facts:
    """
    The facts of a node in maintenance, or of its first report after that: what failed was measured in it and says
    nothing, nor does what validations say of it. It counts as seen, so that it is not held against the node later. No
    run is ordered meanwhile.
    """
    outcomes = tuple(
        dataclasses.replace(one, passed=None, faults=()) if one.passed is False else one for one in facts.outcomes
    )
    return dataclasses.replace(facts, outcomes=outcomes, accusations=(), allocated=facts.allocated or facts.maintenance)


def _inherited(now: float, record: RuleRecord, facts: Facts, spoken: Quarantine) -> RuleRecord:
    """What a hard rule said is latched; the others count as accused. One with an end has nothing left but time."""
    name = spoken.owner.removeprefix("rule:")
    rule = Rule(name) if name in {known.value for known in Rule} else Rule.HARD
    if spoken.until is not None:
        word = RuleVerdict(
            rule=rule,
            mode=RuleMode.ENFORCED,
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
        return latch_fault(record, facts, fault, Tier.QUICK, now, quiet)
    mark = CountedResult(at=now, failed=True)
    count = dataclasses.replace(accused(now, fault), fails=1, marks=(mark,), tripped=True)
    return dataclasses.replace(record, counts=(*record.counts, count))


# --- causes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cause:
    """
    One reason to keep the node out. `key` stays while it is the same cause. `observed`: its rule may only watch.
    `devices` are those of a `Quarantine`.
    """

    rule: Rule
    code: str
    key: str
    reason: str
    injected: bool
    observed: bool
    devices: tuple[str, ...]


def causes_of(record: RuleRecord, facts: Facts, policy: Policy) -> tuple[Cause, ...]:
    """All that keeps the node out now: those that mean it first, then by rule."""
    found = [_latched(latch, facts, policy) for latch in record.latches]
    found += [_owed(one, facts, policy) for one in record.owed]
    for count in record.counts:
        if count.tripped and count.passes < CLEAR_PASSES:
            found.append(_counted(count, policy))
    return tuple(sorted(found, key=lambda one: (one.observed, _ORDER[one.rule], one.injected, one.key)))


def rebooted(latch: Latch, facts: Facts) -> bool:
    """Whether this is known to be another boot than that in which the fault was seen."""
    return latch.boot_id is not None and facts.boot_id is not None and latch.boot_id != facts.boot_id


def _at_fault(record: RuleRecord, causes: tuple[Cause, ...]) -> tuple[str, ...]:
    """The devices at fault, where every cause that keeps the node out is on a device; none: the node is at fault."""
    meant = [one for one in causes if not one.observed] or causes
    found = devices_at_fault(device for one in meant for device in (one.devices or (None,)))
    # Beyond the bound of latches a device may be latched that is not among them.
    return () if len(found) > MOST_DEVICES or len(record.latches) >= MOST_LATCHES else found


def _cause(
    rule: Rule, code: str, key: str, reason: str, policy: Policy, *, injected: bool, devices: tuple[str, ...]
) -> Cause:
    observed = rule.value in policy.rules_observe or code in policy.rules_observe
    text = reason.removesuffix(" (injected)") + (" (injected)" if injected else "")
    return Cause(
        rule=rule,
        code=code,
        key=f"{rule.value} {key}",
        reason=text[:900],
        injected=injected,
        observed=observed,
        devices=devices,
    )


def _latched(latch: Latch, facts: Facts, policy: Policy) -> Cause:
    fault = latch.fault
    often = "once" if latch.times == 1 else f"{latch.times} times, last {moment(latch.last_at)}"
    if latch.identity not in facts.identities:
        where = f"{latch.identity}, which is no longer present"
    else:
        where = latch.identity
    if fault.action in BY_BOOT and rebooted(latch, facts):
        until = f"until {fault.check} passes in tier {latch.tier.value}"
    elif fault.action in BY_BOOT:
        until = f"until a reboot and a pass of {fault.check} in tier {latch.tier.value}"
    else:
        until = "until it is released"
    if fault.check == INHERITED:
        reason = f"a rule decided this before the database was lost; kept {until}: {fault.message}"
    else:
        reason = (
            f"{fault.check} {fault.target} {fault.code}: {fault.message}; seen {often} since {moment(latch.since)}, "
            f"latched on {where} {until}"
        )
    key = f"{latch.identity} {fault.check} {fault.code} {until}"
    # Latched on the machine, because the hardware tells no serial number, it may be on several of its devices.
    devices = tuple(target for target, serial in facts.serials.items() if f"serial:{serial}" == latch.identity)
    return _cause(Rule.HARD, fault.code, key, reason, policy, injected=fault.injected, devices=devices)


def _owed(owed: ReplacementProof, facts: Facts, policy: Policy) -> Cause:
    what = (
        "the repair is marked as done" if owed.repaired else f"{owed.identity} replaced the latched {owed.instead_of}"
    )
    reason = f"{owed.target}: {what} and has not passed the {owed.tier.value} tier since {moment(owed.since)}"
    devices = (owed.target,) if owed.target in facts.serials else ()
    key = f"{owed.target} {owed.identity}"
    return _cause(Rule.HARD, "NotYetRun", key, reason, policy, injected=False, devices=devices)


def _counted(count: FailureCount, policy: Policy) -> Cause:
    fault, failed = count.fault, sum(mark.failed for mark in count.marks)
    within = span(count.window_seconds)
    if fault.check == INHERITED:
        reason = f"a rule decided this before the database was lost: {fault.message}"
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
    return _cause(count.rule, fault.code, key, reason, policy, injected=fault.injected, devices=count.devices)


# --- the verdict ------------------------------------------------------------------------------------------------------


def speak(
    now: float, record: RuleRecord, facts: Facts, causes: tuple[Cause, ...], effects: list[Effect]
) -> tuple[RuleVerdict | None, int, float | None]:
    """The word from now on, the number of words so far, and when the last began."""
    word, repeats, last_at = record.word, record.repeats, record.last_at
    if last_at is not None and now - last_at > HISTORY_DAYS * 86400.0 and word is None:
        repeats, last_at = 0, None
    if not causes:
        return _without_cause(now, word, repeats, last_at, facts, effects)
    first = causes[0]
    begins = word is None
    if word is None:
        # The exponent is bounded long before the number could not be a float any more.
        grown = COOLDOWN_SECONDS * COOLDOWN_FACTOR ** min(repeats, 20)
        word = RuleVerdict(
            rule=first.rule,
            mode=RuleMode.SHADOWED,
            code=first.code,
            reason="",
            lead="",
            since=now,
            until=now + min(grown, COOLDOWN_MAX_SECONDS),
            clear=False,
            injected=True,
            repeats_before=repeats,
            last_before=last_at,
        )
        repeats, last_at = min(repeats + 1, MOST_REPEATS), now
    before = record.word
    injected = word.injected and all(cause.injected for cause in causes)
    mode = _mode(word if not begins else None, facts, first, effects, now)
    if begins or word.lead != first.key or mode is not word.mode or word.clear:
        nth = "" if repeats < 2 else f"; {repeats} times in {HISTORY_DAYS:g} days"
        least = f"; out for at least {span(word.until - word.since)}" if word.until > word.since else ""
        reason = f"{first.reason}{least}{nth}"
        word = dataclasses.replace(
            word, rule=first.rule, code=first.code, reason=reason, lead=first.key, mode=mode, clear=False
        )
    word = dataclasses.replace(word, injected=injected, devices=_at_fault(record, causes))
    _tell(before, word, facts, effects)
    return word, repeats, last_at


def quarantine_of(word: RuleVerdict) -> Quarantine:
    """The word as others are told of it: without an end until only time has to pass."""
    return Quarantine(
        reason=word.reason,
        owner=f"rule:{word.rule.value}",
        owner_kind="rule",
        since=word.since,
        until=word.until if word.clear else None,
        injected=word.injected,
        devices=word.devices,
    )


def _without_cause(
    now: float, word: RuleVerdict | None, repeats: int, last_at: float | None, facts: Facts, effects: list[Effect]
) -> tuple[RuleVerdict | None, int, float | None]:
    if word is None:
        return None, repeats, last_at
    if word.injected:
        if facts.kept:
            effects.append(LiftQuarantine(why="the injected fault is cleared"))
        return None, word.repeats_before, word.last_before
    if now >= word.until:
        if facts.kept:
            effects.append(LiftQuarantine(why=f"no cause is left since {moment(word.since)}"))
        return None, repeats, last_at
    after = dataclasses.replace(word, clear=True)
    if facts.person:
        after = dataclasses.replace(after, mode=RuleMode.SHADOWED)
    _tell(word, after, facts, effects)
    return after, repeats, last_at


def _mode(word: RuleVerdict | None, facts: Facts, first: Cause, effects: list[Effect], now: float) -> RuleMode:
    """What may come of it now; an enforced one stays enforced whatever the breaker says."""
    if facts.person:
        return RuleMode.SHADOWED
    if first.observed:
        return RuleMode.OBSERVED
    if word is not None and word.mode is RuleMode.ENFORCED and facts.kept:
        return RuleMode.ENFORCED
    room = facts.room
    if room.open:
        return RuleMode.HELD
    if room.kept + 1 > room.most:
        effects.append(OpenBreaker(pool=room.pool, reason=_tripped(room, facts, now)))
        return RuleMode.HELD
    return RuleMode.ENFORCED


def _tripped(room: PoolLimit, facts: Facts, now: float) -> str:
    where = f"pool {room.pool}" if room.pool else "nodes without a pool"
    return (
        f"{where}: rules quarantine {room.kept} of {room.size} nodes and may quarantine {room.most}; {facts.node} "
        f"would be one more ({moment(now)}); the rules stop there until an operator runs 'healthd fleet breaker "
        "reset'"
    )


def _tell(before: RuleVerdict | None, word: RuleVerdict, facts: Facts, effects: list[Effect]) -> None:
    """What changed from one word to the next."""
    was = facts.kept and before is not None and before.mode is RuleMode.ENFORCED
    now_is = word.mode is RuleMode.ENFORCED
    if now_is and (not was or before is None or quarantine_of(before) != quarantine_of(word)):
        effects.append(SetQuarantine(quarantine=quarantine_of(word)))
    if was and word.mode is RuleMode.OBSERVED:
        effects.append(LiftQuarantine(why="its remaining causes may only be observed"))
    if before is None or before.mode is not word.mode:
        effects.append(word)


# --- the next run -----------------------------------------------------------------------------------------------------


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
    if not policy.rules or not causes or facts.allocated or now < record.probe_after:
        return record
    if word is None or now < word.until:
        return record
    # A node that a person keeps out is left alone, unless a person has said that it is repaired.
    out = word.mode is RuleMode.ENFORCED or (
        word.mode is RuleMode.SHADOWED and any(one.repaired for one in record.owed)
    )
    if not out:
        return record
    tiers = list(_tiers(record, facts))
    if not tiers or None in tiers:
        return record
    tier = max((one for one in tiers if one is not None), key=lambda one: one.rank)
    order_id = f"rule:{facts.node}:{int(now * 1000):x}"
    within = policy.run_seconds[tier] + facts.compile_seconds
    found = RecheckRun(order_id=order_id, tier=tier, ordered_at=now, deadline_seconds=within)
    return dataclasses.replace(record, probe=found)


def _tiers(record: RuleRecord, facts: Facts) -> Iterator[Tier | None]:
    """The tier that each cause waits for; None for one that no run can take away."""
    for latch in record.latches:
        if latch.fault.action not in BY_BOOT or not rebooted(latch, facts):
            yield None
        elif latch.tier is not Tier.PASSIVE:
            yield latch.tier
    yield from (one.tier for one in record.owed)
    for count in record.counts:
        if count.tripped and count.passes < CLEAR_PASSES and (count.active or count.rule is Rule.ACCUSED):
            yield count.tier if count.tier is not Tier.PASSIVE else Tier.QUICK


# --- what goes --------------------------------------------------------------------------------------------------------


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
        text = f"{seat.target}: {other} replaced the latched {seat.identity} and needs a deep pass"
        effects.append(HistoryNote(kind="replaced", message=text))
    for target, one in list(owed.items()):
        now_there = _other_in(DeviceSlot(target=target, identity=one.identity), facts)
        if now_there is not None:
            owed[target] = dataclasses.replace(one, identity=now_there, since=now)
        elif (at := facts.soak_at if one.tier is Tier.SOAK else facts.deep_at) is not None and at > one.since:
            del owed[target]
            text = f"{target}: {one.identity} has passed the {one.tier.value} tier"
            effects.append(HistoryNote(kind="proved", message=text))
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


def _in_time(now: float, record: RuleRecord) -> tuple[FailureCount, ...]:
    """Counts with the marks that still count, and whether they are too many; those without any are forgotten."""
    kept = []
    for count in record.counts:
        marks = tuple(mark for mark in count.marks if now - mark.at <= count.window_seconds)
        if count.rule is Rule.SOFT:
            marks = marks[-SOFT_RESULTS:]
        least = SOFT_FAILS if count.rule is Rule.SOFT else ACCUSED_FAILS
        tripped = count.tripped or sum(mark.failed for mark in marks) >= least
        if tripped or any(mark.failed for mark in marks):
            kept.append(dataclasses.replace(count, marks=marks, tripped=tripped))
    return tuple(kept[-MOST_COUNTS:])


# --- what is kept -----------------------------------------------------------------------------------------------------


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
