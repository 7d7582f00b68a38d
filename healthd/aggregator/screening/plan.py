"""
Which free nodes are screened next. Pure.

A node that passed rests for half of `every`. In the third quarter of it nodes are taken by risk, and in the last one
before all others, so that each is reached within `every` where its pool has idle time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime

from healthd.aggregator.screening.records import Standing, Start
from healthd.aggregator.screening.settings import ScreeningSettings

REST_RATIO = 0.5
"""The part of `every` for which a node rests that passed."""
URGENT_RATIO = 0.75
"""The part of `every` after which a node comes before all that are not as late."""
MOST_LOOKED_AT = 256
"""Nodes of a pool that are asked in one turn whether they are free, beyond those that are started."""


def limit(settings: ScreeningSettings, size: int) -> int:
    """How many nodes of a pool of this size may be screened at a time."""
    return max(1, int(size * settings.share + 1e-9))


def in_window(settings: ScreeningSettings, now: float) -> bool:
    """Whether screenings may start now (seconds since the epoch, in UTC)."""
    hour = datetime.fromtimestamp(now, UTC).hour
    for window in settings.windows:
        first, last = (int(word) for word in window.split("-"))
        if (first <= hour < last) if first < last else (hour >= first or hour < last):
            return True
    return not settings.windows


def plan(
    now: float,
    pools: Mapping[str, int],
    nodes: Iterable[Standing],
    running: Mapping[str, str],
    settings: ScreeningSettings,
    is_free: Callable[[str], bool],
) -> tuple[Start, ...]:
    """
    What to start now. `pools` says how many nodes a pool has, `running` the pool of each node that is screened now.

    `is_free` says whether nobody has or wants a node; it is asked for the nodes that come first.
    """
    if not in_window(settings, now):
        return ()
    room = {pool: limit(settings, size) for pool, size in pools.items()}
    for pool in running.values():
        room[pool] = room.get(pool, 0) - 1
    most = {pool: limit(settings, size) for pool, size in pools.items()}
    due: dict[str, list[tuple[bool, float, str, Standing]]] = {pool: [] for pool, left in room.items() if left > 0}
    fresh: dict[tuple[str, str], list[str]] = {}  # by pool and accelerator: possible partners that are not due
    rest_before, urgent_before = now - REST_RATIO * settings.every_seconds, now - URGENT_RATIO * settings.every_seconds
    for one in nodes:
        if one.pool not in due or one.not_before > now or one.node in running:
            continue
        at = -math.inf if one.changed else one.tier_at
        if at > rest_before and one.kind is not None and most[one.pool] > 1:  # its links are what may be due
            at = one.pair_at
            if at > rest_before:
                fresh.setdefault((one.pool, one.kind), []).append(one.node)
        if at <= rest_before:
            due[one.pool].append((at > urgent_before, -one.risk, one.node, one))
    found: list[Start] = []
    for pool, waiting in due.items():
        waiting.sort()
        partners = {kind: names for (where, kind), names in fresh.items() if where == pool}
        found.extend(_of_pool([entry[3] for entry in waiting], room[pool], rest_before, is_free, partners))
    return tuple(found)


def _of_pool(
    waiting: list[Standing],
    room: int,
    rest_before: float,
    is_free: Callable[[str], bool],
    partners: Mapping[str, list[str]],
) -> Iterator[Start]:
    """
    The first of a pool that are free, within its room. Nodes whose tier is fresh are paired: with each other, and the
    last one with any of `partners`.
    """
    single: dict[str, Standing] = {}  # by accelerator: it waits for a partner
    asked = 0
    for one in waiting:
        if room <= 0 or asked >= MOST_LOOKED_AT + room:
            return
        kind = one.kind if not one.changed and one.tier_at > rest_before else None
        if kind is not None and room < 2:
            continue
        asked += 1
        if not is_free(one.node):
            continue
        if kind is None:
            room -= 1
            yield Start(node=one.node)
        elif (other := single.pop(kind, None)) is not None:
            room -= 2
            yield Start(node=other.node, partner=one.node)
        else:
            single[kind] = one
    for kind, one in single.items():
        possible = itertools.islice(partners.get(kind, ()), MOST_LOOKED_AT)
        if room >= 2 and (partner := next(filter(is_free, possible), None)) is not None:
            room -= 2
            yield Start(node=one.node, partner=partner)
