"""The verdict and its sentences, made of what the rules found and of the course of the tests."""

from __future__ import annotations

from collections.abc import Iterable

from healthd.localize.evidence import Evidence, Ids
from healthd.localize.judge import Judged, judge
from healthd.localize.model import Culprit, LabelFault, Manner, PathFault, ScaleFault, TrunkFault, Verdict
from healthd.localize.network import Trunk
from healthd.localize.rounds import rest_of, rest_state
from healthd.localize.search import Found
from healthd.localize.targets import SILENT

SHOWN = 8  # names in one sentence; the verdict itself holds all


def verdict_of(ev: Evidence, found: Found, *, spent: bool) -> Verdict:
    """What rounds of disjoint groups have shown. `spent`: ended by a bound or by the caller."""
    judged = judge(ev)
    remain = rest_of(ev, judged)
    rest = found.grown or (largest_passed(ev, remain) if spent else None) or remain
    passed = rest_state(ev, rest)
    culprits = tuple(_culprit(ev, v, counted) for v, counted in sorted(judged.accused.items()))
    paths = tuple(
        PathFault(ends=(ev.names[a], ev.names[b]), failed=ev.own((a, b))[0], slow=_slow(ev, ev.bad_pairs[a, b]))
        for a, b in sorted(judged.paths)
    )
    groups = tuple(
        LabelFault(label=label, value=value, members=ev.say(members), inside=_inside(ev, members, inside=inside))
        for label, value, members, inside in sorted(judged.groups, key=lambda one: (one[:2], sorted(one[2])))
    )
    trunks = tuple(_trunk(ev, one) for one in judged.trunks)
    silent = tuple(v for v in ev.job if ev.silent[v] >= SILENT and not ev.passes[v] and v not in judged.blamed())
    one_of = tuple(ev.say(part) for part in _untold(ev, judged, passed=passed is True and judged.explains()))
    scale = _scale(ev, found, judged)
    failed_once = any(test.bad for test in ev.tests)
    named = bool(culprits or paths or groups or trunks or scale)
    cleared = passed is True or (named and not rest)
    decided = not one_of and not silent and (cleared or scale is not None) and rest == remain
    decided = decided and (named or not failed_once or _is_passing(ev, rest))
    reasons = [*map(_say_culprit, culprits), *map(_say_path, paths), *map(_say_group, groups), *map(_say_trunk, trunks)]
    reasons += [_say_scale(scale, len(ev.job))] if scale else []
    reasons += [_say_one_of(part) for part in one_of]
    reasons += [f"no outcome from any test with {names(ev.say(silent))}: nothing is known of them"] if silent else []
    if rest != remain:
        reasons.append(f"the {len(remain)} that remain fail together; {len(rest)} of them is the largest group to pass")
    reasons += _say_rest(ev, rest, passed, named=named, failed=failed_once)
    reasons += (
        ["ended by the bound on rounds, on tests, or by the caller: this is what is known so far"] if spent else []
    )
    return Verdict(
        culprits=culprits,
        paths=paths,
        groups=groups,
        trunks=trunks,
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


def names(members: Iterable[str]) -> str:
    """Names for a sentence, the first few and how many more."""
    listed = list(members)
    more = len(listed) - SHOWN
    return ", ".join(listed[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _slow(ev: Evidence, tests: Iterable[int]) -> bool:
    kept = [n for n in tests if n not in ev.dropped]
    return bool(kept) and all(ev.tests[n].slow for n in kept)


def _culprit(ev: Evidence, v: int, counted: list[tuple[int, int]]) -> Culprit:
    failed = len(ev.counted(v)) or len(counted)
    passed = max(0, ev.pair_tests[v] - failed)
    manner = Manner.SOMETIMES if ev.passes[v] else Manner.ALWAYS
    if _slow(ev, [n for _, n in counted]):
        manner = Manner.SLOW
    return Culprit(
        member=ev.names[v],
        manner=manner,
        failed_with=ev.say({o for o, _ in counted if o != v}),
        failed=max(failed, 2),
        passed=passed,
    )


def _inside(ev: Evidence, members: frozenset[int], *, inside: bool) -> bool | None:
    """Whether a group passes among itself; None when that was not measured."""
    return True if inside else False if any(o in members for v in members for o in ev.met[v]) else None


def _trunk(ev: Evidence, one: Trunk) -> TrunkFault:
    members = (ev.say(one.members[0]), ev.say(one.members[1]))
    return TrunkFault(label=one.label, values=one.values, members=members, failed=one.failed)


def _is_passing(ev: Evidence, rest: Ids) -> bool:
    """Whether a failure came and went: the whole passes now, and chance fails tests in this fleet."""
    return rest == ev.job and any(pair in ev.good_pairs for pair in ev.bad_pairs)


def _scale(ev: Evidence, found: Found, judged: Judged) -> ScaleFault | None:
    """The fault of scale, unless one of its members turned out to be the cause after all."""
    if found.scale is None or judged.blamed() & set(found.scale.members):
        return None
    scale = found.scale
    return ScaleFault(members=ev.say(scale.members), largest_passing=scale.largest_passing, any_group=scale.any_group)


def largest_passed(ev: Evidence, rest: Ids) -> Ids | None:
    """The largest group within the rest that passed, where the rest itself fails: those can run."""
    wanted = frozenset(rest)
    if rest_state(ev, rest) is not False:
        return None
    passed = (
        t.members
        for n, t in enumerate(ev.tests)
        if not t.bad and len(t.members) > 2 and t.members <= wanted and not _failed_after(ev, n, t.members)
    )
    found = max(passed, key=len, default=None)
    return tuple(sorted(found)) if found else None


def _failed_after(ev: Evidence, number: int, members: frozenset[int]) -> bool:
    """Whether a part of a group that passed in this test failed in a later one."""
    later = enumerate(ev.tests[number + 1 :], number + 1)
    return any(t.bad and t.members <= members for n, t in later if n not in ev.dropped)


def _untold(ev: Evidence, judged: Judged, *, passed: bool) -> list[Ids]:
    """
    Sets in which something is at fault that cannot be told: linked by failures that nothing named explains.

    `passed`: all that remain passed together, so what failed once between two of them is over.
    """
    blamed, out = set(judged.accused) | {v for _, _, part, _ in judged.groups for v in part}, set(judged.paths)
    odd = set() if passed else set(judged.odd)
    links: dict[int, set[int]] = {v: set() for v in judged.pending}
    for (a, b), tests in ev.bad_pairs.items():
        if not blamed.isdisjoint((a, b)) or (a, b) in out or ev.dropped.issuperset(tests):
            continue
        never = not ev.passes[a] or not ev.passes[b]
        if (never or (a, b) in odd) and not any(one.explains((a, b)) for one in judged.trunks):
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
    return f"{one.member} {text}: {counts}, failed{partners}"


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
    what = f"{one.label} {one.value}: all its" if one.label else "cut off:"
    return f"{what} {len(one.members)} members ({names(one.members)}) fail with all others; {inside}; none is accused"


def _say_trunk(one: TrunkFault) -> str:
    first, second = one.values
    return (
        f"the trunk between {one.label} {first} and {second}: {one.failed} pairs across fail and none passed, while "
        "both pass with others; none of their members is accused"
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


def _say_rest(ev: Evidence, rest: Ids, passed: bool | None, *, named: bool, failed: bool) -> list[str]:
    """Why those who are healthy are."""
    count, whole = len(rest), len(rest) == len(ev.job)
    subject = f"all {count}" if whole else f"the other {count}"
    if passed is True:
        if whole and failed and not named:
            return [
                f"{subject} are healthy: the whole failed before and passes now, and nobody else failed for certain"
            ]
        return [
            f"{subject} are healthy: they passed together" + (", without those named" if named and not whole else "")
        ]
    if count < 2:
        return [] if failed else ["no test gave an outcome: nothing is known"]
    well = sum(ev.passes[v] > 0 for v in rest)
    why = f"{well} of them passed in other groups, so nobody of these is accused" if well else "none of them passed yet"
    if passed is None:
        return [f"{subject} were not measured together; {why}"]
    return [f"{subject} fail together" + ("" if named else " and no smaller cause was found") + f"; {why}"]
