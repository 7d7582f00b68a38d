"""The rules' word on a node: when it begins, what comes of it, when it ends. Pure."""

from __future__ import annotations

import dataclasses

from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.quarantine_facts import Facts, PoolLimit
from healthd.aggregator.model.quarantines import (
    Effect,
    LiftQuarantine,
    Mode,
    OpenBreaker,
    RuleRecord,
    RuleVerdict,
    SetQuarantine,
    VerdictChanged,
)
from healthd.aggregator.quarantine.causes import Cause
from healthd.core.model import Quarantine
from healthd.core.text import moment, span

MOST_REPEATS = 1000


def speak(
    now: float, record: RuleRecord, facts: Facts, policy: Policy, causes: tuple[Cause, ...], effects: list[Effect]
) -> tuple[RuleVerdict | None, int, float | None]:
    """The word from now on, the number of words so far, and when the last began."""
    word, repeats, last_at = record.word, record.repeats, record.last_at
    if last_at is not None and now - last_at > policy.history_days * 86400.0 and word is None:
        repeats, last_at = 0, None
    if not causes:
        return _without_cause(now, word, repeats, last_at, facts, effects)
    first = causes[0]
    begins = word is None
    if word is None:
        # The exponent is bounded long before the number could not be a float any more.
        grown = policy.cooldown_seconds * policy.cooldown_factor ** min(repeats, 20)
        word = RuleVerdict(
            rule=first.rule,
            mode=Mode.SHADOWED,
            code=first.code,
            reason="",
            lead="",
            since=now,
            until=now + min(grown, policy.cooldown_max_seconds),
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
        nth = "" if repeats < 2 else f"; {repeats} times in {policy.history_days:g} days"
        reason = f"{first.reason}; out for {span(word.until - word.since)} at least{nth}"
        word = dataclasses.replace(
            word, rule=first.rule, code=first.code, reason=reason, lead=first.key, mode=mode, clear=False
        )
    word = dataclasses.replace(word, injected=injected)
    _tell(before, word, facts, effects)
    return word, repeats, last_at


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
            effects.append(LiftQuarantine(why=f"nothing is left of what caused it since {moment(word.since)}"))
        return None, repeats, last_at
    after = dataclasses.replace(word, clear=True)
    if facts.person:
        after = dataclasses.replace(after, mode=Mode.SHADOWED)
    _tell(word, after, facts, effects)
    return after, repeats, last_at


def _mode(word: RuleVerdict | None, facts: Facts, first: Cause, effects: list[Effect], now: float) -> Mode:
    """What may come of it now; an enforced one stays enforced whatever the breaker says."""
    if facts.person:
        return Mode.SHADOWED
    if first.observed:
        return Mode.OBSERVED
    if word is not None and word.mode is Mode.ENFORCED and facts.kept:
        return Mode.ENFORCED
    room = facts.room
    if room.open:
        return Mode.HELD
    if room.kept + 1 > room.most:
        effects.append(OpenBreaker(pool=room.pool, reason=_tripped(room, facts, now)))
        return Mode.HELD
    return Mode.ENFORCED


def _tripped(room: PoolLimit, facts: Facts, now: float) -> str:
    where = f"pool {room.pool}" if room.pool else "nodes without a pool"
    return (
        f"{where}: rules keep {room.kept} of {room.size} nodes out and may keep {room.most}; {facts.node} would be one "
        f"more ({moment(now)}); rules quarantine nobody there until somebody looks and says "
        "`healthd fleet breaker reset`"
    )


def _tell(before: RuleVerdict | None, word: RuleVerdict, facts: Facts, effects: list[Effect]) -> None:
    """What changed from one word to the next."""
    was = facts.kept and before is not None and before.mode is Mode.ENFORCED
    now_is = word.mode is Mode.ENFORCED
    if now_is and (not was or before is None or quarantine_of(before) != quarantine_of(word)):
        effects.append(SetQuarantine(quarantine=quarantine_of(word)))
    if was and word.mode is Mode.OBSERVED:
        effects.append(LiftQuarantine(why="what is left of its causes may only be observed"))
    if before is None or before.mode is not word.mode:
        effects.append(VerdictChanged(rule=word.rule, code=word.code, mode=word.mode, reason=word.reason))


def quarantine_of(word: RuleVerdict) -> Quarantine:
    """The word as others are told of it: without an end until only time has to pass."""
    return Quarantine(
        reason=word.reason,
        owner=f"rule:{word.rule.value}",
        owner_kind="rule",
        since=word.since,
        until=word.until if word.clear else None,
        injected=word.injected,
    )
