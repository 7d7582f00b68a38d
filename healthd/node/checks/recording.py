"""Results on their way from a run into the book and to those who ordered it, and the faults they are made under."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checks.worker.faults import Fault, parse_fault
from healthd.core.model import CheckResult
from healthd.node.checks.active_run import Ordered
from healthd.node.state.results import is_busy
from healthd.node.state.store import NodeBook
from healthd.runner import OnResult


class Recorder:
    """Of one daemon. `take_look` is called with each result: what the run saw of the machine is known by then."""

    def __init__(self, book: NodeBook, take_look: Callable[[], None]) -> None:
        self._book = book
        self._take_look = take_look
        self._fault_epoch = 0
        self._changed: dict[str, int] = {}  # the epoch in which the faults of a check last changed

    def faults(self) -> tuple[Fault, ...]:
        """Those in force."""
        return tuple(parse_fault(text) for text in self._book.faults)

    def set_faults(self, faults: tuple[str, ...]) -> set[str]:
        """These are in force from now on. Drops what earlier ones latched; the checks that are touched."""
        touched = {text.partition("=")[0].partition("@")[0] for text in {*faults} ^ {*self._book.faults}}
        self._fault_epoch += 1
        self._changed.update(dict.fromkeys(touched, self._fault_epoch))
        self._book.set_faults(faults)
        self._book.drop_injected()
        return touched

    def start(self, ordered: Sequence[Ordered]) -> OnResult:
        """Takes in results of a run that starts now; of checks whose faults change meanwhile none is kept."""
        epoch = self._fault_epoch

        def record(result: CheckResult) -> None:
            self._take_look()
            kept = epoch >= self._changed.get(result.check, 0)
            for one in ordered:
                if not kept:
                    one.void.add(result.check)
                    continue
                one.seen[result.status] += 1
                if one.joined:
                    one.left = tuple(name for name in one.left if name != result.check)
                if is_busy(result):
                    one.busy = result.findings[0].message
            if kept:
                self._book.record(result)

        return record
