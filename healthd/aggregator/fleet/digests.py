"""
Digests of fixed work, compared between nodes by vote as they come: a minority is accused. Without a strict majority no
one can tell which is wrong, and all are suspects.

Devices of one node share power, firmware and host, so they are one vote however many they are: that of most of them.
A digest that an injected fault made is judged like the others, and judges no other: a drill must not touch healthy
nodes. On the event loop alone; a report costs what its own node and the number of different digests cost, however many
nodes there are.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from checks.contract import Action, Finding, Status
from checks.peers import vote as vote_over
from checks.training.digests import first_difference
from healthd.core.model import NodeState
from healthd.core.model.results import MOST_DIGESTS, is_bounded, unpack

MOST_ROOTS = 64
"""Different digests of one group that are told apart; the rest vote as one, since so many say that nothing compares."""
MOST_NAMED = 3
"""Nodes that a sentence names."""
_MOST_SORTED = 1000
REST = "..."
"""In place of the digests beyond `MOST_ROOTS`; it is never the right one."""
MOST_GROUPS = 10_000
"""Kinds of devices and of work; what is beyond is not compared."""
MOST_OF_NODE = 32
"""Digests of one node: three dtypes and devices that differ, and no node can take the room of all."""
MOST_CHARACTERS = 64 << 20
"""Of the places of all digests; beyond it a difference is still found, and its place not named."""
MOST_REFRESHED = 32
"""Where so few nodes differ, their sentences follow each change of the numbers in them."""
MOST_NEWS = 1000


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


Made = tuple[str, bool]
"""A digest, and whether an injected fault made it: these are two, and the second takes no room from the first."""


@dataclass(slots=True)
class Group:
    """
    The nodes of one group by the digests of their devices. No set is copied or walked through to count: the nodes of a
    group may be tens of thousands.
    """

    nodes: dict[Made, dict[str, bool]] = field(default_factory=dict)
    """Of each digest the nodes that have it on any device, and whether it is their vote."""
    places: dict[str, str] = field(default_factory=dict)
    """Of each digest, as on the wire."""
    _votes: Counter[Made] = field(default_factory=Counter)
    _members: dict[bool, Counter[str]] = field(default_factory=lambda: {False: Counter(), True: Counter()})
    """How many digests each node has: its own, and those that a fault made."""

    def roots(self, *, injected: bool = False) -> Sequence[str]:
        """The digests in it that no fault made, or those that one made."""
        return [root for root, made in self.nodes if made is injected]

    def with_digest(self, root: str, *, injected: bool = False) -> Mapping[str, bool]:
        """The nodes that have a digest on any device. Not to be changed."""
        return self.nodes.get((root, injected), {})

    def size(self) -> int:
        """How many nodes are in it, but for those with injected faults."""
        return len(self._members[False])

    def add(self, node: str, vote: Vote, places: str) -> str:
        """Count a vote; what it is counted as, for `standings`."""
        made = vote.injected
        room = sum(one is made for _, one in self.nodes) < MOST_ROOTS
        root = vote.root if room or (vote.root, made) in self.nodes else REST
        nodes = self.nodes.setdefault((root, made), {})
        if node not in nodes:
            self._members[made][node] += 1
        if vote.counts and not nodes.get(node):
            self._votes[root, made] += 1
        nodes[node] = vote.counts or nodes.get(node, False)
        if root != REST:
            self.places.setdefault(root, places)
        return root

    def remove(self, node: str) -> None:
        """Drop all votes of a node."""
        for key in [key for key, nodes in self.nodes.items() if node in nodes]:
            self._votes[key] -= self.nodes[key].pop(node)
            if not self.nodes[key]:
                del self.nodes[key], self._votes[key]
        for members in self._members.values():
            members.pop(node, None)
        for root in [root for root in self.places if not {(root, False), (root, True)} & self.nodes.keys()]:
            del self.places[root]

    def right(self) -> str | None:
        """The digest of more than half of the voters, and of two nodes at least; None where there is none."""
        votes = {root: count for (root, made), count in self._votes.items() if count and not made}
        root = vote_over(votes).right if votes else None
        return root if root is not None and root != REST and len(self.with_digest(root)) > 1 else None

    def standings(self) -> Mapping[Made, Standing]:
        """Of each digest; what is not there agrees."""
        roots, right = self.roots(), self.right()
        found: dict[Made, Standing] = {}
        differs = Standing.UNDECIDED if right is None else Standing.MINORITY
        if len(roots) > 1 and self.size() > 1:
            found.update({(root, False): differs for root in roots if root != right})
        injected = self.roots(injected=True)
        if injected and self.size() + len(self._members[True]) > 1:
            alone = len({*roots, *injected}) == 1
            found.update({(root, True): differs for root in injected if root != right and not alone})
        return found


def findings_of(group: Group, node: str, vote: Vote, counted_as: str) -> Iterator[Finding]:
    """What the group says of a digest of a node; nothing where it agrees, or nobody is there to compare with."""
    if group.standings().get((counted_as, vote.injected), Standing.AGREES) is Standing.AGREES:
        return
    right = group.right()
    total = group.size() + vote.injected
    if right is not None:
        status, reason = Status.FAIL, "SilentCorruption"
        others = group.with_digest(right)
        what = f"differs from {len(others)} of {total} nodes of its kind ({_names(others)})"
        place, step = _difference(group, right, counted_as)
    else:
        status, reason = Status.UNKNOWN, "DigestMismatch"
        other, made = _other(group, vote, node, counted_as)
        same, different_ones = (
            group.with_digest(counted_as, injected=vote.injected),
            group.with_digest(other, injected=made),
        )
        sides = f"{_names(same)} on one side, {_names(different_ones)} on the other"
        different = len({*group.roots(), counted_as})
        if different > 2:
            sides += f", {different} different results in total"
        what = f"differs between {total} nodes of one kind, and no majority shows which are wrong: {sides}"
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
    roots = [one for one in group.roots(injected=made) if one != root]
    nodes = {one: group.with_digest(one, injected=made) for one in roots}
    return max(roots, key=lambda one: (len(nodes[one]) - (node in nodes[one]), one)), made


def _difference(group: Group, right: str, root: str) -> tuple[str, str]:
    """The first place at which two digests differ, in words, and the step."""
    wanted, found = unpack(group.places.get(right, "")), unpack(group.places.get(root, ""))
    return first_difference(wanted, found) if wanted and found else ("an unknown place", "step 1")


def _names(nodes: Mapping[str, bool]) -> str:
    count = len(nodes)
    named = sorted(nodes if count <= _MOST_SORTED else itertools.islice(nodes, MOST_NAMED))[:MOST_NAMED]
    return ", ".join(named) + (f" and {count - len(named)} more" if count > len(named) else "")


@dataclass(frozen=True, kw_only=True)
class Differing:
    """A node whose digests differ from those of its peers; `message` is the first sentence about it."""

    node: str
    standing: Standing
    message: str


class DigestComparison:
    """The digests of the whole fleet. `news` holds (node, message) of what has changed lately; empty: it agrees now."""

    def __init__(self) -> None:
        self.news: deque[tuple[str, str]] = deque(maxlen=MOST_NEWS)
        self._groups: dict[str, Group] = {}
        self.votes: dict[str, tuple[tuple[Vote, str], ...]] = {}
        """Of each node that has given digests, each with its places."""
        self._known: dict[tuple[tuple[Vote, str], ...], tuple[tuple[Vote, str], ...]] = {}
        self._differing: dict[str, Differing] = {}
        self._characters = 0
        self.left_out = 0
        """Digests that were not compared for want of room, since the start."""

    @property
    def differing(self) -> Mapping[str, Differing]:
        """The nodes that do not agree with their peers, by name."""
        return self._differing

    def __len__(self) -> int:
        return len(self.votes)

    def compared(self) -> int:
        """How many nodes have a digest that another node's was compared with."""
        shared = {name for name, group in self._groups.items() if group.size() > 1}
        return sum(any(vote.group in shared for vote, _ in votes) for votes in self.votes.values())

    def put(self, node: str, state: NodeState) -> set[str]:
        """The digests in a node's newest state. Returns the nodes of which something else is to be said now."""
        votes = list(_votes_of(state))
        self.left_out += max(0, len(votes) - MOST_OF_NODE)
        return self._replace(node, votes[:MOST_OF_NODE])

    def forget(self, node: str) -> set[str]:
        """The node is gone, and its vote with it. Returns as `put`."""
        changed = self._replace(node, [])
        changed.discard(node)
        return changed

    def judge(self, node: str) -> Mapping[str, tuple[Finding, ...]]:
        """What is to be said of a node now, by check; whether it differs is noted in `differing` and `news`."""
        found: dict[str, list[Finding]] = {}
        worst: tuple[Standing, str] | None = None
        for vote, counted_as in self.votes.get(node, ()):
            for finding in findings_of(self._groups[vote.group], node, vote, counted_as):
                found.setdefault(vote.check, []).append(finding)
                standing = Standing.MINORITY if finding.reason == "SilentCorruption" else Standing.UNDECIDED
                if worst is None or (standing is Standing.MINORITY and worst[0] is Standing.UNDECIDED):
                    worst = (standing, f"{finding.target}: {finding.message}")
        self._note(node, worst)
        return {check: tuple(some) for check, some in found.items()}

    def _note(self, node: str, worst: tuple[Standing, str] | None) -> None:
        before = self._differing.get(node)
        if worst is None:
            if self._differing.pop(node, None) is not None:
                self.news.append((node, ""))
            return
        self._differing[node] = Differing(node=node, standing=worst[0], message=worst[1])
        if before is None or before.standing is not worst[0]:
            self.news.append((node, worst[1]))

    def _replace(self, node: str, new: Sequence[tuple[Vote, str]]) -> set[str]:
        before = self.votes.get(node, ())
        if [vote for vote, _ in before] == [vote for vote, _ in new]:
            return set()
        names = dict.fromkeys([vote.group for vote, _ in before] + [vote.group for vote, _ in new])
        old = {name: self._groups[name].standings() if name in self._groups else {} for name in names}
        self._characters -= self._stored(names)
        for vote, _ in before:
            self._groups[vote.group].remove(node)
        counted = []
        for vote, places in new:
            group = self._groups.get(vote.group)
            if group is None:
                if len(self._groups) >= MOST_GROUPS:
                    self.left_out += 1
                    continue
                group = self._groups[vote.group] = Group()
            kept = places if self._characters + len(places) <= MOST_CHARACTERS else ""
            counted.append((vote, group.add(node, vote, kept)))
        self._put(node, tuple(counted))
        changed = {node}
        for name in names:
            changed |= self._changed(name, old[name])
        self._characters += self._stored(names)
        return changed

    def _stored(self, names: Iterable[str]) -> int:
        groups = (self._groups[name] for name in names if name in self._groups)
        return sum(len(text) for group in groups for text in group.places.values())

    def _put(self, node: str, votes: tuple[tuple[Vote, str], ...]) -> None:
        if votes:
            self.votes[node] = self._known.setdefault(votes, votes)
            if len(self._known) > 2 * len(self.votes) + MOST_NEWS:
                self._known = {one: one for one in self.votes.values()}
        else:
            self.votes.pop(node, None)

    def _changed(self, name: str, old: Mapping[Made, Standing]) -> set[str]:
        """The nodes of a group whose standing is another, and those few whose sentence is."""
        group = self._groups.get(name)
        if group is None:
            return set()
        if not group.nodes:
            del self._groups[name]
            return set()
        new = group.standings()
        agrees = Standing.AGREES
        found: set[str] = set()
        few: set[str] = set()
        for made, nodes in group.nodes.items():
            standing = new.get(made, agrees)
            if standing is not old.get(made, agrees):
                found.update(nodes)
            elif standing is not agrees and len(few) + len(nodes) <= MOST_REFRESHED:
                few.update(nodes)
        return found | few


def _votes_of(state: NodeState) -> Iterable[tuple[Vote, str]]:
    """
    The digests of a state as votes, each with its places.

    Only the key says what may be compared: hardware and versions in the state are those of now, and the digests may be
    of an hour ago.
    """
    for result in state.results:
        digests = [one for one in result.digests[:MOST_DIGESTS] if is_bounded(one)]
        if not digests:
            continue
        devices: dict[str, int] = {}
        for one in digests:
            devices[one.key] = devices.get(one.key, 0) + len(one.targets)
        for one in digests:
            vote = Vote(
                check=result.check,
                group=f"{result.check} | {one.key}",
                label=one.label,
                root=one.root,
                targets=one.targets,
                injected=result.injected,
                counts=2 * len(one.targets) > devices[one.key],
            )
            yield vote, one.places
