"""
Nodes compared with each other: digests of fixed work by vote, running jobs by an integration; what that shows of a
node becomes findings on its record.

Devices of one node share power, firmware and host, so they are one vote however many they are: that of most of them.
A minority is accused. Without a strict majority nobody can tell which is wrong: all are suspects.

A digest that an injected fault made is judged like the others, and judges nobody: a drill must not touch healthy nodes.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from checks.contract import Action, Finding, Status
from checks.peers import vote as vote_over
from checks.training.digests import first_difference
from healthd.aggregator.fleet.node_record import NodeRecord
from healthd.aggregator.fleet.running_jobs import job_comparison
from healthd.core.model import NodeState, StepBlock
from healthd.core.model.results import MOST_DIGESTS, is_bounded, unpack

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
        root = vote_over({root: len(nodes) for root, nodes in self.voters.items()}).right
        return root if root is not None and root != REST and self.count(root) > 1 else None

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
        what = f"differs from {group.count(right)} of {total} nodes of its kind ({_names(group, right)})"
        place, step = _difference(group, right, counted_as)
    else:
        status, reason = Status.UNKNOWN, "DigestMismatch"
        other, made = _other(group, vote, node, counted_as)
        same = _names(group, counted_as, injected=vote.injected)
        sides = f"{same} on one side, {_names(group, other, injected=made)} on the other"
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
    roots = [one for one in (group.injected if made else group.roots()) if one != root]
    own = {one: any(node in nodes for nodes in group.sets_of(one, injected=made)) for one in roots}
    return max(roots, key=lambda one: (group.count(one, injected=made) - own[one], one)), made


def _difference(group: Group, right: str, root: str) -> tuple[str, str]:
    """The first place at which two digests differ, in words, and the step."""
    wanted, found = unpack(group.places.get(right, "")), unpack(group.places.get(root, ""))
    return first_difference(wanted, found) if wanted and found else ("an unknown place", "step 1")


def _names(group: Group, root: str, *, injected: bool = False) -> str:
    nodes, count = group.nodes_with(root, injected=injected), group.count(root, injected=injected)
    named = sorted(nodes if count <= _MOST_SORTED else itertools.islice(nodes, MOST_NAMED))[:MOST_NAMED]
    return ", ".join(named) + (f" and {count - len(named)} more" if count > len(named) else "")


# The digests of the whole fleet, compactly, compared as they come; on the event loop alone.


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


# What nodes show of each other, put onto their records: as findings of the checks whose results were compared.


log = logging.getLogger(__name__)

AT_ONCE = 200
"""Records that are changed before the node is answered; each takes some tens of microseconds."""
TURN_SECONDS = 0.1
SWEEP_SECONDS = 60.0
SILENT_SECONDS = 86400.0
"""A node that was silent for so long, such as a terminated machine, has no vote. It has one again when it speaks."""


class PeerFindings:
    """See the module. `records` are those of the roster, `notify` says that a node's evidence is another."""

    def __init__(
        self, records: Mapping[str, NodeRecord], notify: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.digests = DigestComparison()
        self.jobs = job_comparison(clock)
        self._records = records
        self._notify = notify
        self._clock = clock
        self._pending: dict[str, None] = {}
        self._swept_at = clock()
        self._left_out = (0, 0)

    def take(self, node: str, state: NodeState) -> None:
        """Take in the new state of a node's daemon, which is on its record already."""
        changed = self.digests.put(node, state)
        if node in changed or node in self.digests.differing:
            self._apply(node)
        self._apply_soon(changed - {node})

    def take_executor(self, node: str) -> None:
        """
        A hook's executor has sent its state, which is on its line already.

        Its digests have no vote: the libraries of a job's image may give other bits under the same versions. What is
        known of the node by its daemon's digests is shown on the executor's line too.
        """
        if node in self.digests.differing:
            self._apply(node)

    def take_steps(self, node: str, blocks: tuple[StepBlock, ...]) -> None:
        """Take in the steps of running jobs that a node tells; they are judged a moment later."""
        self.jobs.put(node, blocks)

    def keep_jobs(self, node: str, jobs: tuple[str, ...]) -> None:
        """These jobs report their steps on a node; every other one is over there."""
        self._apply_soon(self.jobs.keep(node, jobs))

    def forget(self, node: str) -> None:
        """The node is gone."""
        changed = self.digests.forget(node)
        self.digests.judge(node)
        self._apply_soon(changed)

    def _apply_soon(self, nodes: set[str]) -> None:
        self._pending.update(dict.fromkeys(sorted(nodes)))
        self._work()

    def _work(self) -> None:
        for _ in range(min(AT_ONCE, len(self._pending))):
            node = next(iter(self._pending))
            del self._pending[node]
            if self._apply(node):
                self._notify(node)

    def _apply(self, node: str) -> bool:
        record = self._records.get(node)
        findings = {**self.digests.judge(node), **self.jobs.findings(node, lambda: _devices(record))}
        lines = () if record is None else (record, record.executor)
        return max((line.amend(findings) for line in lines if line is not None), default=False)  # all of them

    async def run(self) -> None:
        """Deal with what was put off, and drop the votes of nodes that are gone; for ever. Ends by cancellation."""
        while True:
            await asyncio.sleep(TURN_SECONDS)
            self._apply_soon(await self.jobs.judge())
            if self._clock() - self._swept_at >= SWEEP_SECONDS:
                self._swept_at = self._clock()
                self.sweep()
                self._apply_soon(self.jobs.forget_old())
                self._say_left_out()

    def _say_left_out(self) -> None:
        left_out = self.digests.left_out, self.jobs.left_out
        if left_out != self._left_out:
            self._left_out = left_out
            log.warning(
                "not compared between nodes since the start for lack of room: %d digests, %d blocks of steps; a node "
                "may report %d digests and %d jobs",
                *left_out,
                MOST_OF_NODE,
                self.jobs.most_of_node,
            )

    def sweep(self) -> None:
        """Drop the votes of nodes that have been silent for a day."""
        now = self._clock()
        for node in self.digests.nodes:
            record = self._records.get(node)
            heard = None if record is None else record.heard_at  # the vote is the daemon's
            if heard is None or now - heard > SILENT_SECONDS:
                self._apply_soon(self.digests.forget(node) | {node})


def _devices(record: NodeRecord | None) -> tuple[str, ...]:
    """What the ranks of a node run on; empty where that is not known."""
    inventory = None if record is None or record.state is None else record.state.open().inventory
    return () if inventory is None else inventory.rank_targets
