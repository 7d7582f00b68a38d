"""Where ends of jobs go, beside the store: integrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from healthd.aggregator.jobs.postmortem_records import Postmortem
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.config import record_at
from healthd.integrations import INTEGRATIONS


class JobEvents(Protocol):
    """Takes the last word on each job without blocking, and sends it while `run` runs."""

    def job_died(self, record: Postmortem, at: float) -> None:
        """Queue a record; `at` is now, in seconds since the epoch."""

    async def run(self) -> None:
        """Send for ever."""


def job_events(settings: AggregatorSettings, *, source: str) -> Iterator[tuple[str, JobEvents]]:
    """Name and sink of each integration that is on. `source` names the aggregator's database. ConfigError."""
    for one in INTEGRATIONS:
        if one.job_events is not None:
            make: Callable[[AggregatorSettings, str], JobEvents | None] = record_at(one.job_events)
            if (sink := make(settings, source)) is not None:
                yield one.name, sink
