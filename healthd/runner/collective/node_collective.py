"""
Runs collectives inside one node: one check on all workers at once, as ranks of one group.

The group stays open over consecutive collectives as long as all ranks are well. After anything else all ranks are
started anew, because a group that has lost a member is of no use.

Also here:

- learns for how long the ranks of a collective may be silent, from the runs that went well on this machine;
- finds the rank of a node that is at fault when a collective of all ranks fails and names none: by smaller groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import re
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks.atomic_file import write_atomically
from checks.contract import Blame, CheckInfo, Finding, Status
from checks.json_text import parse_json
from checks.reasons import blame_of
from checks.worker.faults import Fault
from checks.worker.protocol import shorten
from healthd.core.model import CheckResult
from healthd.localize import Course, Culprit, GroupOutcome, Manner, NextRound, Problem, ValidationVerdict, names
from healthd.localize import Outcome as TestOutcome
from healthd.runner.collective.ranks import BEYOND_DEADLINE_SECONDS, Deadline, Rank, RankGroup, group_of
from healthd.runner.compilation import Compilation
from healthd.runner.settings import SILENCE_FLOOR_SECONDS
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.outcome import Outcome as RankOutcome
from healthd.runner.workers.worker_lane import WorkerLane
from healthd.runner.workers.workers import Workers

log = logging.getLogger(__name__)

FACTOR = 10.0
"""Ten times what was ever seen: throttled clocks and a slow disk under the same boot cost less than that."""
KEPT_RUNS = 20
"""So many good runs of each collective count."""
MAX_BYTES = 64 * 1024
MAX_COLLECTIVES = 64

LOOK_SECONDS = 0.5
"""How often silent ranks are looked at."""

Command = Callable[[CheckInfo, Sequence[str], dict[str, Any] | None], dict[str, Any]]

MOST_ROUNDS = 24
"""Rounds of one search: to find a path takes ten and more, a device three."""
PAIR_ROUNDS = 4
"""Clean rounds of pairs before larger groups are searched: a node has few ranks, which have met each other by then."""
GROUP_SECONDS = 15.0
"""A collective of a group hangs when it takes longer than this, and than twice the time of all ranks."""
SLOW = ("SlowLink", "SlowDevice")

Judge = Callable[[CheckInfo, Sequence[RankOutcome]], Awaitable[RankOutcome]]


class NodeCollective:
    """
    The ranks of one run: rank R is the R-th device of the inventory.

    The inventory says how ranks become a group: their workers are `kept`, or start `fresh` for each group, or one
    process drives all devices `together`.
    """

    def __init__(
        self,
        workers: Workers,
        lanes: Sequence[WorkerLane],
        folder: Path,
        compilation: Compilation | None = None,
        *,
        numbers: Sequence[int] | None = None,
        learns: bool = False,
    ) -> None:
        """
        `numbers` are the ranks by which faults refer to the lanes, where these are not all lanes of the node.

        With `learns`, good runs teach how long ranks may be silent, and a collective that has run before is held to it.
        """
        self._workers = workers
        self._lanes = lanes
        self._folder = folder
        self._compilation = compilation
        self._numbers = tuple(range(len(lanes)) if numbers is None else numbers)
        self._learns = learns
        self._limits: SilenceLimits | None = None
        self._generation = 0
        self._seed = secrets.randbits(31)

    async def run(
        self, info: CheckInfo, timeout_seconds: float, command: Command, faults: Sequence[Fault]
    ) -> tuple[list[Outcome], bool]:
        """
        The outcomes of all ranks, and whether they were a whole group, which a judge can compare.

        A rank that crashes without an injected fault is a transient failure: all run again, and the crash is reported.
        """
        kind = self._workers.inventory.get("ranks", "kept")
        if self._compilation is not None:
            self._compilation.announce([info], len(self._lanes))
        if kind != "kept":  # no worker may have a device any more
            self._generation += 1
            await asyncio.gather(*(lane.retire() for lane in self._lanes))
        group = RankGroup(self._workers, self._ranks(together=kind == "together"))
        attempt = 0
        crashes: dict[str, tuple[str, ...]] = {}
        try:
            while True:
                attempt += 1
                if kind == "fresh":
                    self._workers.group = group_of([lane.target for lane in self._lanes])
                if lost := await self._start(group, info, faults):
                    return lost, False
                outcomes = await self._attempt(group, info, timeout_seconds, command, faults)
                for outcome in outcomes:
                    outcome.attempts, outcome.crashes = attempt, crashes.get(outcome.target, ())
                crashed = {o.target: o.missing.message for o in outcomes if o.missing and o.crashed}
                if not crashed or faults or attempt > self._workers.settings.retries:
                    # One process for all ranks that gives nothing tells nothing about any rank.
                    return outcomes, kind != "together" or outcomes[0].missing is None
                for target, message in crashed.items():
                    crashes[target] = (*crashes.get(target, ()), message)
                await self._workers.back_off(attempt)
        finally:
            if kind == "together":
                await group.retire()

    def _ranks(self, *, together: bool) -> list[Rank]:
        targets = tuple(lane.target for lane in self._lanes)
        names = [(target, f"rank:{number}") for target, number in zip(targets, self._numbers, strict=True)]
        if together:
            lane = WorkerLane(self._workers, ",".join(targets))
            return [Rank(lane=lane, first=0, targets=targets, names=tuple(name for pair in names for name in pair))]
        return [
            Rank(lane=lane, first=rank, targets=(lane.target,), names=names[rank])
            for rank, lane in enumerate(self._lanes)
        ]

    async def _start(self, group: RankGroup, info: CheckInfo, faults: Sequence[Fault]) -> list[Outcome]:
        """Make all workers ready; the outcomes of those that cannot take part, when the group cannot be whole."""
        lost: list[Outcome] = []
        for rank, missing in zip(group.ranks, await group.start(info, faults), strict=True):
            if missing is not None:
                text = f"{missing.target}: {missing.message}; without it the {len(self._lanes)} ranks cannot start"
                number = rank.first + (rank.targets.index(missing.target) if missing.target in rank.targets else 0)
                lost.append(Outcome(target=f"rank:{number}").fail(missing.reason, text, action=missing.action))
        return lost

    async def _attempt(
        self, group: RankGroup, info: CheckInfo, timeout_seconds: float, command: Command, faults: Sequence[Fault]
    ) -> list[Outcome]:
        """One attempt of all ranks; afterwards all are well, or all are gone."""
        lanes = [rank.lane for rank in group.ranks]
        together = len(group.ranks) < len(self._lanes)
        compile_seconds = self._compilation.allowance_seconds(lanes) if self._compilation is not None else 0.0
        seconds = timeout_seconds + compile_seconds
        limits = self._silence_limits() if self._learns and not compile_seconds and not together else None
        name = self._name(info)
        began = time.monotonic()
        silence = Silence(limits.silence_seconds(name) if limits else None, began)
        rendezvous = (self._folder / f"rendezvous-{self._generation}").as_uri()
        common = {
            "size": len(self._lanes),
            "rendezvous": f"in-process-{self._generation}" if together else rendezvous,
            "interface": "lo",
            "seed": self._seed,
            "timeout_seconds": seconds + BEYOND_DEADLINE_SECONDS,
            "targets": [lane.target for lane in self._lanes],
        }
        outcomes = await group.run(
            info,
            lambda rank: command(info, rank.names, {"rank": rank.first, **common}),
            Deadline(seconds, f"did not end within {seconds:g} s"),
            _SilenceWatch(silence, lanes).look,
        )
        for rank, outcome in zip(group.ranks, outcomes, strict=True):
            outcome.target = "node" if together else f"rank:{rank.first}"
            if outcome.missing is not None:
                outcome.missing = dataclasses.replace(outcome.missing, target=outcome.target)
        if any(outcome.missing is not None for outcome in outcomes):
            self._generation += 1
            await group.kill(info.name)
        elif limits and not faults:
            limits.learn(name, longest_silence(_report_times(began, outcomes)))
        return outcomes

    def _silence_limits(self) -> SilenceLimits | None:
        """Known once all workers are ready, since then their libraries are. None where the boot is not known."""
        workers = self._workers
        if self._limits is None and workers.boot_id is not None:
            identity = {"boot": workers.boot_id, "machine": workers.identity, "libraries": dict(workers.versions)}
            settings = workers.settings
            floor_seconds = settings.silence_floor_seconds
            self._limits = SilenceLimits(settings.times_file, identity, floor_seconds=floor_seconds)
        return self._limits

    def _name(self, info: CheckInfo) -> str:
        """What takes the same time: the check with its parameters and its number of ranks."""
        params = json.dumps(self._workers.settings.params.get(info.name, {}), sort_keys=True, default=str)
        return f"{info.name} {len(self._lanes)} {zlib.crc32(params.encode()):08x}"


class SilenceLimits:
    """
    The longest silences of good runs, by collective, in one file.

    `file` None, a file that cannot be read and one about another `identity` mean that nothing is learned yet. A file
    that cannot be written is no error, since the time limit of the check holds anyway.
    """

    def __init__(
        self, file: Path | None, identity: Mapping[str, Any], *, floor_seconds: float = SILENCE_FLOOR_SECONDS
    ) -> None:
        self._file = file
        self._floor_seconds = floor_seconds
        self._identity = parse_json(json.dumps(identity))
        self._silences = self._read()

    def silence_seconds(self, collective: str) -> float | None:
        """How long its ranks may be silent before they count as hung; None where that is not known."""
        known = self._silences.get(collective)
        return max(self._floor_seconds, FACTOR * max(known)) if known else None

    def learn(self, collective: str, silence_seconds: float) -> None:
        """Record the longest silence of a run that went well."""
        if not 0.0 <= silence_seconds < math.inf:
            return
        known = [*self._silences.get(collective, []), round(silence_seconds, 6)][-KEPT_RUNS:]
        others = {name: seconds for name, seconds in self._silences.items() if name != collective}
        while len(others) >= MAX_COLLECTIVES:
            del others[next(iter(others))]
        self._silences = {**others, collective: known}
        self._write()

    def _read(self) -> dict[str, list[float]]:
        if self._file is None:
            return {}
        try:
            with self._file.open("rb") as stream:
                content = parse_json(stream.read(MAX_BYTES))
            if content["identity"] != self._identity:
                return {}
            return {str(name): _seconds(values) for name, values in content["silences"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.info("%s: not used, so the time limits of the checks apply: %s", self._file, error)
            return {}

    def _write(self) -> None:
        if self._file is None:
            return
        content = json.dumps({"identity": self._identity, "silences": self._silences})
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, content.encode(), several_writers=True)
        except OSError as error:
            log.info("%s: not written, so the time limits of the checks apply: %s", self._file, error)


def longest_silence(moments: Sequence[float]) -> float:
    """The longest time between two moments (monotonic) at which any rank reported something."""
    ordered = sorted(moments)
    return max((later - earlier for earlier, later in itertools.pairwise(ordered)), default=0.0)


class Silence:
    """
    How long the ranks of one collective have been silent, less the time for which they waited for a processor.

    `limit_seconds` None: there is no limit. A rank that was ready to run and did not get a processor is slow because of
    other processes: on an overloaded machine the clock of the silence stands still.
    """

    def __init__(self, limit_seconds: float | None, began: float) -> None:
        self.limit_seconds = limit_seconds
        self._reported_at = began
        self._waited: dict[int, float] | None = None

    def left_seconds(self, now: float, reported_at: float, waited: Mapping[int, float]) -> float:
        """
        How long they may still be silent; infinite without a limit.

        `reported_at` is when a rank last reported something; `waited` the seconds for which each of their threads, by
        its id, has waited for a processor since it started.
        """
        if self.limit_seconds is None:
            return math.inf
        if self._waited is None or reported_at > self._reported_at:
            self._reported_at, self._waited = max(reported_at, self._reported_at), dict(waited)
        before = self._waited
        starved = max((seconds - before.get(thread, 0.0) for thread, seconds in waited.items()), default=0.0)
        return self.limit_seconds - max(0.0, now - self._reported_at - starved)


def signs_of_life(lanes: Sequence[WorkerLane]) -> tuple[float, dict[int, float]]:
    """When a rank last reported, and how long the threads of the ranks and of this process waited for a processor."""
    processes = [lane.process for lane in lanes if lane.process is not None]
    waited = waited_seconds([os.getpid(), *(process.worker_pid for process in processes)])
    return max((process.last_event_at for process in processes), default=0.0), waited


def waited_seconds(pids: Iterable[int]) -> dict[int, float]:
    """How long each thread of these processes has waited for a processor (schedstat); empty where it is not known."""
    found: dict[int, float] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    words = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                    found[int(thread)] = int(words[1]) / 1e9
    return found


def is_unresolved(judgement: RankOutcome) -> bool:
    """Whether a collective failed, was slow or hung, and no rank nor anything else is named as the cause."""
    if judgement.missing is not None:
        return False
    bad = [one for one in judgement.findings if one.status in (Status.FAIL, Status.UNKNOWN)]
    if not bad or any(one.target.startswith("rank:") for one in bad):
        return False
    return all(one.status is Status.FAIL or one.reason == "Timeout" for one in bad)


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
        known = [GroupOutcome(members=members, outcome=TestOutcome.SLOW if slow else TestOutcome.FAIL, round=0)]
        known += [GroupOutcome(members=(self._name(rank),), outcome=TestOutcome.FAIL, round=0) for rank in probes]
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
    ) -> TestOutcome:
        """Let these ranks run the failed collectives, one after the other, to the first that fails again."""
        if len(group) < 2:
            return TestOutcome.UNKNOWN
        ranks = self._make_group(group, f"round-{number}-{index}")
        for test in failing:
            outcomes, whole = await ranks.run(test.info, test.within_seconds, self._command, test.faults)
            judgement = await self._judge(test.info, outcomes) if whole else None
            if judgement is None or judgement.missing is not None:
                return TestOutcome.UNKNOWN
            outcome = outcome_of(judgement.findings)
            if outcome is not TestOutcome.PASS:
                self._remember(group, judgement.findings)
                return outcome
        return TestOutcome.PASS

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
        self, verdict: ValidationVerdict, failing: Sequence[UnresolvedFailure], probes: Mapping[int, str]
    ) -> tuple[Finding, ...]:
        what = names(test.info.name for test in failing)
        found = [self._of_culprit(culprit, what, probes) for culprit in verdict.culprits]
        for path in verdict.paths:
            a, b = (self._lanes[int(end.partition(":")[2])].target for end in path.ends)
            text = f"{what} is {'slow' if path.slow else 'broken'} between {a} and {b}; both pass with others"
            found.append(_finding(Status.FAIL, "DeviceLinkFault", text, f"path:{a}-{b}"))
        worst = Status.FAIL if any(o.status is Status.FAIL for t in failing for o in t.findings) else Status.UNKNOWN
        for part in verdict.one_of:
            text = f"one of {names(map(self._full, part))} is at fault in {what}, or a link between them"
            failed = [f"{self._full(name)} failed {probes[rank]}" for name in part if (rank := _rank(name)) in probes]
            found.append(_finding(worst, "RanksAmbiguous", "; ".join([text, *failed]), "node"))
        for group in verdict.groups:
            own = names(map(self._full, group.members))
            text = (
                f"{own} pass {what} among themselves but fail with all others: the link between the two groups is "
                "broken"
            )
            found.append(_finding(Status.FAIL, "DeviceLinkFault", text, "node"))
        if verdict.scale is not None:
            scale = verdict.scale
            text = f"{what} fails with {len(scale.members)} ranks and passes with {scale.largest_passing}"
            found.append(_finding(worst, "RanksAmbiguous", f"{text}; no single rank is at fault", "node"))
        if not found:
            text = f"smaller groups of ranks do not show which rank is at fault in {what}: {'; '.join(verdict.reasons)}"
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


def not_applicable(accelerator: object) -> Finding:
    """The finding where workers are not kept, so that there is no search."""
    text = f"the rank at fault was not searched for: ranks of {accelerator} cannot be regrouped at once"
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


def outcome_of(findings: Sequence[Finding]) -> TestOutcome:
    """The outcome of a judged collective of a group: a hang is a failure, what was not measured is unknown."""
    bad = _bad(findings)
    if not bad:
        return TestOutcome.PASS if any(one.status is not Status.SKIP for one in findings) else TestOutcome.UNKNOWN
    if all(one.reason in SLOW for one in bad):
        return TestOutcome.SLOW
    if any(one.status is Status.FAIL or one.reason == "Timeout" for one in bad):
        return TestOutcome.FAIL
    return TestOutcome.UNKNOWN


def _seconds(values: Sequence[Any]) -> list[float]:
    seconds = [float(value) for value in values[-KEPT_RUNS:]]
    if not all(0.0 <= value < math.inf for value in seconds):
        raise ValueError("a silence is not a number of seconds")
    return seconds


class _SilenceWatch:
    """Ends a collective whose ranks are silent for too long."""

    def __init__(self, silence: Silence, lanes: Sequence[WorkerLane]) -> None:
        self._silence = silence
        self._lanes = lanes
        self._overdue = False

    def look(self, deadline: Deadline, _: Mapping[int, Outcome]) -> float:
        """See `Watch`."""
        if self._silence.limit_seconds is None:
            return deadline.at - time.monotonic()
        left = self._silence.left_seconds(time.monotonic(), *signs_of_life(self._lanes))
        if left <= 0 and self._overdue:
            limit = self._silence.limit_seconds
            deadline.shorten(0.0, f"was silent for {limit:.3g} s, far longer than in successful runs here")
        self._overdue = left <= 0  # a report may have arrived and not been read yet: look once more
        return LOOK_SECONDS if self._overdue else min(left, LOOK_SECONDS)


def _report_times(began: float, outcomes: Sequence[Outcome]) -> list[float]:
    """When ranks reported in a run that is over, by the clock of this host, which all share."""
    ended = max(outcome.ended for outcome in outcomes)
    reports = (progress.monotonic_seconds for outcome in outcomes for progress in outcome.progress)
    return [began, *(at for at in reports if began <= at <= ended), *(outcome.ended for outcome in outcomes)]


def _bad(findings: Iterable[Finding]) -> list[Finding]:
    return [one for one in findings if one.status in (Status.FAIL, Status.UNKNOWN)]


def _rank(name: str) -> int:
    return int(name.partition(":")[2])


def _renamed(number: str, group: Sequence[int]) -> str:
    return f"rank:{group[int(number)]}" if int(number) < len(group) else f"rank:{number}"


def _finding(status: Status, reason: str, message: str, target: str, *, blame: Blame | None = None) -> Finding:
    return Finding(status=status, reason=reason, message=shorten(message), target=target, blame=blame)


MakeGroup = Callable[[tuple[int, ...], str], NodeCollective]
"""A group of these ranks, under a name of its own."""
