"""Results with their stamps, how many of them are kept, and what they say to those who schedule: pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from checks.contract import Status
from healthd.core.model import CheckResult, CheckSpec


@dataclass(frozen=True, kw_only=True)
class Stamped:
    """A result and when it was measured, by CLOCK_BOOTTIME of the boot `boot_id`. Its own age counts for nothing."""

    result: CheckResult
    measured_at: float
    boot_id: str | None

    def as_of(self, now: float) -> CheckResult:
        """The result with its age at `now`."""
        return dataclasses.replace(self.result, age_seconds=max(0.0, now - self.measured_at))


class History:
    """The last results of one check, and besides them the last ones that did not pass: failures are kept longest."""

    def __init__(self, size: int) -> None:
        self._recent: collections.deque[Stamped] = collections.deque(maxlen=max(1, size))
        self._failed: collections.deque[Stamped] = collections.deque(maxlen=max(1, size))

    def add(self, stamped: Stamped) -> None:
        """Remember one more."""
        self._recent.append(stamped)
        if stamped.result.status not in (Status.PASS, Status.SKIP):
            self._failed.append(stamped)

    def all(self) -> tuple[Stamped, ...]:
        """Each once, newest first."""
        kept = {id(stamped) for stamped in self._recent}
        older = [stamped for stamped in self._failed if id(stamped) not in kept]
        return tuple(reversed([*older, *self._recent]))


def is_busy(result: CheckResult) -> bool:
    """Whether a run measured nothing because somebody had the devices."""
    return result.status is Status.SKIP and any(finding.reason == "Busy" for finding in result.findings)


def ended_well(result: CheckResult) -> bool:
    """Whether a result says something good, or that the check does not concern this node."""
    if result.status is Status.SKIP:
        return bool(result.findings) and all(finding.reason == "NotApplicable" for finding in result.findings)
    return result.status in (Status.PASS, Status.WARN)


def by_name(specs: Iterable[CheckSpec]) -> dict[str, CheckSpec]:
    """Specs by their names."""
    return {spec.name: spec for spec in specs}
