"""Reads and writes files of the state directory: each is written whole or not at all, a damaged one is set aside."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from pathlib import Path
from typing import TypeVar

from checks.atomic_file import write_atomically
from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, HealthdError, words_of

log = logging.getLogger(__name__)

T = TypeVar("T")

# Larger than any state that the bounds of the daemon allow; guards against a file that is not ours.
MAX_BYTES = 32 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class StateDirError(HealthdError):
    """The state directory cannot be used."""


class DamagedError(HealthdError):
    """A file is there and what it holds cannot be known."""


def prepare(directory: Path) -> str:
    """
    Make the directory and see that it can be written, or raise StateDirError in one line.

    A full disk is one line in the log, which is returned (empty: it can be written): the daemon still starts to report
    that, and leases are refused later.
    """
    import secrets

    probe = directory / f".probe-{secrets.token_hex(4)}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        try:
            probe.write_bytes(b"x")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in _FULL and directory.is_dir():
            log.error("%s", full := unstorable(directory, error))
            return full
        raise StateDirError(
            f"{directory}: cannot be written: {error.strerror}; make it writable or name another with --state-dir"
        ) from None
    return ""


def unstorable(path: Path, error: Exception) -> str:
    """Why no lease can be stored: the words of the log, of `/readyz`, and of the refusal of a lease."""
    remedy = "free some space" if isinstance(error, OSError) and error.errno in _FULL else "make it writable"
    return f"no lease can be stored: {path}: {words_of(error)}; {remedy}"


def save(path: Path, value: object, *, durable: bool) -> None:
    """
    Write a record as JSON in one step: readers see the old file or the new one.

    `durable` waits until the disk has it. Raises OSError (disk full, read-only): the caller decides what that means.
    """
    write_atomically(path, wire.encode(value), mode=0o600, durable=durable)


def read(path: Path, wanted: type[T]) -> T | None:
    """The record in a file; None when there is none, DamagedError when it is damaged or cannot be read."""
    try:
        return wire.decode(read_file(path, MAX_BYTES), wanted, what="content")
    except FileNotFoundError:
        return None
    except (OSError, BadInputError) as error:
        raise DamagedError(str(error)) from None


def load(path: Path, wanted: type[T]) -> T | None:
    """The record in a file; None when there is none, or when it was damaged (it is set aside and logged)."""
    try:
        return read(path, wanted)
    except DamagedError as error:
        aside = _aside(path)
        log.error("%s: cannot be used (%s); moved to %s, continuing without it", path, error, aside.name)
        with contextlib.suppress(OSError):
            path.replace(aside)
        return None


def copy_aside(path: Path) -> Path:
    """Copy a damaged file aside; it stays in its place too, so that a crash does not make it look missing."""
    aside = _aside(path)
    with contextlib.suppress(OSError):
        aside.unlink(missing_ok=True)
    try:
        aside.hardlink_to(path)
    except OSError:  # a folder, or a file system without hard links
        with contextlib.suppress(OSError):
            path.replace(aside)
    return aside


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def node_key(state_dir: Path) -> str:
    """The node's own key, made at the first start (64 hexadecimal digits, mode 0600); StateDirError in one line."""
    path = state_dir / "node.key"
    try:
        try:
            key = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            key = ""
        if len(key) == 64 and all(c in "0123456789abcdef" for c in key):
            return key
        if key:
            log.error("%s: contains no key; a new one is created, and an admin must accept it at the aggregator", path)
        import secrets

        key = secrets.token_hex(32)
        write_atomically(path, f"{key}\n".encode("ascii"), mode=0o600, durable=True)
    except (OSError, UnicodeDecodeError) as error:
        raise StateDirError(f"{path}: the node's key cannot be stored: {error}; repair it or remove it") from None
    return key


def boot_id(host_root: Path | None) -> str | None:
    """The id of this boot of the kernel; None where it cannot be read (then no evidence outlives the daemon)."""
    try:
        text = ((host_root or Path("/")) / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text or None


def host_name(host_root: Path | None) -> str | None:
    """The name by which the machine calls itself; None where it cannot be read."""
    if host_root is None:
        return socket.gethostname() or None
    try:
        with (host_root / "etc/hostname").open(encoding="utf-8") as file:
            return file.readline(256).strip() or None
    except (OSError, UnicodeDecodeError):
        return None
