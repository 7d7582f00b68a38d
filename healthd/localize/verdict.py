"""The verdict and its sentences, made of what the rules found and of the course of the tests."""

from __future__ import annotations

import math
from collections.abc import Iterable

from healthd.localize.evidence import Evidence, Ids
from healthd.localize.judge import Judged, inside_of, judge, log_likelihood
from healthd.localize.model import Culprit, LabelFault, Manner, PathFault, ScaleFault, Verdict
from healthd.localize.rounds import SILENT, Found, rest_of, rest_state
from healthd.localize.sequence import Sequence, proof

SHOWN = 8  # names in one sentence; the verdict itself holds all


def from_rounds(ev: Evidence, found: Found, *, spent: bool) -> Verdict:
    """What rounds of disjoint groups have shown. `spent`: ended by a bound or by the caller."""
    judged = judge(ev)
    rest = rest_of(ev, judged)
    passed = rest_state(ev, rest)
    culprits = tuple(_culprit(ev, v, counted) for v, counted in sorted(judged.accused.items()))
    paths = tuple(
        PathFault(ends=(ev.names[a], ev.names[b]), failed=ev.with_both(a, b)[0], slow=_slow(ev, ev.bad_pairs[a, b]))
        for a, b in sorted(judged.paths)
    )
    groups = tuple(
        LabelFault(label=label, value=value, members=ev.say(members), inside=inside_of(ev, members))
        for (label, value), members in sorted(judged.groups.items())
    )
    silent = tuple(v for v in ev.job if ev.silent[v] >= SILENT and not ev.passes[v] and v not in judged.blamed())
    one_of = tuple(ev.say(part) for part in _components(ev, judged))
    scale = _scale(ev, found, judged)
    failed_once = any(test.bad for test in ev.tests)
    named = bool(culprits or paths or groups or scale)
    noise = ev.problem.noise.false_alarm_ratio
    cleared = (passed is True or (named and not rest)) and (named or noise > 0 or not failed_once)
    decided = not one_of and not silent and (cleared or scale is not None)
    reasons = [*map(_say_culprit, culprits), *map(_say_path, paths), *map(_say_group, groups)]
    reasons += [_say_scale(scale, len(ev.job))] if scale else []
    reasons += [_say_one_of(part) for part in one_of]
    reasons += [f"no outcome from any test with {names(ev.say(silent))}: nothing is known of them"] if silent else []
    reasons += _say_rest(ev, rest, passed, named=named, spent=spent, failed=failed_once)
    return Verdict(
        culprits=culprits,
        paths=paths,
        groups=groups,
        scale=scale,
        one_of=one_of,
        not_measured=ev.say(silent),
        rest=ev.say(rest),
        rest_passed=passed,
        decided=decided,
        reasons=tuple(reasons),
        rounds=ev.rounds,
        tests=ev.asked,
    )


def from_sequence(ev: Evidence, state: Sequence, *, spent: bool) -> Verdict:
    """What tests one after another have shown, under the deterministic hypothesis."""
    culprits = tuple(
        Culprit(
            member=ev.names[v],
            manner=Manner.SLOW if _slow(ev, [n for _, n in ev.counted(v)]) else Manner.ALWAYS,
            failed_with=ev.say(proof(ev, state, v)),
            failed=sum(test.bad and v in test.members for test in ev.tests),
            passed=0,
            log10_likelihood=None,
        )
        for v in sorted(state.culprits)
        if not state.contradiction and state.rest_passed is not False and proof(ev, state, v)
    )
    reasons = [_say_culprit(culprit) for culprit in culprits]
    one_of: tuple[tuple[str, ...], ...] = ()
    if state.contradiction or state.rest_passed is False:
        reasons.append(
            "a group failed whose parts all passed: no member fails always, so nobody is accused; localise by rounds"
        )
    else:
        unproved = [pair for pair in state.culprits.items() if not proof(ev, state, pair[0])]
        one_of = tuple(ev.say(part) for part in (state.tainted, *state.aside, *unproved) if part)
        reasons += [_say_one_of(part) for part in one_of]
    if spent:
        reasons.append("ended before everything was told apart: the bound on tests, or of the time, is reached")
    rest = () if state.contradiction else tuple(state.clean)
    if state.done and not state.culprits:
        rest = ev.job
    return Verdict(
        culprits=culprits,
        paths=(),
        groups=(),
        scale=None,
        one_of=one_of,
        not_measured=(),
        rest=ev.say(rest),
        rest_passed=state.rest_passed,
        decided=state.done,
        reasons=tuple(reasons) or ("all members passed together",),
        rounds=ev.rounds,
        tests=ev.asked,
    )


def names(members: Iterable[str]) -> str:
    """Names for a sentence, the first few and how many more."""
    listed = list(members)
    more = len(listed) - SHOWN
    return ", ".join(listed[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _slow(ev: Evidence, tests: Iterable[int]) -> bool:
    kept = [n for n in tests if n not in ev.dropped]
    return bool(kept) and all(ev.tests[n].slow for n in kept)


def _culprit(ev: Evidence, v: int, counted: list[tuple[int, int]]) -> Culprit:
    failed = len(list(ev.counted(v)))
    passed = ev.pair_tests[v] - failed
    manner = Manner.SOMETIMES if ev.passes[v] else Manner.ALWAYS
    if _slow(ev, [n for _, n in counted]):
        manner = Manner.SLOW
    noisy = ev.problem.noise.false_alarm_ratio > 0
    ratio = log_likelihood(ev, len(counted), ev.passes[v]) / math.log(10) if noisy else None
    return Culprit(
        member=ev.names[v],
        manner=manner,
        failed_with=ev.say({o for o, _ in counted if o != v}),
        failed=failed,
        passed=passed,
        log10_likelihood=None if ratio is None else round(ratio, 2),
    )


def _scale(ev: Evidence, found: Found, judged: Judged) -> ScaleFault | None:
    """The fault of scale, unless one of its members turned out to be the cause after all."""
    if found.scale is None or judged.blamed() & set(found.scale.members):
        return None
    scale = found.scale
    return ScaleFault(members=ev.say(scale.members), largest_passing=scale.largest_passing, any_group=scale.any_group)


def _components(ev: Evidence, judged: Judged) -> list[Ids]:
    """Sets in which something is at fault that cannot be told: linked by failures that nothing named explains."""
    blamed, paths = judged.blamed(), set(judged.paths)
    open_pairs = set(judged.odd)
    links: dict[int, set[int]] = {}
    for (a, b), tests in ev.bad_pairs.items():
        unexplained = blamed.isdisjoint((a, b)) and (a, b) not in paths and any(n not in ev.dropped for n in tests)
        never = not ev.passes[a] or not ev.passes[b]
        if unexplained and (never or (a, b) in open_pairs):
            links.setdefault(a, set()).add(b)
            links.setdefault(b, set()).add(a)
    parts: list[Ids] = []
    seen: set[int] = set()
    for v in sorted(links):
        if v in seen:
            continue
        part, edge = {v}, [v]
        while edge:
            for o in links[edge.pop()] - part:
                part.add(o)
                edge.append(o)
        seen |= part
        parts.append(tuple(sorted(part)))
    return parts


def _say_culprit(one: Culprit) -> str:
    text = {
        Manner.ALWAYS: "fails always",
        Manner.SOMETIMES: "fails sometimes",
        Manner.SLOW: "is slow",
    }[one.manner]
    partners = f" with {names(one.failed_with)}, who are otherwise clean" if one.failed_with else " alone"
    counts = f"{one.failed} of {one.failed + one.passed} tests"
    ratio = "" if one.log10_likelihood is None else f"; 10^{one.log10_likelihood:.1f} times likelier bad than healthy"
    return f"{one.member} {text}: {counts}, failed{partners}{ratio}"


def _say_path(one: PathFault) -> str:
    what = "is slow" if one.slow else "fails"
    return (
        f"the path between {one.ends[0]} and {one.ends[1]} {what}: {one.failed} tests with both, none passed, and each "
        "passes with others; neither is accused"
    )


def _say_group(one: LabelFault) -> str:
    inside = {
        True: "they pass among themselves, so it is their way out",
        False: "they fail among themselves too",
        None: "among themselves they were not measured",
    }[one.inside]
    return (
        f"{one.label} {one.value}: all its {len(one.members)} members ({names(one.members)}) fail with everybody "
        f"outside; {inside}; none of them is accused"
    )


def _say_scale(one: ScaleFault, whole: int) -> str:
    size = len(one.members)
    others = {
        True: f"another group of {size} fails too, so the number matters",
        False: f"another group of {size} passes, so it matters who takes part",
        None: "no other group of that size was measured",
    }[one.any_group]
    return (
        f"seen only at scale: the smallest failing group of the {whole} has {size} ({names(one.members)}), the largest "
        f"that passed {one.largest_passing}; {others}; nobody is accused"
    )


def _say_one_of(part: tuple[str, ...]) -> str:
    if len(part) == 1:
        return f"{part[0]} failed alone once; it was not tested again, so it is not accused"
    between = "the path between them" if len(part) == 2 else "a path between two of them"
    kind = "one of" if len(part) == 2 else "at least one of"
    return f"{kind} {names(part)}, or {between}: more cannot be told; a known-good partner would decide it"


def _say_rest(ev: Evidence, rest: Ids, passed: bool | None, *, named: bool, spent: bool, failed: bool) -> list[str]:
    tail = ["ended by the bound on rounds, on tests, or by the caller: this is what is known so far"] if spent else []
    whole = rest == ev.job
    if passed is True:
        if whole and failed and not named:
            return [f"the whole of {len(rest)} failed before and passes now, and nobody else failed for certain", *tail]
        subject = f"all {len(rest)}" if whole else f"the other {len(rest)}"
        return [f"{subject} passed together", *tail]
    if passed is False and not named:
        return [f"the whole of {len(rest)} fails and no smaller cause was found", *tail]
    if passed is False:
        return [f"the other {len(rest)} still fail together", *tail]
    if len(rest) > 1:
        return [f"the other {len(rest)} were not measured together", *tail]
    return tail or ([] if failed else ["no test gave an outcome: nothing is known"])
