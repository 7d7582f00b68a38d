"""`healthd doctor`: what is missing on this machine, and how to get it. Changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from checks.host.machine import Host, HostError
from checks.host.running import TimeUpError, run_program
from checks.json_text import parse_json
from healthd.cli.settings.options import common_options, load_settings
from healthd.cli.settings.tree import Settings, check_run_dir
from healthd.core.errors import ConfigError, HealthdError, words_of

# What the probes need of the interpreter that runs them, asked in one go.
PROBE = """
import json, sys
said = {"python": sys.version.split()[0]}
try:
    import torch
    import torch.distributed as dist
    said["torch"] = torch.__version__
    said["gloo"] = bool(dist.is_available() and dist.is_gloo_available())
    said["cuda"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
except Exception as error:
    said["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


MAX_ANSWER_BYTES = 1 << 20
COUNTED = (("device_count", "devices"), ("core_count", "cores"), ("efa_count", "EFA interfaces"))


@dataclass(frozen=True)
class Item:
    """One thing looked at: `state` is ok, missing (checks cannot run) or note (they can, with less)."""

    name: str
    state: str
    text: str
    remedy: str = ""


@click.command()
@common_options
@click.option("--json", "as_json", is_flag=True, help="Print only JSON.")
def doctor(as_json: bool, **options: Any) -> int:
    """
    Report what is missing on this machine, and how to get it.

    Exit code 0: nothing is missing. 1: something is missing.
    """
    settings = load_settings(options, section="node")
    from healthd.cli.terminal import render

    with render.busy("checking devices, interpreter, directories and tools", quiet=as_json):
        items = list(examine(settings))
    if as_json:
        sys.stdout.write(json.dumps([asdict(item) for item in items]) + "\n")
    else:
        render.print_items([(item.name, item.state, item.text, item.remedy) for item in items])
    return 1 if any(item.state == "missing" for item in items) else 0


def examine(settings: Settings) -> Iterator[Item]:
    """Everything, the basic first."""
    python = settings.probe.python or Path(sys.executable)
    host = Host(settings.node.host_root)
    yield _devices(settings, host)
    yield from _interpreter(python, settings.probe.start_seconds)
    yield from _vendors_packages(settings, python, host)
    yield from _compile_cache(settings)
    yield _folder("state directory", settings.node.state_dir, "--state-dir")
    yield _run_folder(settings)
    yield _kernel_log(host)
    yield from _schedulers(settings)
    yield from _launchers()
    yield _shared_memory(host)
    yield from _programs(settings)
    yield from _tools(host)


def _devices(settings: Settings, host: Host) -> Item:
    """What kind of devices is found, and how many; of the machine that --host-root stands for, where it is given."""
    from checks.accelerators import find_accelerator

    name = "devices"
    try:
        options = settings.runner().options
        inventory = find_accelerator(settings.probe.accelerator, host).find(host, options)
    except (OSError, ValueError, LookupError, HealthdError) as error:
        return Item(
            name, "missing", str(error), "'healthd check --tier passive' tells more; or set [probe] accelerator"
        )
    counts = [f"{inventory[key]} {what}" for key, what in COUNTED if inventory.get(key) is not None]
    return Item(name, "ok", f"{inventory['accelerator']}: {', '.join(counts) or 'their number is unknown'}")


def _interpreter(python: Path, seconds: float) -> Iterator[Item]:
    name = "probe interpreter"
    try:
        # Not subprocess.run: a wedged driver keeps the interpreter in the kernel, and nothing would end the wait.
        code, out, err = run_program(
            [str(python), "-I", "-c", PROBE],
            environment=os.environ,
            timeout_seconds=seconds,
            max_bytes=MAX_ANSWER_BYTES,
        )
    except OSError as error:
        yield Item(
            name, "missing", f"{python}: {error.strerror}", "set python under [probe] to the interpreter that has torch"
        )
        return
    except TimeUpError as error:
        text, remedy = f"{python} did not respond within {seconds:g} s", "check what its site-packages do at start"
        if not error.killed:
            text += " and cannot be killed: the kernel holds it"
            remedy = "the driver or a file system hangs: see the kernel log, then reboot"
        yield Item(name, "missing", text, remedy)
        return
    try:
        said = parse_json(out.decode("utf-8", "replace").strip().splitlines()[-1])
        version = tuple(int(part) for part in said["python"].split(".")[:2])
    except (IndexError, KeyError, TypeError, ValueError):
        last = (err.decode("utf-8", "replace").strip().splitlines() or [f"exit code {code}"])[-1]
        yield Item(name, "missing", f"{python}: {last}", "set python under [probe] to a working Python 3.10 or newer")
        return
    ok = version >= (3, 10)
    yield Item(
        name, "ok" if ok else "missing", f"{python} (Python {said['python']})", "" if ok else "use 3.10 or newer"
    )
    if "torch" not in said:
        remedy = (
            "name the interpreter of your jobs: python under [probe], or HEALTHD_PROBE_PYTHON; for CPUs only, create "
            "one with the CPU build of torch, separate from healthd's own environment (docs/install.md)"
        )
        yield Item("torch", "missing", f"{python}: {said.get('error', 'torch is not installed')}", remedy)
        return
    yield Item("torch", "ok", f"{said['torch']}, {said['cuda']} CUDA devices")
    if said["gloo"]:
        yield Item("gloo", "ok", "collectives between CPU ranks can run")
    else:
        yield Item("gloo", "missing", "this torch has no gloo", "install a build of torch with distributed support")


def _vendors_packages(settings: Settings, python: Path, host: Host) -> Iterator[Item]:
    """The distributions that a vendor has in an index of its own: the real ones, placeholders, or none."""
    from checks.accelerators import descriptors
    from healthd.cli.warm import ask_packages

    said = ask_packages(python, settings.probe.start_seconds)
    installed, placeholders = said.get("installed"), said.get("placeholders")
    if not isinstance(installed, dict) or not isinstance(placeholders, list):
        return  # the interpreter itself is missing or broken, and that has been said
    for kind in descriptors():
        if kind.own_index is None:
            continue
        title, needed, source = kind.own_index.title, kind.own_index.needed, kind.own_index.source
        there = {name: version for name, version in installed.items() if name in kind.python_packages}
        empty = [text for text in map(str, placeholders) if text.split()[0] in kind.python_packages]
        if empty:
            yield Item(
                title,
                "missing",
                f"{', '.join(empty)}: empty placeholders from the public index",
                f"remove them and install from: {source}; {python} -m pip uninstall "
                + " ".join(text.split()[0] for text in empty),
            )
        elif needed in there:
            yield Item(title, "ok", ", ".join(f"{name} {version}" for name, version in sorted(there.items())))
        elif settings.probe.accelerator == kind.name or (kind.device_files and host.exists(f"{kind.device_files}0")):
            remedy = f"name the interpreter that has it (python of [probe]), or install it: {source}"
            yield Item(title, "missing", f"{python} has no {needed}", remedy)


def _compile_cache(settings: Settings) -> Iterator[Item]:
    """Failed compilations and stale locks in our compile cache; nothing where nothing was compiled."""
    from checks.compile_cache import find_troubles

    folder = settings.compile_cache()
    if not os.path.isdir(folder):
        return
    troubles = find_troubles(folder)
    if troubles:
        text = f"{len(troubles)} of them: {', '.join(troubles[:3])}"
        yield Item("compile cache", "note", text, "run 'healthd warm', which clears them and compiles again")
    else:
        yield Item("compile cache", "ok", str(folder))


def _folder(name: str, path: Path, option: str) -> Item:
    """Whether a directory can be written to, or made."""
    place = path
    while not os.path.exists(place) and place != place.parent:  # what may not be looked at is not there either
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return Item(name, "ok", str(path) if os.path.exists(path) else f"{path} (will be created)")
    return Item(name, "missing", f"{path} cannot be written", f"run as root, or choose another with {option}")


def _run_folder(settings: Settings) -> Item:
    """Whether the run directory is ours and can be written to, or made."""
    try:
        check_run_dir(settings.node.run_dir)
    except ConfigError as error:
        return Item("run directory", "missing", str(error))
    return _folder("run directory", settings.node.run_dir, "--run-dir")


def _kernel_log(host: Host) -> Item:
    try:
        os.close(os.open(host.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        remedy = "run as root or with CAP_SYSLOG; in a container mount /dev/kmsg"
        return Item(
            "kernel log",
            "note",
            f"/dev/kmsg: {error.strerror}: healthd will miss hardware faults reported there",
            remedy,
        )
    return Item("kernel log", "ok", "/dev/kmsg can be read")


def _schedulers(settings: Settings) -> Iterator[Item]:
    """The job schedulers of the host, and whether it can be seen what they give away."""
    import asyncio

    from healthd.node.clock import system_clock
    from healthd.node.occupancy.occupancy import Schedulers

    schedulers = Schedulers(settings.node.allocations, settings.node.host_root, clock=system_clock())
    for reading in asyncio.run(schedulers.look()).readings:
        name = f"scheduler {reading.scheduler}".strip()
        if reading.unseen:
            remedy = "until then active checks run unprompted once per boot (active.unprompted)"
            yield Item(name, "note", reading.unseen, remedy)
        else:
            held = ", ".join(workload.name for workload in reading.workloads or ()) or "nothing"
            yield Item(name, "ok", f"has given away {held}")


def _launchers() -> Iterator[Item]:
    """Which launchers of jobs started this process, innermost first; nothing outside of a job."""
    from healthd.core.errors import ConfigError
    from healthd.hooks.launchers import describe, find_place, find_places

    try:
        for index, place in enumerate(find_places(os.environ)):
            yield Item("launcher" if index == 0 else "launcher around it", "ok", describe(place))
        find_place(os.environ)
    except ConfigError as error:
        yield Item("launcher", "note", str(error), "needed only for 'healthd preflight' and 'gate --join'")


def _shared_memory(host: Host) -> Item:
    try:
        found = host.file_system("/dev/shm")
    except OSError as error:
        return Item("/dev/shm", "note", words_of(error), "mount a tmpfs there; in a container: --shm-size")
    return Item("/dev/shm", "ok", f"{found.size_bytes / 1e9:.1f} GB")


def _programs(settings: Settings) -> Iterator[Item]:
    for name, program in settings.programs.items():
        command = program.command[0] if program.command else ""
        found = shutil.which(command)
        if found:
            yield Item(f"program {name}", "ok", found)
        else:
            yield Item(
                f"program {name}",
                "missing",
                f"no such program: {command!r}",
                f"install it or correct programs.{name}.command",
            )


def _tools(host: Host) -> Iterator[Item]:
    """Vendors' tools: they matter only where their devices are."""
    from checks.accelerators import descriptors

    for kind in descriptors():
        if kind.device_files is None or not host.exists(f"{kind.device_files}0"):
            continue
        for tool, remedy in kind.tools.items():
            try:
                yield Item(tool, "ok", host.find_program(tool))
            except HostError as error:
                yield Item(tool, "missing", str(error), remedy)
