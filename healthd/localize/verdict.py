"""The verdict and its sentences, made of what the rules found and of the course of the tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from healthd.localize.evidence import SILENT, Evidence, Ids, Parts, Trunk
from healthd.localize.judge import Group, Judged, judge
from healthd.localize.model import Culprit, LabelFault, Manner, PathFault, ScaleFault, TrunkFault, ValidationVerdict
from healthd.localize.rounds import Found, in_doubt, passed_parts, rest_of, rest_state

SHOWN = 8  # names in one sentence; the verdict itself holds all


def verdict_of(ev: Evidence, found: Found, *, spent: bool) -> ValidationVerdict:
    """What rounds of disjoint groups have shown. `spent`: ended by a bound or by the caller."""
    judged = judge(ev)
    remain = rest_of(ev, judged)
    rest = _rest(ev, judged, found.grown or remain, spent=spent)
    passed = rest_state(ev, rest)
    # No fault of scale if one of its members turned out to be the cause after all.
    scale = found.scale if found.scale and set(ev.say(judged.blamed())).isdisjoint(found.scale.members) else None
    verdict = ValidationVerdict(
        culprits=tuple(_culprit(ev, v, counted) for v, counted in sorted(judged.accused.items())),
        paths=tuple(
            PathFault(ends=(ev.names[a], ev.names[b]), failed=ev.own((a, b))[0], slow=_is_slow(ev, ev.bad_pairs[a, b]))
            for a, b in sorted(judged.paths)
        ),
        groups=tuple(
            _group(ev, group) for group in sorted(judged.groups, key=lambda group: (group[:2], sorted(group[2])))
        ),
        trunks=tuple(_trunk(ev, trunk, failed) for trunk, failed in judged.trunks.items()),
        scale=scale,
        one_of=tuple(map(ev.say, _untold(ev, judged, rest if passed is True else ()))),
        not_measured=ev.say(_silent(ev, judged)),
        rest=ev.say(rest),
        rest_passed=passed,
        decided=False,
        reasons=(),
        rounds=ev.rounds,
        tests=ev.asked,
    )
    reasons = list(_faults(verdict, len(ev.job)))
    if rest != remain:
        reasons.append(
            f"the {len(remain)} remaining members fail together; the largest group that passed has {len(rest)}"
        )
    reasons += _of_rest(ev, rest, passed, named=_is_named(verdict), failed=_has_failed(ev))
    if spent:
        reasons.append("stopped by the limit on rounds, or by the caller: this is the result so far")
    decided = rest == remain and _is_decided(ev, verdict, whole=rest == ev.job)
    return replace(verdict, decided=decided, reasons=tuple(reasons))


def names(members: Iterable[str]) -> str:
    """Names for a sentence, the first few and how many more."""
    listed = list(members)
    more = len(listed) - SHOWN
    return ", ".join(listed[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _is_decided(ev: Evidence, verdict: ValidationVerdict, *, whole: bool) -> bool:
    """Whether each failure has a name, and all who remain are known to be healthy. `whole`: all remain."""
    named, passed = _is_named(verdict), verdict.rest_passed is True
    failure_explained = named or not _has_failed(ev) or (whole and _passed_since(ev))
    rest_explained = passed or verdict.scale is not None or (named and not verdict.rest)
    return not verdict.one_of and not verdict.not_measured and failure_explained and rest_explained


def _is_named(verdict: ValidationVerdict) -> bool:
    """Whether anything is at fault that has a name."""
    return bool(verdict.culprits or verdict.paths or verdict.groups or verdict.trunks or verdict.scale)


def _has_failed(ev: Evidence) -> bool:
    return any(test.bad for test in ev.tests)


def _passed_since(ev: Evidence) -> bool:
    """Whether a failure came and went: a pair that failed has passed, too. Chance fails tests in this fleet."""
    return any(pair in ev.good_pairs for pair in ev.bad_pairs)


def _rest(ev: Evidence, judged: Judged, rest: Ids, *, spent: bool) -> Ids:
    """Who remains; of a rest that fails, the largest group that passed can run where the tests have ended."""
    if not spent or rest_state(ev, rest) is not False:
        return rest
    largest = passed_parts(ev, rest, {*judged.paths, *judged.odd})[0]
    return largest if len(largest) > 2 else rest


def _silent(ev: Evidence, judged: Judged) -> Ids:
    """Who never gave a result."""
    blamed = judged.blamed()
    return tuple(v for v in ev.job if ev.silent[v] >= SILENT and not ev.passes[v] and v not in blamed)


def _untold(ev: Evidence, judged: Judged, passed: Ids) -> list[list[int]]:
    """
    Sets in which something is at fault that cannot be told: linked by failures that nothing named explains.

    `passed`: all that remain, where they passed together. That clears them: who failed with them is left alone.
    """
    told = set(judged.accused).union(*(part for _, _, part, _ in judged.groups))
    odd = set(in_doubt(ev, judged) if passed else judged.odd)
    links, ends = Parts(len(ev.job)), set(judged.pending)
    for pair in ev.bad_pairs:
        untold = ev.own(pair)[0] and told.isdisjoint(pair) and not judged.is_over_trunk(ev, pair)
        left = set(pair).difference(passed)
        if untold and left and pair not in judged.paths and (pair in odd or not all(ev.passes[v] for v in pair)):
            links.join(left)
            ends.update(left)
    return list(links.of(sorted(ends)).values())


def _culprit(ev: Evidence, v: int, counted: list[tuple[int, int]]) -> Culprit:
    failed = len(ev.counted(v))
    slow = _is_slow(ev, [n for _, n in counted])
    return Culprit(
        member=ev.names[v],
        manner=Manner.SLOW if slow else Manner.SOMETIMES if ev.passes[v] else Manner.ALWAYS,
        failed_with=ev.say({o for o, _ in counted if o != v}),
        failed=failed,
        passed=ev.pair_tests[v] - failed,
    )


def _is_slow(ev: Evidence, tests: Iterable[int]) -> bool:
    kept = [n for n in tests if n not in ev.dropped]
    return bool(kept) and all(ev.tests[n].slow for n in kept)


def _group(ev: Evidence, group: Group) -> LabelFault:
    label, value, members, inside = group
    met_inside = any(o in members for v in members for o in ev.met[v])
    return LabelFault(
        label=label, value=value, members=ev.say(members), inside=inside or (False if met_inside else None)
    )


def _trunk(ev: Evidence, trunk: Trunk, failed: int) -> TrunkFault:
    one, other = ev.sides(trunk)
    return TrunkFault(label=trunk[0], values=trunk[1:], members=(ev.say(one), ev.say(other)), failed=failed)


def _faults(verdict: ValidationVerdict, whole: int) -> Iterator[str]:
    """A sentence for each statement but that on the rest."""
    for culprit in verdict.culprits:
        how = {Manner.ALWAYS: "fails always", Manner.SOMETIMES: "fails sometimes", Manner.SLOW: "is slow"}
        partners = f"with {names(culprit.failed_with)}, which otherwise pass" if culprit.failed_with else "alone"
        counts = f"{culprit.failed} of {culprit.failed + culprit.passed} tests"
        yield f"{culprit.member} {how[culprit.manner]}: {counts}, failed {partners}"
    for path in verdict.paths:
        yield (
            f"the path between {' and '.join(path.ends)} {'is slow' if path.slow else 'fails'}: {path.failed} tests "
            "with both failed, none passed, and each passes with others; neither is accused"
        )
    for group in verdict.groups:
        what = f"{group.label} {group.value}: all its" if group.label else "cut off:"
        inside = {
            True: "they pass among themselves, so their link to the others is at fault",
            False: "they also fail among themselves",
            None: "they were not tested among themselves",
        }[group.inside]
        fail = f"{len(group.members)} members ({names(group.members)}) fail with all others"
        yield f"{what} {fail}; {inside}; none is accused"
    for trunk in verdict.trunks:
        yield (
            f"the trunk between {trunk.label} {' and '.join(trunk.values)}: {trunk.failed} pairs across it fail and "
            "none passed, while both members pass with others; no member is accused"
        )
    if verdict.scale:
        yield _of_scale(verdict.scale, whole)
    for part in verdict.one_of:
        yield _of_one(part)
    if verdict.not_measured:
        yield f"no test with {names(verdict.not_measured)} produced a result: their health is unknown"


def _of_scale(one: ScaleFault, whole: int) -> str:
    size = len(one.members)
    others = {
        True: f"another group of {size} also fails, so the number matters",
        False: f"another group of {size} passes, so the members matter",
        None: "no other group of that size was measured",
    }[one.any_group]
    return (
        f"only at scale: the smallest failing group of the {whole} has {size} ({names(one.members)}), the largest "
        f"passing group {one.largest_passing}; {others}; no member is accused"
    )


def _of_one(part: tuple[str, ...]) -> str:
    if len(part) == 1:
        return f"{part[0]} failed, and whether it is at fault is unknown; a known-good partner would decide it"
    kind, path = ("one of", "the path") if len(part) == 2 else ("at least one of", "a path")
    return f"{kind} {names(part)}, or {path} between them, is at fault; a known-good partner would decide which"


def _of_rest(ev: Evidence, rest: Ids, passed: bool | None, *, named: bool, failed: bool) -> list[str]:
    """Why those who are healthy are."""
    whole = len(rest) == len(ev.job)
    subject = f"all {len(rest)}" if whole else f"the other {len(rest)}"
    if passed is True:
        why = "they passed together" + (", without the suspects" if named and not whole else "")
        if whole and failed and not named:
            why = "the full group failed before and passes now, and no other member is known to have failed"
        return [f"{subject} are healthy: {why}"]
    if len(rest) < 2:
        return [] if failed else ["no test produced a result"]
    well = sum(ev.passes[v] > 0 for v in rest)
    why = f"{well} of them passed in other groups, so none is accused" if well else "none of them has passed yet"
    if passed is None:
        return [f"{subject} were not measured together; {why}"]
    return [f"{subject} fail together" + ("" if named else " and no smaller cause was found") + f"; {why}"]
