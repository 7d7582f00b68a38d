"""How far the groups under test are, in words for people who wait: who is missing, who lags, where the others are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from healthd.aggregator.model.validations import Group
from healthd.core.model import FINAL_STATUSES, RANK_READY, OrderReport

MOST_NAMED = 4

Far = tuple[int, int]
"""Checks begun and signs of life in the newest of them, of the rank of a node that is least far."""


def how_far(groups: Sequence[Group], reports: Mapping[str, OrderReport]) -> str:
    """Of all groups of a round together; `reports` has the last report of each member that gave one."""
    members = [node for group in groups for node in group.members]
    absent = [node for node in members if node not in reports]
    if absent:
        return f"waiting for {_named(absent)} to begin"
    places = {node: _place(reports[node]) for node in members if reports[node].status not in FINAL_STATUSES}
    text = f"{len(members) - len(places)} of {len(members)} nodes ended"
    if not any(reports[node].ranks for node in places):
        return text
    (far, where), _ = max(Counter(places.values()).items(), key=lambda one: (one[1], one[0]))
    behind = [node for node, place in places.items() if place[0] < far]
    if not behind:
        return f"{text}, {_named(list(places)) if len(places) < len(members) else 'all'} {where}"
    least = min(places[node] for node in behind)
    last = [node for node in behind if places[node] == least]
    return f"{text}, {_named(last)} {least[1]}, others {where}"


def _place(report: OrderReport) -> tuple[Far, str]:
    """Where the rank of a node is that is least far."""
    if not report.ranks:
        return (0, 0), "starting"
    checks = list(dict.fromkeys(rank.check for rank in report.ranks))
    rank = min((one for one in report.ranks if one.check == checks[-1]), key=lambda one: (one.last != "", one.events))
    if not rank.last:
        return (0, 0), "starting"
    if rank.last == RANK_READY:
        return (len(checks), 0), "ready"
    return (len(checks), rank.events), f"at {rank.last}"


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:MOST_NAMED]) + (f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else "")
