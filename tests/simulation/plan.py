"""What happens in a simulation, drawn from a seed: jobs, faults, and what people do. Data, so that it can be shrunk."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

AGGREGATORS = ("head", "head2", "head3")
"""The addresses at which aggregators may be."""
NODES = ("n1", "n2", "n3")
STEPS = 30
"""Events of a plan, jobs and faults together."""
FIRST_AT, PAUSE_SECONDS = 3.0, 6.0
JOBS = ("j1", "j2", "j3", "j4", "j5", "j6")
RUNS = ("5", "20", "60", "900")
"""How long a job runs, in seconds; the longest outlives every other gate."""
WAYS = ("cut", "lose", "lose-answers", "slow", "repeat", "bad")
"""What may be wrong with a way, see `TROUBLES` of `world`."""


@dataclass(frozen=True)
class Event:
    """Something that happens at a time; what, see `World.happen`."""

    at: float
    kind: str
    of: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.at:.3f} {self.kind} {' '.join(self.of)}".rstrip()


@dataclass(frozen=True)
class Plan:
    """All events of a simulation, in their order; all else that is left to chance follows from the seed."""

    seed: int
    events: tuple[Event, ...]
    ends_at: float
    """When everything is mended."""
    aggregators: int = 1
    """How many there are. One has the disk for itself; several share it, and one of them leads."""


def _ask(chance: random.Random) -> tuple[str, ...]:
    nodes = chance.sample(NODES, chance.choice((1, 1, 2, 3)))
    return chance.choice(JOBS), "+".join(nodes), chance.choice(("5", "20", "60")), chance.choice(RUNS)


def _node(chance: random.Random) -> tuple[str, ...]:
    return (chance.choice(NODES),)


def _trouble(chance: random.Random) -> tuple[str, ...]:
    return chance.choice((*NODES, "hooks", "hooks")), chance.choice(WAYS), _seconds(chance)


def _seconds(chance: random.Random) -> str:
    return f"{chance.choice((0.5, 5.0, 12.0, 25.0)) * chance.uniform(0.7, 1.3):.2f}"


KINDS: dict[str, tuple[float, Callable[[random.Random], tuple[str, ...]]]] = {
    "ask": (8.0, _ask),
    "end": (1.5, lambda chance: (chance.choice(JOBS),)),
    "ask-again": (3.0, lambda chance: (chance.choice(JOBS),)),
    "bad": (2.0, _node),
    "good": (1.5, _node),
    "swap": (0.7, _node),
    "quarantine": (0.7, _node),
    "kill": (0.8, lambda _: ()),
    "kill-at-step": (1.5, lambda chance: (str(int(chance.expovariate(1 / 60))),)),
    "kill-at-commit": (2.0, lambda chance: (chance.choice("0012345"), chance.choice(("before", "after")))),
    "freeze": (0.7, lambda chance: (_seconds(chance),)),
    "take-over": (0.8, lambda chance: (_seconds(chance),)),
    "restart-node": (1.0, lambda chance: (*_node(chance), _seconds(chance))),
    "reboot-node": (0.7, lambda chance: (*_node(chance), _seconds(chance))),
    "freeze-node": (0.7, lambda chance: (*_node(chance), _seconds(chance))),
    "trouble": (4.0, _trouble),
    "disk": (2.5, lambda chance: (chance.choice(("slow", "fails", "fails-after")), _seconds(chance))),
    "clock": (0.4, lambda chance: (chance.choice(("-5", "-86400", "30", "86400")),)),
    "copy": (0.4, lambda _: ()),
    "restore": (0.3, lambda _: ()),
    "lose": (0.1, lambda _: ()),
}
"""What may happen: how often, compared with the others, and to what."""


def _some_seconds(chance: random.Random) -> str:
    return f"{chance.choice((2.0, 5.0, 8.0, 15.0)) * chance.uniform(0.7, 1.3):.2f}"


def _cut_disk(chance: random.Random) -> tuple[str, ...]:
    return chance.choice(("leader", *AGGREGATORS)), chance.choice(("hangs", "refused")), _some_seconds(chance)


def _part(chance: random.Random) -> tuple[str, ...]:
    one, other = chance.sample(("leader", *AGGREGATORS), 2)
    return one, other, chance.choice(WAYS), _some_seconds(chance)


def _part_client(chance: random.Random) -> tuple[str, ...]:
    source = chance.choice((*NODES, "hooks", "hooks"))
    return source, chance.choice(("leader", *AGGREGATORS)), chance.choice(WAYS), _some_seconds(chance)


LEADER_KINDS: dict[str, tuple[float, Callable[[random.Random], tuple[str, ...]]]] = {
    "kill": (1.0, lambda _: ()),
    "freeze": (2.0, lambda chance: (_some_seconds(chance),)),
    "stop": (1.0, lambda _: ()),
    "step-down": (1.5, lambda _: ()),
    "cut-disk": (3.0, _cut_disk),
    "part": (2.0, _part),
    "part-client": (2.0, _part_client),
}
"""What may happen besides, where several aggregators share the disk."""
LEADER_STEPS_RATIO = 0.4
"""Of such events for each of the others."""


def drawn(seed: int, steps: int = STEPS, aggregators: int | None = None) -> Plan:
    """The plan of a seed. It also says how many aggregators there are, where that is not given."""
    aggregators = aggregators or (1, 2, 3)[seed % 3]
    chance = random.Random(f"{seed}:plan")
    ends_at, events = _events(chance, steps, KINDS)
    if aggregators > 1:
        more = random.Random(f"{seed}:leaders")
        _, others = _events(more, round(steps * LEADER_STEPS_RATIO), LEADER_KINDS, most=ends_at)
        events = sorted([*events, *others], key=lambda event: event.at)
    return Plan(seed, tuple(events), ends_at + PAUSE_SECONDS, aggregators)


Kinds = dict[str, tuple[float, Callable[[random.Random], tuple[str, ...]]]]


def _events(chance: random.Random, steps: int, kinds: Kinds, *, most: float | None = None) -> tuple[float, list[Event]]:
    """Events one after the other, and when the last one is; with `most` anywhere before that."""
    weights = [weight for weight, _ in kinds.values()]
    at, events = FIRST_AT, []
    for _ in range(steps):
        if most is None:
            at += chance.choice((0.0, 0.02, 0.5, 1.0, 2.0)) * chance.uniform(0.0, PAUSE_SECONDS / 2)
        else:
            at = chance.uniform(FIRST_AT, most)
        (kind,) = chance.choices(list(kinds), weights)
        events.append(Event(round(at, 3), kind, kinds[kind][1](chance)))
    return at, events
