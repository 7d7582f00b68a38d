"""What the leaders of all shards answered about the fleet, as one answer. Pure; the records are JSON as it came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Parts = Mapping[str, Any]
"""The record of each shard that answered."""
Merge = Callable[[Parts, Mapping[str, str], Mapping[str, str]], Any]
"""From the records, why other shards do not answer, and the query; None: without all of them there is no answer."""

DEFAULT_LIMIT = 100
"""As of the paths of lists."""


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


MERGED: Mapping[str, Merge] = {
    "/v1/fleet": fleet,
    "/v1/fleet/breaker": _breakers,
    "/v1/nodes": _page("nodes", "node", newest_first=False),
    "/v1/gates": _page("gates", "id", newest_first=True),
    "/v1/postmortems": _page("postmortems", "gate", newest_first=True),
    "/v1/sd/prometheus": _targets,
}


def of_all(records: Sequence[Any]) -> Any:
    """Of a change that was made in all shards: the first answer, with what any of them has changed."""
    found = dict(records[0])
    if "recovered" in found:
        found["recovered"] = any(one["recovered"] for one in records)
    if "reset" in found:
        found["reset"] = sorted({pool for one in records for pool in one["reset"]})
    return found
