"""
`healthd record`: this machine's readings as a directory that `--host-root` replays. `healthd bundle`: the same
redacted, with the daemon's state and the doctor's findings, as one archive for a support case. Nothing that fails to be
read keeps the rest from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import os
import re
import socket
import stat
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from checks.accelerators import descriptors
from checks.host.machine import Host
from checks.json_text import parse_json
from checks.printable import printable
from healthd import __version__
from healthd.cli.settings.options import common_options, load_settings, load_usable_settings
from healthd.cli.settings.tree import Settings
from healthd.core.bounded import read_file
from healthd.core.errors import ConfigError, HealthdError, OutputError, words_of
from healthd.core.pseudonyms import Redactor

# All together; the slowest is the probe interpreter that imports torch.
DEADLINE_SECONDS = 60.0
MACHINE_SECONDS = 45.0
TOOL_SECONDS = 10.0
PROBE_SECONDS = 20.0
MAX_FILE_BYTES = 4 << 20
MAX_TAIL_BYTES = 256 << 10
MAX_KERNEL_LINES = 1000
MAX_PROFILES = 5  # the newest; each is read value by value
MAX_LOGS = 3

# What a bundle has of all machines. What it has of a kind of device is in the descriptor of the kind.
# Lines of the kernel that say something of the accelerators' network and the machine's own faults.
KERNEL_WORDS = (
    r"\befa\b|infiniband|rdma|hardware error|\bmce\b|edac|ecc|\baer\b|pcie|"
    r"out of memory|oom|hung task|blocked for more than|segfault|i/o error|link (?:is )?(?:up|down)|nvme|iommu"
)
MODULES = ("efa", "ib_core")
PACKAGES = ("torch", "grpcio", "httpx")
# Of what a program says the beginning is kept, so the lines are counted where they are written.
JOURNAL = ("journalctl", "-u", "healthd-node", "-u", "healthd-boot", "-n", "1000", "--no-pager", "-o", "short-iso")
NCCOM_LOGS = ("/tmp", "nccom_test_log_*")  # it leaves them there, for people

MACHINE = "machine"
NOT_REDACTABLE = frozenset({f"{MACHINE}/proc/net/if_inet6"})  # addresses in a form that no pattern knows

_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[^\s\"'\\]+", re.IGNORECASE)
_SERVERS = re.compile(r"(?:^|\s)(?://(?=[\w.-]+/)|(?=[\w.-]+:/))([a-z][\w.-]*)", re.IGNORECASE | re.MULTILINE)
"""Of file systems on the network: `server:/path`, `//server/share`."""

Source = Callable[[], Any]
"""Gives the content of one file: text, or JSON values."""


class NoLogError(HealthdError):
    """A log that cannot be had; the text says why."""


@click.command(short_help="Record what checks read on this machine.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--no-tools", is_flag=True, help="Do not run the vendors' tools.")
@click.option("--json", "as_json", is_flag=True, help="Print only JSON.")
@common_options
def record(directory: Path, no_tools: bool, as_json: bool, **options: Any) -> int:
    """
    Record what checks read on this machine into DIRECTORY, which must not exist yet; only you can read it.

    'healthd check --tier passive --host-root DIRECTORY' then gives the same findings. No environment, command line or
    mount password is recorded; host names and addresses are. Run as root to record everything.
    """
    from healthd.cli.support.recording import record as record_machine

    settings = load_settings(options, section="node")
    made = record_machine(Host(settings.node.host_root), directory, tools=not no_tools)
    if as_json:
        said = {"directory": str(directory), "files": made.files, "bytes": made.bytes, "left_out": made.left_out}
        sys.stdout.write(json.dumps(said) + "\n")
        return 0
    click.echo(f"{directory}: {made.files} files, {made.bytes / 1e6:.1f} MB")
    for path, why in made.left_out.items():
        click.echo(f"left out: {path}: {why}")
    return 0


@click.command()
@common_options
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="The archive (default: a new one here)."
)
@click.option("--no-redact", is_flag=True, help="Keep names, addresses and secrets.")
def bundle(output: Path | None, no_redact: bool, **options: Any) -> int:
    """
    Collect a redacted archive (tar.gz) for a support case.

    It contains state, recent results, settings, logs, versions, the newest profiles of slow probes, and a record of the
    machine with the kernel's lines about devices and the vendors' tools, with or without a running daemon. The instance
    id stays in it, because the vendor needs it. Read its README.txt before you send it.

    Exit code: 0 if it was written, even if the settings are broken or some sources could not be read (README.txt lists
    them).
    """
    from healthd.cli.terminal.render import busy

    settings, trouble = load_usable_settings(options, section="node")
    if trouble is not None:
        click.echo(f"healthd: {trouble}; continuing with other settings, mostly defaults", err=True)
    path = output or Path(time.strftime("healthd-bundle-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    try:
        # Only for its owner; and never over another file.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; name another with --output") from None
    try:
        with (
            os.fdopen(descriptor, "wb") as file,
            tempfile.TemporaryDirectory(prefix="healthd-bundle-", ignore_cleanup_errors=True) as folder,
        ):
            machine = Path(folder) / MACHINE
            with busy("collecting state, settings, the machine's readings and tools' outputs"):
                found, failed = collect(sources(settings, machine), DEADLINE_SECONDS)
            for place, why in (found.pop(MACHINE, None) or {}).items():
                failed[f"{MACHINE}{place}"] = why
            found.update(recorded_texts(machine))
            if trouble is not None:
                failed["effective settings"] = (
                    f"{trouble}; everything else was collected with other settings, mostly defaults"
                )
            redactor = Redactor(hosts=hosts_of(settings, found), versions=versions_of(found), off=no_redact)
            files = render(found, failed, redactor, redacted=not no_redact)
            _write(file, files, machine)
    except BaseException as error:
        path.unlink(missing_ok=True)  # half an archive, or none, is nothing to send
        if isinstance(error, OSError):
            text = f"{path}: cannot be written: {words_of(error)}; name another with --output"
            raise OutputError(text) from None
        raise
    click.echo(f"{path}: {len(found)} files" + (f"; not available: {', '.join(sorted(failed))}" if failed else ""))
    return 0


# --- what goes into a bundle ------------------------------------------------------------------------------------------


def sources(settings: Settings, machine: Path) -> dict[str, Source]:
    """
    File name -> what gives its content: text, or JSON values. Each raises OSError, HealthdError or ValueError.
    `MACHINE` records the machine into its folder, and gives what was left out.
    """
    from healthd.cli.support.recording import record as record_machine
    from healthd.node.state.saving import ProfileFolder

    host = Host(settings.node.host_root)
    state_dir = settings.node.state_dir
    profiles = ProfileFolder(state_dir / "profiles", settings.node.profiles)
    newest = [record.id for record in profiles.records()[:MAX_PROFILES]]
    return {
        "state.json": lambda: _state(settings),
        "results-saved.json": lambda: _json_file(state_dir / "state.json"),
        "orders.json": lambda: _json_file(state_dir / "orders.json"),
        "profiles.json": lambda: [dataclasses.asdict(record) for record in profiles.records()],
        **{f"profiles/{name}.trace.json": functools.partial(_trace, profiles.trace(name)) for name in newest},
        "settings.json": lambda: _config(settings),
        "schedulers.json": lambda: _schedulers(settings),
        "doctor.json": lambda: _doctor(settings),
        "instance.json": lambda: _instance(host),
        "versions.json": lambda: _healthd_versions(host, settings),
        "journal.txt": lambda: journal(host, TOOL_SECONDS),
        "nccom-logs.txt": lambda: nccom_logs(host, MAX_TAIL_BYTES),
        MACHINE: lambda: record_machine(host, machine, seconds=MACHINE_SECONDS).left_out,
    }


def collect(wanted: Mapping[str, Source], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """What could be read in time, and why the rest could not."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def read(name: str) -> None:
        try:
            found[name] = wanted[name]()
        except (OSError, HealthdError, ValueError) as error:
            failed[name] = " ".join(str(error).split()) or type(error).__name__
        except Exception as error:  # noqa: BLE001 - the others are still worth having
            failed[name] = f"internal error: {type(error).__name__}: {error}"

    threads = [threading.Thread(target=read, args=(name,), daemon=True) for name in wanted]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = [name for name in wanted if name not in found and name not in failed]
    return dict(found), {**failed, **dict.fromkeys(late, f"was not read within {seconds:g} s")}


def recorded_texts(machine: Path) -> dict[str, str]:
    """The files of the record, as far as it has come; of the kernel's lines those that may tell of a fault."""
    found = {}
    for path in sorted(machine.rglob("*")):
        if not path.is_symlink() and path.is_file() and _is_readable(path):
            found[f"{MACHINE}/{path.relative_to(machine)}"] = path.read_text(encoding="utf-8", errors="replace")
    log = f"{MACHINE}/dev/kmsg"
    if log in found:
        words = [one.kernel_words for one in descriptors() if one.kernel_words is not None]
        telling = re.compile("|".join((*words, KERNEL_WORDS)), re.IGNORECASE)
        kept = [line for line in found[log].splitlines() if telling.search(line) and "ommand line:" not in line]
        found[log] = "\n".join(kept[-MAX_KERNEL_LINES:]) + "\n"
    return found


def _is_readable(path: Path) -> bool:
    """Whether it could be read on the machine; for root the recorded file can be in any case."""
    return bool(path.stat().st_mode & 0o777)


def _state(settings: Settings) -> Any:
    from healthd.core import wire
    from healthd.node.http.control_socket import node_state

    return wire.plain(node_state(settings.control_socket()))


def _trace(path: Path) -> Any:
    """A profile as the values that it holds, so that names in it can be told apart."""
    with gzip.open(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; it is in the state directory")
    return parse_json(content)


def _json_file(path: Path) -> Any:
    return parse_json(_head(path))


def _config(settings: Settings) -> Any:
    """The file as it was read, and which variables set something: their values are not ours to tell."""
    from healthd.core.config import parse_toml

    variables = sorted(name for name in os.environ if name.startswith("HEALTHD_"))
    file = settings.file
    # A date in it, which JSON does not have, becomes text.
    content = parse_json(json.dumps(parse_toml(_head(file)), default=str)) if file is not None else None
    return {"file": None if file is None else str(file), "content": content, "variables": variables}


def _schedulers(settings: Settings) -> Any:
    import asyncio

    from healthd.node.clock import system_clock
    from healthd.node.occupancy.occupancy import Schedulers

    found = asyncio.run(Schedulers(settings.node.allocations, settings.node.host_root, clock=system_clock()).look())
    return dataclasses.asdict(found)


def _doctor(settings: Settings) -> Any:
    from healthd.cli.support.doctor import examine

    probe = dataclasses.replace(settings.probe, start_seconds=min(settings.probe.start_seconds, PROBE_SECONDS))
    return [dataclasses.asdict(item) for item in examine(dataclasses.replace(settings, probe=probe))]


def _instance(host: Host) -> Any:
    from checks.host.identity import read_identity

    # The tables of the firmware and the metadata service, as for every survey.
    return read_identity(host)


def _healthd_versions(host: Host, settings: Settings) -> Any:
    """Those of this interpreter and of the one that probes: a torch may be in either."""
    from healthd.cli.warm import ask_packages

    python = settings.probe.python or Path(sys.executable)
    found: dict[str, Any] = {"healthd": __version__, "python": sys.version.split()[0]}
    found["probe"] = {"python": str(python), **ask_packages(python, PROBE_SECONDS)}
    for name in (*PACKAGES, *(name for one in descriptors() for name in one.python_packages)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    modules = dict[str, str | None]()
    for name in (*(name for one in descriptors() for name in one.kernel_modules), *MODULES):
        try:
            modules[name] = host.read(f"/sys/module/{name}/version").strip()
        except OSError:
            modules[name] = None
    return {**found, "kernel_module_versions": modules}


def journal(host: Host, seconds: float) -> str:
    """The daemon's own last lines, as far as this host's systemd has them. Raises HostError and NoLogError."""
    if host.root is not None and not host.exists("/bin/journalctl"):
        raise NoLogError("the journal here belongs to this host, but --host-root names another machine")
    done = host.run(JOURNAL, timeout_seconds=seconds)
    return done.stdout if done.returncode == 0 else f"{done.stdout}\n(exit code {done.returncode})\n{done.stderr}"


def nccom_logs(host: Host, max_bytes: int) -> str:
    """The ends of nccom-test's newest logs, newest first, each at most `max_bytes`. Raises HostError."""
    found = []
    for path in host.glob(*NCCOM_LOGS):
        with contextlib.suppress(OSError):  # it is gone
            found.append((os.lstat(host.path(path)).st_mtime, path))
    kept: list[str] = []
    for _, path in sorted(found, reverse=True):
        text = _end_of(host.path(path), max_bytes) if len(kept) < MAX_LOGS else None
        if text is not None:
            kept.append(f"--- {path}\n{text}\n")
    return "".join(kept) or "(empty)\n"


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


def _head(path: Path) -> str:
    return read_file(path, MAX_FILE_BYTES).decode("utf-8", "replace")


# --- the archive ------------------------------------------------------------------------------------------------------


def hosts_of(settings: Settings, found: Mapping[str, Any]) -> Iterator[str]:
    """Names of this host and of those it speaks to."""
    from urllib.parse import urlsplit

    yield socket.gethostname()
    with contextlib.suppress(OSError):
        yield Host(settings.node.host_root).host_name()
    yield settings.node.name
    yield from settings.node.aliases
    # Of the file too, such as the database: not all of it is settings of this command.
    urls = _URL.findall(json.dumps(found.get("settings.json")))
    for url in (*settings.node.sync.aggregators, *settings.gate.aggregator.split(","), *urls):
        with contextlib.suppress(ValueError):
            yield urlsplit(url).hostname or ""
    for line in found.get(f"{MACHINE}/etc/hosts", "").splitlines():
        yield from line.split("#")[0].split()[1:]
    for name in ("etc/fstab", "proc/self/mountinfo"):
        yield from _SERVERS.findall(found.get(f"{MACHINE}/{name}", ""))
    state = found.get("state.json")
    if isinstance(state, dict):
        yield str(state.get("node") or "")
        yield from (str(alias) for alias in state.get("aliases") or ())


def versions_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Texts whose dotted numbers are versions."""
    state = found.get("state.json")
    if isinstance(state, dict):
        yield json.dumps(state.get("versions"))
    packages = [name for name in found if name.startswith((f"{MACHINE}/var/lib/dpkg/", f"{MACHINE}/bin/rpm."))]
    for name in ("versions.json", *packages):
        yield re.sub(r"[-+~_\s]", " ", json.dumps(found.get(name)).replace("\\n", " "))


def render(
    found: Mapping[str, Any], failed: Mapping[str, str], redactor: Redactor, *, redacted: bool
) -> dict[str, str]:
    """File name -> text, README first. Nothing of `found` gets past the redactor."""
    for value in found.values():
        redactor.learn(value if isinstance(value, str) else json.dumps(value))
    files: dict[str, str] = {}
    for name in sorted(found):
        if redacted and name in NOT_REDACTABLE:
            continue
        value, of_tool = found[name], name.startswith(f"{MACHINE}/bin/")
        if isinstance(value, str) and name.endswith((".json", ".out")):
            value = _parsed(value)
        # What a tool streamed is one line for each reading.
        text = value if isinstance(value, str) else json.dumps(redactor.plain(value), indent=None if of_tool else 1)
        files[name] = printable(redactor.text(value) if isinstance(value, str) else text + "\n")
    left_out = {name: redactor.text(why) for name, why in sorted(failed.items())}
    return {"README.txt": _readme(files, left_out, redactor, redacted=redacted), **files}


def _parsed(text: str) -> Any:
    """JSON as values, so that members can be told apart; the text where it is none."""
    try:
        value = parse_json(text)
    except ValueError:
        # Whoever wrote half a document may have written a command line in it.
        return re.sub(r'("(?:command|cmdline)"\s*:\s*)"[^"]*"?', r'\1"(removed)"', text)
    return value if isinstance(value, dict | list) else text


def _readme(files: Mapping[str, str], failed: Mapping[str, str], redactor: Redactor, *, redacted: bool) -> str:
    counts = "".join(f"  {number:6} {kind}\n" for kind, number in sorted(redactor.counts.items()))
    removed = (
        "Removed: tokens and other secrets, values of environment variables, command lines, user names.\n"
        "Replaced by pseudonyms, the same throughout this archive: ARNs and account ids, network resources, host\n"
        "names, IP and MAC addresses. Kept: the instance id, device serials, labels, names of jobs, pods, programs.\n"
        f"How often:\n{counts or '       0 of anything' + chr(10)}"
        if redacted
        else "Written with --no-redact: names, addresses and secrets are in it.\n"
    )
    own = {name: text for name, text in files.items() if not name.startswith(f"{MACHINE}/")}
    listed = "".join(f"  {name} ({len(text.encode())} bytes)\n" for name, text in own.items())
    listed += f"  {MACHINE}/ ({len(files) - len(own)} files): for healthd check --tier passive --host-root {MACHINE}\n"
    missing = "".join(f"  {name}: {why}\n" for name, why in failed.items())
    return (
        f"healthd {__version__}: a bundle for a support case\n\n{removed}\nFiles:\n{listed}\nNot available:\n"
        f"{missing or '  (nothing)' + chr(10)}"
    )


def _write(file: Any, files: Mapping[str, str], machine: Path) -> None:
    """The files, and what else the record of the machine has: folders, links, programs, files not to be read."""
    now, top = int(time.time()), machine.parent
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for path in sorted(machine.rglob("*")):
            entry = tarfile.TarInfo(f"healthd-bundle/{path.relative_to(top)}")
            entry.mode, entry.mtime = 0o700, now
            if path.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
            elif path.is_dir():
                entry.type = tarfile.DIRTYPE
            elif _is_readable(path):
                continue
            else:
                entry.mode = 0
            archive.addfile(entry)
        for name, text in files.items():
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"healthd-bundle/{name}")
            runs = name.startswith(f"{MACHINE}/") and os.access(top / name, os.X_OK)
            entry.size, entry.mode, entry.mtime = len(content), 0o700 if runs else 0o600, now
            archive.addfile(entry, io.BytesIO(content))
