"""
The records of localisation: problem, outcomes, next tests, verdict.

Frozen data only. A member is a node of a job; nothing here depends on that, so ranks of one node work as well.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from healthd.core.errors import BadInputError


class Outcome(str, enum.Enum):
    """Of one group test. UNKNOWN (no answer, our own tool failed, cancelled) is no evidence of anything."""

    PASS = "pass"
    FAIL = "fail"
    SLOW = "slow"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """
    What the test of one group gave.

    `round` 0 is the first whole and whatever else was known before; rounds count from 1. Groups of one round are taken
    to have run at once: a slow group counts as measured alone only where its round had no other group. `shown` are
    members in whom the test itself saw the fault: one died, hung, or sent wrong values.
    """

    members: tuple[str, ...]
    outcome: Outcome
    round: int
    shown: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """
    What is to be localised, and how long to go on.

    `members` of the job, and idle ones that joined once it failed: they help, and are judged by the same rules.
    `labels`: topology, e.g. `{"n1": {"switch": "s7"}}`; absent where nothing is known. `seed` decides every shuffle.
    The share of healthy groups that fail is learnt; `false_alarm_ratio` is what to expect until more is seen, and who
    passes at times is never judged by less.
    `seen_failed` of `seen_tests` healthy groups have failed in earlier searches of the same fleet. `pair_rounds` of
    shuffled pairs must be clean before bisection: a member that fails half of its tests is missed by six once in 64.
    Six of `max_rounds` are enough for up to half of the members bad; paths and flaky members take more.
    """

    members: tuple[str, ...]
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seed: int = 0
    false_alarm_ratio: float = 0.0
    seen_failed: float = 0.0
    seen_tests: float = 0.0
    max_rounds: int = 40
    pair_rounds: int = 6

    def __post_init__(self) -> None:
        twice = sorted(name for name, count in Counter(self.members).items() if count > 1)
        if not self.members:
            raise BadInputError("localisation: there are no members to test; name at least one")
        if twice:
            raise BadInputError(f"localisation: named twice: {', '.join(twice[:5])}; name each once")
        if not (0 <= self.false_alarm_ratio < 0.5 and 0 <= self.seen_failed <= self.seen_tests):
            raise BadInputError("localisation: it must be 0 <= false_alarm_ratio < 0.5, 0 <= seen_failed <= seen_tests")
        if self.max_rounds < 0 or self.pair_rounds < 1:
            raise BadInputError("localisation: max_rounds must not be negative, and pair_rounds at least 1")


@dataclass(frozen=True, kw_only=True)
class NextRound:
    """Groups to test now, all at once: they share no member. `why` is one sentence for people."""

    number: int
    groups: tuple[tuple[str, ...], ...]
    why: str


class Manner(str, enum.Enum):
    """How a culprit fails."""

    ALWAYS = "always"
    SOMETIMES = "sometimes"
    SLOW = "slow"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """
    An accused member.

    `failed_with`: the different clean partners of its failures; `passed` and `failed`: its tests in pairs.
    """

    member: str
    manner: Manner
    failed_with: tuple[str, ...]
    failed: int
    passed: int


@dataclass(frozen=True, kw_only=True)
class PathFault:
    """Two members fail together and each passes with others: neither is accused."""

    ends: tuple[str, str]
    failed: int
    slow: bool


@dataclass(frozen=True, kw_only=True)
class LabelFault:
    """
    Members that are cut off, none of them at fault. `label` is the key (`switch`) that all of them have and nobody
    else, `value` which one; both are empty where no label is theirs alone.

    `inside` True: they pass among themselves (an uplink); False: they fail there too; None: not measured.
    """

    label: str
    value: str
    members: tuple[str, ...]
    inside: bool | None


@dataclass(frozen=True, kw_only=True)
class ScaleFault:
    """
    Pairs pass and a larger group fails.

    `members` is the smallest failing group seen and `largest_passing` the size of the largest that passed.
    `any_group`: another group of that size failed too (True), passed (False), was not tested (None).
    """

    members: tuple[str, ...]
    largest_passing: int
    any_group: bool | None


@dataclass(frozen=True, kw_only=True)
class TrunkFault:
    """
    Members of two values of a label fail with each other and pass with everybody else: what joins the two is broken.

    `members` are those of the first and of the second value; `failed`: different pairs that failed across.
    """

    label: str
    values: tuple[str, str]
    members: tuple[tuple[str, ...], tuple[str, ...]]
    failed: int


@dataclass(frozen=True, kw_only=True)
class ValidationVerdict:
    """
    What is known at the end. No member outside `culprits` is accused.

    `one_of`: sets of which at least one member, or a path inside, is at fault and more cannot be told. `not_measured`:
    tests with these gave no outcome. `rest`: who remains; `rest_passed` True when all of them passed together last,
    False when they failed, None when that was not measured. `decided` is False where a failure has no named cause.
    """

    culprits: tuple[Culprit, ...]
    paths: tuple[PathFault, ...]
    groups: tuple[LabelFault, ...]
    scale: ScaleFault | None
    one_of: tuple[tuple[str, ...], ...]
    not_measured: tuple[str, ...]
    rest: tuple[str, ...]
    rest_passed: bool | None
    decided: bool
    reasons: tuple[str, ...]
    rounds: int
    tests: int
    trunks: tuple[TrunkFault, ...] = ()
