"""What happens in a simulation, drawn from a seed: jobs, faults, and what people do. Data, so that it can be shrunk."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

AGGREGATOR = "head"
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
    "clock": (0.4, lambda chance: (chance.choice(("-5", "30", "86400")),)),
    "copy": (0.4, lambda _: ()),
    "restore": (0.3, lambda _: ()),
    "lose": (0.1, lambda _: ()),
}
"""What may happen: how often, compared with the others, and to what."""


def drawn(seed: int, steps: int = STEPS) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"{seed}:plan")
    weights = [weight for weight, _ in KINDS.values()]
    at, events = FIRST_AT, []
    for _ in range(steps):
        at += chance.choice((0.0, 0.02, 0.5, 1.0, 2.0)) * chance.uniform(0.0, PAUSE_SECONDS / 2)
        (kind,) = chance.choices(list(KINDS), weights)
        events.append(Event(round(at, 3), kind, KINDS[kind][1](chance)))
    return Plan(seed, tuple(events), at + PAUSE_SECONDS)
