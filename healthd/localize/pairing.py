"""Which pairs to form: disjoint, fresh where possible, across topology first, the same for the same seed."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from healthd.localize.evidence import Evidence, Ids, Pair


def shuffled_pairs(ev: Evidence, members: Sequence[int], *, across: bool) -> list[Ids]:
    """
    One round of disjoint pairs over all members, nobody with a partner met before where that can be had.

    `across` pairs by position in two halves ordered by labels, so that a label group below half of the fleet meets
    outsiders only: the first failure then tells of whole groups. An odd one out waits. Where the whole was slow, pairs
    are within label groups instead, since many pairs across load the uplinks themselves.
    """
    order = list(members)
    ev.random("pairs").shuffle(order)
    labelled = any(ev.labels[v] for v in order)
    if labelled and ev.first and ev.first.slow:
        order.sort(key=lambda v: ev.labels[v])
        return list(_neighbours(ev, order))
    if across:
        order.sort(key=lambda v: ev.labels[v])  # stable: shuffled within a label
    elif len(order) % 2:
        order.sort(key=lambda v: ev.pair_tests[v])  # stable; who was tested most is the one to wait
    half = len(order) // 2
    return list(_fresh(ev, order[:half], order[half : 2 * half]) if across else _fresh_any(ev, order))


def _neighbours(ev: Evidence, order: list[int]) -> list[Pair]:
    """Pairs of neighbours in an order, the nearest that has not been met first."""
    left, pairs = deque(order), list[Pair]()
    while len(left) > 1:
        v = left.popleft()
        near = [o for o in itertools.islice(left, 16) if ev.labels[o] == ev.labels[v]] or [left[0]]
        other = next((o for o in near if o not in ev.met[v]), near[0])
        left.remove(other)
        pairs.append((v, other))
    return pairs


def _fresh(ev: Evidence, left: list[int], right: list[int]) -> list[Pair]:
    """Pair left[i] with right[i + shift] for the first shift at which nobody has met, else the one with the fewest."""
    best: tuple[int, list[Pair]] | None = None
    for shift in range(min(len(right), 16)):
        turned = right[shift:] + right[:shift]
        pairs = list(zip(left, turned, strict=True))
        again = sum(b in ev.met[a] for a, b in pairs)
        if best is None or again < best[0]:
            best = (again, pairs)
        if not again:
            break
    return best[1] if best else []


def _fresh_any(ev: Evidence, order: list[int]) -> list[Pair]:
    """
    Disjoint pairs in which nobody has met, or as few as possible.

    Small fleets: a bounded search for the best. Large ones: neighbours in a shuffle, where a meeting again is rare, put
    right by a swap.
    """
    if len(order) <= 32:
        return _best_matching(ev, order)
    pairs = [(order[i], order[i + 1]) for i in range(0, len(order) - 1, 2)]
    for i, (a, b) in enumerate(pairs):
        if b in ev.met[a]:
            for j in range(i + 1, i + len(pairs)):
                c, d = pairs[j % len(pairs)]
                if d not in ev.met[a] and b not in ev.met[c]:
                    pairs[i], pairs[j % len(pairs)] = (a, d), (c, b)
                    break
    return pairs


def _best_matching(ev: Evidence, order: list[int]) -> list[Pair]:
    """As many fresh disjoint pairs as a bounded search finds; then those who remain meet again."""
    best: list[Pair] = []
    budget = 2000

    def search(rest: list[int], taken: list[Pair]) -> bool:
        nonlocal best, budget
        budget -= 1
        if len(taken) > len(best):
            best = list(taken)
        if len(rest) < 2 or budget < 0:
            return True
        head, *tail = rest
        for other in tail:
            if other not in ev.met[head] and search([v for v in tail if v != other], [*taken, (head, other)]):
                return len(best) == len(order) // 2 or budget < 0
        return search(tail, taken) and (len(best) == len(order) // 2 or budget < 0)

    search(order, [])
    left = [v for v in order if all(v not in pair for pair in best)]
    return best + [(left[i], left[i + 1]) for i in range(0, len(left) - 1, 2)]


def witness_pairs(ev: Evidence, wanted: Sequence[int], clean: Iterable[int], *, again: bool = False) -> list[Ids]:
    """
    Pair each wanted member, in this order, with a clean one that it has not met.

    Of those, one with no label in common with it, nor with the partners it failed with, comes first: a witness from the
    same switch is a poor one. Where the whole was slow it is one with the same labels, since those load no uplink.
    `again`: a partner met before will do where there is no other.
    """
    free = list(dict.fromkeys(clean))
    near = ev.first is not None and ev.first.slow
    pairs: list[Ids] = []
    for v in wanted:
        spot = _best_witness(ev, v, free, again=again, near=near)
        if spot is not None:
            pairs.append((v, free.pop(spot)))
    return pairs


def _best_witness(ev: Evidence, v: int, free: list[int], *, again: bool, near: bool) -> int | None:
    """Place in `free` of the best partner for v. Looks from the end, and at 64 at most for the sake of topology."""
    own = set(ev.labels[v])
    known = {pair for o, _ in ev.fails.get(v, ()) for pair in ev.labels[o]} | own
    second = third = None
    looked = 0
    for spot in range(len(free) - 1, -1, -1):
        o = free[spot]
        if o == v:
            continue
        if o in ev.met[v]:
            third = spot if third is None else third
            continue
        looked += 1
        if (own == set(ev.labels[o])) if near and own else known.isdisjoint(ev.labels[o]):
            return spot
        second = spot if second is None else second
        if looked >= 64:
            break
    return second if second is not None or not again else third


def near_pairs(ev: Evidence, members: Sequence[int]) -> list[Ids]:
    """
    Fresh disjoint pairs in this order, with one that has a label in common first: they pass if they are only cut off.

    Where one is left over it is of the last.
    """
    by_label: dict[tuple[str, str], list[int]] = {}
    for v in reversed(members):
        for label in ev.labels[v]:
            by_label.setdefault(label, []).append(v)
    used: set[int] = set()
    pairs: list[Ids] = []
    for v in members if by_label else ():
        others = [o for label in ev.labels[v] for o in by_label[label][-64:]]
        other = next((o for o in reversed(others) if o != v and o not in used and o not in ev.met[v]), None)
        if v not in used and other is not None:
            used |= {v, other}
            pairs.append((v, other))
    left = [v for v in members if v not in used]
    return pairs + [(a, b) for a, b in _fresh_any(ev, left) if b not in ev.met[a] or len(members) == 2]


def among_themselves(ev: Evidence, members: Sequence[int]) -> list[Ids]:
    """Fresh disjoint pairs out of members of whom none is known to be clean; nobody meets again."""
    order = list(members)
    ev.random("among").shuffle(order)
    pairs = _fresh_any(ev, order)
    return [(a, b) for a, b in pairs if b not in ev.met[a]]
