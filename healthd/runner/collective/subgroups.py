"""
Finds the rank of a node that is at fault when a collective of all ranks fails and names none: by smaller groups.

The same localisation that names a node of a fleet names a rank of a node: pairs of the node's own ranks run the
collectives that failed, until each failure has a culprit or no more can be found out. Only ranks whose workers are kept
can be regrouped in moments (CPU, CUDA); with workers that start anew for each group it would take minutes.

Unverified on hardware: groups of GPUs (NCCL); on CPUs (gloo) it is tested.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from checks.contract import Blame, CheckInfo, Finding, Status
from checks.reasons import blame_of
from checks.worker.faults import Fault
from checks.worker.protocol import shorten
from healthd.core.model import CheckResult
from healthd.localize import Course
from healthd.localize.model import Culprit, GroupOutcome, Manner, NextRound, Outcome, Problem, Verdict
from healthd.localize.verdict import names
from healthd.runner.collective.node_collective import Command, NodeCollective
from healthd.runner.workers.outcome import Outcome as RankOutcome
from healthd.runner.workers.worker_lane import WorkerLane
from healthd.runner.workers.workers import Workers

log = logging.getLogger(__name__)

MOST_ROUNDS = 24
"""Rounds of one search: to find a path takes ten and more, a device three."""
PAIR_ROUNDS = 4
"""Clean rounds of pairs before larger groups are searched: a node has few ranks, which have met each other by then."""
GROUP_SECONDS = 15.0
"""A collective of a group hangs when it takes longer than this, and than twice the time of all ranks."""
SLOW = ("SlowLink", "SlowDevice")

Judge = Callable[[CheckInfo, Sequence[RankOutcome]], Awaitable[RankOutcome]]


MakeGroup = Callable[[tuple[int, ...], str], NodeCollective]
"""A group of these ranks, under a name of its own."""


@dataclass(frozen=True, kw_only=True)
class UnresolvedFailure:
    """A collective of all ranks that failed without a culprit, with everything of which its result is composed."""

    info: CheckInfo
    outcomes: Sequence[RankOutcome]
    judgement: RankOutcome
    faults: tuple[Fault, ...]
    """Those that are injected into the check."""
    timeout_seconds: float
    """The time limit of the check."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings about all ranks together."""
        return tuple(self.judgement.findings)

    @property
    def within_seconds(self) -> float:
        """The time limit of the same collective in a smaller group."""
        began = min(outcome.began for outcome in self.outcomes)
        seconds = max(outcome.ended for outcome in self.outcomes) - began
        return min(self.timeout_seconds, max(GROUP_SECONDS, 2 * seconds))


@dataclass(kw_only=True)
class GroupMessages:
    """What failed groups reported, with the rank numbers of the whole node."""

    by_rank: dict[int, str] = field(default_factory=dict)
    by_group: dict[frozenset[int], str] = field(default_factory=dict)


def is_unresolved(judgement: RankOutcome) -> bool:
    """Whether a collective failed, was slow or hung, and no rank nor anything else is named as the cause."""
    if judgement.missing is not None:
        return False
    bad = [one for one in judgement.findings if one.status in (Status.FAIL, Status.UNKNOWN)]
    if not bad or any(one.target.startswith("rank:") for one in bad):
        return False
    return all(one.status is Status.FAIL or one.reason == "Timeout" for one in bad)


def not_applicable(accelerator: object) -> Finding:
    """The finding where workers are not kept, so that there is no search."""
    text = f"which rank is at fault was not searched for: ranks of {accelerator} cannot be put together anew at once"
    return Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")


def failed_probes(results: Iterable[CheckResult], targets: Sequence[str]) -> dict[int, str]:
    """Rank -> the failure of a probe of its device alone. Probes that passed do not clear a rank."""
    found: dict[int, str] = {}
    for result in results:
        for one in result.findings:
            own = (one.blame or blame_of(one.reason)) is Blame.NODE
            if one.status is Status.FAIL and own and one.target in targets:
                found.setdefault(targets.index(one.target), f"{result.check} {one.reason}: {one.message}")
    return found


class Subgroups:
    """The search of one run, once all its collectives of all ranks have ended. `search` is called once."""

    def __init__(
        self,
        workers: Workers,
        lanes: Sequence[WorkerLane],
        make_group: MakeGroup,
        *,
        command: Command,
        judge: Judge,
        seed: int = 0,
    ) -> None:
        self._workers = workers
        self._lanes = lanes
        self._make_group = make_group
        self._command = command
        self._judge = judge
        self._seed = seed
        self._messages = GroupMessages()

    async def search(
        self, failing: Sequence[UnresolvedFailure], results: Iterable[CheckResult], *, deadline: float
    ) -> tuple[Finding, ...]:
        """
        The findings of smaller groups of ranks, at least one; `results` are those of the run so far.

        `deadline` is monotonic: then groups under way are ended, and the findings say what is known by then.
        """
        if self._workers.inventory.get("ranks", "kept") != "kept":
            return (not_applicable(self._workers.inventory.get("accelerator")),)
        probes = failed_probes(results, [lane.target for lane in self._lanes])
        members = tuple(self._name(rank) for rank in range(len(self._lanes)))
        problem = Problem(members=members, seed=self._seed, max_rounds=MOST_ROUNDS, pair_rounds=PAIR_ROUNDS)
        course = Course(problem)
        slow = all(one.reason in SLOW for test in failing for one in _bad(test.findings))
        known = [GroupOutcome(members=members, outcome=Outcome.SLOW if slow else Outcome.FAIL, round=0)]
        known += [GroupOutcome(members=(self._name(rank),), outcome=Outcome.FAIL, round=0) for rank in probes]
        step = course.step(known)
        while isinstance(step, NextRound):
            log.info("sub-groups, round %d: %s", step.number, step.why)
            outcomes = await self._round(step, failing, deadline)
            step = course.conclude() if outcomes is None else course.step(outcomes)
        return self._findings(step, failing, probes)

    # --- groups -------------------------------------------------------------------------------------------------------

    async def _round(
        self, step: NextRound, failing: Sequence[UnresolvedFailure], deadline: float
    ) -> list[GroupOutcome] | None:
        """The outcomes of a round; None when the time was up before it ended."""
        groups = [tuple(sorted(int(name.partition(":")[2]) for name in group)) for group in step.groups]
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                tests = (self._test(step.number, index, group, failing) for index, group in enumerate(groups))
                found = await asyncio.gather(*tests)
        except TimeoutError:
            await asyncio.gather(*(lane.kill("") for lane in self._lanes))
            return None
        return [
            GroupOutcome(members=tuple(map(self._name, group)), outcome=outcome, round=step.number)
            for group, outcome in zip(groups, found, strict=True)
        ]

    async def _test(
        self, number: int, index: int, group: tuple[int, ...], failing: Sequence[UnresolvedFailure]
    ) -> Outcome:
        """Let these ranks run the failed collectives, one after the other, to the first that fails again."""
        if len(group) < 2:
            return Outcome.UNKNOWN
        ranks = self._make_group(group, f"round-{number}-{index}")
        for test in failing:
            outcomes, whole = await ranks.run(test.info, test.within_seconds, self._command, test.faults)
            judgement = await self._judge(test.info, outcomes) if whole else None
            if judgement is None or judgement.missing is not None:
                return Outcome.UNKNOWN
            outcome = outcome_of(judgement.findings)
            if outcome is not Outcome.PASS:
                self._remember(group, judgement.findings)
                return outcome
        return Outcome.PASS

    def _remember(self, group: tuple[int, ...], findings: Sequence[Finding]) -> None:
        for one in _bad(findings):
            # In a group of its own the first rank is 0 again.
            text = re.sub(r"\brank:(\d+)", lambda found: _renamed(found[1], group), one.message)
            rank = re.fullmatch(r"rank:(\d+)", one.target)
            if rank is not None and int(rank[1]) < len(group):
                self._messages.by_rank[group[int(rank[1])]] = text
            else:
                self._messages.by_group[frozenset(group)] = text

    # --- findings -----------------------------------------------------------------------------------------------------

    def _name(self, rank: int) -> str:
        return f"rank:{rank}"

    def _full(self, name: str) -> str:
        """`rank:1 (cpu:1)`."""
        return f"{name} ({self._lanes[int(name.partition(':')[2])].target})"

    def _findings(
        self, verdict: Verdict, failing: Sequence[UnresolvedFailure], probes: Mapping[int, str]
    ) -> tuple[Finding, ...]:
        what = names(test.info.name for test in failing)
        found = [self._of_culprit(culprit, what, probes) for culprit in verdict.culprits]
        for path in verdict.paths:
            a, b = (self._lanes[int(end.partition(":")[2])].target for end in path.ends)
            text = f"{what} is {'slow' if path.slow else 'broken'} between {a} and {b}, and both pass with others"
            found.append(_finding(Status.FAIL, "DeviceLinkFault", text, f"path:{a}-{b}"))
        worst = Status.FAIL if any(o.status is Status.FAIL for t in failing for o in t.findings) else Status.UNKNOWN
        for part in verdict.one_of:
            text = f"one of {names(map(self._full, part))} is at fault in {what}, or a link between them"
            failed = [f"{self._full(name)} failed {probes[rank]}" for name in part if (rank := _rank(name)) in probes]
            found.append(_finding(worst, "RanksAmbiguous", "; ".join([text, *failed]), "node"))
        for group in verdict.groups:
            own = names(map(self._full, group.members))
            text = f"{own} pass {what} among themselves and fail with all others: what joins them is broken"
            found.append(_finding(Status.FAIL, "DeviceLinkFault", text, "node"))
        if verdict.scale is not None:
            scale = verdict.scale
            text = f"{what} fails with {len(scale.members)} ranks and passes with {scale.largest_passing}"
            found.append(_finding(worst, "RanksAmbiguous", f"{text}; no rank alone is at fault", "node"))
        if not found:
            text = f"smaller groups of ranks do not say who is at fault in {what}: {'; '.join(verdict.reasons)}"
            found.append(_finding(Status.UNKNOWN, "Undecided", text, "node", blame=Blame.CHECK))
        return tuple(found)

    def _of_culprit(self, culprit: Culprit, what: str, probes: Mapping[int, str]) -> Finding:
        rank = _rank(culprit.member)
        slow = culprit.manner is Manner.SLOW
        manner = {Manner.ALWAYS: "fails", Manner.SOMETIMES: "sometimes fails", Manner.SLOW: "is slow"}[culprit.manner]
        text = f"{self._full(culprit.member)} {manner} in {what}"
        if culprit.failed_with:
            text += f" with {names(culprit.failed_with)}, which pass without it"
        seen = self._messages.by_rank.get(rank) or self._of_smallest_group(rank)
        causes = [*([f"its device failed {probes[rank]}"] if rank in probes else []), *([seen] if seen else [])]
        text += f": {'; '.join(causes)}" if causes else ""
        return _finding(Status.FAIL, "SlowRank" if slow else "RankFault", text, culprit.member)

    def _of_smallest_group(self, rank: int) -> str | None:
        groups = [group for group in self._messages.by_group if rank in group]
        return self._messages.by_group[min(groups, key=lambda group: (len(group), sorted(group)))] if groups else None


def outcome_of(findings: Sequence[Finding]) -> Outcome:
    """The outcome of a judged collective of a group: a hang is a failure, what was not measured is unknown."""
    bad = _bad(findings)
    if not bad:
        return Outcome.PASS if any(one.status is not Status.SKIP for one in findings) else Outcome.UNKNOWN
    if all(one.reason in SLOW for one in bad):
        return Outcome.SLOW
    if any(one.status is Status.FAIL or one.reason == "Timeout" for one in bad):
        return Outcome.FAIL
    return Outcome.UNKNOWN


def _bad(findings: Iterable[Finding]) -> list[Finding]:
    return [one for one in findings if one.status in (Status.FAIL, Status.UNKNOWN)]


def _rank(name: str) -> int:
    return int(name.partition(":")[2])


def _renamed(number: str, group: Sequence[int]) -> str:
    return f"rank:{group[int(number)]}" if int(number) < len(group) else f"rank:{number}"


def _finding(status: Status, reason: str, message: str, target: str, *, blame: Blame | None = None) -> Finding:
    return Finding(status=status, reason=reason, message=shorten(message), target=target, blame=blame)
