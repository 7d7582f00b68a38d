"""
What node checks remember from look to look (counters, damage that the kernel has logged), kept over a restart of the
daemon: what has been seen in this boot must not be forgotten because the daemon was started again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from healthd import __version__
from healthd.node.state import files
from healthd.runner import Remembered, Runner

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedEvidence:
    """The file. Only the version that wrote it reads it: what a check remembers is its own affair."""

    version: str
    boot_id: str | None
    remembered: tuple[Remembered, ...]


class KeptEvidence:
    """Gives the runner what an earlier daemon of this boot had; `save` writes what it has now."""

    def __init__(self, path: Path, runner: Runner, boot_id: str | None) -> None:
        self._path = path
        self._runner = runner
        self._boot_id = boot_id
        self._complaint = ""
        saved = files.load(path, SavedEvidence)
        if saved is not None and boot_id is not None and (saved.version, saved.boot_id) == (__version__, boot_id):
            runner.recall(saved.remembered)

    def save(self) -> None:
        """A disk that is full is one line in the log, and the daemon goes on."""
        remembered = self._runner.remembered()
        saved = SavedEvidence(version=__version__, boot_id=self._boot_id, remembered=remembered)
        complaint = ""
        try:
            files.save(self._path, saved, durable=False)
        except (OSError, ValueError) as error:  # a lone surrogate cannot be written
            why = getattr(error, "strerror", None) or error
            complaint = f"{self._path}: cannot be written ({why}); a restarted daemon counts anew"
            if complaint != self._complaint:
                log.error("%s", complaint)
        self._complaint = complaint
