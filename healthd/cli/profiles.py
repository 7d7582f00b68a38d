"""Profiles for people: the new folder of `healthd check --profile`, and the summary of its contents."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from healthd.core.errors import ConfigError

if TYPE_CHECKING:
    from healthd.node.settings import NodeSettings
    from healthd.node.state.saving import ProfileFolder

_LEAST_COUNT = 200
_LEAST_BYTES = 64 << 20


def new_folder(settings: NodeSettings, directory: Path | None) -> ProfileFolder:
    """A new folder for the profiles of this run: they are for a person, who removes them."""
    import time

    from healthd.node.state.saving import ProfileFolder

    wanted = directory or Path(time.strftime("healthd-profiles-%Y%m%dT%H%M%SZ", time.gmtime()))
    try:
        wanted.mkdir(parents=True, exist_ok=True, mode=0o700)
        if wanted.stat().st_uid != os.geteuid():
            raise ConfigError(f"{wanted}: belongs to another user; name a directory of your own with --profile-dir")
        if any(wanted.iterdir()):
            raise ConfigError(f"{wanted}: is not empty; name a new directory with --profile-dir")
    except OSError as error:
        raise ConfigError(f"{wanted}: cannot be created: {error.strerror}; name another with --profile-dir") from None
    kept = settings.profiles  # of the daemon, which may keep none
    count, max_bytes = max(kept.count, _LEAST_COUNT), max(kept.max_bytes, _LEAST_BYTES)
    return ProfileFolder(wanted, dataclasses.replace(kept, count=count, max_bytes=max_bytes))


def show_profiles(profiles: ProfileFolder, *, everything: bool) -> None:
    """
    Each profile with its file and its sentence, on standard error: the output may be for a program.

    `everything` that is timed was to be profiled; else what is slow.
    """
    kept = profiles.records()
    for record in reversed(kept):
        click.echo(f"{profiles.trace(record.id)}: {record.target}: {record.said}", err=True)
    if not kept:
        why = "no probe of a device was timed" if everything else "no probe was slow (--profile profiles all)"
        click.echo(f"healthd: nothing was profiled: {why}, or profiling is not possible here", err=True)
