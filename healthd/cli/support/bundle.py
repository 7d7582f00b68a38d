"""`healthd bundle`: one redacted archive for a support case. Nothing that fails to be read keeps the rest from it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gzip
import io
import ipaddress
import json
import os
import re
import socket
import stat
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from checks.accelerators import descriptors
from checks.host.machine import Host
from checks.json_text import parse_json
from checks.printable import printable
from healthd import __version__
from healthd.cli.settings.options import common_options, load_usable_settings
from healthd.cli.settings.tree import Settings
from healthd.core.bounded import read_file
from healthd.core.errors import ConfigError, HealthdError, OutputError, words_of
from healthd.core.redaction import GONE, is_secret_name, redact

# Reads all sources of a bundle within a time, and finds in them what names hosts and versions.


_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[^\s\"'\\]+", re.IGNORECASE)

Source = Callable[[], Any]
"""Gives the content of one file: text, or JSON values."""


def collect(wanted: Mapping[str, Source], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """What could be read in time, and why the rest could not. Tools run one after the other, beside the rest."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    tools = [name for name in wanted if name.startswith("tools/")]
    rows = [[name] for name in wanted if name not in tools] + [tools]

    def read(names: list[str]) -> None:
        for name in names:
            try:
                found[name] = wanted[name]()
            except (OSError, HealthdError, ValueError) as error:
                failed[name] = " ".join(str(error).split()) or type(error).__name__
            except Exception as error:  # noqa: BLE001 - the others are still worth having
                failed[name] = f"internal error: {type(error).__name__}: {error}"

    threads = [threading.Thread(target=read, args=(names,), daemon=True) for names in rows]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = [name for name in wanted if name not in found and name not in failed]
    return dict(found), {**failed, **dict.fromkeys(late, f"was not read within {seconds:g} s")}


def hosts_of(settings: Settings, found: Mapping[str, Any]) -> Iterator[str]:
    """Names of this host and of those it speaks to."""
    from urllib.parse import urlsplit

    from checks.host.machine import Host

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
    state = found.get("state.json")
    if isinstance(state, dict):
        yield str(state.get("node") or "")
        yield from (str(alias) for alias in state.get("aliases") or ())


def versions_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Texts whose dotted numbers are versions."""
    state = found.get("state.json")
    if isinstance(state, dict):
        yield json.dumps(state.get("versions"))
    for name in ("versions.json", "tools/packages-dpkg.txt", "tools/packages-rpm.txt"):
        yield re.sub(r"[-+~_\s]", " ", json.dumps(found.get(name)))


# Logs for `healthd bundle`: the daemon's own last lines, and those that nccom-test leaves behind.


# Of what a program says the beginning is kept, so the lines are counted where they are written.
JOURNAL = ("journalctl", "-u", "healthd-node", "-u", "healthd-boot", "-n", "1000", "--no-pager", "-o", "short-iso")
NCCOM_LOGS = ("/tmp", "nccom_test_log_*")  # it leaves them there, for people
MAX_LOGS = 3


class NoLogError(HealthdError):
    """A log that cannot be had; the text says why."""


def journal(host: Host, seconds: float) -> str:
    """As far as this host's systemd has it. Raises HostError and NoLogError."""
    if host.root is not None and not host.exists("/bin/journalctl"):
        raise NoLogError("the journal here belongs to this host, but --host-root names another machine")
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


# Bundles without what is nobody's business: names of people and networks become stable pseudonyms, secrets go. Pure.


# Members whose values are commands, or the environment, of whoever runs here.
_COMMANDS = frozenset({"command", "cmdline", "argv", "args", "arguments", "env", "environ", "environment"})
_NAMES = frozenset({"instance_name", "tags"})
_ARN = re.compile(r"\barn:aws[\w-]*:[^\s\"',;)\]}]+")
_ACCOUNTS = (
    re.compile(r"\barn:aws[\w-]*:[\w-]*:[\w-]*:(\d{12})\b"),
    re.compile(r"\b(\d{12})\.dkr\.ecr"),
    re.compile(r"(?i)account[_ -]?(?:id)?[\"']?\s*[:=]\s*[\"']?(\d{12})\b"),
)
_RESOURCE = re.compile(r"\b(subnet|vpc|eni|sg|vol|lt|eipalloc)-[0-9a-f]{8,17}\b")
_DNS = re.compile(
    r"\b(?:ip-\d+-\d+-\d+-\d+|[a-z0-9][\w-]*(?:\.[\w-]+)*\.(?:internal|local|amazonaws\.com))\b(?:\.[\w.-]+\b)?",
    re.IGNORECASE,
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])")
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", re.IGNORECASE)
_HOME = re.compile(r"(?<=/home/)[^/\s\"']+|(?<=/Users/)[^/\s\"']+|(?<=/fsx/)[^/\s\"']+")
_VERSION = re.compile(r"(?i)(?:version|driver|release|neuronx[\w-]*)\W{1,4}v?(\d+(?:\.\d+){3})(?![\d.]*\w*[/:]\d)")


class Redactor:
    """
    Replaces within one bundle: the same thing gets the same pseudonym everywhere, `host-1`, `ip-2`.

    `hosts` are names to be replaced wherever they stand as words; `versions` are texts in which dotted numbers are
    versions, not addresses. With `off` nothing is changed.
    """

    def __init__(self, *, hosts: Iterable[str] = (), versions: Iterable[str] = (), off: bool = False) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._off = off
        self._names: dict[tuple[str, str], str] = {}
        self._numbers: collections.Counter[str] = collections.Counter()
        self._accounts: set[str] = set()
        self._versions = {match for text in versions for match in _IPV4.findall(text)}
        named = {name for each in hosts for name in (each, each.partition(".")[0]) if _is_telling(name)}
        longest_first = sorted(named, key=lambda name: (-len(name), name))
        words = "|".join(re.escape(name) for name in longest_first)
        self._hosts = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE) if words else None

    def learn(self, text: str) -> None:
        """Note the accounts and versions that a text shows, before anything is replaced."""
        for pattern in _ACCOUNTS:
            self._accounts.update(pattern.findall(text))
        self._versions.update(_VERSION.findall(text))

    def text(self, text: str) -> str:
        """A text without what must not leave."""
        if self._off:
            return text
        text = redact(text, lambda: self._gone("secrets"))
        text = _ARN.sub(lambda match: self._as("arn", match[0]), text)
        for account in sorted(self._accounts):
            text = re.sub(rf"(?<!\d){account}(?!\d)", lambda match: self._as("account", match[0]), text)
        text = _RESOURCE.sub(lambda match: self._as(match[1], match[0]), text)
        text = _DNS.sub(lambda match: self._as("host", match[0]), text)
        if self._hosts is not None:
            text = self._hosts.sub(lambda match: self._as("host", match[0]), text)
        text = _MAC.sub(lambda match: self._as("mac", match[0]), text)
        text = _IPV4.sub(self._ip, text)
        text = _IPV6.sub(self._ip, text)
        return _HOME.sub(lambda match: self._as("user", match[0]), text)

    def plain(self, value: Any) -> Any:
        """The same of JSON values: texts are cleaned, and members that hold commands or secrets emptied."""
        if self._off:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._member(str(key), inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(inner) for inner in value]
        return value

    def _member(self, key: str, value: Any) -> Any:
        if value in (None, "", [], {}) or isinstance(value, bool):
            return value
        if key.lower() in _COMMANDS:
            return self._gone("commands")
        if key.lower() in _NAMES:
            return self._gone("names")
        if is_secret_name(key):
            return self._gone("secrets")
        return self.plain(value)

    def _gone(self, kind: str) -> str:
        self.counts[kind] += 1
        return GONE

    def _as(self, kind: str, value: str) -> str:
        self.counts[kind] += 1
        key = (kind, value.lower())
        if key not in self._names:
            self._numbers[kind] += 1
            self._names[key] = f"{kind}-{self._numbers[kind]}"
        return self._names[key]

    def _ip(self, match: re.Match[str]) -> str:
        """An address by its pseudonym; what every machine has, and versions, as they are."""
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        metadata = ipaddress.ip_address("169.254.169.254")
        if address.is_loopback or address.is_unspecified or address == metadata or match[0] in self._versions:
            return match[0]
        return self._as("ip", match[0])


def _is_telling(name: str) -> bool:
    """Whether a name tells anything of its owner: an instance id is needed, and `localhost` is everybody's."""
    return len(name) > 1 and name != "localhost" and not re.fullmatch(r"i-[0-9a-f]{8,17}|\d+", name)


# All together; the slowest is the probe interpreter that imports torch.
DEADLINE_SECONDS = 60.0
TOOL_SECONDS = 10.0
PROBE_SECONDS = 20.0
MAX_FILE_BYTES = 4 << 20
MAX_TAIL_BYTES = 256 << 10
MAX_KERNEL_LINES = 1000
MAX_PROFILES = 5  # the newest; each is read value by value

# What a bundle has of all machines. What it has of a kind of device is in the descriptor of the kind.
# Lines of the kernel that say something of the accelerators' network and the machine's own faults.
KERNEL_WORDS = (
    r"\befa\b|infiniband|rdma|hardware error|\bmce\b|edac|ecc|\baer\b|pcie|"
    r"out of memory|oom|hung task|blocked for more than|segfault|i/o error|link (?:is )?(?:up|down)|nvme|iommu"
)
SYSTEM_PACKAGES = ("efa*", "libfabric*", "openmpi*")
MODULES = ("efa", "ib_core")
PACKAGES = ("torch", "grpcio", "httpx")


def tools() -> dict[str, tuple[str, ...]]:
    """File name -> command. They run one after the other: Neuron's failed when several asked the driver at once."""
    patterns = (*(name for one in descriptors() for name in one.system_packages), *SYSTEM_PACKAGES)
    return {
        **{name: command for one in descriptors() for name, command in one.support_tools.items()},
        "fi_info.txt": ("fi_info", "-p", "efa"),
        "packages-dpkg.txt": ("dpkg-query", "-W", *patterns),
        "packages-rpm.txt": ("rpm", "-qa", *patterns),
    }


@click.command()
@common_options
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="The archive (default: a new one here)."
)
@click.option("--no-redact", is_flag=True, help="Redact nothing: keep names, addresses, command lines and secrets.")
def bundle(output: Path | None, no_redact: bool, **options: Any) -> int:
    """
    Collect a redacted archive (tar.gz) for a support case.

    It contains state, recent results, settings, kernel lines, logs, tools' outputs, versions and the newest profiles of
    slow probes, with or without a running daemon. The instance id stays in it, because the vendor needs it. Read its
    README.txt before you send it.

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
        with os.fdopen(descriptor, "wb") as file:
            with busy("collecting state, settings, kernel lines and tools' outputs"):
                found, failed = collect(sources(settings), DEADLINE_SECONDS)
            if trouble is not None:
                failed["effective settings"] = (
                    f"{trouble}; everything else was collected with other settings, mostly defaults"
                )
            redactor = Redactor(hosts=hosts_of(settings, found), versions=versions_of(found), off=no_redact)
            _write(file, render(found, failed, redactor, redacted=not no_redact))
    except BaseException as error:
        path.unlink(missing_ok=True)  # half an archive, or none, is nothing to send
        if isinstance(error, OSError):
            text = f"{path}: cannot be written: {words_of(error)}; name another with --output"
            raise OutputError(text) from None
        raise
    click.echo(f"{path}: {len(found)} files" + (f"; not available: {', '.join(sorted(failed))}" if failed else ""))
    return 0


# --- what goes in -----------------------------------------------------------------------------------------------------


def sources(settings: Settings) -> dict[str, Source]:
    """File name -> what gives its content: text, or JSON values. Each raises OSError, HealthdError or ValueError."""
    from checks.host.machine import Host
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
        "kernel.txt": lambda: _kernel(host),
        "instance.json": lambda: _instance(host),
        "versions.json": lambda: _healthd_versions(host, settings),
        "journal.txt": lambda: journal(host, TOOL_SECONDS),
        "nccom-logs.txt": lambda: nccom_logs(host, MAX_TAIL_BYTES),
        **{f"tools/{name}": functools.partial(_tool, host, argv) for name, argv in tools().items()},
        **{
            f"tools/{name}": functools.partial(host.first_line, argv, timeout_seconds=TOOL_SECONDS)
            for one in descriptors()
            for name, argv in one.support_streams.items()
        },
    }


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


def _kernel(host: Any) -> str:
    lines = [f"[{'?' if seconds is None else seconds}] {text}" for seconds, text in host.kernel_log()]
    words = [one.kernel_words for one in descriptors() if one.kernel_words is not None]
    telling = re.compile("|".join((*words, KERNEL_WORDS)), re.IGNORECASE)
    kept = [line for line in lines if telling.search(line) and "ommand line:" not in line]
    return "\n".join(kept[-MAX_KERNEL_LINES:]) + "\n"


def _instance(host: Any) -> Any:
    from checks.host.identity import read_identity

    # The tables of the firmware and the metadata service, as for every survey.
    return read_identity(host)


def _healthd_versions(host: Any, settings: Settings) -> Any:
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
    modules = {}
    for name in (*(name for one in descriptors() for name in one.kernel_modules), *MODULES):
        try:
            modules[name] = host.read(f"/sys/module/{name}/version").strip()
        except OSError:
            modules[name] = None
    return {**found, "kernel_module_versions": modules}


def _tool(host: Any, argv: tuple[str, ...]) -> str:
    done = host.run(argv, timeout_seconds=TOOL_SECONDS)
    said = done.stdout if done.returncode == 0 else f"{done.stdout}\n(exit code {done.returncode})\n{done.stderr}"
    return said[-MAX_TAIL_BYTES:]


def _head(path: Path) -> str:
    return read_file(path, MAX_FILE_BYTES).decode("utf-8", "replace")


# --- the archive ------------------------------------------------------------------------------------------------------


def render(
    found: Mapping[str, Any], failed: Mapping[str, str], redactor: Redactor, *, redacted: bool
) -> dict[str, str]:
    """File name -> text, README first. Nothing of `found` gets past the redactor."""
    for value in found.values():
        redactor.learn(value if isinstance(value, str) else json.dumps(value))
    files: dict[str, str] = {}
    for name in sorted(found):
        value = found[name]
        if isinstance(value, str) and name.endswith(".json"):
            value = _parsed(value)
        is_text = isinstance(value, str)
        text = redactor.text(value) if is_text else json.dumps(redactor.plain(value), indent=1) + "\n"
        files[name] = printable(text)
    left_out = {name: redactor.text(why) for name, why in sorted(failed.items())}
    return {"README.txt": _readme(files, left_out, redactor, redacted=redacted), **files}


def _parsed(text: str) -> Any:
    """A tool's JSON as values, so that members can be told apart; the text where it is none."""
    try:
        return parse_json(text)
    except ValueError:
        # Whoever wrote half a document may have written a command line in it.
        return re.sub(r'("(?:command|cmdline)"\s*:\s*)"[^"]*"?', r'\1"(removed)"', text)


def _readme(files: Mapping[str, str], failed: Mapping[str, str], redactor: Redactor, *, redacted: bool) -> str:
    counts = "".join(f"  {number:6} {kind}\n" for kind, number in sorted(redactor.counts.items()))
    removed = (
        "Removed: tokens and other secrets, values of environment variables, command lines, user names.\n"
        "Replaced by pseudonyms, the same throughout this archive: ARNs and account ids, network resources, host\n"
        "names, IP and MAC addresses. Kept: the instance id, device serials, names of jobs and pods, labels.\n"
        f"How often:\n{counts or '       0 of anything' + chr(10)}"
        if redacted
        else "NOTHING WAS REMOVED (--no-redact): names, addresses, command lines and secrets may be in it.\n"
    )
    listed = "".join(f"  {name} ({len(text.encode())} bytes)\n" for name, text in files.items())
    missing = "".join(f"  {name}: {why}\n" for name, why in failed.items())
    return (
        f"healthd {__version__}: a bundle for a support case\n\n{removed}\nFiles:\n{listed}\nNot available:\n"
        f"{missing or '  (nothing)' + chr(10)}"
    )


def _write(file: Any, files: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in files.items():
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"healthd-bundle/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(content))
