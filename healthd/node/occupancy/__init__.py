"""
Reads the allocations of the job schedulers of this host: finds them anew at each look, asks all, in bounded time.

    schedulers = Schedulers(settings.allocations, host_root, clock=clock)
    scheduled = await schedulers.look()         # never raises
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthd.node.occupancy.model import KINDS, NO_SCHEDULERS, Reading, Scheduled, Workload
    from healthd.node.occupancy.own import inside_a_job
    from healthd.node.occupancy.schedulers import Schedulers

__all__ = ["KINDS", "NO_SCHEDULERS", "Reading", "Scheduled", "Schedulers", "Workload", "inside_a_job"]

if not TYPE_CHECKING:
    from healthd.core.lazy import names_of

    __getattr__ = names_of(__name__, __all__, ("model", "own", "schedulers"))
