"""What the job's command is given when the hook becomes it: its number, its peers, clean signals and files."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from checks.printable import printable_line
from healthd.core.errors import ConfigError
from healthd.hooks.launchers import Place
from healthd.hooks.preflight import Outcome

_PID_FILE = re.compile(r"(.*-)(\d+)\.txt")


def environment_of(place: Place, outcome: Outcome, environ: Mapping[str, str]) -> dict[str, str]:
    """The command's environment: its number among the admitted, and the launcher's own variables to match."""
    environment = dict(environ)
    rank, size, main = outcome.rank or 0, outcome.size or 1, outcome.main or place.main
    environment.update(HEALTHD_RANK=str(rank), HEALTHD_NNODES=str(size), HEALTHD_MAIN=main)
    if place.source == "torchrun":
        from healthd.hooks.launchers import torchrun

        environment.update(torchrun.renumber(environ, rank=rank, size=size, main=main))
    environment["HEALTHD_HOSTFILE"] = str(write_hostfile(outcome.hosts))
    return environment


def write_hostfile(hosts: tuple[str, ...], *, folder: Path | None = None) -> Path:
    """
    The admitted, one a line, in a file named by this process, which is about to become the command.

    Nobody can remove it when the command ends, so those of processes that are gone are removed here. A folder may be
    shared by hosts and by containers, in which the same number is another process: their files stay.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"healthd-hosts-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or folder.is_symlink():
            folder = Path(tempfile.mkdtemp(prefix="healthd-hosts-"))
        here = f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-".replace("/", "_")
        for old in folder.iterdir():
            match = _PID_FILE.fullmatch(old.name)
            if match and match[1] == here and not Path(f"/proc/{match[2]}").exists():
                with contextlib.suppress(FileNotFoundError):
                    old.unlink()
        file = folder / f"{here}{os.getpid()}.txt"
        file.write_text("".join(f"{printable_line(host)}\n" for host in hosts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: the host file cannot be written: {error.strerror}; set TMPDIR") from None
    return file


def become(command: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    """Never returns: the hook becomes the command. ConfigError when it cannot be started."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would forget one that comes just now
    # Python ignores these, and what is ignored stays so over exec: a pipe's end would no longer end a job's commands.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, dict(environment))  # noqa: S606 - the hook becomes the job's command
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be started: {error.strerror}") from None
