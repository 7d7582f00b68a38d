"""Holds the results of checks with the times when they were measured, as evidence and as history."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Iterable
from dataclasses import dataclass

from checks.contract import Status, worst
from healthd.core.evidence import blames_node
from healthd.core.model import CheckResult, CheckSpec, DeviceRecord, Quarantine
from healthd.node.clock import Clock


@dataclass(frozen=True, kw_only=True)
class StampedResult:
    """A result with the time when it was measured; its own age is not used."""

    result: CheckResult
    measured_at: float
    """In seconds of CLOCK_BOOTTIME."""
    boot_id: str | None
    """The boot in which it was measured; None where it is unknown."""

    def as_of(self, now: float) -> CheckResult:
        """The result with its age at `now`."""
        return dataclasses.replace(self.result, age_seconds=max(0.0, now - self.measured_at))


class History:
    """The last results of one check, and in addition the last ones that did not pass: failures are kept longest."""

    def __init__(self, size: int) -> None:
        self._recent: collections.deque[StampedResult] = collections.deque(maxlen=max(1, size))
        self._failed: collections.deque[StampedResult] = collections.deque(maxlen=max(1, size))

    def add(self, stamped: StampedResult) -> None:
        """Add one result."""
        self._recent.append(stamped)
        if stamped.result.status not in (Status.PASS, Status.SKIP):
            self._failed.append(stamped)

    def all(self) -> tuple[StampedResult, ...]:
        """All results, each once, newest first."""
        recent = {id(stamped) for stamped in self._recent}
        older = [stamped for stamped in self._failed if id(stamped) not in recent]
        return tuple(reversed([*older, *self._recent]))


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The state file."""

    version: int
    boot_id: str | None
    """The boot in which it was written; None where it is unknown."""
    results: tuple[StampedResult, ...]
    """Evidence of that boot."""
    history: tuple[StampedResult, ...]
    """Results of that boot and of earlier ones."""
    quarantine: Quarantine | None = None
    """Saved so that the node can report it to an aggregator that has lost its database."""
    quarantine_told: bool = False
    """An aggregator has said whether there is a quarantine."""
    issuer: str | None = None
    """The database of that aggregator: to another one the quarantine is news."""
    devices: tuple[DeviceRecord, ...] = ()
    """The devices as they were seen last: since when each is there."""


class ResultLog:
    """
    The current result and the history of each check.

    Results of an earlier boot, and those that an injected fault has changed before a restart, are history and no
    evidence.
    """

    def __init__(self, *, boot_id: str | None, history_results: int) -> None:
        self._boot_id = boot_id
        self._history_results = history_results
        self._current: dict[str, StampedResult] = {}
        self._history: dict[str, History] = {}

    def add(self, result: CheckResult, measured_at: float, *, passive: bool) -> None:
        """
        Add a finished check. A run that found the devices busy measured nothing, so it never replaces evidence.

        One that found a part of them busy leaves the faults standing that were found there before. A `passive` check
        looks also at devices that are busy.
        """
        stamped = StampedResult(result=result, measured_at=measured_at, boot_id=self._boot_id)
        before = self._current.get(result.check)
        if before is not None and is_busy(result):
            return
        if before is not None and not passive and is_partly_busy(result):
            stamped = _with_earlier_faults(stamped, before)
        self._current[result.check] = stamped
        self._history_of(result.check).add(stamped)

    def _history_of(self, check: str) -> History:
        return self._history.setdefault(check, History(self._history_results))

    def get(self, check: str) -> StampedResult | None:
        """The current result of a check; None where there is no evidence."""
        return self._current.get(check)

    def history(self, check: str, clock: Clock) -> tuple[CheckResult, ...]:
        """Recent results, newest first, and the last ones that did not pass; ages of an earlier boot are unbounded."""
        history = self._history.get(check)
        return () if history is None else tuple(self._with_age(stamped, clock) for stamped in history.all())

    def _with_age(self, stamped: StampedResult, clock: Clock) -> CheckResult:
        if stamped.boot_id == self._boot_id and self._boot_id is not None:
            return stamped.as_of(clock.boot())
        return dataclasses.replace(stamped.result, age_seconds=max(0.0, clock.wall() - stamped.result.started_at))

    def drop_injected(self) -> None:
        """Drop the current results that an injected fault has changed."""
        self._current = {check: one for check, one in self._current.items() if not one.result.injected}

    def saved(self) -> tuple[tuple[StampedResult, ...], tuple[StampedResult, ...]]:
        """The current results, and the history, oldest first."""
        history = (stamped for one in self._history.values() for stamped in reversed(one.all()))
        return tuple(self._current.values()), tuple(history)

    def restore(self, saved: SavedState, checks: Container[str], now: float) -> None:
        """Restore what an earlier daemon has saved of these checks."""
        for stamped in saved.history:
            if stamped.result.check in checks:
                self._history_of(stamped.result.check).add(stamped)
        if self._boot_id is None or saved.boot_id != self._boot_id:
            return
        for stamped in saved.results:
            # A stamp ahead of the clock is not of this boot, whatever the file says.
            valid = not stamped.result.injected and stamped.measured_at <= now
            if valid and stamped.result.check in checks:
                self._current[stamped.result.check] = stamped


def is_busy(result: CheckResult) -> bool:
    """Whether a run measured nothing because the devices were in use."""
    return result.status is Status.SKIP and any(finding.reason == "Busy" for finding in result.findings)


def is_partly_busy(result: CheckResult) -> bool:
    """Whether a run could look at a part of the devices only, because the others were in use."""
    return not is_busy(result) and any(finding.reason == "Busy" for finding in result.findings)


def _with_earlier_faults(new: StampedResult, before: StampedResult) -> StampedResult:
    """
    A partly busy result with the faults of before, without those of targets that were looked at.

    It is as old as before, so that an earlier fault is not counted again with each run, unless the node fails anew: a
    new fault must count, and a result has one age.
    """
    busy = {finding.target for finding in new.result.findings if finding.reason == "Busy"}
    seen = {finding.target for finding in new.result.findings} - busy
    faults = tuple(one for one in before.result.findings if one.status is Status.FAIL and one.target not in seen)
    if not faults:
        return new
    findings = (*new.result.findings, *faults)  # the new ones first: the rules look at a few of them
    result = dataclasses.replace(
        new.result,
        findings=findings,
        status=worst(finding.status for finding in findings),
        injected=new.result.injected or before.result.injected,
    )
    if any(blames_node(finding) for finding in new.result.findings):
        return dataclasses.replace(new, result=result)
    result = dataclasses.replace(result, started_at=min(result.started_at, before.result.started_at))
    return dataclasses.replace(new, result=result, measured_at=min(new.measured_at, before.measured_at))


def ended_well(result: CheckResult) -> bool:
    """Whether a result is a pass or a warning, or the check does not apply to this node."""
    if result.status is Status.SKIP:
        return bool(result.findings) and all(finding.reason == "NotApplicable" for finding in result.findings)
    return result.status in (Status.PASS, Status.WARN)


def by_name(specs: Iterable[CheckSpec]) -> dict[str, CheckSpec]:
    """Specs by their names."""
    return {spec.name: spec for spec in specs}
