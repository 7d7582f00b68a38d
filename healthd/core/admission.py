"""Whether an admission answers what was asked: pure. What starts a job is the names in it, so they are looked at."""

from __future__ import annotations

from healthd.core.model import Decision, GateRequest, Verdict

MOST_NAMED = 3


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
        return "names no node"
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"names {twice[0]} twice"
    least, most = _bounds(request, anyway=decision.would is not None)
    if request.nodes and (strange := [name for name in names if name not in request.nodes]):
        more = f" and {len(strange) - MOST_NAMED} more" if len(strange) > MOST_NAMED else ""
        return f"names {', '.join(strange[:MOST_NAMED])}{more}, which was not asked for"
    if not least <= len(names) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        return f"names {len(names)} nodes, and {wanted} were asked for"
    return ""


def _bounds(request: GateRequest, *, anyway: bool) -> tuple[int, int]:
    """How few and how many nodes an admission may name."""
    if request.join is not None:
        return (1 if anyway else request.min_nodes or request.join.size), request.join.size
    most = len(request.nodes) or request.count or 0
    return request.min_nodes or most, most
