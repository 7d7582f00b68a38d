"""
Saves the node's state and the evidence of its checks in the state directory, and restores them after a restart.

Also here:

- keeps the profiles of slow probes in a folder, within bounds of number, bytes and age; the oldest go first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checks.contract import Profile
from checks.worker.profiles import PROFILE_ID
from healthd import __version__
from healthd.core.errors import words_of
from healthd.core.tasks import LogOnce, wait_for
from healthd.node.settings import NodeSettings, ProfileSettings
from healthd.node.state import files
from healthd.node.state.store import NodeStore, SavedState
from healthd.runner.runner import LastEvidence, Runner

log = logging.getLogger(__name__)

_RECORD, _TRACE = ".json", ".trace.json.gz"
_AHEAD_SECONDS = 60.0  # taken later than this from now: the clock was ahead, and nobody knows when it was taken
_OURS = re.compile(r"\.?[a-z0-9][a-z0-9_.-]*-\d{8}t\d{6}z-[0-9a-f]{6}(\.json|\.trace\.json\.gz|\.json\.new)")


class SavedEvidence:
    """
    The file of the last evidence of node checks: counters, damage that the kernel has logged.

    What was seen in this boot must not be lost because the daemon was started again. `save` writes that of the runner.
    """

    def __init__(self, path: Path, runner: Runner, boot_id: str | None) -> None:
        self._path = path
        self._runner = runner
        self._boot_id = boot_id
        self._trouble = LogOnce(log)
        saved = files.load(path, EvidenceFile)
        if saved is not None and boot_id is not None and (saved.version, saved.boot_id) == (__version__, boot_id):
            runner.restore_evidence(saved.remembered)

    def save(self) -> None:
        """Write the file. A full disk is one line in the log, and the daemon goes on."""
        remembered = self._runner.last_evidence()
        saved = EvidenceFile(version=__version__, boot_id=self._boot_id, remembered=remembered)
        try:
            files.save(self._path, saved, durable=False)
        except (OSError, ValueError) as error:  # a lone surrogate cannot be written
            why = getattr(error, "strerror", None) or error
            self._trouble.say(f"{self._path}: cannot be written ({why}); a restart loses its counts", logging.ERROR)
        else:
            self._trouble.clear()


@dataclass(frozen=True, kw_only=True)
class EvidenceFile:
    """The file. Only the version that wrote it reads it, because checks may change the form of their evidence."""

    version: str
    boot_id: str | None
    remembered: tuple[LastEvidence, ...]


class StateSaver:
    """
    Saves the state: active results at once, since an aggregator may hear of them now; passive ones at most every
    `save_seconds`. `save_evidence` saves that of the runner.
    """

    def __init__(self, store: NodeStore, settings: NodeSettings, save_evidence: Callable[[], None]) -> None:
        self._file = StateFile(store, settings.state_dir / "state.json")
        self._store = store
        self._save_evidence = save_evidence
        self._every_seconds = settings.save_seconds
        self._dirty = asyncio.Event()
        self._at_once = asyncio.Event()
        self._was_running = False
        self._results = store.runs.total()
        self._quarantine = store.quarantine
        store.listen(self._changed)

    def _changed(self) -> None:
        self._dirty.set()
        running, results = self._store.running is not None, self._store.runs.total()
        measured = running and results != self._results
        if measured or (self._was_running and not running) or self._quarantine != self._store.quarantine:
            self._at_once.set()
        self._was_running, self._results, self._quarantine = running, results, self._store.quarantine

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
        self._save_evidence()


class StateFile:
    """The file of the node's state."""

    def __init__(self, store: NodeStore, path: Path) -> None:
        self._store = store
        self._path = path
        self._trouble = LogOnce(log)

    def restore(self) -> None:
        """Restore what an earlier daemon has saved; a damaged file is set aside by `healthd.node.state.files.load`."""
        saved = files.load(self._path, SavedState)
        if saved is not None:
            self._store.restore(saved)

    def save(self) -> None:
        """
        Write the file. A full disk is one line in the log, and the daemon goes on: the node is not ready meanwhile,
        because its leases are stored in the same directory.
        """
        unwritable = ""
        try:
            files.save(self._path, self._store.saved(), durable=False)
        except (OSError, ValueError) as error:  # ValueError: text that no file takes
            complaint = f"{self._path}: cannot be written ({words_of(error)}); a restarted daemon will know less"
            unwritable = files.unstorable(self._path.parent, error) if isinstance(error, OSError) else ""
            self._trouble.say(complaint, logging.ERROR)
        else:
            self._trouble.clear()
        self._store.set_unwritable(unwritable)


class ProfileFolder:
    """The profiles in one directory, which is made with the first of them."""

    def __init__(self, directory: Path, settings: ProfileSettings, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch."""
        self._directory = directory
        self._settings = settings
        self._clock = clock
        self._trouble = LogOnce(log)

    def tidy(self) -> None:
        """Remove what an earlier owner has left unfinished, and what is too old or too much."""
        self._remove_leftovers()
        self._remove_surplus()

    def keep(self, profile: Profile) -> bool:
        """Write a profile and remove the surplus; False where it cannot be written or may not be kept."""
        size = len(profile.content)
        if size > self._settings.max_bytes or self._settings.count < 1:
            return False
        record = ProfileRecord(
            id=profile.id,
            target=profile.target,
            said=profile.said,
            format=profile.format,
            size_bytes=size,
            taken_at=self._clock(),
        )
        kept = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.trace(profile.id), flags, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(profile.content)
            files.save(self._path(profile.id, _RECORD), record, durable=False)
            kept = True
            self._trouble.clear()
        except OSError as error:
            why = error.strerror or error
            self._trouble.say(f"{self._directory}: the profile cannot be kept: {why}", logging.ERROR)
            self._remove(profile.id)
        self._remove_surplus(profile.id)
        return kept and self._path(profile.id, _RECORD).exists()

    def records(self) -> tuple[ProfileRecord, ...]:
        """What is kept and not too old, the newest first."""
        oldest = self._clock() - self._settings.age_seconds
        return tuple(record for record in self._all() if record.taken_at >= oldest)

    def read(self, profile_id: str) -> bytes | None:
        """The trace of a profile, compressed as it is; None where there is no such profile."""
        if not PROFILE_ID.fullmatch(profile_id) or all(one.id != profile_id for one in self.records()):
            return None
        try:
            with self.trace(profile_id).open("rb") as file:
                return file.read(self._settings.max_bytes + 1)
        except OSError:
            return None

    def trace(self, profile_id: str) -> Path:
        return self._path(profile_id, _TRACE)

    def _path(self, profile_id: str, ending: str) -> Path:
        return self._directory / f"{profile_id}{ending}"

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._directory))
        except OSError:
            return []

    def _all(self) -> list[ProfileRecord]:
        found = []
        for name in self._names():
            if name.endswith(_RECORD) and PROFILE_ID.fullmatch(name.removesuffix(_RECORD)):
                with contextlib.suppress(files.DamagedError):
                    record = files.read(self._directory / name, ProfileRecord)
                    if record is not None and record.id == name.removesuffix(_RECORD):
                        found.append(record)
        return sorted(found, key=lambda record: (-record.taken_at, record.id))

    def _remove_surplus(self, newest: str = "") -> None:
        """`newest` was just written, and stays whatever the others say of their time."""
        total = 0
        now = self._clock()
        all_ = sorted(self._all(), key=lambda record: (record.id != newest, record.taken_at > now + _AHEAD_SECONDS))
        for count, record in enumerate(all_, 1):
            total += record.size_bytes
            surplus = count > self._settings.count or total > self._settings.max_bytes
            if record.id != newest and (surplus or record.taken_at < now - self._settings.age_seconds):
                self._remove(record.id)

    def _remove_leftovers(self) -> None:
        """Remove files of ours that are no part of a whole profile; a file with another name is not ours."""
        whole = {name for record in self._all() for name in (f"{record.id}{_RECORD}", f"{record.id}{_TRACE}")}
        for name in self._names():
            if name not in whole and _OURS.fullmatch(name):
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()

    def _remove(self, profile_id: str) -> None:
        for ending in (_RECORD, _TRACE):
            with contextlib.suppress(OSError):
                self._path(profile_id, ending).unlink()


@dataclass(frozen=True, kw_only=True)
class ProfileRecord:
    """What a kept profile is."""

    id: str
    target: str
    """The device."""
    said: str
    """The operations that took most of the time, in words."""
    format: str
    """Of the trace: `trace-event-json-gzip`."""
    size_bytes: int
    """Of the trace."""
    taken_at: float
    """In seconds since the epoch."""
