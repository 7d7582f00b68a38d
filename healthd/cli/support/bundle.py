"""`healthd bundle`: one redacted archive for a support case. Nothing that fails to be read keeps the rest from it."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import json
import os
import re
import sys
import tarfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from checks.json_text import parse_json
from checks.printable import printable
from healthd import __version__
from healthd.cli.settings.options import common_options, load_usable_settings
from healthd.cli.settings.tree import Settings
from healthd.cli.support.collecting import Source, collect, hosts_of, versions_of
from healthd.cli.support.pseudonyms import Redactor
from healthd.core.bounded import read_file
from healthd.core.errors import ConfigError, OutputError, words_of

# All together; the slowest is the probe interpreter that imports torch.
DEADLINE_SECONDS = 60.0
TOOL_SECONDS = 10.0
PROBE_SECONDS = 20.0
MAX_FILE_BYTES = 4 << 20
MAX_TAIL_BYTES = 256 << 10
MAX_KERNEL_LINES = 1000
MAX_PROFILES = 5  # the newest; each is read value by value

# Lines of the kernel that say something of accelerators, their network and the machine's own faults.
_KERNEL = re.compile(
    r"(?i)neuron|nvidia|nvrm|\bxid\b|\befa\b|infiniband|rdma|hardware error|\bmce\b|edac|ecc|\baer\b|pcie|"
    r"out of memory|oom|hung task|blocked for more than|segfault|i/o error|link (?:is )?(?:up|down)|nvme|iommu"
)
# One after the other: Neuron's tools failed when several asked the driver at once.
TOOLS: Mapping[str, tuple[str, ...]] = {
    "neuron-ls.json": ("neuron-ls", "-j"),
    "fi_info.txt": ("fi_info", "-p", "efa"),
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "packages-dpkg.txt": ("dpkg-query", "-W", "aws-neuron*", "efa*", "libfabric*", "nvidia-driver*", "openmpi*"),
    "packages-rpm.txt": ("rpm", "-qa", "aws-neuron*", "efa*", "libfabric*", "nvidia-driver*", "openmpi*"),
}
MODULES = ("neuron", "efa", "nvidia", "ib_core")
PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "nvidia-ml-py", "grpcio", "httpx")


@click.command()
@common_options
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="The archive (default: a new one here)."
)
@click.option("--no-redact", is_flag=True, help="Redact nothing: names, addresses, command lines and secrets stay.")
def bundle(output: Path | None, no_redact: bool, **options: Any) -> int:
    """
    A redacted archive (tar.gz) for a support case.

    State, recent results, settings, kernel lines, logs, tools' outputs, versions and the newest profiles of slow
    probes, with and without a running daemon.
    The instance id stays in it: the vendor needs it. Look into README.txt in it before you send it.

    Exit code: 0 when it was written, also when the settings are broken or some sources could not be read (README.txt
    says which).
    """
    from healthd.cli.terminal.render import busy

    settings, trouble = load_usable_settings(options, section="node")
    if trouble is not None:
        click.echo(f"healthd: {trouble}; going on without, by other settings, mostly defaults", err=True)
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
                failed["settings in force"] = f"{trouble}; all else was collected by other settings, mostly defaults"
            redactor = Redactor(hosts=hosts_of(settings, found), versions=versions_of(found), off=no_redact)
            _write(file, render(found, failed, redactor, redacted=not no_redact))
    except BaseException as error:
        path.unlink(missing_ok=True)  # half an archive, or none, is nothing to send
        if isinstance(error, OSError):
            text = f"{path}: cannot be written: {words_of(error)}; name another with --output"
            raise OutputError(text) from None
        raise
    click.echo(f"{path}: {len(found)} files" + (f"; could not be had: {', '.join(sorted(failed))}" if failed else ""))
    return 0


# --- what goes in -----------------------------------------------------------------------------------------------------


def sources(settings: Settings) -> dict[str, Source]:
    """File name -> what gives its content: text, or JSON values. Each raises OSError, HealthdError or ValueError."""
    from checks.host.machine import Host
    from healthd.cli.support import logs
    from healthd.node.state.profiles import ProfileFolder

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
        "journal.txt": lambda: logs.journal(host, TOOL_SECONDS),
        "nccom-logs.txt": lambda: logs.nccom_logs(host, MAX_TAIL_BYTES),
        **{f"tools/{name}": functools.partial(_tool, host, argv) for name, argv in TOOLS.items()},
        "tools/neuron-monitor.json": lambda: host.first_line(["neuron-monitor"], timeout_seconds=TOOL_SECONDS),
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
    from healthd.core.config.toml_text import parse_toml

    variables = sorted(name for name in os.environ if name.startswith("HEALTHD_"))
    file = settings.file
    # A date in it, which JSON does not have, becomes text.
    content = parse_json(json.dumps(parse_toml(_head(file)), default=str)) if file is not None else None
    return {"file": None if file is None else str(file), "content": content, "variables": variables}


def _schedulers(settings: Settings) -> Any:
    import asyncio

    from healthd.node.clock import system_clock
    from healthd.node.occupancy.schedulers import Schedulers

    found = asyncio.run(Schedulers(settings.node.allocations, settings.node.host_root, clock=system_clock()).look())
    return dataclasses.asdict(found)


def _doctor(settings: Settings) -> Any:
    from healthd.cli.support.doctor import examine

    probe = dataclasses.replace(settings.probe, start_seconds=min(settings.probe.start_seconds, PROBE_SECONDS))
    return [dataclasses.asdict(item) for item in examine(dataclasses.replace(settings, probe=probe))]


def _kernel(host: Any) -> str:
    lines = [f"[{'?' if seconds is None else seconds}] {text}" for seconds, text in host.kernel_log()]
    kept = [line for line in lines if _KERNEL.search(line) and "ommand line:" not in line]
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
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    modules = {}
    for name in MODULES:
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
        f"healthd {__version__}: a bundle for a support case\n\n{removed}\nFiles:\n{listed}\n"
        f"Could not be had:\n{missing or '  (nothing)' + chr(10)}"
    )


def _write(file: Any, files: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in files.items():
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"healthd-bundle/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(content))
