"""Logs for `healthd bundle`: the daemon's own last lines, and those that nccom-test leaves behind."""

from __future__ import annotations

import contextlib
import os
import stat

from checks.host.machine import Host
from healthd.core.errors import HealthdError

# Of what a program says the beginning is kept, so the lines are counted where they are written.
JOURNAL = ("journalctl", "-u", "healthd-node", "-u", "healthd-boot", "-n", "1000", "--no-pager", "-o", "short-iso")
NCCOM_LOGS = ("/tmp", "nccom_test_log_*")  # it leaves them there, for people
MAX_LOGS = 3


class NoLogError(HealthdError):
    """A log that cannot be had; the text says why."""


def journal(host: Host, seconds: float) -> str:
    """As far as this host's systemd has it. Raises HostError and NoLogError."""
    if host.root is not None and not host.exists("/bin/journalctl"):
        raise NoLogError("the journal here is of this host, and --host-root names another machine")
    done = host.run(JOURNAL, timeout_seconds=seconds)
    return done.stdout if done.returncode == 0 else f"{done.stdout}\n(exit code {done.returncode})\n{done.stderr}"


def nccom_logs(host: Host, max_bytes: int) -> str:
    """The ends of the newest, newest first, each at most `max_bytes`. Raises HostError."""
    found = []
    for path in host.glob(*NCCOM_LOGS):
        with contextlib.suppress(OSError):  # it is gone
            found.append((os.lstat(host.path(path)).st_mtime, path))
    kept: list[str] = []
    for _, path in sorted(found, reverse=True):
        text = _end_of(host.path(path), max_bytes) if len(kept) < MAX_LOGS else None
        if text is not None:
            kept.append(f"--- {path}\n{text}\n")
    return "".join(kept) or "(there is none)\n"


def _end_of(path: str, max_bytes: int) -> str | None:
    """None for what is no log: anybody may write to /tmp, and a link there must not lead our rights to another file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, status.st_size - max_bytes))
        return file.read(max_bytes).decode("utf-8", "replace")
