"""
Faults at random, one after another, on a fleet in network namespaces: who is named, and is it ever the wrong one?

    python -m tests.netns.soak [--faults N] [--seed S] [--nodes N] [--only KIND ...] [--join TIME] [--timeout TIME]

Each fault is of a random kind, on a random node, under a gate over some of the fleet; the other nodes are idle and may
be borrowed. The table counts by kind: `named`, the right name and the job on the rest; `undecided`, nobody healthy is
blamed, but the job is not started on the rest; `wrong`, a healthy node is blamed. Needs root. Exit code: 1 when there
was a wrong one.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.netns.fleet import Decided, Fleet

Fault = Callable[[Fleet, str, Sequence[str], random.Random], AbstractContextManager[None]]
"""(fleet, the node at fault, who is asked for, chance): the fault, as long as it lasts."""


@dataclass
class Kind:
    """What came of the faults of one kind."""

    seconds: list[float] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _corrupt(fleet: Fleet, node: str, asked: Sequence[str], chance: random.Random) -> Iterator[None]:
    fleet.fault(node, f"all_reduce@rank:{sorted(asked).index(node)}=corrupt")
    try:
        yield
    finally:
        fleet.fault(node)


def _killed(fleet: Fleet, node: str, asked: Sequence[str], chance: random.Random) -> AbstractContextManager[None]:
    return fleet.nodes[node].ranks_get(signal.SIGKILL, joined=chance.random() < 0.5)


def _stopped(fleet: Fleet, node: str, asked: Sequence[str], chance: random.Random) -> AbstractContextManager[None]:
    return fleet.nodes[node].ranks_get(signal.SIGSTOP, joined=chance.random() < 0.5)


def _slow_link(fleet: Fleet, node: str, asked: Sequence[str], chance: random.Random) -> AbstractContextManager[None]:
    return fleet.nodes[node].slow_link()


def _little_processor(
    fleet: Fleet, node: str, asked: Sequence[str], chance: random.Random
) -> AbstractContextManager[None]:
    return fleet.nodes[node].few_processors()


def _cut(fleet: Fleet, node: str, asked: Sequence[str], chance: random.Random) -> AbstractContextManager[None]:
    other = chance.choice([name for name in asked if name != node])
    return fleet.nodes[node].mute_to(fleet.nodes[other])


def _link_down(fleet: Fleet, node: str, asked: Sequence[str], chance: random.Random) -> AbstractContextManager[None]:
    return fleet.nodes[node].link_down()


FAULTS: dict[str, Fault] = {
    "wrong values": _corrupt,
    "ranks killed": _killed,
    "ranks stopped": _stopped,
    "slow link": _slow_link,
    "little processor": _little_processor,
    "path cut one way": _cut,
    "link down": _link_down,
}
BLAMELESS = ("path cut one way", "link down")
"""Kinds for which no node is at fault: the path, or nobody knows."""


def soak(fleet: Fleet, faults: int, chance: random.Random, kinds: Sequence[str]) -> dict[str, Kind]:
    """Make the faults and ask a gate under each."""
    found: dict[str, Kind] = defaultdict(Kind)
    names = list(fleet.nodes)
    for number in range(faults):
        kind = chance.choice(kinds)
        asked = sorted(chance.sample(names, chance.randint(3, len(names))))
        node = chance.choice(asked)
        with FAULTS[kind](fleet, node, asked, chance):
            decided = fleet.decide(*asked, min_nodes=len(asked) - 1)
        words = _count(found[kind], kind, node, decided)
        sys.stderr.write(f"{number + 1}/{faults} {kind} on {node} of {','.join(asked)}: {words}\n")
        for name in names:
            fleet.healthy(name)
    return found


def _count(found: Kind, kind: str, node: str, decided: Decided) -> str:
    blamed = decided.blamed - (set() if kind in BLAMELESS else {node})
    if blamed:
        found.wrong.append(f"{node} had {kind}, and {', '.join(sorted(blamed))} was blamed: {decided}")
        return found.wrong[-1]
    right = set(decided.excluded) == {node} if kind != BLAMELESS[0] else len(decided.excluded) == 1
    # A path that no test of the search needed may pass all the same.
    if decided.code == 0 and (right or (kind == BLAMELESS[0] and not decided.excluded)):
        found.seconds.append(decided.seconds)
        return f"named after {decided.seconds:.1f} s"
    found.undecided.append(f"{node} had {kind}: {decided}")
    return found.undecided[-1]


def table(found: dict[str, Kind]) -> str:
    """In Markdown, as it stands in the docs."""
    lines = [
        "| fault | times | named | undecided | wrong | median | longest |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in FAULTS:
        if kind in found:
            one = found[kind]
            times = len(one.seconds) + len(one.undecided) + len(one.wrong)
            median = f"{statistics.median(one.seconds):.1f} s" if one.seconds else "-"
            longest = f"{max(one.seconds):.1f} s" if one.seconds else "-"
            named = f"{len(one.seconds)} | {len(one.undecided)} | {len(one.wrong)}"
            lines.append(f"| {kind} | {times} | {named} | {median} | {longest} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.netns.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--faults", type=int, default=30, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--nodes", type=int, default=6, choices=range(3, 9), metavar="N")
    parser.add_argument("--only", action="append", choices=list(FAULTS), metavar="KIND")
    parser.add_argument("--join", default="4s", metavar="TIME", help="for ranks to find each other, and to be heard of")
    parser.add_argument("--timeout", default="5s", metavar="TIME", help="for a collective")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is started is ended on the way out
    with tempfile.TemporaryDirectory(prefix="healthd-soak-") as folder:
        fleet = Fleet(
            Path(folder),
            arguments.nodes,
            collective_join=arguments.join,
            **{"tuning.collective_contact": arguments.join},
            collective_timeout=arguments.timeout,
        )
        try:
            found = soak(fleet, arguments.faults, random.Random(arguments.seed), arguments.only or list(FAULTS))
        finally:
            fleet.close()
    sys.stdout.write(table(found) + "\n")
    return 1 if any(one.wrong for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
