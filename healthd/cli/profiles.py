"""Profiles for a person: the new folder that `healthd check --profile` puts them in, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from healthd.core.errors import ConfigError

if TYPE_CHECKING:
    from healthd.node.settings import NodeSettings
    from healthd.node.state.profiles import ProfileFolder


def new_folder(settings: NodeSettings, directory: Path | None) -> ProfileFolder:
    """A new folder for the profiles of this run: they are for a person, who removes them."""
    import time

    from healthd.node.state.profiles import ProfileFolder

    wanted = directory or Path(time.strftime("healthd-profiles-%Y%m%dT%H%M%SZ", time.gmtime()))
    try:
        wanted.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(wanted.iterdir()):
            raise ConfigError(f"{wanted}: is not empty; name a new directory with --profile-dir")
    except OSError as error:
        raise ConfigError(f"{wanted}: cannot be made: {error.strerror}; name another with --profile-dir") from None
    return ProfileFolder(wanted, settings.profiles)


def show_profiles(profiles: ProfileFolder) -> None:
    """Each profile with its file and its sentence, on standard error: the output may be for a program."""
    kept = profiles.records()
    for record in reversed(kept):
        click.echo(f"{profiles.trace(record.id)}: {record.target}: {record.said}", err=True)
    if not kept:
        click.echo("healthd: nothing was profiled: no probe of a device was timed, or none can be here", err=True)
