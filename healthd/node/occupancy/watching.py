"""What the node daemon wants of those who see the end of workloads that it cannot see by itself: pods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from healthd.core.config import record_at
from healthd.core.tasks import Tasks
from healthd.core.workload import Pod
from healthd.integrations import INTEGRATIONS
from healthd.node.settings import DAEMON, NodeSettings


@dataclass(frozen=True, kw_only=True)
class PodFate:
    """
    What is known of a pod: that it is `there`, with the sources that show it and its UID, or why it has `ended`.
    Neither: it is not known.
    """

    there: bool = False
    ended: str = ""
    seen_by: tuple[str, ...] = ()
    uid: str | None = None


def unknown_fate(pod: Pod, seen_by: tuple[str, ...]) -> PodFate:
    """Where nobody sees pods."""
    return PodFate()


class WorkloadWatch(Protocol):
    """Watches pods. `run` is a supervised task, `on_change` is called after what it sees has changed."""

    on_change: Callable[[], None]

    def follow(self, pods: tuple[Pod, ...]) -> None:
        """From now on look at these pods, and at no others."""

    def fate(self, pod: Pod, seen_by: tuple[str, ...]) -> PodFate:
        """
        Whether a pod goes on, by what is seen now and by who has shown it until now.

        `pod` has the UID by which it was seen first.
        """

    async def run(self) -> None:
        """Look for ever."""


class MakeWorkloadWatch(Protocol):
    """Makes the watch of an integration; None where it has nothing to look at. ConfigError."""

    def __call__(self, settings: NodeSettings, tasks: Tasks) -> WorkloadWatch | None:
        """As configured."""


def workload_watch(settings: NodeSettings, tasks: Tasks) -> WorkloadWatch | None:
    """The watch of this node; None in a hook, which sees nothing of the host and lets go of its lease."""
    if settings.executor != DAEMON:
        return None
    for one in INTEGRATIONS:
        if one.workload_watch is not None:
            make: MakeWorkloadWatch = record_at(one.workload_watch)
            return make(settings, tasks)
    return None
