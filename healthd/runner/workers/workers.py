"""Starts and sets up the worker processes of one run, and records those that could not be killed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checks.accelerators import find_descriptor
from checks.contract import Missing
from checks.learned import hardware_in
from healthd.core.backoff import Backoff
from healthd.runner.settings import OnProgress, RunnerSettings, RunProgress
from healthd.runner.workers.launch import LOAD, Launch, command, environment, take_ahead
from healthd.runner.workers.process import WorkerProcess


class Unreaped:
    """Killed workers that the kernel still holds, by device target or `node/CHECK`. Lives as long as the runner."""

    def __init__(self) -> None:
        self._by_key: dict[str, WorkerProcess] = {}

    def add(self, key: str, process: WorkerProcess) -> None:
        """Record one."""
        self._by_key[key] = process

    def reap(self, key: str) -> WorkerProcess | None:
        """Try to reap the one with this key; returns it when it is still there."""
        process = self._by_key.get(key)
        if process is not None and process.is_gone():
            del self._by_key[key]
            return None
        return process

    def __contains__(self, process: object) -> bool:
        return any(process is other for other in self._by_key.values())

    def keys(self) -> tuple[str, ...]:
        """The keys of those that are still there."""
        return tuple(key for key in list(self._by_key) if self.reap(key) is not None)


class Workers:
    """The worker processes of one run."""

    def __init__(
        self,
        settings: RunnerSettings,
        unreaped: Unreaped,
        versions: dict[str, str],
        on_progress: OnProgress | None,
    ) -> None:
        self.settings = settings
        self.inventory: dict[str, Any] = {}
        """Devices and their holders, by the last survey."""
        self.identity: dict[str, Any] | None = None
        """Hardware and versions, by the last survey: see `checks.learned`."""
        self.boot_id: str | None = None
        """The boot id, by the last survey."""
        self.compile: dict[str, Any] | None = None
        """What new workers are to do about compilation: see `healthd.runner.compilation`."""
        self.group: dict[str, Any] | None = None
        """The group of which new workers become ranks, where they must know it before they open their device."""
        self.device_seconds = 0.0
        """How long workers have had devices, all together."""
        self.python = str(settings.probe_python or sys.executable)
        self._unreaped = unreaped
        self._versions = versions
        self._on_progress = on_progress
        self._processes: list[tuple[str, WorkerProcess]] = []
        self._prestarted: WorkerProcess | None = None
        self._unreaped_of_node = 0
        self._env = environment(self.python, settings.env, os.environ)
        self._extra_files = check_files(settings.directories)

    def prestart(self) -> WorkerProcess:
        """Start the node's worker and let it import its checks, for a later run to `adopt`. Raises OSError."""
        ahead = take_ahead(self._command(None), self._env)
        if ahead is not None:
            return WorkerProcess(ahead)
        process = self.spawn(None)
        process.send(LOAD)
        return process

    def adopt(self, process: WorkerProcess) -> None:
        """Use a prestarted worker as the first one of the node."""
        self._prestarted = process
        self._processes.append(("node", process))

    def spawn(self, target: str | None) -> WorkerProcess:
        """Start a worker for a device, or for the node (None). Raises OSError."""
        if target is None and self._prestarted is not None:
            process, self._prestarted = self._prestarted, None
            return process
        process = WorkerProcess(Launch(self._command(target), self._env))
        self._processes = [(name, other) for name, other in self._processes if not other.reaped.is_set()]
        self._processes.append((target or "node", process))
        return process

    def _command(self, target: str | None) -> list[str]:
        # Only checks from outside may need site-packages.
        alone = target is None and not (self.settings.third_party or self.settings.directories)
        return command(self.python, alone=alone)

    def note_survey(self, answer: Mapping[str, Any]) -> None:
        """Use this answer to a survey for the setup of new workers."""
        self.inventory = {**answer["inventory"], "holders": answer["holders"]}
        self.identity = {
            "hardware": hardware_in(answer["instance_type"], answer["inventory"]),
            "accelerator": answer["inventory"]["accelerator"],
            "versions": answer["versions"],
        }
        self.boot_id = answer["boot_id"]

    def setup(self, target: str | None) -> dict[str, Any]:
        """The members of a worker's first command."""
        settings = self.settings
        options = {**settings.options, "ignore_pids": [os.getpid(), *settings.options.get("ignore_pids", ())]}
        if settings.run_dir is not None:
            options["run_dir"] = str(settings.run_dir)
        if self.group is not None:
            options["group"] = self.group
        return {
            "host_root": str(settings.host_root) if settings.host_root else None,
            "target": target,
            "accelerator": self.inventory.get("accelerator") or settings.accelerator,
            "inventory": self.inventory,
            "compile": self.compile if target is not None else None,
            "options": options,
            "limits": {name: dataclasses.asdict(limit) for name, limit in settings.limits.items()},
            "learned": [dataclasses.asdict(one) for one in settings.baselines],
            "identity": self.identity if target is not None else None,
            "extra_files": self._extra_files,
            "third_party": list(settings.third_party),
            "programs": {name: dataclasses.asdict(program) for name, program in settings.programs.items()},
        }

    def note_versions(self, versions: object) -> None:
        """Record the versions of a worker's libraries."""
        if isinstance(versions, dict):
            self._versions.update({str(k)[:64]: str(v)[:64] for k, v in list(versions.items())[:32]})

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that workers have reported, by name."""
        return self._versions

    def machine(self) -> str | None:
        """Hardware and versions of this run, as far as they decide bits; None where one of them is not known."""
        identity = self.identity or {}
        described = find_descriptor(identity.get("accelerator"))
        hardware = identity.get("hardware")
        if described is None or not hardware:
            return None
        versions = {**self._versions, **identity["versions"]}
        matter = described.speed_versions
        # A part of the others may not be installed; a driver is always there.
        if any(name not in versions for name in matter if name == matter[0] or name.endswith("_driver")):
            return None
        return ", ".join(
            (str(hardware)[:120], described.name, *(f"{name} {versions.get(name, 'none')}" for name in matter))
        )

    def report_progress(self, event: RunProgress) -> None:
        """Pass a sign of progress to the listener."""
        if self._on_progress is not None:
            self._on_progress(event)

    async def back_off(self, attempt: int) -> None:
        """Wait before another attempt at something transient."""
        await asyncio.sleep(Backoff(self.settings.retry_backoff_seconds, 10.0).after(attempt))

    def stuck(self, target: str) -> Missing | None:
        """Why no worker can be started for a target: a killed one is still there. None when one can."""
        # A worker of several devices (`xla:0,xla:1`) holds each of them.
        process = next((found for one in target.split(",") if (found := self._unreaped.reap(one)) is not None), None)
        if process is None and not (target == "node" and self._unreaped_of_node > 1):
            return None
        who = f"pid {process.worker_pid}" if process is not None else "more than one"
        text = f"a killed probe ({who}) does not end: the kernel or the device's driver holds it; reboot the node"
        return Missing(target=target, reason="Stuck", message=text)

    def add_unreaped(self, key: str, process: WorkerProcess) -> None:
        """Record a worker that was killed and is still there."""
        process.close_pipes()
        self._unreaped_of_node += key.startswith("node/")
        for one in key.split(","):
            self._unreaped.add(one, process)

    async def kill_all(self) -> None:
        """Kill all workers and wait until they are reaped; those that are not in time are recorded as unreaped."""
        for _, process in self._processes:
            process.kill()
        left = [(name, process) for name, process in self._processes if process not in self._unreaped]
        deadline = time.monotonic() + self.settings.kill_grace_seconds
        for name, process in left:
            if not await process.wait_gone(max(0.0, deadline - time.monotonic())) and name != "node":
                self.add_unreaped(name, process)


def worker_targets(inventory: Mapping[str, Any]) -> list[str]:
    """
    The targets that get a worker each, and become ranks: those that the inventory names, else its devices.

    Empty where there are devices and it is not known how to assign them to workers.
    """
    named = inventory.get("workers")
    found = [device["target"] for device in inventory.get("devices") or ()] if named is None else named
    return [str(target) for target in found]


def probed_devices(inventory: Mapping[str, Any]) -> tuple[str, ...]:
    """The devices that the workers measure: those that are workers' targets, or whose cores are."""
    targets = set(worker_targets(inventory))
    cores = {target.rpartition(":")[2] for target in targets}
    found = []
    for device in inventory.get("devices") or ():
        own = {str(core) for core in device.get("core_ids") or ()}
        if device["target"] in targets or (own and own <= cores):
            found.append(str(device["target"]))
    return tuple(found)


def check_files(directories: tuple[Path, ...]) -> list[str]:
    """The check files of an operator, sorted; the worker reports a directory that cannot be read."""
    found: list[str] = []
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            found.append(str(directory.absolute()))
            continue
        found.extend(
            str(directory.absolute() / name) for name in names if name.endswith(".py") and not name.startswith("_")
        )
    return found
