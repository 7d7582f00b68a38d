"""Saves the node's state and the evidence of its checks in the state directory, and restores them after a restart."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from healthd import __version__
from healthd.core.errors import words_of
from healthd.core.tasks import wait_for
from healthd.node.settings import NodeSettings
from healthd.node.state import files
from healthd.node.state.results import SavedState
from healthd.node.state.store import NodeStore
from healthd.runner.runner import LastEvidence, Runner

log = logging.getLogger(__name__)


class StateFile:
    """The file of the node's state."""

    def __init__(self, store: NodeStore, path: Path) -> None:
        self._store = store
        self._path = path
        self._complaint = ""

    def restore(self) -> None:
        """Restore what an earlier daemon has saved; a damaged file is set aside by `files.load`."""
        saved = files.load(self._path, SavedState)
        if saved is not None:
            self._store.restore(saved)

    def save(self) -> None:
        """
        Write the file. A full disk is one line in the log, and the daemon goes on: the node is not ready meanwhile,
        because its leases are stored in the same directory.
        """
        complaint = unwritable = ""
        try:
            files.save(self._path, self._store.saved(), durable=False)
        except (OSError, ValueError) as error:  # ValueError: text that no file takes
            complaint = f"{self._path}: cannot be written ({words_of(error)}); a restarted daemon will know less"
            unwritable = files.unstorable(self._path.parent, error) if isinstance(error, OSError) else ""
            if complaint != self._complaint:
                log.error("%s", complaint)
        self._complaint = complaint
        self._store.set_unwritable(unwritable)


@dataclass(frozen=True, kw_only=True)
class EvidenceFile:
    """The file. Only the version that wrote it reads it, because checks may change the form of their evidence."""

    version: str
    boot_id: str | None
    remembered: tuple[LastEvidence, ...]


class SavedEvidence:
    """
    The file of the last evidence of node checks: counters, damage that the kernel has logged.

    What was seen in this boot must not be lost because the daemon was started again. `save` writes that of the runner.
    """

    def __init__(self, path: Path, runner: Runner, boot_id: str | None) -> None:
        self._path = path
        self._runner = runner
        self._boot_id = boot_id
        self._complaint = ""
        saved = files.load(path, EvidenceFile)
        if saved is not None and boot_id is not None and (saved.version, saved.boot_id) == (__version__, boot_id):
            runner.restore_evidence(saved.remembered)

    def save(self) -> None:
        """Write the file. A full disk is one line in the log, and the daemon goes on."""
        remembered = self._runner.last_evidence()
        saved = EvidenceFile(version=__version__, boot_id=self._boot_id, remembered=remembered)
        complaint = ""
        try:
            files.save(self._path, saved, durable=False)
        except (OSError, ValueError) as error:  # a lone surrogate cannot be written
            why = getattr(error, "strerror", None) or error
            complaint = f"{self._path}: cannot be written ({why}); a restarted daemon counts anew"
            if complaint != self._complaint:
                log.error("%s", complaint)
        self._complaint = complaint


class StateSaver:
    """Saves the state: after active runs at once, after passive ones at most every `save_seconds`."""

    def __init__(self, store: NodeStore, settings: NodeSettings, evidence: SavedEvidence) -> None:
        self._file = StateFile(store, settings.state_dir / "state.json")
        self._store = store
        self._evidence = evidence
        self._every_seconds = settings.save_seconds
        self._dirty = asyncio.Event()
        self._at_once = asyncio.Event()
        self._was_running = False
        self._quarantine = store.quarantine
        store.listen(self._changed)

    def _changed(self) -> None:
        self._dirty.set()
        running = self._store.running is not None
        if (self._was_running and not running) or self._quarantine != self._store.quarantine:
            self._at_once.set()
        self._was_running, self._quarantine = running, self._store.quarantine

    async def run(self) -> None:
        """Save after changes, for ever."""
        while True:
            await self._dirty.wait()
            await wait_for(self._at_once, self._every_seconds)
            self._dirty.clear()
            self.save()

    def save(self) -> None:
        """Save everything now."""
        self._file.save()
        self._evidence.save()
