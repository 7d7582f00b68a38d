"""
Claims the devices for active checks: takes the lock file, and sees that no process and no job has the devices.

Also here:

- makes surveys of the machine from the answers of the node's worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import math
import os
import pwd
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.atomic_file import write_atomically
from checks.contract import Status
from checks.worker.faults import Fault, without_missing
from checks.worker.protocol import shorten
from healthd.core.model import DeviceRecord, Inventory
from healthd.runner.settings import Survey
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.workers import Workers

_RETRY_SECONDS = 0.05
_LOCKS = "locks"  # directory in the run directory that its owner alone can enter
_LEASES = "leased"  # file beside the locks: the boot id, then the jobs that have the node
_LEASES_BYTES = 4096

NO_INVENTORY = Inventory(
    accelerator="unknown", device_count=None, core_count=None, memory_bytes=None, efa_count=None, devices=()
)


class DeviceClaim:
    """The claim of one run, or of one session of ranks. `survey` looks at the devices and at who holds them."""

    def __init__(self, workers: Workers, survey: Callable[[], Awaitable[Outcome]]) -> None:
        self._workers = workers
        self._settings = workers.settings
        self._survey = survey

    @contextlib.asynccontextmanager
    async def held(self, surveyed: Outcome) -> AsyncIterator[None]:
        """
        The devices are claimed inside of this context. Raises ClaimError.

        `surveyed` is the latest survey. It is repeated where another healthd process had the lock meanwhile.
        """
        async with contextlib.AsyncExitStack() as stack:
            waited = False
            if self._settings.run_dir is not None:
                path = lock_file(self._settings.run_dir, self._workers.inventory["accelerator"])
                waited = await stack.enter_async_context(device_lock(path, self._settings.lock_wait_seconds))
            await self.check_free(await self._survey() if waited else surveyed)
            yield

    async def check_free(self, surveyed: Outcome) -> None:
        """
        See that no process holds the devices and no job has a lease. Raises ClaimError.

        It looks again a few times, because the last user may be about to exit, such as the probes of a run before.
        """
        attempt = 0
        while busy := self._lease() or busy_by(surveyed):
            attempt += 1
            if attempt > self._settings.retries:
                raise ClaimError("Busy", busy)
            await self._workers.back_off(attempt)
            surveyed = await self._survey()

    def _lease(self) -> str | None:
        """Why the node belongs to a job although no process holds devices, as the node's daemon says."""
        if self._settings.run_dir is None or not self._settings.heed_leases:
            return None
        return read_leases_file(self._settings.run_dir, self._workers.boot_id, past=self._settings.past)


def busy_by(surveyed: Outcome) -> str | None:
    """Who holds the devices according to a survey; None when they are free."""
    if surveyed.missing is not None:
        return f"the holders of the devices are unknown: {surveyed.missing.message}"
    holders = surveyed.answers[0]["holders"] if surveyed.answers else None
    if holders is None:
        return "the holders of the devices cannot be seen: run as root, and in a container in the host's PID namespace"
    return f"in use by {', '.join(holders[:4])}{' and others' if len(holders) > 4 else ''}" if holders else None


def lock_file(run_dir: Path, accelerator: str) -> Path:
    return run_dir / _LOCKS / f"{accelerator}.lock"


@contextlib.asynccontextmanager
async def device_lock(path: Path, wait_seconds: float) -> AsyncIterator[bool]:
    """
    Hold the lock of an accelerator, which the daemon, `check` and `preflight` share. Yields whether it had to wait.

    Raises ClaimError when another process keeps the lock for `wait_seconds`, or when the file cannot be made.
    """
    try:
        descriptor = _open_lock(path)
    except OSError as error:
        text = f"cannot lock {path}: {error.strerror or error}; set run_dir to a directory of your own"
        raise ClaimError("NoPermission", text) from None
    deadline = time.monotonic() + wait_seconds
    waited = False
    try:
        while not _try_lock(descriptor):
            waited = True
            if time.monotonic() >= deadline:
                raise ClaimError("Busy", _who_holds(descriptor, path))
            await asyncio.sleep(_RETRY_SECONDS)
        with contextlib.suppress(OSError):  # the pid is for people; a full disk does not make the lock invalid
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        try:
            yield waited
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
    finally:
        # Closing releases the lock. The file stays: removing it would let two processes hold "the" lock.
        os.close(descriptor)


class ClaimError(Exception):
    """The devices cannot be claimed. `reason` is a code of `checks.reasons`; a claim that is `Busy` is skipped."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = Status.SKIP if reason == "Busy" else Status.UNKNOWN


def write_leases_file(run_dir: Path, boot_id: str | None, jobs: Sequence[str]) -> None:
    """
    Record which jobs have the node, for the other healthd processes of the host; remove the file when none has.

    The file outlives its daemon on purpose: a lease goes on while the daemon is away. It ends with the boot.
    Raises OSError.
    """
    path = run_dir / _LEASES
    if not jobs:
        path.unlink(missing_ok=True)
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    text = shorten(" ".join(", ".join(jobs).split()))
    body = f"{boot_id or ''}\n{text}\n".encode(errors="replace")
    write_atomically(path, body, mode=0o644)  # any user who can run checks can read it


def read_leases_file(run_dir: Path, boot_id: str | None, *, past: str | None = None) -> str | None:
    """
    Why the node belongs to a job; None when no lease is recorded. A file that cannot be read counts as a lease. A lease
    of the gate `past` does not count where it is the only one.
    """
    path = run_dir / _LEASES
    try:
        with path.open("rb") as file:
            text = file.read(_LEASES_BYTES).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"cannot see whether the node is leased: {path}: {error.strerror}"
    boot, _, jobs = text.partition("\n")
    if not text.strip() or (boot and boot_id is not None and boot != boot_id):
        return None
    if past is not None and jobs.strip().endswith(f"(gate {past})") and jobs.count("(gate ") == 1:
        return None
    return f"leased to {jobs.strip() or 'a job'} ({path})"


def to_survey(outcome: Outcome, versions: Mapping[str, str], lost: Sequence[Fault], seen: SeenDevices) -> Survey:
    """A survey from the answer of a worker, without the devices that faults `lost`; all unknown without an answer."""
    if outcome.missing is not None or not outcome.answers:
        failed = outcome.missing.message if outcome.missing else "no answer"
        return Survey(
            inventory=NO_INVENTORY,
            boot_id=None,
            instance_id=None,
            instance_type=None,
            versions=dict(versions),
            holders=None,
            looked_at=time.clock_gettime(time.CLOCK_BOOTTIME) - max(0.0, time.monotonic() - outcome.began),
            failed=failed,
            raw={"error": failed},
        )
    answer = outcome.answers[0]
    seen.note(answer)
    plain = without_missing(answer["inventory"], lost)
    holders = answer["holders"]
    return Survey(
        inventory=Inventory(
            accelerator=plain["accelerator"],
            device_count=plain["device_count"],
            core_count=plain["core_count"],
            memory_bytes=plain["memory_bytes"],
            efa_count=plain["efa_count"],
            devices=tuple(
                seen.stamp(
                    DeviceRecord(**{field.name: device.get(field.name) for field in dataclasses.fields(DeviceRecord)})
                )
                for device in plain["devices"]
            ),
            workers=tuple(plain.get("workers") or ()),
        ),
        boot_id=answer["boot_id"],
        instance_id=answer["instance_id"],
        instance_type=answer["instance_type"],
        versions={**versions, **answer["versions"]},
        holders=None if holders is None else tuple(holders),
        looked_at=answer["looked_at"],
        raw={key: value for key, value in answer.items() if key not in ("kind", "id", "looked_at")},
    )


class SeenDevices:
    """
    Since when each device is there as it is now: not gone, swapped or reset meanwhile.

    A survey that could not tell which devices there are says nothing. What comes and goes between two surveys is seen
    where its device file was made anew, or where a check reports the reset (`note_resets`).
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._looked_at = 0.0
        self._resets: dict[str, float] | None = None  # None: nobody has looked for resets yet

    def note(self, answer: Mapping[str, Any]) -> None:
        """Take in the answer to a survey."""
        inventory, looked_at = answer["inventory"], answer["looked_at"]
        if inventory["device_count"] is None or looked_at < self._looked_at:
            return
        self._looked_at = looked_at
        seen = {}
        for device in inventory["devices"]:
            now = _Seen(serial=device.get("serial"), file=device.get("file"), since=looked_at)
            seen[device["target"]] = now.after(self._seen.get(device["target"]))
        self._seen = seen

    def note_resets(self, data: Mapping[str, Any], at: float) -> None:
        """
        Take in the evidence DEVICE_RESETS of a look that began at `at` (CLOCK_BOOTTIME).

        A reset that the look before did not see counts from this look, and one that the first look sees from when it
        was, because the clock of the kernel log drifts from ours over weeks.
        """
        resets = {str(target): float(seconds) for target, seconds in data["resets"].items()}
        for target, seconds in resets.items():
            device = self._seen.get(target)
            if device is None:
                continue
            if self._resets is None:
                device.since = max(device.since, at - max(0.0, float(data["now"]) - seconds))
            elif seconds > self._resets.get(target, -math.inf):
                device.since = max(device.since, at)
        self._resets = {**(self._resets or {}), **resets}

    def restore(self, devices: Iterable[DeviceRecord]) -> None:
        """Go on from what an earlier daemon has seen in this boot."""
        for device in devices:
            if device.since is not None:
                self._seen.setdefault(device.target, _Seen(serial=device.serial, file=None, since=device.since))

    def stamp(self, device: DeviceRecord) -> DeviceRecord:
        """The device with the time since when it is there as it is now; None where it was not seen."""
        seen = self._seen.get(device.target)
        return dataclasses.replace(device, since=seen.since if seen is not None else None)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock(path: Path) -> int:
    """
    Open the lock file, which this user alone can open, in a directory that no other user can enter: who can open a file
    can hold a lock on it. Both are made so where they are not.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    # No links: what they lead to would be closed to others, and emptied.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _close_to_others(folder, 0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path.name, flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _close_to_others(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _close_to_others(descriptor: int, mode: int) -> None:
    if os.fstat(descriptor).st_mode & 0o077:
        os.fchmod(descriptor, mode)


def _who_holds(descriptor: int, path: Path) -> str:
    """Who holds the lock: a healthd writes its process id into the file, and the kernel knows who locked it."""
    written = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    locked_by = _locked_by(descriptor)
    if locked_by is None:
        pid = f"pid {written}" if written.isdigit() else "of unknown pid"
        return f"another healthd ({pid}) is running active checks"
    who = _described(locked_by)
    if str(locked_by) == written:
        return f"another healthd ({who}) is running active checks"
    return f"{who} holds {path} and is not healthd: active checks can only run after it exits"


def _locked_by(descriptor: int) -> int | None:
    """The process that has locked an open file, by the kernel's list; None where it does not show it."""
    try:
        lines = Path("/proc/locks").read_text(errors="replace").splitlines()
    except OSError:
        return None
    inode = str(os.fstat(descriptor).st_ino)
    for line in lines:
        # `1: FLOCK  ADVISORY  WRITE 4711 00:1a:1234 0 EOF`, where `1: -> FLOCK` waits for the lock.
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode:
            return int(words[4]) if words[4].isdigit() and int(words[4]) > 0 else None
    return None


def _described(pid: int) -> str:
    """A process as people know it: `pid 4711, flock, user eve`."""
    place = Path("/proc") / str(pid)
    try:
        uid = place.stat().st_uid
        command = (place / "comm").read_text(errors="replace").strip()
    except OSError:
        return f"pid {pid}, which has exited and left the lock to a child process"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return shorten(f"pid {pid}, {command}, user {user}")


@dataclass(kw_only=True)
class _Seen:
    """A device as it was seen. `file` is the inode of its device file; None where there is none or it is not known."""

    serial: str | None
    file: int | None
    since: float

    def after(self, before: _Seen | None) -> _Seen:
        """A new device, or the one that was seen before, of which no less is known now."""
        if before is None or _differ(before.serial, self.serial) or _differ(before.file, self.file):
            return self
        return _Seen(serial=self.serial or before.serial, file=self.file or before.file, since=before.since)


def _differ(before: object, now: object) -> bool:
    return None not in (before, now) and before != now
