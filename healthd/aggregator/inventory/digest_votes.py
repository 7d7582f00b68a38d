"""
Whose digests of fixed work differ from those of other nodes: votes by node, the majority, and what it says. Pure.

Devices of one node share power, firmware and host, so they are one vote however many they are: that of most of them.
A minority is accused. Without a strict majority nobody can tell which is wrong: all are suspects.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from checks.contract import Action, Finding, Status
from checks.training.judge import first_difference
from healthd.core.model.work_digests import unpack

MOST_ROOTS = 64
"""Different digests of one group that are told apart; the rest vote as one, since so many say that nothing compares."""
MOST_NAMED = 3
"""Nodes that a sentence names."""
_MOST_SORTED = 1000
REST = "..."
"""In place of the digests beyond `MOST_ROOTS`; it is never the right one."""


class Standing(enum.Enum):
    """Of a digest among those of its group."""

    AGREES = "agrees"
    """With most nodes, or there is no other to compare with."""
    MINORITY = "minority"
    """Most nodes, and at least two, have another digest."""
    UNDECIDED = "undecided"
    """Other nodes have another digest, and no majority says which is right."""


@dataclass(frozen=True, slots=True)
class Vote:
    """
    A digest of devices of a node. `group` names what may be compared. `counts`: most of the node's devices in the group
    have it, so it is the node's vote.
    """

    check: str
    group: str
    label: str
    root: str
    targets: tuple[str, ...]
    injected: bool
    counts: bool


@dataclass(slots=True)
class Group:
    """
    The nodes of one group by the digests of their devices: `voters` whose vote it is, `others` who have it on fewer
    devices. `places` are those of each digest, as on the wire.
    """

    voters: dict[str, set[str]] = field(default_factory=dict)
    others: dict[str, set[str]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    injected: set[str] = field(default_factory=set)
    """Nodes whose digest an injected fault made."""

    def roots(self) -> Sequence[str]:
        """The digests in it."""
        return list(dict.fromkeys((*self.voters, *self.others)))

    def nodes_with(self, root: str) -> set[str]:
        """All that have a digest, on any device. Not to be changed."""
        voters, others = self.voters.get(root), self.others.get(root)
        return voters | others if voters and others else voters or others or set()

    def size(self) -> int:
        """How many nodes are in it. The sets of voters have no node in common and may be large; the others are few."""
        others: set[str] = set().union(*self.others.values())
        also = sum(any(node in nodes for nodes in self.voters.values()) for node in others)
        return sum(map(len, self.voters.values())) + len(others) - also

    def add(self, node: str, vote: Vote, places: str) -> str:
        """Count a vote; what it is counted as, for `remove`."""
        known = vote.root in self.voters or vote.root in self.others
        root = vote.root if known or len(self.voters) + len(self.others) < MOST_ROOTS else REST
        (self.voters if vote.counts else self.others).setdefault(root, set()).add(node)
        if root != REST:
            self.places.setdefault(root, places)
        if vote.injected:
            self.injected.add(node)
        return root

    def remove(self, node: str) -> None:
        """Drop all votes of a node."""
        self.injected.discard(node)
        for votes in (self.voters, self.others):
            for root in [root for root, nodes in votes.items() if node in nodes]:
                votes[root].discard(node)
                if not votes[root]:
                    del votes[root]
        for root in [root for root in self.places if root not in self.voters and root not in self.others]:
            del self.places[root]

    def right(self) -> str | None:
        """The digest of more than half of the voters, and of two nodes at least; None where there is none."""
        if not self.voters:
            return None
        root, nodes = max(self.voters.items(), key=lambda item: len(item[1]))
        decided = 2 * len(nodes) > sum(map(len, self.voters.values()))
        return root if decided and root != REST and len(self.nodes_with(root)) > 1 else None

    def standings(self) -> Mapping[str, Standing]:
        """Of each digest; empty where there is but one, or one node alone."""
        roots = self.roots()
        if len(roots) < 2 or self.size() < 2:
            return {}
        right = self.right()
        return {
            root: Standing.AGREES if root == right else Standing.UNDECIDED if right is None else Standing.MINORITY
            for root in roots
        }


def findings_of(group: Group, node: str, vote: Vote, counted_as: str) -> Iterator[Finding]:
    """What the group says of a digest of a node; nothing where it agrees, or nobody is there to compare with."""
    standing = group.standings().get(counted_as, Standing.AGREES)
    if standing is Standing.AGREES:
        return
    right = group.right()
    total = group.size()
    if right is not None:
        status, reason, others = Status.FAIL, "SilentCorruption", group.nodes_with(right)
        what = f"has other bits than on {len(others)} of {total} nodes of its kind ({_names(others)})"
        place, step = _difference(group, right, counted_as)
    else:
        status, reason = Status.UNKNOWN, "DigestMismatch"
        other = _other(group, node, counted_as)
        same, differing = group.nodes_with(counted_as), group.nodes_with(other)
        sides = f"{_names(same)} on one side, {_names(differing)} on the other"
        if len(group.roots()) > 2:
            sides += f", {len(group.roots())} different results in all"
        what = f"differs between {total} nodes of one kind and no majority can say which are wrong: {sides}"
        place, step = _difference(group, other, counted_as)
    text = f"{vote.label} {step}: {place} {what}"
    if group.injected - {node}:
        text += f"; a fault is injected on {_names(group.injected - {node})}"
    for target in vote.targets:
        # It is taken back by the next run that agrees, so it must not latch as what a node finds on its own does.
        yield Finding(status=status, reason=reason, message=text, target=target, action=Action.INSPECT)


def _other(group: Group, node: str, root: str) -> str:
    """The digest that most others have."""
    return max(
        (one for one in group.roots() if one != root),
        key=lambda one: (len(nodes := group.nodes_with(one)) - (node in nodes), one),
    )


def _difference(group: Group, right: str, root: str) -> tuple[str, str]:
    """The first place at which two digests differ, in words, and the step."""
    wanted, found = unpack(group.places.get(right, "")), unpack(group.places.get(root, ""))
    return first_difference(wanted, found) if wanted and found else ("a place that was not told", "step 1")


def _names(nodes: set[str]) -> str:
    few = nodes if len(nodes) <= _MOST_SORTED else itertools.islice(nodes, MOST_NAMED)
    named = sorted(few)[:MOST_NAMED]
    return ", ".join(named) + (f" and {len(nodes) - len(named)} more" if len(nodes) > len(named) else "")
