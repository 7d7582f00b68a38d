"""Which pairs to form: disjoint, fresh where possible, across topology first, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from healthd.localize.evidence import Evidence, Ids

Pair = tuple[int, int]


def shuffled_pairs(ev: Evidence, members: Sequence[int], *, across: bool) -> list[Ids]:
    """
    One round of disjoint pairs over all members, nobody with a partner met before where that can be had.

    `across` pairs by position in two halves ordered by labels, so that a label group below half of the fleet meets
    outsiders only: the first failure then tells of whole groups. An odd one out waits.
    """
    order = list(members)
    ev.random("pairs").shuffle(order)
    if across:
        order.sort(key=lambda v: ev.labels[v])  # stable: shuffled within a label
    elif len(order) % 2:
        order.sort(key=lambda v: ev.pair_tests[v])  # stable; who was tested most is the one to wait
    half = len(order) // 2
    return list(_fresh(ev, order[:half], order[half : 2 * half]) if across else _fresh_any(ev, order))


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
    same switch is a poor one. `again`: a partner met before will do where there is no other.
    """
    free = list(dict.fromkeys(clean))
    pairs: list[Ids] = []
    for v in wanted:
        spot = _best_witness(ev, v, free, again=again)
        if spot is not None:
            pairs.append((v, free.pop(spot)))
    return pairs


def _best_witness(ev: Evidence, v: int, free: list[int], *, again: bool) -> int | None:
    """Place in `free` of the best partner for v. Looks from the end, and at 64 at most for the sake of topology."""
    near = {pair for o, _ in ev.fails.get(v, ()) for pair in ev.labels[o]} | set(ev.labels[v])
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
        if near.isdisjoint(ev.labels[o]):
            return spot
        second = spot if second is None else second
        if looked >= 64:
            break
    return second if second is not None or not again else third


def among_themselves(ev: Evidence, members: Sequence[int]) -> list[Ids]:
    """Fresh disjoint pairs out of members of whom none is known to be clean; nobody meets again."""
    order = list(members)
    ev.random("among").shuffle(order)
    pairs = _fresh_any(ev, order)
    return [(a, b) for a, b in pairs if b not in ev.met[a]]
