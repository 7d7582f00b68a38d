"""Saves the approved baselines of the aggregator in the state directory, so that they apply while it is away too."""

from __future__ import annotations

import logging
from pathlib import Path

from healthd.core.model import LearnedLimits
from healthd.node.state import files
from healthd.runner.runner import Runner

log = logging.getLogger(__name__)

MOST_LIMITS = 1000
"""More are refused: a kind of machine has some dozens."""


class ApprovedBaselines:
    """
    Passes them to the runner, where the operator's own file takes precedence. They name the machine and the versions
    for which they are meant; the worker that judges checks that.
    """

    def __init__(self, path: Path, runner: Runner) -> None:
        self._path = path
        self._runner = runner
        self._own = runner.learned
        self._saved = files.load(path, LearnedLimits)
        self._use()

    @property
    def digest(self) -> str:
        """The digest of the saved baselines; empty when there are none."""
        return self._saved.digest if self._saved is not None else ""

    def set(self, learned: LearnedLimits) -> None:
        """Use these from now on. Where the disk is full they are not saved, which is logged."""
        if learned.digest == self.digest:
            return
        if len(learned.limits) > MOST_LIMITS:
            log.error(
                "the aggregator sent %d learned limits; at most %d are accepted", len(learned.limits), MOST_LIMITS
            )
            return
        self._saved = learned
        self._use()
        log.info("learned limits %s for %s: %d", learned.digest, learned.hardware, len(learned.limits))
        try:
            files.save(self._path, learned, durable=False)
        except OSError as error:
            log.error("%s: cannot be written (%s); it is sent again after a restart", self._path, error.strerror)

    def _use(self) -> None:
        """Where the operator's file has baselines of this hardware, those of the aggregator do not apply."""
        saved = self._saved
        own = {(one.hardware, one.accelerator) for one in self._own}
        approved = () if saved is None or (saved.hardware, saved.accelerator) in own else (saved,)
        self._runner.learned = (*self._own, *approved)
