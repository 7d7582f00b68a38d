"""
A validation as it is stored: the groups under test, the findings, the verdict. Frozen data.

It is part of its gate and is stored with it, so a restarted aggregator continues it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from healthd.core.model import Reason
from healthd.localize import Outcome, ValidationVerdict


@dataclass(frozen=True, kw_only=True)
class RankRange:
    """A member of the group with its ranks: `first_rank` is its first in this group."""

    node: str
    first_rank: int
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """
    A group under test. `id` is used once; `main` and `port` are where its rank 0 waits.

    `ends_at` is when all its nodes must have reported. `met_at` is when all ranks were seen to be up: how long some
    take to start is no fault, but from here on they must find each other. `failing_since` is when the first rank was
    seen lost: the others get a grace to say what they saw. `closed`: its orders are called off, last reports come in
    until `ends_at`. `hosts` are the members' addresses where nccom-test runs over them, empty for ranks of torch.
    `compile_seconds` is how much longer it may take where ranks say that they have to compile.
    """

    id: str
    seats: tuple[RankRange, ...]
    main: str
    port: int
    started_at: float
    ends_at: float
    met_at: float | None = None
    failing_since: float | None = None
    closed: bool = False
    hosts: tuple[str, ...] = ()
    compile_seconds: float = 0.0

    @property
    def members(self) -> tuple[str, ...]:
        """Names, in the order of ranks."""
        return tuple(seat.node for seat in self.seats)

    def order_id(self, node: str) -> str:
        """Of the order to a member."""
        return f"{self.id}:{node}"


@dataclass(frozen=True, kw_only=True)
class Tested:
    """
    What the test of a group gave.

    `accused` holds what was seen of single nodes, by name; `reasons` is what the group as such has to say. `silent`
    are members that never said how it ended, `unfit` those that could not take part, `ended_within` those of them that
    had begun and failed in the middle. `busbw_bytes_per_second` by check, for the largest size; `seconds` from the
    order to the last report.
    """

    members: tuple[str, ...]
    outcome: Outcome
    round: int
    seconds: float
    reasons: tuple[Reason, ...] = ()
    accused: Mapping[str, Reason] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    unfit: Mapping[str, Reason] = field(default_factory=dict)
    ended_within: tuple[str, ...] = ()
    busbw_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    injected: bool = False


@dataclass(frozen=True, kw_only=True)
class ChanceSeen:
    """Of so many tests of healthy groups in past validations, how many failed by chance; the oldest count less."""

    failed: float = 0.0
    tests: float = 0.0


NO_CHANCE_SEEN = ChanceSeen()


@dataclass(frozen=True, kw_only=True)
class Validation:
    """
    Collectives over `members` together, and the search for who is at fault when they fail.

    `partners` are idle nodes with good evidence of their own, reserved for the search. `ranks` is how many each has,
    `whole` the first rank of each in the first whole group; `labels` are those of topology. `deadline`: the search ends
    with what is known. `turn` counts the groups started, for ids and ports. `why` is what the round under way is for.
    `launch` is how nccom-test gets onto the nodes (ssh, slurm); None: ranks of torch run the collectives.
    `checks` are what groups run; empty: the policy's collectives. `left_out` says in sentences what they do not run,
    because a member does not know it. `chance` is what was known of chance when it began.
    """

    id: str
    members: tuple[str, ...]
    ranks: Mapping[str, int]
    whole: Mapping[str, int]
    seed: int
    started_at: float
    deadline: float
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    partners: tuple[str, ...] = ()
    round: int = 0
    why: str = "the whole"
    groups: tuple[Group, ...] = ()
    done: tuple[Tested, ...] = ()
    history: tuple[Tested, ...] = ()
    turn: int = 0
    launch: str | None = None
    checks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    chance: ChanceSeen = NO_CHANCE_SEEN
    verdict: ValidationVerdict | None = None
    ended_at: float | None = None
