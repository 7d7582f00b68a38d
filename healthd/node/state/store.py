"""
What the daemon knows, stamped with CLOCK_BOOTTIME: the one snapshot that all outlets render.

Nothing runs and nothing is sent from here. Results of an earlier boot, and those that an injected fault had touched in
an earlier life of the daemon, are history and no evidence.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checks.contract import Status
from healthd.core.evidence import judge_health
from healthd.core.model import Allocation, CheckResult, CheckSpec, Health, Lease, NodeState, Quarantine
from healthd.node.clock import Clock
from healthd.node.occupancy import NONE_THERE, Scheduled
from healthd.node.occupancy.allocation import allocations
from healthd.node.settings import NodeSettings
from healthd.node.state import files
from healthd.node.state.results import History, Stamped, is_busy
from healthd.runner import Survey
from healthd.runner.workers.outcome import HOLDERS_CHECK, hidden_holders

log = logging.getLogger(__name__)

# Ages are shown in whole seconds, so a snapshot is good for one.
SNAPSHOT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """
    The state file. `results` are evidence of the boot `boot_id`; `history` may be older.

    `quarantine` is kept so that the node can say it to an aggregator that has lost its database. `quarantine_told`: an
    aggregator has said whether there is one.
    """

    version: int
    boot_id: str | None
    results: tuple[Stamped, ...]
    history: tuple[Stamped, ...]
    quarantine: Quarantine | None = None
    quarantine_told: bool = False


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counted since the daemon started."""

    runs: Mapping[Status, int]
    probe_device_seconds: float


class NodeBook:
    """
    All that is known of this node, on the event loop alone.

    `version` grows with every change, and `changed` (set by the daemon) is called after it. `snapshot()` is cheap.
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
        """`compile_seconds` says of an accelerator how much longer an ordered run may take because it compiles."""
        self.settings = settings
        self._compile_seconds = compile_seconds
        self.specs = specs
        self.clock = clock
        self.boot_id = boot_id
        self.version = 0
        self.address: str | None = settings.address
        self.hostname = _hostname(settings.host_root)
        self._peer_address: str | None = None
        self.started_at = clock.boot()
        self._listeners: list[Callable[[], None]] = []
        self._results: dict[str, Stamped] = {}
        self._history: dict[str, History] = {}
        self._runs = collections.Counter[Status]()
        self._device_seconds = 0.0
        self._survey: Survey | None = None
        self._surveyed_at: float | None = None
        self._scheduled: Scheduled = NONE_THERE
        self._leases: tuple[tuple[Lease, float], ...] = ()
        self._doubt = ""
        self._quarantine: Quarantine | None = None
        self._quarantine_told = False
        self._faults: tuple[str, ...] = settings.faults
        self._running: str | None = None
        self._cached: tuple[int, float, NodeState] | None = None
        self._health: Health | None = None
        self._save_complaint = ""

    # --- what comes in ------------------------------------------------------------------------------------------------

    def listen(self, callback: Callable[[], None]) -> None:
        """Call this after every change."""
        self._listeners.append(callback)

    def record(self, result: CheckResult) -> None:
        """
        Take in a finished check. A run that found the devices busy measured nothing, so it never replaces evidence.
        """
        self._runs[result.status] += 1
        if not any(spec.name == result.check for spec in self.specs):
            return
        stamped = Stamped(result=result, measured_at=self.clock.boot() - result.age_seconds, boot_id=self.boot_id)
        if not (is_busy(result) and result.check in self._results):
            self._results[result.check] = stamped
            self._history.setdefault(result.check, History(self.settings.history_results)).add(stamped)
        self._touch()

    def survey(self, survey: Survey) -> None:
        """Take in what the machine looks like now, and who holds its devices."""
        self._surveyed_at = self.clock.boot()
        if survey != self._survey:
            self._survey = survey
            self._touch()

    def set_scheduled(self, scheduled: Scheduled) -> None:
        """Take in what the host's job schedulers have given away."""
        news = scheduled.readings != self._scheduled.readings
        self._scheduled = scheduled
        if news:
            self._touch()

    def set_specs(self, specs: tuple[CheckSpec, ...]) -> None:
        """The same checks, as they count from now on."""
        if specs != self.specs:
            self.specs = specs
            self._touch()

    def spent(self, device_seconds: float) -> None:
        """What our active checks took of the devices since the start."""
        self._device_seconds = device_seconds

    def set_leases(self, leases: tuple[tuple[Lease, float], ...]) -> None:
        """The leases in force, each with the boot-time stamp from which its age counts."""
        self._leases = leases
        self._touch()

    def set_doubt(self, doubt: str) -> None:
        """Why there may be leases that are not known here; empty when they are known."""
        if doubt != self._doubt:
            self._doubt = doubt
            self._touch()

    def set_quarantine(self, quarantine: Quarantine | None) -> None:
        """The aggregator's word."""
        if quarantine != self._quarantine or not self._quarantine_told:
            self._quarantine, self._quarantine_told = quarantine, True
            self._touch()

    def set_faults(self, faults: tuple[str, ...]) -> None:
        """The injected faults in force."""
        self._faults = faults
        self._touch()

    def set_peer_address(self, address: str | None) -> None:
        """The IP address by which the ranks of other nodes reach this one's."""
        if address != self._peer_address:
            self._peer_address = address
            self._touch()

    def set_running(self, running: str | None) -> None:
        """What active run is under way, for people."""
        if running != self._running:
            self._running = running
            self._touch()

    def drop_injected(self) -> tuple[str, ...]:
        """Forget what injected faults latched; the names of the checks that know nothing now."""
        names = tuple(name for name, stamped in self._results.items() if stamped.result.injected)
        for name in names:
            del self._results[name]
        self._touch()
        return names

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def faults(self) -> tuple[str, ...]:
        """The injected faults in force."""
        return self._faults

    @property
    def running(self) -> str | None:
        """The active run under way."""
        return self._running

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases in force, ages as of now."""
        now = self.clock.boot()
        return tuple(dataclasses.replace(lease, age_seconds=max(0.0, now - since)) for lease, since in self._leases)

    @property
    def holders(self) -> tuple[str, ...] | None:
        """Processes that hold devices, without our own; None where it cannot be seen or was not looked at yet."""
        seen = self._survey.holders if self._survey is not None else None
        return seen or (None if self._hidden else seen)

    @property
    def _hidden(self) -> bool:
        """Whether the devices' driver shows processes on them that the look at /proc does not."""
        stamped = self._results.get(HOLDERS_CHECK)
        return stamped is not None and hidden_holders(stamped.result) is not None

    @property
    def devices(self) -> tuple[str, ...]:
        """The targets of the devices; empty until the machine was looked at."""
        return () if self._survey is None else tuple(device.target for device in self._survey.inventory.devices)

    @property
    def rank_targets(self) -> tuple[str, ...]:
        """The targets that checks run on: devices, or their cores; empty until the machine was looked at."""
        return () if self._survey is None else self._survey.inventory.rank_targets

    @property
    def quarantine(self) -> Quarantine | None:
        """The aggregator's word, as it was last heard."""
        return self._quarantine

    @property
    def quarantine_untold(self) -> str:
        """Why it is not known whether the node is quarantined; empty where it is, or where no aggregator is named."""
        if self._quarantine_told or not self.settings.sync.aggregators:
            return ""
        return "no aggregator has said yet whether this node is quarantined"

    @property
    def accelerator(self) -> str | None:
        """The kind of devices; None until the machine was looked at."""
        return self._survey.inventory.accelerator if self._survey is not None else None

    @property
    def surveyed_at(self) -> float | None:
        """When the devices were last looked at."""
        return self._surveyed_at

    @property
    def scheduled(self) -> Scheduled:
        """What the host's job schedulers have given away, as of the last look."""
        return self._scheduled

    @property
    def allocated(self) -> tuple[Allocation, ...]:
        """Who has the devices; empty when they are free."""
        return allocations(
            surveyed=self._survey is not None,
            holders=self.holders,
            leases=self.leases,
            scheduled=tuple(workload.name for workload in self._scheduled.workloads),
            blind=self._scheduled.blind,
            doubt=self._doubt,
        )

    @property
    def totals(self) -> Totals:
        """What was counted since the start."""
        return Totals(runs={status: self._runs[status] for status in Status}, probe_device_seconds=self._device_seconds)

    def result(self, check: str) -> Stamped | None:
        """The last result of a check that counts as evidence."""
        return self._results.get(check)

    def history(self, check: str) -> tuple[CheckResult, ...]:
        """Recent results, newest first, and the last ones that did not pass; ages of an earlier boot are unbounded."""
        kept = self._history.get(check)
        return () if kept is None else tuple(self._shown(stamped) for stamped in kept.all())

    def _shown(self, stamped: Stamped) -> CheckResult:
        if stamped.boot_id == self.boot_id and self.boot_id is not None:
            return stamped.as_of(self.clock.boot())
        return dataclasses.replace(stamped.result, age_seconds=max(0.0, self.clock.wall() - stamped.result.started_at))

    def snapshot(self) -> NodeState:
        """The node, at most a second ago and never before the last change: what outlets show."""
        now = self.clock.boot()
        if self._cached is not None:
            version, at, state = self._cached
            if version == self.version and 0 <= now - at < SNAPSHOT_SECONDS:
                return state
        return self.exact()

    def exact(self) -> NodeState:
        """The node as of this moment: what is sent, because its ages are added to."""
        now = self.clock.boot()
        state = self._render(now)
        self._cached = (self.version, now, state)
        if state.health is not self._health:
            self._log_health(state)
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
            carriers=("torch", "nccom") if self.settings.nccom_carried else ("torch",),
            inventory=survey.inventory if survey else None,
            versions=survey.versions if survey else {},
            health=Health.UNKNOWN,
            reasons=(),
            checks=self.specs,
            results=tuple(self._results[spec.name].as_of(now) for spec in self.specs if spec.name in self._results),
            allocated=self.allocated,
            leases=self.leases,
            quarantine=self._quarantine,
            faults=self._faults,
            running=self._running,
            address=self.address,
            peer_address=self._peer_address,
            observed_at=self.clock.wall(),
            compile_seconds=self._compile_seconds(survey.inventory.accelerator) if survey else 0.0,
        )
        health, reasons = judge_health(blank)
        return dataclasses.replace(blank, health=health, reasons=reasons)

    def _log_health(self, state: NodeState) -> None:
        """One line whenever the health becomes another one."""
        why = f": {state.reasons[0].message}" if state.reasons else ""
        log.info("%s is %s%s", state.node, state.health.value, why)
        self._health = state.health

    def _touch(self) -> None:
        self.version += 1
        for callback in self._listeners:
            callback()

    # --- what survives ------------------------------------------------------------------------------------------------

    def restore(self, path: Path) -> None:
        """Take up what an earlier daemon had saved; a damaged file is set aside by `files.load`."""
        saved = files.load(path, Saved)
        if saved is None:
            return
        self._quarantine, self._quarantine_told = saved.quarantine, saved.quarantine_told
        now = self.clock.boot()
        known = {spec.name for spec in self.specs}
        for stamped in saved.history:
            if stamped.result.check in known:
                self._history.setdefault(stamped.result.check, History(self.settings.history_results)).add(stamped)
        if self.boot_id is None or saved.boot_id != self.boot_id:
            return
        for stamped in saved.results:
            # A stamp ahead of the clock is no stamp of this boot, whatever the file says.
            if stamped.result.check in known and not stamped.result.injected and stamped.measured_at <= now:
                self._results[stamped.result.check] = stamped
        self._touch()

    def save(self, path: Path) -> None:
        """Write what is to survive. A disk that is full is one line in the log, and the daemon goes on."""
        saved = Saved(
            version=1,
            boot_id=self.boot_id,
            results=tuple(self._results.values()),
            history=tuple(stamped for kept in self._history.values() for stamped in reversed(kept.all())),
            quarantine=self._quarantine,
            quarantine_told=self._quarantine_told,
        )
        try:
            files.save(path, saved, durable=False)
        except OSError as error:
            complaint = f"{path}: cannot be written ({error.strerror}); a restarted daemon will know less"
            if complaint != self._save_complaint:
                log.error("%s", complaint)
            self._save_complaint = complaint
        else:
            self._save_complaint = ""


def _hostname(host_root: Path | None) -> str | None:
    """What the machine calls itself; None where it cannot be told."""
    if host_root is None:
        return socket.gethostname() or None
    try:
        with (host_root / "etc/hostname").open(encoding="utf-8") as file:
            return file.readline(256).strip() or None
    except (OSError, UnicodeDecodeError):
        return None
