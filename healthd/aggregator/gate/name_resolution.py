"""
Resolves the names by which a gate asks for its nodes. Pure. A scheduler may call a node by another name than its
daemon.

Another name is resolved only when exactly one node is known by it, and only after the fleet had time to report: a later
node could be meant as well. From then on the gate uses the own name of the node.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable, Sequence

from healthd.aggregator.model.gates import Gate
from healthd.aggregator.model.nodes import Snapshot
from healthd.core.evidence import reason
from healthd.core.model import Reason

MOST_NAMED = 32
"""Names that get a sentence each: as many as the reasons at the top of a decision."""


def resolve_names(gate: Gate, snapshot: Snapshot) -> Gate:
    """The gate with own names in place of other names of nodes; the same gate where there are none."""
    if gate.request.join is not None or snapshot.settling is not None or snapshot.recovering is not None:
        return gate
    wanted = set(gate.request.nodes)
    own: dict[str, str] = {}
    for name in gate.request.nodes:
        if name in snapshot.nodes:
            continue
        found = snapshot.called.get(name, ())
        if len(found) == 1 and found[0] not in wanted:
            own[name] = found[0]
            wanted.add(found[0])
    if not own:
        return gate
    nodes = tuple(own.get(name, name) for name in gate.request.nodes)
    asked = {**gate.asked, **{node: name for name, node in own.items()}}
    return dataclasses.replace(gate, request=dataclasses.replace(gate.request, nodes=nodes), asked=asked)


def names_found(gate: Gate, called: Callable[[str], Sequence[str]], heard: Collection[str]) -> bool:
    """Whether a node that was just heard is known by a name that the gate has not resolved; `called` tells by which."""
    if gate.decision is not None or not heard or gate.request.join is not None:
        return False
    return any(
        name not in heard and one != name and one in heard for name in gate.request.nodes for one in called(name)
    )


def ambiguous_text(name: str, nodes: Sequence[str]) -> str:
    """Why a name by which several nodes are known cannot be resolved."""
    rest = f" and {len(nodes) - 2} more" if len(nodes) > 2 else ""
    text = f"{name}: {nodes[0]} and {nodes[1]}{rest} are known by this name"
    return f"{text}; ask for the one that is meant by its own name, or correct their aliases"


def unresolved_text(gate: Gate, snapshot: Snapshot, name: str) -> str:
    """Why a name cannot be resolved; empty where no node is known by it."""
    nodes = snapshot.called.get(name, ())
    if len(nodes) > 1:
        return ambiguous_text(name, nodes)
    if len(nodes) == 1 and nodes[0] != name and nodes[0] in gate.request.nodes:
        also = f", as {gate.asked[nodes[0]]}" if nodes[0] in gate.asked else ""
        return f"{name} is another name of {nodes[0]}, which is asked for as well{also}; name each node once"
    return ""


def unknown_node_reasons(gate: Gate, snapshot: Snapshot, names: Iterable[str]) -> tuple[Reason, ...]:
    """A reason for each name that no node has, with the nearest known names or why it cannot be resolved."""
    known = list(snapshot.nodes)
    reasons: list[Reason] = []
    for name in sorted(names)[:MOST_NAMED]:
        # Looking for near names takes time in a large fleet; the first few show what kind of mistake it is.
        near = difflib.get_close_matches(name, known, n=3) if len(reasons) < 3 else []
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        text = unresolved_text(gate, snapshot, name) or f"{name}: no node of this name has ever reported{hint}"
        reasons.append(reason("UnknownNode", text, node=name))
    return tuple(reasons)
