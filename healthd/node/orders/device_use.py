"""What has the devices for a while without being a run of checks, such as the ranks of a validation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Stay:
    """
    `work` starts when the devices are its own, ends by itself or when it is cancelled, and raises nothing else.

    `refuse` is told why it never starts, and `tell` why it must end early. `workload` is the job that it is for, which
    the host's scheduler may have given the devices. `idle` says that it has nothing to do at the moment: then it makes
    room for a run that was ordered. `gone` is set once the devices are seen to be free again.
    """

    name: str
    work: Callable[[], Coroutine[Any, Any, None]]
    refuse: Callable[[str], None]
    tell: Callable[[str], None]
    idle: Callable[[], bool] = lambda: False
    workload: str | None = None
    task: asyncio.Task[None] | None = None
    leaving: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self, why: str) -> None:
        """Stop it, once: a second time would disturb the cleaning up after it. One that has not begun never does."""
        if self.leaving:
            return
        self.leaving = True
        self.tell(why)
        if self.task is None:
            self.refuse(why)
        else:
            self.task.cancel()
