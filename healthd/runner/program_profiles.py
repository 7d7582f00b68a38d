"""Profiles of what ran as a compiled program: captured on a device that its worker has left, for what was slow."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

from checks.accelerators import find_descriptor
from checks.contract import Finding, Status
from healthd.runner.run_record import RunRecord
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, WorkerLane
from healthd.runner.workers.workers import Workers

log = logging.getLogger(__name__)

SECONDS = 130.0
"""For one profile: capturing and reading it may take a minute each (see `checks.profiling.neuron`)."""
RUN_SECONDS = 2 * SECONDS
"""For all profiles of a run, from the beginning of the first: an ordered run has minutes, and waits for them."""
_SLOW = "SlowDevice"


class ProgramProfiles:
    """The profiles of one run."""

    def __init__(self, workers: Workers, record: RunRecord) -> None:
        self._workers = workers
        self._record = record
        self._slots = asyncio.Semaphore(workers.settings.max_workers_at_once)
        self._until: float | None = None

    def wants(self, outcome: Outcome) -> bool:
        """Whether a profile of this outcome is to be had: of a check that ended, never of one that hangs or died."""
        if outcome.program is None or outcome.missing is not None:
            return False
        described = find_descriptor(self._workers.inventory.get("accelerator"))
        if described is None or not described.profiles_programs:
            return False
        limit = self._record.plan.timeout_seconds
        if limit is not None and self._record.began + limit - time.monotonic() < 2 * SECONDS:
            return False  # what is known must be published before the time of the run is up
        always = self._workers.settings.profile == "always"
        return any(_is_slow(finding) or (always and finding.status is Status.PASS) for finding in outcome.findings)

    async def add(self, check: str, outcome: Outcome) -> None:
        """Capture a profile and let the findings name it; where that fails, they stay as they are."""
        done: list[Outcome] = []
        async with self._slots:
            now = time.monotonic()
            self._until = self._until or now + RUN_SECONDS
            if now + SECONDS > self._until:
                log.warning("no profile of %s on %s: others of this run took their time", check, outcome.target)
                return
            lane = WorkerLane(self._workers, None)
            command = {"kind": "capture", "program": outcome.program, "target": outcome.target}
            lane.submit(Job(check=check, command=command, timeout_seconds=SECONDS, finish=done.append, retry=False))
            lane.close()
            await lane.serve()
        (captured,) = done
        if captured.missing is not None or not captured.profiles:
            why = captured.missing.message if captured.missing is not None else "nothing was captured"
            log.warning("no profile of %s on %s: %s", check, outcome.target, why)
            return
        profile = captured.profiles[0]
        outcome.profile_parts.whole.append(profile)
        about = [one for one in outcome.findings if _is_slow(one)] or outcome.findings
        outcome.findings = [_named(one, profile.id, profile.said) if one in about else one for one in outcome.findings]


def _is_slow(finding: Finding) -> bool:
    return finding.status is not Status.PASS and finding.reason == _SLOW


def _named(finding: Finding, profile: str, said: str) -> Finding:
    message = f"{finding.message}; {said}" if _is_slow(finding) else finding.message
    return dataclasses.replace(finding, message=message, profile=profile)
