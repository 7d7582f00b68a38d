"""Passes the results of a run to the store and to its orders, and knows the faults in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checks.worker.faults import Fault, check_of, parse_fault
from healthd.core.model import CheckResult
from healthd.node.checks.active_run import OrderedRun
from healthd.node.state.results import is_busy
from healthd.node.state.store import NodeStore
from healthd.runner import OnResult


class ResultRecorder:
    """`note_survey` is called with each result: the survey of the run is known by then."""

    def __init__(self, store: NodeStore, note_survey: Callable[[], None]) -> None:
        self._store = store
        self._note_survey = note_survey
        self._epoch = 0  # counts changes of the faults
        self._changed: dict[str, int] = {}  # the epoch in which the faults of a check last changed

    def faults(self) -> tuple[Fault, ...]:
        """The faults in force."""
        return tuple(parse_fault(text) for text in self._store.faults)

    def set_faults(self, faults: tuple[str, ...]) -> set[str]:
        """Replace the faults in force and drop the results that faults have changed; the checks that are affected."""
        affected = {check_of(text) for text in {*faults} ^ {*self._store.faults}}
        self._epoch += 1
        self._changed.update(dict.fromkeys(affected, self._epoch))
        self._store.set_faults(faults)
        self._store.drop_injected()
        return affected

    def listener(self, orders: Sequence[OrderedRun]) -> OnResult:
        """The listener of a run that starts now; it drops the results of checks whose faults change meanwhile."""
        epoch = self._epoch

        def record(result: CheckResult) -> None:
            self._note_survey()
            valid = epoch >= self._changed.get(result.check, 0)
            for ordered in orders:
                if not valid:
                    ordered.void.add(result.check)
                    continue
                ordered.seen[result.status] += 1
                if ordered.joined:
                    ordered.left = tuple(name for name in ordered.left if name != result.check)
                if is_busy(result):
                    ordered.busy = result.findings[0].message
            if valid:
                self._store.record(result)

        return record
