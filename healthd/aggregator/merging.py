"""What the leaders of all shards answered about the fleet, as one answer. Pure; the records are JSON as it came."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from healthd.baselines import MOST_SAMPLES

Parts = Mapping[str, Any]
"""The record of each shard that answered."""
Merge = Callable[[Parts, Mapping[str, str], Mapping[str, str]], Any]
"""From the records, why other shards do not answer, and the query; None: without all of them there is no answer."""

DEFAULT_LIMIT = 100
"""As of the paths of lists."""
MOST_COMPARED = 1000
"""Rows of a list of what was compared, as of one shard."""


def fleet(parts: Parts, unanswered: Mapping[str, str], _query: Mapping[str, str]) -> Any:
    """Of /v1/fleet. A shard that does not answer is in `recovering`: nobody knows how it is."""
    if not parts:
        return None
    first = next(iter(parts.values()))
    texts = [f"{shard}: {part['recovering']}" for shard, part in parts.items() if part["recovering"]]
    texts += [f"{shard} does not answer: {why}" for shard, why in unanswered.items()]
    overrides = {one["job"]: one for part in parts.values() for one in part["overrides"]}
    return {
        **first,
        **{name: sum(part[name] for part in parts.values()) for name in _COUNTS},
        **{name: _sums(part[name] for part in parts.values()) for name in ("health", "pools")},
        "overrides": list(overrides.values()),
        "recovering": "; ".join(texts) or None,
        "breakers": {pool: one for part in parts.values() for pool, one in part["breakers"].items()},
        "unanswered": dict(unanswered),
    }


_COUNTS = ("nodes", "quarantined", "accused", "leased", "gates_holding")


def _sums(counts: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            found[name] = found.get(name, 0) + count
    return found


def _page(member: str, key: str, *, newest_first: bool) -> Merge:
    """Of a list by pages."""

    def merge(parts: Parts, unanswered: Mapping[str, str], query: Mapping[str, str]) -> Any:
        if not parts:
            return None
        limit = int(query.get("limit", DEFAULT_LIMIT))
        rows = sorted(
            (row for part in parts.values() for row in part[member]), key=lambda row: row[key], reverse=newest_first
        )
        more = len(rows) > limit or any(part["next"] is not None for part in parts.values())
        page = rows[:limit]
        return {member: page, "next": page[-1][key] if more and page else None, "unanswered": dict(unanswered)}

    return merge


def _breakers(parts: Parts, unanswered: Mapping[str, str], _query: Mapping[str, str]) -> Any:
    return (
        None if unanswered else {"open": {pool: one for part in parts.values() for pool, one in part["open"].items()}}
    )


def _targets(parts: Parts, unanswered: Mapping[str, str], _query: Mapping[str, str]) -> Any:
    """Prometheus keeps its targets while it gets no answer; from a part of them it would drop the others."""
    return None if unanswered else [row for part in parts.values() for row in part]


def _compared(*lists: str, counts: tuple[str, ...] = ()) -> Merge:
    """Of what is compared within each shard: the lists one after the other, the counts added up."""

    def merge(parts: Parts, unanswered: Mapping[str, str], _query: Mapping[str, str]) -> Any:
        if not parts:
            return None
        sums = {name: sum(part[name] for part in parts.values()) for name in counts}
        rows = {name: [row for part in parts.values() for row in part[name]][:MOST_COMPARED] for name in lists}
        return {**sums, **rows, "unanswered": dict(unanswered)}

    return merge


def _samples(parts: Parts, unanswered: Mapping[str, str], _query: Mapping[str, str]) -> Any:
    """Limits learned from a part of the fleet would be taken for those of all of it: whole or not at all."""
    if unanswered:
        return None
    found: dict[str, list[Any]] = {}
    for part in parts.values():
        for row in part["series"]:
            kind = (row["hardware"], row["accelerator"], sorted(row["versions"].items()), row["name"])
            found.setdefault(json.dumps(kind), []).append(row)
    return {"series": [_one_series(rows) for rows in found.values()]}


def _one_series(rows: Sequence[Any]) -> Any:
    """
    Of the same kind and name in several shards. The values of each shard are a draw: where they are too many together,
    every shard gives as many as its share of the devices.
    """
    devices = sum(row["devices"] for row in rows)
    values = [value for row in rows for value in row["values"]]
    if len(values) > MOST_SAMPLES:
        chance = random.Random(0)  # noqa: S311  the same draw as long as the numbers are
        given = ((row["values"], math.ceil(MOST_SAMPLES * row["devices"] / max(1, devices))) for row in rows)
        values = [value for there, most in given for value in chance.sample(there, min(most, len(there)))]
    return {**rows[0], "devices": devices, "values": values[:MOST_SAMPLES]}


def _claims(parts: Parts, unanswered: Mapping[str, str], _query: Mapping[str, str]) -> Any:
    """A controller lets go of what it finds no claim of: whole or not at all."""
    rows = (row for part in parts.values() for row in part["claims"])
    return None if unanswered else {"claims": sorted(rows, key=lambda row: row["gate"])}


MERGED: Mapping[str, Merge] = {
    "/v1/fleet": fleet,
    "/v1/fleet/breaker": _breakers,
    "/v1/nodes": _page("nodes", "node", newest_first=False),
    "/v1/gates": _page("gates", "id", newest_first=True),
    "/v1/postmortems": _page("postmortems", "gate", newest_first=True),
    "/v1/sd/prometheus": _targets,
    "/v1/claims": _claims,
    "/v1/fleet/stragglers": _compared("confirmed", "suspects", counts=("nodes",)),
    "/v1/fleet/digests": _compared("accused", "suspects", counts=("nodes", "compared")),
    "/v1/fleet/steps": _compared("jobs", "slow"),
    "/v1/fleet/samples": _samples,
}


def of_all(records: Sequence[Any]) -> Any:
    """Of a change that was made in all shards: the first answer, with what any of them has changed."""
    found = dict(records[0])
    if "recovered" in found:
        found["recovered"] = any(one["recovered"] for one in records)
    if "reset" in found:
        found["reset"] = sorted({pool for one in records for pool in one["reset"]})
    return found
