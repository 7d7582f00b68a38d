"""
Whose digests of fixed work differ from those of other nodes: votes by node, the majority, and what it says. Pure.

Devices of one node share power, firmware and host, so they are one vote however many they are: that of most of them.
A minority is accused. Without a strict majority nobody can tell which is wrong: all are suspects.

A digest that an injected fault made is judged like the others, and judges nobody: a drill must not touch healthy nodes.
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
    devices, `injected` whose digest an injected fault made. `places` are those of each digest, as on the wire.

    No set is copied or walked through to count: the nodes of a group may be tens of thousands.
    """

    voters: dict[str, set[str]] = field(default_factory=dict)
    others: dict[str, set[str]] = field(default_factory=dict)
    injected: dict[str, set[str]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    _voteless: set[str] = field(default_factory=set)
    """Nodes among the others that are no voters."""
    _injected: set[str] = field(default_factory=set)

    def roots(self) -> Sequence[str]:
        """The digests in it that no fault made."""
        return list(dict.fromkeys((*self.voters, *self.others)))

    def count(self, root: str, *, injected: bool = False) -> int:
        """How many nodes have a digest on any device."""
        return sum(map(len, self.sets_of(root, injected=injected)))

    def nodes_with(self, root: str, *, injected: bool = False) -> Iterator[str]:
        """They, each once, in any order."""
        return itertools.chain.from_iterable(self.sets_of(root, injected=injected))

    def sets_of(self, root: str, *, injected: bool = False) -> Sequence[set[str]]:
        """The sets of a digest's nodes, which have no node in common. Not to be changed."""
        if injected:
            return (self.injected.get(root, set()),)
        return self.voters.get(root, set()), self.others.get(root, set())

    def size(self) -> int:
        """How many nodes are in it, but for those with injected faults."""
        return self._votes() + len(self._voteless)

    def _votes(self) -> int:
        return sum(map(len, self.voters.values()))

    def is_empty(self) -> bool:
        """Whether it has no node."""
        return not (self.voters or self.others or self.injected)

    def add(self, node: str, vote: Vote, places: str) -> str:
        """Count a vote; what it is counted as, for `standings`."""
        tables = (self.injected,) if vote.injected else (self.voters, self.others)  # a drill takes no room from others
        known = any(vote.root in table for table in tables)
        root = vote.root if known or sum(map(len, tables)) < MOST_ROOTS else REST
        if vote.injected:
            self.injected.setdefault(root, set()).add(node)
            self._injected.add(node)
        elif vote.counts:
            self.voters.setdefault(root, set()).add(node)
            self._voteless.discard(node)
            _drop(self.others, root, node)
        elif node not in self.voters.get(root, ()):
            self.others.setdefault(root, set()).add(node)
            if not any(node in nodes for nodes in self.voters.values()):
                self._voteless.add(node)
        if root != REST:
            self.places.setdefault(root, places)
        return root

    def remove(self, node: str) -> None:
        """Drop all votes of a node."""
        self._injected.discard(node)
        self._voteless.discard(node)
        tables = (self.voters, self.others, self.injected)
        for table in tables:
            for root in list(table):
                _drop(table, root, node)
        for root in [root for root in self.places if not any(root in table for table in tables)]:
            del self.places[root]

    def right(self) -> str | None:
        """The digest of more than half of the voters, and of two nodes at least; None where there is none."""
        if not self.voters:
            return None
        root, nodes = max(self.voters.items(), key=lambda item: len(item[1]))
        decided = 2 * len(nodes) > self._votes()
        return root if decided and root != REST and self.count(root) > 1 else None

    def standings(self) -> Mapping[tuple[str, bool], Standing]:
        """Of each digest, and whether a fault made it; what is not there agrees."""
        roots, right = self.roots(), self.right()
        found: dict[tuple[str, bool], Standing] = {}
        differs = Standing.UNDECIDED if right is None else Standing.MINORITY
        if len(roots) > 1 and self.size() > 1:
            found.update({(root, False): differs for root in roots if root != right})
        if self.injected and self.size() + len(self._injected) > 1:
            known = {*roots, *self.injected}
            found.update({(root, True): differs for root in self.injected if root != right and len(known) > 1})
        return found


def _drop(table: dict[str, set[str]], root: str, node: str) -> None:
    nodes = table.get(root)
    if nodes is not None and node in nodes:
        nodes.discard(node)
        if not nodes:
            del table[root]


def findings_of(group: Group, node: str, vote: Vote, counted_as: str) -> Iterator[Finding]:
    """What the group says of a digest of a node; nothing where it agrees, or nobody is there to compare with."""
    if group.standings().get((counted_as, vote.injected), Standing.AGREES) is Standing.AGREES:
        return
    right = group.right()
    total = group.size() + vote.injected
    if right is not None:
        status, reason = Status.FAIL, "SilentCorruption"
        what = f"has other bits than on {group.count(right)} of {total} nodes of its kind ({_names(group, right)})"
        place, step = _difference(group, right, counted_as)
    else:
        status, reason = Status.UNKNOWN, "DigestMismatch"
        other, made = _other(group, vote, node, counted_as)
        same = _names(group, counted_as, injected=vote.injected)
        sides = f"{same} on one side, {_names(group, other, injected=made)} on the other"
        different = len({*group.roots(), counted_as})
        if different > 2:
            sides += f", {different} different results in all"
        what = f"differs between {total} nodes of one kind and no majority can say which are wrong: {sides}"
        place, step = _difference(group, other, counted_as)
    text = f"{vote.label} {step}: {place} {what}"
    if vote.injected:
        text += "; a fault is injected here"
    for target in vote.targets:
        # It is taken back by the next run that agrees, so it must not latch as what a node finds on its own does.
        yield Finding(status=status, reason=reason, message=text, target=target, action=Action.INSPECT)


def _other(group: Group, vote: Vote, node: str, root: str) -> tuple[str, bool]:
    """The digest that most others have, and whether a fault made it: only where all digests are made by faults."""
    made = vote.injected and not any(one != root for one in group.roots())
    roots = [one for one in (group.injected if made else group.roots()) if one != root]
    own = {one: any(node in nodes for nodes in group.sets_of(one, injected=made)) for one in roots}
    return max(roots, key=lambda one: (group.count(one, injected=made) - own[one], one)), made


def _difference(group: Group, right: str, root: str) -> tuple[str, str]:
    """The first place at which two digests differ, in words, and the step."""
    wanted, found = unpack(group.places.get(right, "")), unpack(group.places.get(root, ""))
    return first_difference(wanted, found) if wanted and found else ("a place that was not told", "step 1")


def _names(group: Group, root: str, *, injected: bool = False) -> str:
    nodes, count = group.nodes_with(root, injected=injected), group.count(root, injected=injected)
    named = sorted(nodes if count <= _MOST_SORTED else itertools.islice(nodes, MOST_NAMED))[:MOST_NAMED]
    return ", ".join(named) + (f" and {count - len(named)} more" if count > len(named) else "")
