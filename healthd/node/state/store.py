"""
Holds everything that the daemon knows about its node, and renders it as the one snapshot that all outlets show.

Also here:

- holds the results of checks with the times when they were measured, as evidence and as history;
- computes the digest of a state, over everything that decisions depend on: not ages, times or measured values.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from checks.accelerators import find_descriptor
from checks.contract import Status, Tier, worst
from checks.worker.faults import Fault, check_of, parse_fault
from healthd.core import wire
from healthd.core.evidence import blames_node, judge_health, untested_devices
from healthd.core.model import (
    Allocation,
    CheckResult,
    CheckSpec,
    DeviceRecord,
    Health,
    Inventory,
    Lease,
    NodeState,
    Quarantine,
    Reason,
)
from healthd.node.clock import Clock
from healthd.node.occupancy.model import NO_SCHEDULERS, Scheduled, allocations
from healthd.node.settings import NodeSettings
from healthd.node.state import files
from healthd.runner.run_record import hidden_holders
from healthd.runner.settings import Survey

log = logging.getLogger(__name__)

# Ages are shown in whole seconds, so a snapshot is good for one.
SNAPSHOT_SECONDS = 1.0


def ended_well(result: CheckResult) -> bool:
    """Whether a result is a pass or a warning, or the check does not apply to this node."""
    if result.status is Status.SKIP:
        return bool(result.findings) and all(finding.reason == "NotApplicable" for finding in result.findings)
    return result.status in (Status.PASS, Status.WARN)


def by_name(specs: Iterable[CheckSpec]) -> dict[str, CheckSpec]:
    return {spec.name: spec for spec in specs}


class NodeStore:
    """
    Everything that is known of this node; used on the event loop alone.

    `version` grows with every change, and then all listeners are called. `snapshot()` is cheap.
    """

    def __init__(
        self,
        settings: NodeSettings,
        specs: tuple[CheckSpec, ...],
        *,
        clock: Clock,
        boot_id: str | None,
        compile_seconds: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        """`compile_seconds` maps an accelerator to how much longer an ordered run may take because it compiles."""
        self.settings = settings
        self._compile_seconds = compile_seconds
        self.specs = specs
        self.clock = clock
        self.boot_id = boot_id
        self.version = 0
        self.address: str | None = settings.address
        self.hostname = files.host_name(settings.host_root)
        self._peer_address: str | None = None
        self._listeners: list[Callable[[], None]] = []
        self._results = ResultLog(boot_id=boot_id, history_results=settings.history_results)
        self.runs = collections.Counter[Status]()
        """Results since the start, by status."""
        self.device_seconds = 0.0
        """How long active checks have had the devices since the start."""
        self._survey: Survey | None = None
        self.seen_before: tuple[DeviceRecord, ...] = ()
        """The devices as an earlier daemon saw them last in this boot."""
        self.surveyed_at: float | None = None
        """When the last look at the devices began (CLOCK_BOOTTIME); None before the first time."""
        self.scheduled: Scheduled = NO_SCHEDULERS
        """The allocations of the host's job schedulers, by their last answers."""
        self._leases: tuple[tuple[Lease, float], ...] = ()
        self._doubt = ""
        self.unwritable = ""
        """Why no lease can be stored in the state directory; empty where the last file was written."""
        self.quarantine: Quarantine | None = None
        """The quarantine by the last statement of the aggregator; None for no quarantine."""
        self.issuer: str | None = None
        """The database that made this statement; None where none has made any."""
        self._quarantine_known = False
        self._accused: Reason | None = None
        self.maintenance: str | None = None
        """By what the node's platform shows that it is in maintenance; None for no maintenance."""
        self.faults: tuple[str, ...] = settings.faults
        """The injected faults in force."""
        self._faults_changed: dict[str, int] = {}  # the version at which the faults of a check last changed
        self.running: str | None = None
        """The active run under way, in words; None for no run."""
        self._cached: tuple[int, float, NodeState] | None = None
        self._health: Health | None = None

    # --- changes ------------------------------------------------------------------------------------------------------

    def listen(self, callback: Callable[[], None]) -> None:
        """Call this after every change."""
        self._listeners.append(callback)

    def start_run(self) -> tuple[tuple[Fault, ...], Callable[[CheckResult], bool]]:
        """
        The faults of a run that starts now, and what takes its results: it records one, or returns False for one that
        does not count, because the faults of its check have changed since.
        """
        started = self.version

        def record(result: CheckResult) -> bool:
            valid = started >= self._faults_changed.get(result.check, 0)
            if valid:
                self.record(result)
            return valid

        return tuple(parse_fault(text) for text in self.faults), record

    def record(self, result: CheckResult) -> None:
        """Record a finished check."""
        self.runs[result.status] += 1
        spec = next((spec for spec in self.specs if spec.name == result.check), None)
        if spec is not None:
            self._results.add(result, self.clock.boot() - result.age_seconds, passive=spec.tier is Tier.PASSIVE)
            self._touch()

    def set_survey(self, survey: Survey) -> None:
        """Record a survey of the machine, unless a later one is recorded: they may end in another order."""
        looked_at = min(survey.looked_at, self.clock.boot())
        if self.surveyed_at is None or looked_at >= self.surveyed_at:
            changed = survey != self._survey
            self._survey, self.surveyed_at = survey, looked_at
            if changed:
                self._touch()

    def set_scheduled(self, scheduled: Scheduled) -> None:
        """Record the allocations of the host's job schedulers."""
        before, self.scheduled = self.scheduled, scheduled
        if scheduled.readings != before.readings:
            self._touch()

    def set_specs(self, specs: tuple[CheckSpec, ...]) -> None:
        """Replace the specs of the checks; the checks are the same."""
        if specs != self.specs:
            self.specs = specs
            self._touch()

    def set_leases(self, leases: tuple[tuple[Lease, float], ...]) -> None:
        """Replace the leases in force, each with the CLOCK_BOOTTIME stamp from which its age counts."""
        self._leases = leases
        self._touch()

    def set_doubt(self, doubt: str) -> None:
        """Record why there may be leases that are not known; empty when all are known."""
        if doubt != self._doubt:
            self._doubt = doubt
            self._touch()

    def set_unwritable(self, why: str) -> None:
        """Record why the state directory could not be written; empty when it could."""
        if why != self.unwritable:
            self.unwritable = why
            self._touch()

    def set_quarantine(self, quarantine: Quarantine | None, issuer: str | None = None) -> None:
        """Record the statement of the aggregator with the database `issuer`."""
        if (quarantine, issuer) != (self.quarantine, self.issuer) or not self._quarantine_known:
            self.quarantine, self.issuer, self._quarantine_known = quarantine, issuer, True
            self._touch()

    def set_accused(self, accused: Reason | None) -> None:
        """Record what a validation said of the node, as the aggregator tells."""
        if accused != self._accused:
            self._accused = accused
            self._touch()

    def set_faults(self, faults: tuple[str, ...]) -> set[str]:
        """Replace the injected faults in force and drop the results that faults have changed; the affected checks."""
        affected = {check_of(text) for text in {*faults} ^ {*self.faults}}
        self.faults = faults
        self._results.drop_injected()
        self._touch()
        self._faults_changed.update(dict.fromkeys(affected, self.version))
        return affected

    def set_maintenance(self, maintenance: str | None) -> None:
        """Record by what the platform shows that the node is in maintenance; None for no maintenance."""
        if maintenance != self.maintenance:
            self.maintenance = maintenance
            self._touch()

    def set_peer_address(self, address: str | None) -> None:
        """Record the IP address by which the ranks of other nodes reach those of this one."""
        if address != self._peer_address:
            self._peer_address = address
            self._touch()

    def set_running(self, running: str | None) -> None:
        """Record which active run is under way, in words; None for no run."""
        if running != self.running:
            self.running = running
            self._touch()

    def _touch(self) -> None:
        self.version += 1
        for callback in self._listeners:
            callback()

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases in force, ages as of now."""
        now = self.clock.boot()
        return tuple(dataclasses.replace(lease, age_seconds=max(0.0, now - since)) for lease, since in self._leases)

    @property
    def holders(self) -> tuple[str, ...] | None:
        """Processes that hold devices, without our own; None where they cannot be seen, or before the first survey."""
        seen = self._survey.holders if self._survey is not None else None
        return seen or (None if self._hidden else seen)

    @property
    def _hidden(self) -> bool:
        """Whether the devices' driver shows processes on them that the look at /proc does not."""
        described = find_descriptor(self.accelerator)
        stamped = self._results.get(described.holders_check or "") if described is not None else None
        return stamped is not None and hidden_holders(stamped.result) is not None

    @property
    def inventory(self) -> Inventory | None:
        """The devices; None before the first survey."""
        return self._survey.inventory if self._survey is not None else None

    @property
    def quarantine_unknown(self) -> str:
        """Why it is not known whether the node is quarantined; empty where it is known, or without an aggregator."""
        known = self._quarantine_known or not self.settings.sync.aggregators
        return "" if known else "no aggregator has reported yet whether this node is quarantined"

    @property
    def accelerator(self) -> str | None:
        """The kind of devices; None before the first survey."""
        return self.inventory.accelerator if self.inventory is not None else None

    @property
    def allocated(self) -> tuple[Allocation, ...]:
        """Who has the devices; empty when they are free."""
        return allocations(
            surveyed=self._survey is not None,
            holders=self.holders,
            leases=self.leases,
            scheduled=tuple(workload.name for workload in self.scheduled.workloads),
            unseen=self.scheduled.unseen,
            doubt=self._doubt,
        )

    def result(self, check: str) -> StampedResult | None:
        """The last result of a check that is evidence; None without evidence."""
        return self._results.get(check)

    def history(self, check: str) -> tuple[CheckResult, ...]:
        """See `ResultLog.history`."""
        return self._results.history(check, self.clock)

    def snapshot(self) -> NodeState:
        """The node, at most a second old and never older than the last change: what outlets show."""
        now = self.clock.boot()
        if self._cached is not None:
            version, at, state = self._cached
            if version == self.version and 0 <= now - at < SNAPSHOT_SECONDS:
                return state
        return self.exact()

    def exact(self) -> NodeState:
        """The node as of this moment: what is sent, since its ages are counted from then."""
        now = self.clock.boot()
        state = self._render(now)
        self._cached = (self.version, now, state)
        if state.health is not self._health:
            self._health = state.health
            why = f": {state.reasons[0].message}" if state.reasons else ""
            log.info("%s is %s%s", state.node, state.health.value, why)
        return state

    def _render(self, now: float) -> NodeState:
        survey = self._survey
        blank = NodeState(
            node=self.settings.name,
            aliases=self.settings.aliases,
            instance_id=survey.instance_id if survey else None,
            boot_id=self.boot_id,
            labels=self.settings.labels,
            instance_type=survey.instance_type if survey else None,
            hostname=self.hostname,
            inventory=survey.inventory if survey else None,
            versions=survey.versions if survey else {},
            health=Health.UNKNOWN,
            reasons=(),
            checks=self.specs,
            results=tuple(kept.as_of(now) for spec in self.specs if (kept := self._results.get(spec.name))),
            allocated=self.allocated,
            leases=self.leases,
            quarantine=self.quarantine,
            faults=self.faults,
            running=self.running,
            address=self.address,
            peer_address=self._peer_address,
            observed_at=self.clock.wall(),
            compile_seconds=self._compile_seconds(survey.inventory.accelerator) if survey else 0.0,
            maintenance=self.maintenance,
            accused=self._accused,
        )
        health, reasons = judge_health(blank)
        return dataclasses.replace(blank, health=health, reasons=reasons)

    # --- over a restart -----------------------------------------------------------------------------------------------

    def saved(self) -> SavedState:
        """What is saved over a restart."""
        results, history = self._results.saved()
        return SavedState(
            version=1,
            boot_id=self.boot_id,
            results=results,
            history=history,
            quarantine=self.quarantine,
            quarantine_told=self._quarantine_known,
            issuer=self.issuer,
            devices=self.inventory.devices if self.inventory is not None else self.seen_before,
        )

    def restore(self, saved: SavedState) -> None:
        """Restore what an earlier daemon has saved."""
        self.quarantine, self.issuer, self._quarantine_known = saved.quarantine, saved.issuer, saved.quarantine_told
        if self.boot_id is not None and saved.boot_id == self.boot_id:
            self.seen_before = saved.devices
        self._results.restore(saved, {spec.name for spec in self.specs}, self.clock.boot())
        self._touch()


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


class History:
    """The last results of one check, and in addition the last ones that did not pass: failures are kept longest."""

    def __init__(self, size: int) -> None:
        self._recent: collections.deque[StampedResult] = collections.deque(maxlen=max(1, size))
        self._failed: collections.deque[StampedResult] = collections.deque(maxlen=max(1, size))

    def add(self, stamped: StampedResult) -> None:
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


def is_partly_busy(result: CheckResult) -> bool:
    """Whether a run could look at a part of the devices only, because the others were in use."""
    return not is_busy(result) and any(finding.reason == "Busy" for finding in result.findings)


def is_busy(result: CheckResult) -> bool:
    """Whether a run measured nothing because the devices were in use."""
    return result.status is Status.SKIP and any(finding.reason == "Busy" for finding in result.findings)


def digest_of(state: NodeState) -> str:
    """SHA-256 in hexadecimal digits."""
    decisive = {
        "node": state.node,
        "aliases": state.aliases,
        "instance_id": state.instance_id,
        "boot_id": state.boot_id,
        "labels": sorted(state.labels.items()),
        "instance_type": state.instance_type,
        "inventory": state.inventory,
        "versions": sorted(state.versions.items()),
        "health": state.health,
        "reasons": [_reason(reason) for reason in state.reasons],
        "checks": state.checks,
        "results": [_result(result) for result in state.results],
        "untested": _untested(state),
        "allocated": state.allocated,
        "leases": [(lease.id, lease.gate, lease.job, lease.attempt, lease.issuer) for lease in state.leases],
        "quarantine": state.quarantine,
        "accused": state.accused,
        "faults": state.faults,
        "running": state.running,
        "address": state.address,
        "peer_address": state.peer_address,
        "hostname": state.hostname,
        "maintenance": state.maintenance,
    }
    return hashlib.sha256(wire.encode(decisive)).hexdigest()


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


def _untested(state: NodeState) -> list[tuple[str, tuple[str, ...]]]:
    """The devices that each result does not stand for."""
    specs = {spec.name: spec for spec in state.checks}
    found = [
        (result.check, untested_devices(specs[result.check], result, state.inventory))
        for result in state.results
        if result.check in specs
    ]
    return [(check, targets) for check, targets in found if targets]


def _reason(reason: Reason) -> tuple[Any, ...]:
    """Without the message, which contains ages and measured values."""
    return (reason.code, reason.status, reason.blame, reason.action, reason.target, reason.check, reason.injected)


def _result(result: CheckResult) -> tuple[Any, ...]:
    findings = [(f.status, f.reason, f.target, f.blame, f.action) for f in result.findings]
    digests = [(one.key, one.root, one.targets) for one in result.digests]
    return (result.check, result.tier, result.status, result.injected, result.executor, findings, digests)
