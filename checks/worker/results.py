"""Sends what checks yield and raise from a worker process, as bounded lines of `checks.worker.protocol`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checks.accelerators.neuron.cache import ColdCacheError
    from checks.contract import Finding


class ResultWriter:
    """Writes to the descriptor `output`, as answers to the command `command_id`."""

    def __init__(self, output: int) -> None:
        self.output = output
        self.command_id = 0
        self._pid = os.getpid()

    def stream(self, items: Iterable[Any]) -> int:
        """
        Send what a check yields as it comes; the number of findings that were left out.

        Of findings above the bound the worst is sent. Profiles above theirs are left out.
        """
        from checks.contract import SEVERITY, Evidence, Finding, Profile, Progress
        from checks.worker.protocol import MAX_FINDINGS, from_evidence, from_finding, from_progress

        findings = dropped = profiles = 0
        worst_dropped: Finding | None = None
        for item in items:
            if isinstance(item, Finding):
                findings += 1
                if findings < MAX_FINDINGS:
                    self.send("finding", finding=from_finding(item))
                    continue
                dropped += 1
                if worst_dropped is None or SEVERITY[item.status] > SEVERITY[worst_dropped.status]:
                    worst_dropped = item
            elif isinstance(item, Evidence):
                self.send("evidence", evidence=from_evidence(item))
            elif isinstance(item, Progress):
                self.send("progress", progress=from_progress(item))
            elif isinstance(item, Profile):
                from checks.worker.profile_parts import MAX_PROFILES, fits, split

                if profiles >= MAX_PROFILES or not fits(item):
                    continue  # its finding stands; the runner removes the name of a profile that did not come
                profiles += 1
                for part in split(item):
                    self.send("profile", profile=part)
            else:
                raise TypeError(f"yielded {type(item).__name__}; a check yields Finding, Evidence, Progress or Profile")
        if worst_dropped is not None:
            self.send("finding", finding=from_finding(worst_dropped))
        return max(0, dropped - 1)

    def send(self, kind: str, **members: Any) -> None:
        """
        Send one message.

        A copy of this process, made by a check that forks, sends no results: it says that it tried, which makes the
        check unknown, and ends here, before it takes the commands of this process.
        """
        if os.getpid() != self._pid:
            self._write("second_writer", pid=os.getpid())
            os._exit(1)
        self._write(kind, **members)

    def _write(self, kind: str, **members: Any) -> None:
        from checks.worker.protocol import encode

        line = encode({"kind": kind, "id": self.command_id, **members})
        while line:
            line = line[os.write(self.output, line) :]

    def raised(self, error: BaseException) -> None:
        """Report an exception, which is a result as well: its type, its message and its traceback."""
        import time
        import traceback

        from checks.host.machine import HostError
        from checks.worker.protocol import MAX_TRACEBACK_CHARACTERS, shorten

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.send(
            "raised",
            type=type(error).__name__,
            message=shorten(str(error)),
            # Errors of the host have a reason of their own, and so has a cold cache.
            reason=error.reason if isinstance(error, (HostError, _cold_cache())) else None,
            traceback=text[-MAX_TRACEBACK_CHARACTERS:],
            monotonic_seconds=time.monotonic(),
        )


def _cold_cache() -> type[ColdCacheError]:
    from checks.accelerators.neuron.cache import ColdCacheError

    return ColdCacheError
