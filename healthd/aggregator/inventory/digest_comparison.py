"""
The digests of the whole fleet, compactly, compared as they come; on the event loop alone.

A node that agrees costs a reference to a record that all nodes like it share, and its name in a set. Only nodes whose
standing changes are touched by what another node sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checks.contract import Finding
from healthd.aggregator.inventory.digest_votes import Group, Standing, Vote, findings_of
from healthd.core.model import NodeState
from healthd.core.model.work_digests import MOST_DIGESTS, is_bounded

MOST_GROUPS = 10_000
"""Kinds of devices and of work; what is beyond is not compared."""
MOST_OF_NODE = 32
"""Digests of one node: three dtypes and devices that differ, and no node can take the room of all."""
MOST_CHARACTERS = 64 << 20
"""Of the places of all digests; beyond it a difference is still found, and its place not named."""
MOST_REFRESHED = 32
"""Where so few nodes differ, their sentences follow each change of the numbers in them."""
MOST_NEWS = 1000


@dataclass(frozen=True, kw_only=True)
class Differing:
    """A node whose digests differ from those of its peers; `message` is the first sentence about it."""

    node: str
    standing: Standing
    message: str


class DigestComparison:
    """See the module. `news` holds (node, message) of what has changed lately; an empty message: it agrees now."""

    def __init__(self) -> None:
        self.news: deque[tuple[str, str]] = deque(maxlen=MOST_NEWS)
        self._groups: dict[str, Group] = {}
        self._votes: dict[str, tuple[tuple[Vote, str], ...]] = {}
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
        return len(self._votes)

    def compared(self) -> int:
        """How many nodes have a digest that another node's was compared with."""
        shared = {name for name, group in self._groups.items() if group.size() > 1}
        return sum(any(vote.group in shared for vote, _ in votes) for votes in self._votes.values())

    @property
    def nodes(self) -> Iterable[str]:
        """Those that have given digests."""
        return tuple(self._votes)

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
        for vote, counted_as in self._votes.get(node, ()):
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
        before = self._votes.get(node, ())
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
            self._votes[node] = self._known.setdefault(votes, votes)
            if len(self._known) > 2 * len(self._votes) + MOST_NEWS:
                self._known = {one: one for one in self._votes.values()}
        else:
            self._votes.pop(node, None)

    def _changed(self, name: str, old: Mapping[tuple[str, bool], Standing]) -> set[str]:
        """The nodes of a group whose standing is another, and those few whose sentence is."""
        group = self._groups.get(name)
        if group is None:
            return set()
        if group.is_empty():
            del self._groups[name]
            return set()
        new = group.standings()
        agrees = Standing.AGREES
        found: set[str] = set()
        few: set[str] = set()
        counted = [(root, False) for root in group.roots()] + [(root, True) for root in group.injected]
        for root, injected in counted:
            standing = new.get((root, injected), agrees)
            if standing is not old.get((root, injected), agrees):
                found.update(group.nodes_with(root, injected=injected))
            elif standing is not agrees and len(few) + group.count(root, injected=injected) <= MOST_REFRESHED:
                few.update(group.nodes_with(root, injected=injected))
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
