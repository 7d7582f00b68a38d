"""What can name a node, and which names mean the same one: for the daemon that bears them and for the aggregator."""

from __future__ import annotations

import ipaddress
import re

from healthd.core.errors import BadInputError
from healthd.core.model import NodeState

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")

# Every machine has it, so it names none.
NO_NAMES = frozenset({"localhost", "localhost.localdomain"})
# What a state may name: a few schedulers and a cloud. More is a slip, and must not fill the index.
MOST_NAMES = 16


def can_name(text: str) -> bool:
    """Whether a text can be a node's name: a host name or an instance id."""
    return _NAME.fullmatch(text) is not None


def check_name(node: str) -> None:
    """BadInputError unless the text can be a node's name."""
    if not can_name(node):
        raise BadInputError(f"{node[:80]!r} cannot name a node; use letters, digits, dots and dashes (at most 253)")


def names_of(state: NodeState) -> tuple[str, ...]:
    """The other names that a node says it has."""
    told = (*state.aliases[:MOST_NAMES], state.instance_id, state.hostname)
    return tuple(dict.fromkeys(name for name in told if name and name != state.node and name not in NO_NAMES))


def is_called(state: NodeState, name: str) -> bool:
    """Whether a name means this node: one of its names, or one with or without the domain; never another domain."""
    names = (state.node, *names_of(state))
    if name in names:
        return True
    elsewhere = "." in name and any("." in one and short(one) == short(name) for one in names)
    return not elsewhere and any(alike(name, one) for one in names)


def short(name: str) -> str:
    """A host's name without its domain; an address is no such name."""
    first = name.partition(".")[0]
    if first == name:
        return name
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return first
    return name


def alike(one: str, other: str) -> bool:
    """Whether one of them is the other without its domain."""
    return one == other or (("." in one) != ("." in other) and short(one) == short(other))
