"""The approved baselines that an aggregator told, kept in the state directory: they judge while it is away as well."""

from __future__ import annotations

import logging
from pathlib import Path

from healthd.core.model import LearnedLimits
from healthd.node.state import files
from healthd.runner import Runner

log = logging.getLogger(__name__)

MOST_LIMITS = 1000
"""More is no answer of ours: a kind of machine has some dozens."""


class KeptLimits:
    """
    Gives them to the runner, below those of the operator's own file. For which machine and versions they are meant
    stands in them, and is heeded by whoever judges.
    """

    def __init__(self, path: Path, runner: Runner) -> None:
        self._path = path
        self._runner = runner
        self._own = runner.learned
        self._kept = files.load(path, LearnedLimits)
        self._use()

    @property
    def digest(self) -> str:
        """Of what is kept; empty: nothing is."""
        return self._kept.digest if self._kept is not None else ""

    def take(self, learned: LearnedLimits) -> None:
        """What the aggregator says from now on. A disk that is full costs the memory of it, and is said."""
        if learned.digest == self.digest:
            return
        if len(learned.limits) > MOST_LIMITS:
            log.error("the aggregator told %d learned limits; at most %d are taken", len(learned.limits), MOST_LIMITS)
            return
        self._kept = learned
        self._use()
        log.info("learned limits %s for %s: %d", learned.digest, learned.hardware, len(learned.limits))
        try:
            files.save(self._path, learned, durable=False)
        except OSError as error:
            log.error("%s: cannot be written (%s); it is told again after a restart", self._path, error.strerror)

    def _use(self) -> None:
        """Where the operator's file speaks of this hardware, the aggregator does not."""
        kept = self._kept
        own = {(one.hardware, one.accelerator) for one in self._own}
        told = () if kept is None or (kept.hardware, kept.accelerator) in own else (kept,)
        self._runner.learned = (*self._own, *told)
