"""
The course of a validation: the whole first, then what localisation asks for, to the verdict. Pure.

`advance` looks at the reports of the groups under test. A round ends when all its groups have; then localisation says
what comes next.

Also here:

- which deep checks the nodes of a validation cannot all run: pure;
- how often healthy groups have failed in past validations: what a search takes for known of chance.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.policy import Policy
from healthd.aggregator.validation import nccom
from healthd.aggregator.validation.groups import (
    Nodes,
    first_ranks,
    longest_compile_seconds,
    main_address,
    ranks_of,
    start_round,
    waiting,
    wake_at,
    watch,
)
from healthd.aggregator.validation.records import NO_CHANCE_SEEN, ChanceSeen, Tested, Validation
from healthd.localize import Course, GroupOutcome, NextRound, Outcome, Problem, ValidationVerdict, replay

MOST_PARTNERS = 8
"""Idle healthy nodes that a search may borrow. One decides between two suspects; more let rounds run at once."""
NOISE_RATIO = 0.03
"""Share of healthy groups that are expected to fail by chance until more is seen. A node that passes at times is
accused only where that explains its failures too seldom; a larger share that is seen counts instead. With 0 flaky nodes
would be named some rounds sooner, and healthy ones accused in small fleets that are not so good."""
MOST_COURSES = 32
"""Validations whose course of tests is kept in memory; of others it is computed anew from their history."""

_courses: dict[str, tuple[int, Course]] = {}  # by validation: how many tests it knows of

# In a failing group these were seen in a node itself; one that received wrong values is no more than a witness.
_SHOWN = ("RankDied", "RankHung", "DeviceLost", "WrongResult", "SilentCorruption")
_SENDER = "got wrong values from"
_RECEIVED = "reduced gradient of"

MOST_TESTS = 2000.0
"""Tests that are remembered; of more, all counts are halved, so that a network that was mended is believed in time."""


def begin(
    now: float,
    validation_id: str,
    members: Sequence[str],
    nodes: Nodes,
    policy: Policy,
    *,
    deadline: float,
    checks: tuple[str, ...] = (),
    left_out: tuple[str, ...] = (),
    chance: ChanceSeen = NO_CHANCE_SEEN,
) -> Validation:
    """
    A validation of `members`, in this order of ranks, that has not started a group yet.

    `checks` are what its groups run; none: the policy's collectives. `left_out` is for people: what they do not run.
    `chance` is what past validations have seen of it.
    """
    ranks = {node: ranks_of(nodes.get(node)) for node in members}
    launch = nccom.launch_mode(members, nodes, policy, checks or policy.collective_checks)
    within = policy.validation_seconds + (0.0 if launch is not None else longest_compile_seconds(members, nodes))
    return Validation(
        id=validation_id,
        members=tuple(members),
        ranks=ranks,
        whole=first_ranks(members, ranks),
        labels=_labels(members, nodes, policy),
        seed=int.from_bytes(hashlib.sha256(validation_id.encode()).digest()[:4], "big") >> 1,
        started_at=now,
        deadline=min(deadline, now + within),
        launch=launch,
        checks=checks,
        left_out=left_out,
        chance=chance,
    )


def advance(
    now: float,
    validation: Validation,
    nodes: Nodes,
    policy: Policy,
    find_partners: Callable[[int], Sequence[str]],
) -> Step:
    """
    Take a validation as far as it can go now; one with a verdict stays as it is.

    `find_partners(count)` gives idle nodes that are known to be good; it is asked once, when the whole did not pass.
    """
    if validation.verdict is not None:
        return Step(validation=validation, waiting="", wake_at=math.inf)
    if not validation.groups and not validation.done and not validation.history:
        if len(validation.members) == 1:  # the last of several: it runs with idle nodes or not at all
            validation = _borrow(validation, nodes, policy, find_partners)
            if not validation.partners:
                return Step(validation=conclude(now, validation, "no node to run with"), waiting="", wake_at=now)
        whole = (*validation.members, *validation.partners)
        validation = start_round(now, validation, [whole], nodes, policy)
    validation = watch(now, validation, nodes, policy)
    while not validation.groups and validation.verdict is None:
        validation = _next_round(now, validation, nodes, policy, find_partners)
    if validation.verdict is not None:
        return Step(validation=validation, waiting="", wake_at=math.inf)
    checks = len(nccom.checks_of(validation, policy))
    return Step(
        validation=validation,
        waiting=waiting(validation, nodes),
        wake_at=min(wake_at(now, group, nodes, policy, checks) for group in validation.groups),
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """A validation as it goes on: what it waits for, in words, and when to look again if nobody reports."""

    validation: Validation
    waiting: str
    wake_at: float


def conclude(now: float, validation: Validation, why: str) -> Validation:
    """End it with what is known; `why` says what ended it."""
    if validation.verdict is not None:
        return validation
    history = [*validation.history, *validation.done]
    found = replay(_problem(validation), _outcomes(history))[0].conclude()
    return dataclasses.replace(
        validation, groups=(), done=(), history=tuple(history), verdict=found, ended_at=now, why=why
    )


def shown_in(tested: Tested) -> tuple[str, ...]:
    """The nodes in whom a failing group itself saw the fault."""
    return tuple(
        node
        for node, why in tested.accused.items()
        if (why.code in _SHOWN and _RECEIVED not in why.message) or _SENDER in why.message
    )


def lacking(
    checks: Sequence[str], members: Iterable[str], nodes: Mapping[str, FleetNode], policy: Policy
) -> dict[str, str]:
    """
    Check -> the first of `members` that does not name it among its checks, of the policy's deep checks.

    The collectives themselves are not looked at: a node that refuses those cannot take part.
    """
    deep = [name for name in checks if name in policy.collective_deep_checks and name not in policy.collective_checks]
    found: dict[str, str] = {}
    for member in members if deep else ():
        node = nodes.get(member)
        if node is None or node.state is None:
            continue  # it is known by no state, and will be silent
        known = {spec.name for spec in node.state.checks}
        for name in deep:
            if name not in known:
                found.setdefault(name, member)
    return found


def sentence(check: str, node: str) -> str:
    """Why a check is left out, and what to do."""
    return f"{node} does not have {check}: upgrade it, or enable the check (node.checks, node.disabled)"


def add(seen: ChanceSeen, validation: Validation) -> ChanceSeen:
    """The counts with those of a validation that has ended."""
    new_failed, new_tests = _count(validation)
    failed, tests = seen.failed + new_failed, seen.tests + new_tests
    share = 0.5 if tests > MOST_TESTS else 1.0
    return ChanceSeen(failed=failed * share, tests=tests * share)


def _next_round(
    now: float,
    validation: Validation,
    nodes: Nodes,
    policy: Policy,
    find_partners: Callable[[int], Sequence[str]],
) -> Validation:
    """The round is over: what next, or the verdict."""
    history = (*validation.history, *validation.done)
    validation = dataclasses.replace(validation, history=history, done=())
    first = validation.round == 0
    if first and history[-1].outcome is not Outcome.PASS and not validation.partners:
        validation = _borrow(validation, nodes, policy, find_partners)
    # A member that falls out changes what is asked; a partner that does has only given no outcome.
    lost = {name for tested in history if tested.round == validation.round for name in (*tested.silent, *tested.unfit)}
    fallen = not lost.isdisjoint(validation.members)
    if fallen or now >= validation.deadline:
        return conclude(now, validation, "nodes dropped out" if fallen else "timed out")
    longest = max((tested.seconds for tested in history if tested.round), default=0.0)
    found = _localized(validation, history, last=now + 2 * longest > validation.deadline)
    if not isinstance(found, NextRound):
        return dataclasses.replace(validation, verdict=found, ended_at=now)
    validation = dataclasses.replace(validation, round=found.number, why=found.why)
    return start_round(now, validation, found.groups, nodes, policy)


def _localized(validation: Validation, history: Sequence[Tested], *, last: bool) -> NextRound | ValidationVerdict:
    """What comes next. The course of a validation is kept, and computed anew only where it is not that of `history`."""
    problem = _problem(validation)
    kept = _courses.pop(validation.id, None)
    new = [tested for tested in history if tested.round == validation.round]
    if kept is not None and validation.round and kept[0] == len(history) - len(new) and kept[1].problem == problem:
        course = kept[1]
        found = course.step(_outcomes(new), last=last)
    else:
        course, found = replay(problem, _outcomes(history))
    if isinstance(found, NextRound):
        _courses[validation.id] = (len(history), course)
        while len(_courses) > MOST_COURSES:
            _courses.pop(next(iter(_courses)), None)
    return found


def _borrow(
    validation: Validation, nodes: Nodes, policy: Policy, find_partners: Callable[[int], Sequence[str]]
) -> Validation:
    """
    Idle nodes join the search: enough for witnesses, and as many as let all be tested in pairs.

    With an odd number one waits in each round, and a flaky one of three is found in 95 instead of 97 of 100 searches
    (docs/localisation_rules.md). A single member gets at least two if possible: two that fail together decide nothing.
    """
    size = len(validation.members)
    count = max(2, -(-size // 8))
    partners = [
        # One that cannot take part would end the search.
        name
        for name in find_partners(min(MOST_PARTNERS, count + (size + count) % 2))
        if name not in validation.members and ranks_of(nodes.get(name)) and main_address([name], nodes)
    ]
    if validation.launch is not None:  # which wants as many on each
        partners = [n for n in partners if ranks_of(nodes.get(n)) == validation.ranks[validation.members[0]]]
    if size > 1 and (size + len(partners)) % 2:
        partners = partners[:-1] or partners
    ranks = {**validation.ranks, **{name: ranks_of(nodes.get(name)) for name in partners}}
    labels = {**validation.labels, **_labels(partners, nodes, policy)}
    return dataclasses.replace(validation, partners=tuple(partners), ranks=ranks, labels=labels)


def _outcomes(history: Iterable[Tested]) -> list[GroupOutcome]:
    return [
        GroupOutcome(members=one.members, outcome=one.outcome, round=one.round, shown=shown_in(one)) for one in history
    ]


def _labels(names: Iterable[str], nodes: Nodes, policy: Policy) -> dict[str, Mapping[str, str]]:
    """The labels of topology of each node that has any."""
    found: dict[str, Mapping[str, str]] = {}
    for name in names:
        node = nodes.get(name)
        if node is not None and node.state is not None:
            said = {key: node.state.labels[key] for key in policy.topology_labels if key in node.state.labels}
            if said:
                found[name] = said
    return found


def _problem(validation: Validation) -> Problem:
    # Borrowed partners passed their own checks; whether they are good together with others is yet to be seen. So they
    # are members of the problem.
    chance = validation.chance
    return Problem(
        members=(*validation.members, *validation.partners),
        labels=validation.labels,
        seed=validation.seed,
        false_alarm_ratio=NOISE_RATIO,
        seen_failed=chance.failed,
        seen_tests=chance.tests,
    )


def _count(validation: Validation) -> tuple[int, int]:
    """
    How many groups of healthy members failed by chance, and how many had an outcome.

    Only where all that remain passed together: else a cause that was not found is counted. Only pairs; of those that
    failed, the ones that passed too, and those with a member in common once, since that member may be the cause.
    """
    verdict = validation.verdict
    if verdict is None or verdict.rest_passed is not True or verdict.scale is not None:
        return 0, 0
    if any(one.injected for one in validation.history):  # a fault that was lifted meanwhile looks like chance
        return 0, 0
    named, used = _named(verdict), set[str]()
    known = [one for one in validation.history if len(one.members) == 2 and named.isdisjoint(one.members)]
    passed = [frozenset(one.members) for one in known if one.outcome is Outcome.PASS]
    failed = 0
    for one in known:
        mended = one.outcome is Outcome.FAIL and frozenset(one.members) in passed
        if mended and used.isdisjoint(one.members):
            used.update(one.members)
            failed += 1
    return failed, len(passed) + failed


def _named(verdict: ValidationVerdict) -> frozenset[str]:
    """All members that a verdict gives a cause of failures for."""
    return frozenset(one.member for one in verdict.culprits).union(
        verdict.not_measured,
        *(path.ends for path in verdict.paths),
        *(group.members for group in verdict.groups),
        *(side for trunk in verdict.trunks for side in trunk.members),
    )
