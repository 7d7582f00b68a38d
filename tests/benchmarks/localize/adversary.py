"""
Fleets that nobody tuned for: several faults of any kind at once, noise, labels that lie. Who is accused?

    python -m tests.benchmarks.localize.adversary [--fleets N] [--from SEED] [--only WORD] [--show] [--taught N]

Each fleet is drawn from its number. Only fleets whose whole fails are played, as a fleet that passes is never searched.
The table counts those in which a healthy member is accused: by faults, by size, and by how the accused failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from healthd.localize.model import Culprit, Outcome, Problem
from tests.benchmarks.localize.simulator import Fleet, names, play, switches
from tests.benchmarks.localize.table import accused

SIZES = (3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 17, 24, 32, 33, 48, 64, 64, 96, 128, 512)
WEIGHTS = (4, 4, 4, 4, 4, 6, 4, 4, 4, 6, 4, 4, 4, 2, 2, 2, 2, 1, 1, 0.25)
SHARES = (0.0, 0.0, 0.0, 0.002, 0.005, 0.01, 0.02)  # of healthy groups that fail
FAULTS = (0, 1, 1, 1, 1, 2, 2, 3)  # kinds of faults at once

Fault = Callable[[random.Random, Fleet, Sequence[str]], None]


def bad(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    fleet.bad |= frozenset(rng.sample(members, rng.randint(1, max(1, len(members) // 4))))
    fleet.shows = rng.random() < 0.3


def flaky(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    fleet.flaky |= frozenset(rng.sample(members, 1 if len(members) < 8 else rng.randint(1, 2)))
    fleet.flaky_ratio = rng.choice((0.2, 0.3, 0.5, 0.7, 0.9))


def slow(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    fleet.slow |= frozenset(rng.sample(members, rng.randint(1, max(1, len(members) // 8))))
    fleet.contention_ratio = rng.choice((0.0, 0.02, 0.05))


def paths(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    count = rng.randint(1, max(1, min(3, len(members) // 4)))
    fleet.paths |= frozenset(frozenset(rng.sample(members, 2)) for _ in range(count))
    fleet.path_ratio = rng.choice((1.0, 1.0, 1.0, 0.5))


def cut(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    size = max(2, len(members) // rng.choice((2, 3, 4, 8)))
    first = size * rng.randrange(max(1, len(members) // size))
    fleet.cuts += (frozenset(members[first : first + size]),)
    fleet.cut_inside = rng.random() < 0.2 and size * 4 <= len(members)


def trunk(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    size = max(2, len(members) // 4)
    one, other = rng.sample(range(max(2, len(members) // size)), 2)
    sides = [frozenset(members[size * i : size * i + size]) for i in (one, other)]
    if all(sides):
        fleet.trunks += ((sides[0], sides[1]),)


def healing(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    fleet.bad |= frozenset(rng.sample(members, 1))
    fleet.failures_left = rng.randint(1, 6)


def scale(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    fleet.scale = rng.randint(3, len(members))


def together(rng: random.Random, fleet: Fleet, members: Sequence[str]) -> None:
    fleet.together = frozenset(rng.sample(members, min(3, len(members))))


KINDS: tuple[Fault, ...] = (bad, flaky, slow, paths, cut, trunk, healing, scale, together)


def draw(number: int) -> tuple[Fleet, Problem, int, str]:
    """A fleet, what is to be localised, how many of it are idle nodes that join, and its faults in words."""
    rng = random.Random(f"adversary:{number}")
    size = rng.choices(SIZES, WEIGHTS)[0]
    members = names(size)
    fleet = Fleet(seed=rng.randrange(1 << 30), alarm_ratio=rng.choice(SHARES))
    kinds = rng.sample(KINDS, rng.choice(FAULTS))
    for make in kinds:
        make(rng, fleet, members)
    if not kinds:
        fleet.alarm_ratio = rng.choice((0.005, 0.01, 0.02))
    said = "+".join(sorted(make.__name__ for make in kinds)) or "healthy"
    told = rng.choice(("missing", "missing", "right", "half", "wrong"))
    labels = switches(members, max(2, size // rng.choice((2, 4, 8))), told=told, seed=number)
    known = rng.random() < 0.2
    borrowed = rng.choice((0, 0, 0, 1, 2, 3)) if size > 6 else 0
    problem = Problem(members=members, labels=labels, seed=number,
                      false_alarm_ratio=fleet.alarm_ratio if known else 0.0)  # fmt: skip
    noise = f", noise {fleet.alarm_ratio:g}{' set' if known else ''}" if fleet.alarm_ratio else ""
    return fleet, problem, borrowed, said + noise


def is_alone(fleet: Fleet, name: str, members: Sequence[str]) -> bool:
    """Whether a healthy member passes with no healthy one: nothing tells it from one that is broken."""
    others = [other for other in members if other != name and other not in fleet.at_fault()]
    return all(fleet.is_cut(frozenset((name, other))) for other in others)


def how(culprit: Culprit) -> str:
    """How an accused member failed."""
    return f"{culprit.manner.value} {culprit.failed} of {culprit.failed + culprit.passed}"


def main(argv: Sequence[str] | None = None) -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.localize.adversary", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--fleets", type=int, default=2000, metavar="N")
    parser.add_argument("--from", type=int, default=0, metavar="SEED", dest="start")
    parser.add_argument("--only", default="", metavar="WORD", help="fleets whose faults hold this word")
    parser.add_argument(
        "--show", action="store_true", help="a line for each fleet in which a healthy member is accused"
    )
    parser.add_argument(
        "--draws", type=int, default=200, metavar="N", help="of the first whole, until it fails; else passed"
    )
    parser.add_argument(
        "--taught", type=int, default=0, metavar="N", help="tests of healthy groups that were seen before; default 0"
    )
    arguments = parser.parse_args(argv)
    played: Counter[tuple[str, str]] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    passed = 0
    for number in range(arguments.start, arguments.start + arguments.fleets):
        fleet, problem, borrowed, said = draw(number)
        seen = {"seen_failed": arguments.taught * fleet.alarm_ratio, "seen_tests": arguments.taught}
        problem = dataclasses.replace(problem, **seen)
        whole = problem.members[: len(problem.members) - borrowed]
        if arguments.only not in said:
            continue
        first = next(
            (one for _ in range(arguments.draws) for one in fleet.run([whole], 0) if one.outcome is not Outcome.PASS),
            None,
        )
        passed += first is None
        if first is None:
            continue
        verdict, _ = play(fleet, problem, first=first.outcome, borrowed=borrowed)
        size = len(problem.members)
        keys = [("all", ""), ("size", "3 to 7" if size < 8 else "8 to 16" if size < 17 else "17 and more"),
                ("kind", said.partition(",")[0]), ("noise", str(fleet.alarm_ratio)),
                ("faults", str(said.count("+") + (not said.startswith("healthy"))))]  # fmt: skip
        played.update(keys)
        false = [
            one
            for one in verdict.culprits
            if one.member in accused(verdict) - fleet.at_fault() and not is_alone(fleet, one.member, problem.members)
        ]
        if false:
            wrong.update([*keys, ("how", how(false[0]))])
            if arguments.show:
                sys.stdout.write(f"{number}: {size} members, {said}: {', '.join(map(how, false))}\n")
    for what in ("all", "faults", "size", "noise", "kind", "how"):
        for (key, value), count in sorted(wrong.items()):
            if key == what:
                of = played[key, value] or played["all", ""]
                sys.stdout.write(f"{key} {value}: {count} in {of} ({100 * count / of:.2f} %)\n")
    sys.stdout.write(f"{wrong['all', '']} in {played['all', '']} whose whole failed; {passed} passed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
