"""When active checks run unprompted: a job scheduler on the host gives the devices away without asking us."""

from __future__ import annotations

from healthd.node.occupancy.record import Scheduled
from healthd.node.settings import Unprompted


def unprompted_by(scheduled: Scheduled) -> tuple[Unprompted, str]:
    """
    The rule for active checks where nobody has set one, and why: idle, but boot beside a job scheduler whose
    allocations cannot be seen.
    """
    if scheduled.blind:
        return Unprompted.BOOT, scheduled.blind
    names = " and ".join(reading.scheduler for reading in scheduled.readings)
    return Unprompted.IDLE, f"what {names} gives away can be seen" if names else "no job scheduler is on this host"
