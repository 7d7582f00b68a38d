"""
Which deep checks the nodes of a validation cannot all run: pure.

A node refuses the whole order where it does not know one check of it. While nodes are upgraded after the aggregator,
the collectives go on without what some of them do not know yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from healthd.aggregator.model.nodes import FleetNode
from healthd.aggregator.model.policy import Policy


def lacking(
    checks: Sequence[str], members: Iterable[str], nodes: Mapping[str, FleetNode], policy: Policy
) -> dict[str, str]:
    """
    Check -> the first of `members` that does not name it among its checks, of the policy's deep checks.

    The collectives themselves are not looked at: a node that refuses those cannot take part.
    """
    deep = [name for name in checks if name in policy.collective_deep_checks and name not in policy.collective_checks]
    found: dict[str, str] = {}
    for member in members if deep else ():
        node = nodes.get(member)
        if node is None or node.state is None:
            continue  # it is known by no state, and will be silent
        known = {spec.name for spec in node.state.checks}
        for name in deep:
            if name not in known:
                found.setdefault(name, member)
    return found


def sentence(check: str, node: str) -> str:
    """Why a check is left out, and what to do."""
    return f"{node} does not know {check}: upgrade it, or let its node.checks and node.disabled enable it"
