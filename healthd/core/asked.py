"""
What was asked of a gate beside its answer: pure.

Whether an admission answers the request: what starts a job is the names in it, so they are looked at. And for people:
which nodes were asked for, which terms were asked for and which were applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checks.printable import some
from healthd.core.model import Verdict
from healthd.core.text import span

if TYPE_CHECKING:
    from healthd.core.model import Decision, GateRequest

MOST_NAMED = 3
MOST_ASKED = 16
"""Nodes that are named in a line on what was asked."""


def why_unanswered(request: GateRequest, decision: Decision) -> str:
    """
    Why an admission is no answer to the request (no nodes, others than asked, too few); empty where it is one.

    Of a pool the aggregator chooses the nodes, so only their number can be judged; of a group the members that a gate
    admits whatever it found (`would`) may be fewer than its size.
    """
    if decision.decision is not Verdict.ADMIT:
        return ""
    names = [node.asked or node.node for node in decision.nodes]
    if not names:
        return "lists no node"
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"lists {twice[0]} twice"
    least, most = _bounds(request, anyway=decision.would is not None)
    if request.nodes and (strange := [name for name in names if name not in request.nodes]):
        more = f" and {len(strange) - MOST_NAMED} more" if len(strange) > MOST_NAMED else ""
        return f"lists {', '.join(strange[:MOST_NAMED])}{more}, which was not requested"
    if not least <= len(names) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        return f"lists {len(names)} nodes although {wanted} were requested"
    return ""


def _bounds(request: GateRequest, *, anyway: bool) -> tuple[int, int]:
    """How few and how many nodes an admission may name."""
    if request.join is not None:
        return (1 if anyway else request.min_nodes or request.join.size), request.join.size
    most = len(request.nodes) or request.count or 0
    return request.min_nodes or most, most


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of a gate: what the request said (None: it left that to the settings), and what was applied."""

    name: str
    asked: str | None
    applied: str


def nodes_asked(request: GateRequest) -> str:
    """Which nodes a request asks for: `n1, n2, n3`, `2 nodes of pool train`, `group a of 4`."""
    if request.join is not None:
        text = f"group {request.join.group} of {request.join.size}"
        return f"{text}: {some(request.nodes, MOST_ASKED)}" if request.nodes else text
    if request.pool is not None:
        return f"{request.count} node{'' if request.count == 1 else 's'} of pool {request.pool}"
    return some(request.nodes, MOST_ASKED)


def terms_of(decision: Decision) -> tuple[Term, ...]:
    """The terms of a decision, as far as it has them."""
    asked = {} if decision.request is None else _as_asked(decision.request)
    applied = decision.policy
    words: list[tuple[str, str, str]] = []
    if "mode" in applied and "tier" in applied:
        words += [("mode", "mode", str(applied["mode"])), ("tier", "tier", str(applied["tier"]))]
    for key, name in (("max_age_seconds", "maximum age of the evidence"), ("wait_seconds", "wait")):
        if isinstance(applied.get(key), (int, float)):
            words.append((key, name, span(applied[key])))
    if applied.get("runtime_seconds"):
        words.append(("runtime_seconds", "expected runtime", span(applied["runtime_seconds"])))
    if applied.get("lease_seconds"):
        words.append(("lease_seconds", "lease if no node can observe the job's end", span(applied["lease_seconds"])))
    if "collective" in applied:
        words.append(("collective", "collectives over the nodes", _yes(applied["collective"])))
    if "needed" in applied and "wanted" in applied:
        words.append(("needed", "nodes needed", f"{applied['needed']} of {applied['wanted']}"))
    return tuple(Term(name=name, asked=asked.get(key), applied=text) for key, name, text in words)


def _as_asked(request: GateRequest) -> Mapping[str, str]:
    """The terms that a request names, in the words of `terms_of`."""
    found: dict[str, Any] = {
        "mode": None if request.mode is None else request.mode.value,
        "tier": None if request.tier is None else request.tier.value,
        "max_age_seconds": None if request.max_age_seconds is None else span(request.max_age_seconds),
        "wait_seconds": None if request.wait_seconds is None else span(request.wait_seconds),
        "runtime_seconds": None if request.runtime_seconds is None else span(request.runtime_seconds),
        "lease_seconds": None if request.lease_seconds is None else span(request.lease_seconds),
        "collective": None if request.collective is None else _yes(request.collective),
        "needed": None if request.min_nodes is None else f"at least {request.min_nodes}",
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def _yes(value: object) -> str:
    return "yes" if value else "no"
