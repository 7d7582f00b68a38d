"""Whom to test next because of what is known of them: suspects, those to be named, odd pairs, trunks, parts."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from healthd.localize.chance import PATH_FAILS, is_open
from healthd.localize.evidence import SILENT, Ask, Evidence, Ids, Pair
from healthd.localize.judge import Judged, wants_part
from healthd.localize.pairing import fresh_pairs, shuffled_pairs, witness_pairs

ODD_PASSES = 8  # passes with others that each end of an odd pair shall have before the pair is tried again
SUSPECT_TESTS = 8  # of one who met all clean partners and never passed, where chance may still be why
MOST_ODD_TESTS = 30  # of an odd pair and its ends, after which it is left as it is
FILLED_ROUNDS = 9  # up to this round all others are tested beside odd pairs: chance is learnt from them
LINKS = 8  # members of a part that are tested with the main one in one round
PROBES = 3  # pairs across what may be a broken trunk, in one round


@dataclass(kw_only=True)
class Plan:
    """A round as it is put together: its groups share no member."""

    clean: list[int]
    groups: list[Ids] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    said: list[str] = field(default_factory=list)

    def add(self, groups: Iterable[Sequence[int]], what: str) -> None:
        """Take in those groups whose members are free, and say what they are for."""
        for group in groups:
            if self.busy.isdisjoint(group):
                self.busy.update(group)
                self.groups.append(tuple(sorted(group)))
                self.said.extend([what] if what not in self.said else [])

    def free(self, members: Iterable[int] | None = None) -> list[int]:
        """Those of these, or of the clean, who are in no group yet."""
        return [v for v in (self.clean if members is None else members) if v not in self.busy]


def targeted(ev: Evidence, judged: Judged, *, odd: bool) -> Ask | None:
    """All of it at once, most important first; `odd`: odd pairs too, since nothing else explains the failure."""
    out = judged.blamed() | set(judged.awaiting)
    doubtful = {v for pair in judged.odd for v in pair}
    clean = [v for v in ev.job if ev.passes[v] and v not in out and v not in doubtful and ev.silent[v] < SILENT]
    suspects = [v for v in judged.suspects if ev.silent[v] < SILENT and v not in judged.awaiting]
    pending = [v for v in judged.pending if ev.silent[v] < SILENT]
    if suspects or judged.pending or odd or judged.apart:
        ev.random("witnesses").shuffle(clean)
        clean.sort(key=lambda v: -len(ev.fails.get(v, ())))  # taken from the end
    plan = Plan(clean=clean)
    _with_witnesses(ev, judged, plan, suspects, pending)
    if odd:
        plan.add(_odd(ev, judged, plan.free(), plan.busy), "pairs that failed though both pass elsewhere")
        plan.add(_across(ev, judged, plan.free()), "what may be a broken trunk")
    left = plan.free(suspects)
    if not all(any(ev.passes[o] for o, _ in ev.counted(v)) for v in left):
        ev.random("among").shuffle(left)
        plan.add(fresh_pairs(ev, left, near=False), "suspects with each other")
    if not pending and not suspects:
        plan.add(_joined(ev, judged), "what is cut off, together")
    if plan.groups or pending:
        plan.add(named_pairs(ev, judged, plan.busy), "those to be named with each other")
    if not plan.groups:
        return None
    if odd and judged.odd and ev.rounds < FILLED_ROUNDS and not ev.is_near():
        plan.add(shuffled_pairs(ev, plan.free(), across=False), "others, to learn how often they fail")
    shown = [v for v in (*pending, *suspects, *sorted(doubtful)) if v in plan.busy]
    names, more = ", ".join(ev.say(shown)[:6]), len(shown) - 6
    said = "; ".join(plan.said) + (f": {names}" if names else "") + (f" and {more} more" if more > 0 else "")
    return plan.groups, said


def _with_witnesses(ev: Evidence, judged: Judged, plan: Plan, suspects: list[int], pending: list[int]) -> None:
    """Suspects and those to be named, with clean partners of each part of the network."""
    for part in judged.parts():
        far = [v for v in pending if wants_part(ev, v, part)]
        plan.add(witness_pairs(ev, plan.free(far), plan.free(part)), "parts of the network")
    wanting = [v for v in plan.free(pending) if v in judged.wanting]
    # Who has no failure with a clean partner yet comes first: that decides most; of those, who failed at all.
    suspects.sort(key=lambda v: (sum(bool(ev.passes[o]) for o, _ in ev.counted(v)), v not in ev.fails))
    plan.add(witness_pairs(ev, plan.free(suspects), plan.free()), "suspects with clean partners")
    plan.add(witness_pairs(ev, plan.free(wanting), plan.free()), "those to be named with other clean partners")
    known = [v for v in plan.free(suspects) if len(ev.met[v]) > 1 and ev.pair_tests[v] < SUSPECT_TESTS]
    plan.add(witness_pairs(ev, known, plan.free(), again=True), "suspects with clean partners again")
    plan.add(_links(ev, judged, plan.free()), "parts of the network with each other")


def named_pairs(ev: Evidence, judged: Judged, busy: Container[int] = ()) -> list[Ids]:
    """Who never passed and is to be named, with each other: whom that keeps, and who met the fewest, first."""
    named = {v for v in (*judged.pending, *judged.accused) if not ev.passes[v] and ev.silent[v] < SILENT}
    free = [v for v in sorted(named) if v not in busy]
    free.sort(key=lambda v: (v not in judged.pending, ev.labels[v], len(named.intersection(ev.met[v]))))
    return fresh_pairs(ev, free, near=True)


def settled(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """Whether an odd pair is left: it passed again, and neither end is likely to be flaky; or it was tried enough."""
    failed, passed = ev.own(pair)
    if failed + passed + ev.passes_apart(*pair) > MOST_ODD_TESTS:
        return True
    return passed > 0 and not is_open(ev, pair, odd)


def _odd(ev: Evidence, judged: Judged, clean: list[int], busy: set[int]) -> list[Ids]:
    """Ends of odd pairs with others, those that each has passed with first: a failure then is not the path's."""
    ends: list[int] = []
    again: list[Ids] = []
    taken = set(busy)
    for pair in sorted(judged.odd, key=ev.own):
        one, other = (judged.component.get(ev.root(v), frozenset()) for v in pair)
        if one != other and any(o not in ev.met[v] for v in one for o in other):
            continue  # first whether the two parts reach each other at all
        if not taken.isdisjoint(pair) or max(ev.silent[v] for v in pair) >= SILENT:
            continue
        if settled(ev, pair, judged.odd) or ev.is_soft(pair):  # what was slow beside others is measured alone first
            continue
        failed, passed = ev.own(pair)
        enough = ev.passes_apart(*pair) >= ODD_PASSES
        enough = enough or any(sum(v in other for other in judged.odd) > 1 for v in pair)  # flaky, or several paths
        taken |= set(pair)
        if not clean or (not passed and (enough or not is_open(ev, pair, judged.odd)) and failed < PATH_FAILS):
            again.append(pair)
        else:
            ends += pair
    ends.sort(key=lambda v: ev.pair_tests[v])  # with one witness for two ends, in turn
    pairs: list[Ids] = []
    for v in ends:
        used = {o for pair in pairs for o in pair}
        free = [o for o in clean if o not in used]
        known = next((o for o in free if (min(o, v), max(o, v)) in ev.good_pairs), None)
        pairs += witness_pairs(ev, [v], free, again=True) if known is None else [(v, known)]
    return again + pairs


def _links(ev: Evidence, judged: Judged, clean: list[int]) -> list[Ids]:
    """Fresh pairs of the main component and each other one that failed with somebody outside of it."""
    failed = (judged.component.get(ev.root(v)) for pair in judged.odd for v in pair)
    wanted: list[int] = []
    for part in dict.fromkeys((*judged.apart, *failed)):
        if part and part != judged.main:
            ready = [v for v in part if ev.silent[v] < SILENT and judged.main.isdisjoint(o for o, _ in ev.counted(v))]
            wanted += sorted(ready)[:LINKS]
    return witness_pairs(ev, wanted, [v for v in clean if v in judged.main])


def _across(ev: Evidence, judged: Judged, clean: list[int]) -> list[Ids]:
    """Fresh pairs between the label values of an odd pair: is it the trunk between them?"""
    pairs: list[Ids] = []
    for trunk in (trunk for pair in judged.odd for trunk in ev.crossing(*pair)):
        if not ev.passed_across(trunk):
            sides = [[v for v in clean if v in side] for side in ev.sides(trunk)]
            pairs += [(a, b) for a, b in zip(*sides, strict=False) if b not in ev.met[a]][:PROBES]
    return pairs


def _joined(ev: Evidence, judged: Judged) -> list[Ids]:
    """Parts cut off that no label names: all in one group; if that fails, two by two."""
    parts = [part for _, _, part, inside in judged.groups if inside]
    if len(parts) < 2 or all(label for label, _, _, _ in judged.groups):
        return []
    union = tuple(sorted(frozenset[int]().union(*parts)))
    if ev.last(union) is None:
        return [union]
    twos = itertools.combinations(parts, 2)
    return [(min(one), min(other)) for one, other in twos if all(other.isdisjoint(ev.met[v]) for v in one)]


def alone(ev: Evidence, judged: Judged, *, odd: bool) -> Ask | None:
    """A slow pair by itself: one in a round."""
    for v, counted in sorted(judged.awaiting.items()):
        clean = [o for o, _ in counted if o != v and ev.passes[o]]
        if clean and ev.silent[v] < SILENT:
            return [(v, clean[-1])], f"{ev.names[v]} was slow while others ran: again, alone"
    for a, b in judged.odd if odd else ():
        if ev.is_soft((a, b)) and max(ev.silent[a], ev.silent[b]) < SILENT:
            return [(a, b)], f"{ev.names[a]} and {ev.names[b]} were slow while others ran: again, alone"
    return None
