"""
Adds results and accusations to the record: what is counted, what latches, what passes again. Pure.

`facts_of` turns the state of a node into what the rules may see of it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from checks.contract import Blame, Finding, Status, Tier
from checks.reasons import action_of, blame_of
from healthd.aggregator.fleet import machine_identity, name_of
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.policy import Policy
from healthd.aggregator.quarantine.records import (
    ACCUSED_WINDOW_SECONDS,
    COLLECTIVES,
    HARD_ACTIONS,
    CountedResult,
    Effect,
    Facts,
    FailureCount,
    Fault,
    HistoryNote,
    LastCounted,
    Latch,
    Outcome,
    PoolLimit,
    Rule,
    RuleRecord,
)
from healthd.core.evidence import blames_node, judge_tier
from healthd.core.model import CheckResult, Health, Inventory, NodeState, Reason
from healthd.core.text import plain

SOFT_FAILS = 3
"""Failures of one check among its newest results that quarantine a node. Three: two may be one bad moment."""
SOFT_RESULTS = 5
"""How many of its newest results are looked at. Five: a check that fails every other time is caught."""
SOFT_WINDOW_SECONDS = 3600.0
"""How old these may be; or as many intervals of the check as results are looked at, where that is longer."""
ACCUSED_FAILS = 2
"""Accusations by validations that quarantine a node. Two: each was found with partners that pass without it."""
CLEAR_PASSES = 2
"""Passes in a row after which a check, or an accused node's quick tier, counts as well again."""
SLACK_SECONDS = 5.0
"""The age of one and the same result may be told with so much difference: what was on the way is added to it."""
SAME_SLACK_SECONDS = 0.5
"""The same where the result says that it is of another run."""
LONGEST_WINDOW_SECONDS = 7 * 86400.0
"""A check that runs less often than five times a week cannot fail often; a limit on everything."""
MOST_MARKS = 100
MOST_LATCHES = 32
"""Of one node: two for each of 16 devices. What is beyond adds nothing to a node that is out."""
MOST_FAULTS = 8
"""Findings of one result that are looked at: one is enough to fail it, more only say more."""
MOST_MESSAGE = 500
"""Characters of a finding's message: what is longer is cut, because sentences are built of it and kept."""
MOST_OUTCOMES = 200
"""Checks of one node that are looked at: some five times as many as there are."""


def count_results(record: RuleRecord, facts: Facts, effects: list[Effect]) -> RuleRecord:
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
            record = _count(record, facts, outcome, effects)
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


def _count(record: RuleRecord, facts: Facts, outcome: Outcome, effects: list[Effect]) -> RuleRecord:
    """One new result: faults that latch, faults that are counted, a pass for what failed before."""
    hard = [fault for fault in outcome.faults if fault.action in HARD_ACTIONS]
    soft = [fault for fault in outcome.faults if fault.action not in HARD_ACTIONS]
    for fault in hard:
        record = latch(record, facts, fault, outcome.tier, outcome.measured_at, effects)
    window = min(max(SOFT_WINDOW_SECONDS, SOFT_RESULTS * outcome.interval_seconds), LONGEST_WINDOW_SECONDS)
    if soft:
        devices = devices_at_fault(fault.device for fault in soft)
        first = FailureCount(
            rule=Rule.SOFT,
            fault=soft[0],
            tier=outcome.tier,
            active=outcome.active,
            since=outcome.measured_at,
            last_at=outcome.measured_at,
            window_seconds=window,
            devices=devices,
        )
        return _fail(record, first, effects)
    counts = []
    for count in record.counts:
        if count.rule is Rule.SOFT and count.fault.check == outcome.check:
            if outcome.passed is True:
                count = _pass(count, outcome.measured_at, effects)
            else:
                count = dataclasses.replace(count, passes=0)
        counts.append(count)
    return dataclasses.replace(record, counts=tuple(counts))


def _fail(record: RuleRecord, new: FailureCount, effects: list[Effect]) -> RuleRecord:
    """A failure more of what is counted already, or the first one."""
    counts, found = [], False
    for count in record.counts:
        same = (count.rule, count.fault.check, count.fault.injected)
        if same == (new.rule, new.fault.check, new.fault.injected):
            found = True
            if count.passes >= CLEAR_PASSES:
                effects.append(_failed(new.fault))
            marks = (*count.marks, _failure(new))[-MOST_MARKS:]
            count = dataclasses.replace(
                count,
                fault=new.fault,
                tier=max(count.tier, new.tier, key=lambda tier: tier.rank),
                last_at=new.last_at,
                window_seconds=new.window_seconds,
                fails=count.fails + 1,
                passes=0,
                marks=marks,
                devices=_devices_of(marks, new.devices),
            )
        counts.append(count)
    if not found:
        effects.append(_failed(new.fault))
        counts.append(dataclasses.replace(new, fails=1, marks=(_failure(new),)))
    return dataclasses.replace(record, counts=tuple(counts))


def _failure(new: FailureCount) -> CountedResult:
    return CountedResult(at=new.last_at, failed=True, devices=new.devices)


def devices_at_fault(devices: Iterable[str | None]) -> tuple[str, ...]:
    """All devices of these faults; none where one of them is on no device, because then the node is at fault."""
    found = set(devices)
    return () if None in found else tuple(sorted(one for one in found if one is not None))


def _devices_of(marks: tuple[CountedResult, ...], before: tuple[str, ...]) -> tuple[str, ...]:
    """The devices of the failures among the results that are looked at; as before where there is none."""
    failed = [mark for mark in marks[-SOFT_RESULTS:] if mark.failed]
    if not failed:
        return before
    return devices_at_fault(device for mark in failed for device in (mark.devices or (None,)))


def _failed(fault: Fault) -> HistoryNote:
    injected = " (injected)" if fault.injected else ""
    return HistoryNote(kind="failed", message=f"{fault.check} {fault.target} {fault.code}: {fault.message}{injected}")


def _pass(count: FailureCount, at: float, effects: list[Effect]) -> FailureCount:
    passes = count.passes + 1
    if passes == CLEAR_PASSES:
        text = f"{count.fault.check} passes again, {passes} times in a row ({count.fault.code} before)"
        effects.append(HistoryNote(kind="passed again", message=text))
    marks = (
        count.marks if count.rule is Rule.ACCUSED else (*count.marks, CountedResult(at=at, failed=False))[-MOST_MARKS:]
    )
    devices = _devices_of(marks, count.devices)
    return dataclasses.replace(count, passes=min(passes, MOST_MARKS), marks=marks, devices=devices)


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


def accused(now: float, fault: Fault) -> FailureCount:
    """The count of a node that a validation names, with nothing counted yet."""
    return FailureCount(
        rule=Rule.ACCUSED,
        fault=fault,
        tier=Tier.QUICK,
        active=True,
        since=now,
        last_at=now,
        window_seconds=ACCUSED_WINDOW_SECONDS,
    )


def count_accusations(now: float, record: RuleRecord, facts: Facts, effects: list[Effect]) -> RuleRecord:
    """New accusations, and passes of the quick tier that speak for an accused node."""
    for fault in facts.accusations:
        if fault.action in HARD_ACTIONS:
            record = latch(record, facts, fault, Tier.QUICK, now, effects)
            continue
        new = accused(now, fault)
        record = _fail(record, new, effects)
    if facts.quick_at is None or not any(count.rule is Rule.ACCUSED for count in record.counts):
        return record
    before = record.seen.get(COLLECTIVES)
    after = max([count.last_at for count in record.counts if count.rule is Rule.ACCUSED])
    if before is not None:
        after = max(after, before.at)
    if facts.quick_at <= after + SLACK_SECONDS:
        return record
    counts = tuple(
        _pass(count, facts.quick_at, effects) if count.rule is Rule.ACCUSED else count for count in record.counts
    )
    seen = {**record.seen, COLLECTIVES: LastCounted(at=facts.quick_at, started_at=0.0, by_age=True)}
    return dataclasses.replace(record, counts=counts, seen=seen)


# --- facts of a node, from its state ----------------------------------------------------------------------------------


def facts_of(
    now: float,
    node: FleetNode,
    policy: Policy,
    *,
    room: PoolLimit,
    person: bool,
    kept: bool,
    accusations: tuple[Reason, ...] = (),
    probe: str | None = None,
    soak: bool = False,
) -> Facts:
    """
    A node whose state is known and whose contact is confirmed. `probe` is the id of the run that the rules ordered.
    `soak`: something waits for a pass of that tier.

    What an injected fault did counts only while the fault is in force.
    """
    state = node.state
    assert state is not None  # the caller has looked
    specs = {spec.name: spec for spec in state.checks}
    outcomes = tuple(
        Outcome(
            check=result.check,
            tier=result.tier,
            active=specs[result.check].tier is not Tier.PASSIVE,
            interval_seconds=specs[result.check].interval_seconds,
            passed=_passed(result, policy),
            faults=tuple(_faults(result, state.inventory)),
            measured_at=now - node.behind_seconds - result.age_seconds,
            started_at=result.started_at,
        )
        for result in state.results[:MOST_OUTCOMES]
        if result.check in specs
        and name_of(result.check) is not None
        and math.isfinite(result.age_seconds)
        and (not result.injected or in_force(result.check, state.faults))
    )
    report = None if probe is None else node.orders.get(probe)
    return Facts(
        node=node.node,
        identity=machine_identity(state),
        boot_id=name_of(state.boot_id),
        serials=_serials(state.inventory),
        outcomes=outcomes,
        quick_at=_passed_at(now - node.behind_seconds, state, Tier.QUICK, policy),
        deep_at=_passed_at(now - node.behind_seconds, state, Tier.DEEP, policy),
        soak_at=_passed_at(now - node.behind_seconds, state, Tier.SOAK, policy) if soak else None,
        injected=state.faults,
        allocated=bool(state.allocated or state.leases),
        person=person,
        kept=kept,
        room=room,
        accusations=tuple(accusation(reason) for reason in accusations if counts(reason)),
        probe_status=None if report is None else report.status,
        compile_seconds=node.compile_seconds,
        maintenance=state.maintenance is not None,
    )


def counts(reason: Reason) -> bool:
    """Whether an accusation is one: the node is to blame, and somebody is sure that it is this one."""
    return reason.blame is blame_of(reason.code) is Blame.NODE and reason.status is Status.FAIL


def accusation(reason: Reason) -> Fault:
    """A validation's word as a fault of the machine: which of its devices it was, collectives do not tell."""
    # Who shows a fault says by itself that it was injected.
    said = reason.message.removesuffix(" (injected)")
    return Fault(
        code=reason.code,
        check=COLLECTIVES,
        target=plain(reason.target or "node", 128),
        message=plain(said, MOST_MESSAGE),
        action=reason.action,
        device=None,
        injected=reason.injected,
    )


def _serials(inventory: Inventory | None) -> dict[str, str | None]:
    """Serial numbers of the devices; one that two devices tell is none."""
    devices = inventory.devices if inventory is not None else ()
    times = Counter(device.serial for device in devices)
    return {device.target: name_of(device.serial) if times[device.serial] == 1 else None for device in devices}


def in_force(check: str, faults: Iterable[str]) -> bool:
    """Whether an injected fault that stands touches this check; a device injected as missing is counted by others."""
    for fault in faults:
        if check == COLLECTIVES or re.split("[@=]", fault, maxsplit=1)[0] == check or "=missing" in fault:
            return True
    return False


def device_of(target: str, inventory: Inventory | None) -> str | None:
    """The device that a target is or belongs to (a core, a rank); None where that cannot be told."""
    if inventory is None:
        return None
    devices = inventory.devices
    number = target.removeprefix("rank:")
    if number != target and number.isdecimal() and len(number) < 10 and int(number) < len(inventory.rank_targets):
        target = inventory.rank_targets[int(number)]
    if any(device.target == target for device in devices):
        return target
    if target not in inventory.workers:
        return None
    if len(devices) == 1:
        return devices[0].target
    cores = [device.cores or 0 for device in devices]
    if not all(cores) or sum(cores) != len(inventory.workers):
        return None
    index = inventory.workers.index(target)
    for device, count in zip(devices, cores, strict=True):
        if index < count:
            return device.target
        index -= count
    return None


def _passed(result: CheckResult, policy: Policy) -> bool | None:
    """False only for what is the node's own fault; None for all that says nothing of the node."""
    if any(blames_node(finding) for finding in result.findings):
        return False
    if result.status is Status.PASS and result.findings:
        return True
    return True if result.status is Status.WARN and policy.admit_degraded else None


def _faults(result: CheckResult, inventory: Inventory | None) -> Iterator[Fault]:
    for finding, device in _first_of_each_device(result, inventory)[:MOST_FAULTS]:
        yield Fault(
            code=plain(finding.reason or "NoData", 64),
            check=result.check,
            target=plain(finding.target, 128),
            message=plain(finding.message, MOST_MESSAGE),
            action=finding.action or action_of(finding.reason),
            device=device,
            injected=result.injected,
        )


def _first_of_each_device(result: CheckResult, inventory: Inventory | None) -> list[tuple[Finding, str | None]]:
    """Findings that blame the node, with their device: one of each device first, so that a bound leaves none out."""
    found = [(finding, device_of(finding.target, inventory)) for finding in result.findings if blames_node(finding)]
    first = dict(reversed([(device, index) for index, (_, device) in enumerate(found)]))
    order = sorted(range(len(found)), key=lambda index: (index not in first.values(), index))
    return [found[index] for index in order]


def _passed_at(sent_at: float, state: NodeState, tier: Tier, policy: Policy) -> float | None:
    """When the oldest active result was measured of a tier that passed whole; None where it did not."""
    health, _, age = judge_tier(state, tier, math.inf)
    passed = health is Health.HEALTHY or (health is Health.DEGRADED and policy.admit_degraded)
    if not passed or age is None:
        return None
    active = {spec.name for spec in state.checks if spec.tier is not Tier.PASSIVE and spec.tier.rank <= tier.rank}
    ages = [r.age_seconds for r in state.results if r.check in active and r.status is not Status.SKIP]
    return sent_at - max(ages) if ages else None
