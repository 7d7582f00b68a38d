"""
Files that decide what runs here, whom to believe and who may ask: only root and this user may be able to change them.

A settings file names programs that are run, often as root; a token table or a CA file decides who is trusted. A file
that any user can write gives every user that power.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from healthd.core.errors import ConfigError, words_of

_ALL_UIDS = 2**32 - 1  # of the initial namespace; -1 is no user


def check_file(file: Path, what: str, *, owner: bool = True) -> None:
    """
    ConfigError where others than root and this user can change a file, or put another one in its place.

    That is: everybody may write it or a directory on the way to it (one with the sticky bit lets nobody replace what
    is another's), or, with `owner`, it belongs to another user. Nothing is said of a file that is not there, of a
    device or a pipe, nor of an owner who is not told here. What a mount makes read-only nobody can write.
    """
    try:
        status = file.stat()
    except OSError:
        return  # who reads it says what is wrong
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return
    if status.st_mode & stat.S_IWOTH and not _read_only(file):
        raise ConfigError(f"{file}: everyone can write this {what}; run: chmod o-w {file}")
    foreign = status.st_uid not in (0, os.geteuid()) and not _is_unmapped(status.st_uid)
    if owner and foreign and not _read_only(file):
        to = "root" if os.geteuid() == 0 else _name(os.geteuid())
        raise ConfigError(
            f"{file}: this {what} belongs to user {_name(status.st_uid)}, who can change it; run: chown {to} {file}"
        )
    for folder in _folders(file):
        try:
            mode = folder.stat().st_mode
        except OSError:
            continue  # a way by name only: links lead past it (`link/../file`)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not _read_only(folder):
            raise ConfigError(
                f"{file}: everyone can replace this {what} because everyone can write {folder}; run: chmod o-w {folder}"
            )


def check_folder(folder: Path, what: str, *, ending: str) -> None:
    """The same of a directory and of its files with that ending; a sticky bit does not keep anybody from adding one."""
    check_file(folder, f"directory of {what}s")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.endswith(ending):
            check_file(folder / name, what)


def _folders(file: Path) -> Iterator[Path]:
    """The directories through which a file is reached, by its name and by what its links lead to."""
    try:
        ways = {Path(os.path.abspath(file)), file.resolve()}
        yield from sorted({parent for way in ways for parent in way.parents}, key=lambda one: (-len(one.parts), one))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{file}: cannot be resolved: {words_of(error)}") from None


def _read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _is_unmapped(uid: int) -> bool:
    """
    Whether this stands for users that this user namespace does not know: the host's root, as a rootless container sees.

    Source: user_namespaces(7), "Unmapped user and group IDs".
    """
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    except (OSError, ValueError, IndexError):
        return False
    return uid == overflow and mapped < _ALL_UIDS


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
