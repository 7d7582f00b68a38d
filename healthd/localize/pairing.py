"""Which pairs to form: disjoint, fresh where possible, across topology first, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from healthd.localize.evidence import Evidence, Ids

LOOK = 64  # of those who are free, so many are looked at for the best partner
FEW = 4  # pairs and free ones, with whom pairs are formed anew where one has no partner

Rank = Callable[[int, int], int | None]  # how good a partner the second is for the first: 0 is best, None: never


def matched(wanted: Iterable[int], free: Iterable[int], rank: Rank) -> list[Ids]:
    """
    Disjoint pairs: each wanted one, in this order, with a free one of the lowest rank, the last of `free` first.

    Who is wanted may be free too, and then is in one pair alone. Where they are few, one without a partner gets that of
    another who finds a new one.
    """
    left, used = list(free), set[int]()
    pairs: list[Ids] = []

    def best(v: int, but: int) -> int | None:
        found: tuple[int, int] | None = None
        for spot in range(len(left) - 1, max(-1, len(left) - 1 - LOOK), -1):
            o = left[spot]
            ranked = None if o in (v, but) or o in used else rank(v, o)
            if ranked is not None and (found is None or ranked < found[0]):
                found = (ranked, spot)
                if not ranked:
                    break
        return found and found[1]

    for v in wanted:
        while left and left[-1] in used:
            left.pop()
        if v in used:
            continue
        first, spot = v, best(v, v)
        if spot is None and len(pairs) + len(left) <= FEW:
            for i, (a, b) in enumerate(pairs):
                if rank(v, b) is not None and (spot := best(a, v)) is not None:
                    pairs[i], first = (v, b), a
                    break
        if spot is not None:
            pairs.append((first, left.pop(spot)))
            used.update((v, *pairs[-1]))
    return pairs


def shuffled_pairs(ev: Evidence, members: Sequence[int], *, across: bool) -> list[Ids]:
    """
    One round of disjoint pairs over all members, nobody with a partner met before where that can be had.

    `across` pairs by position in two halves ordered by labels, so that a label group below half of the fleet meets
    outsiders only: the first failure then tells of whole groups. Of an odd number one who was tested most waits. Where
    the whole was slow, pairs are within label groups instead, since many pairs across load the uplinks themselves.
    """
    order = list(members)
    ev.random("pairs").shuffle(order)
    near = ev.is_near() and any(ev.labels[v] for v in order)
    order.sort(key=lambda v: ev.labels[v] if near or across else (ev.pair_tests[v],))
    if across and not near:
        return list(zip(order[: len(order) // 2], order[len(order) // 2 :], strict=False))
    return matched(order, order[::-1], lambda v, o: 2 * (near and ev.labels[v] != ev.labels[o]) + (o in ev.met[v]))


def witness_pairs(ev: Evidence, wanted: Sequence[int], clean: Iterable[int], *, again: bool = False) -> list[Ids]:
    """
    Pair each wanted member, in this order, with a clean one that it has not met.

    Of those, one with no label in common with it, nor with the partners it failed with, comes first: a witness from the
    same switch is a poor one. Where the whole was slow it is one with the same labels, since those load no uplink.
    `again`: a partner met before will do where there is no other.
    """
    known = {v: {pair for o in (v, *(o for o, _ in ev.fails.get(v, ()))) for pair in ev.labels[o]} for v in wanted}

    def rank(v: int, o: int) -> int | None:
        if o in ev.met[v]:
            return 2 if again else None
        near = ev.is_near() and ev.labels[v]
        return int(ev.labels[v] != ev.labels[o] if near else not known[v].isdisjoint(ev.labels[o]))

    return matched(wanted, dict.fromkeys(clean), rank)


def fresh_pairs(ev: Evidence, members: Sequence[int], *, near: bool) -> list[Ids]:
    """
    Disjoint pairs in this order of whom nobody has met, but two who are alone may meet again.

    `near`: with one that has a label in common first: they pass if they are only cut off. Who is left is of the last.
    """

    def fresh(v: int, o: int) -> int | None:
        return None if o in ev.met[v] and len(members) > 2 else 0

    def mate(v: int, o: int) -> int | None:
        return None if set(ev.labels[v]).isdisjoint(ev.labels[o]) else fresh(v, o)

    pairs = matched(members, members[::-1], mate) if near else []
    used = {v for pair in pairs for v in pair}
    left = [v for v in members if v not in used]
    return pairs + matched(left, left[::-1], fresh)
